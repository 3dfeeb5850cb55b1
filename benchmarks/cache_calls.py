"""The calls that ``time_caches.py`` times: how their inputs are drawn, and which bytes are right.

A case has several input sets, which together are larger than the L2 cache. Slots are those of a
chunk of prefill: tokens from position 37 of a sequence on whose pages are in random order.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.descriptors.kv_format import ALL_KV_FORMATS, KvFormat
from mlacast.kernels.config.caches import AppendConfig, RopeConfig, RowsConfig
from tests.format_cases import storage_bytes

DEVICE = "cuda"
HEADS = 128
PAGE_SIZE = 64
FIRST_POSITION = 37
TABLE_ROWS = 1 << 16
CHUNK = 8192
SMALL_TOKENS = (1, 2, 4, 8, 16)
FEW_TOKENS = (4, 8, 16, 64)
ROPE_CONFIGS = tuple(
    RopeConfig(*sizes) for sizes in ((8, 4), (8, 4, True), (4, 4), (4, 4, True), (2, 2, True))
)
APPEND_CONFIGS = tuple(
    AppendConfig(32, 8, tile, 128, 128, parts) for tile, parts in ((4096, 4), (8192, 2))
)
# Those that have most to compute for each byte.
APPEND_FORMATS = ("V41_FP4", "NVFP4_384", "V32", "V4", "V41")

Call = Callable[[], object]
Config = RopeConfig | AppendConfig | RowsConfig


@dataclass(frozen=True)
class Case:
    """One call of one operation.

    Attributes:
        op: Public operation.
        rows: Tokens, or rows of latents or slots.
        kv_format: Format of the cache, None for ``rope_quantize_fp8``.
        fused: Whether an append norms and rotates.
        pairing: Pairing of ``rope_quantize_fp8``.
        config: Program sizes to measure, None for those in use.
    """

    op: str
    rows: int
    kv_format: KvFormat | None = None
    fused: bool = False
    pairing: str = "half"
    config: Config | None = None

    @property
    def name(self) -> str:
        """Unique name."""
        what = self.pairing if self.kv_format is None else self.kv_format.name
        sizes = "" if self.config is None else f"-{'.'.join(map(str, self.config))}"
        return f"{self.op}-{what}{'-fused' if self.fused else ''}-t{self.rows}{sizes}"

    @property
    def d_qk(self) -> int:
        """Dimensions of a row of the cache."""
        return (self.kv_format.d_qk or 576) if self.kv_format is not None else 576

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written once: rows, codes, slots, positions and rows of the table."""
        if self.kv_format is None:
            return self.rows * ((HEADS + 1) * 576 * 3 + 64 * 4 + 8)
        record = self.kv_format.bytes_per_token(self.d_qk)
        return self.rows * (self.d_qk * 2 + record + 8 + (64 * 4 + 8 if self.fused else 0))


def usual_cases() -> list[Case]:
    """Cases with the programs in use."""
    rope = [
        Case("rope_quantize_fp8", tokens, pairing=pairing)
        for pairing, counts in (("half", (4096, 64, *SMALL_TOKENS)), ("interleaved", (4096, 1)))
        for tokens in counts
    ]
    appends = [
        Case("kv_cache_append", CHUNK, one, fused)
        for one in ALL_KV_FORMATS
        for fused in (False, True)
    ]
    appends += [Case("kv_cache_append", rows, KvFormat.V4, True) for rows in (1, 64, 1024)]
    return [*rope, *appends, *(Case("kv_cache_gather", CHUNK, one) for one in ALL_KV_FORMATS)]


def sweep_cases() -> list[Case]:
    """Calls that are slower than they might be, with programs in use and of other sizes."""
    few = [
        Case("rope_quantize_fp8", tokens, config=config)
        for tokens in FEW_TOKENS
        for config in (None, *ROPE_CONFIGS)
    ]
    return few + [
        Case("kv_cache_append", CHUNK, KvFormat.from_name(name), fused, config=config)
        for config in (None, *APPEND_CONFIGS)
        for name in APPEND_FORMATS
        for fused in (False, True)
    ]


class Work:
    """The input sets of a case, and its calls.

    Args:
        case: The case.
        sets: Input sets.
    """

    def __init__(self, case: Case, sets: int) -> None:
        self.case = case
        self.calls: list[Call] = []
        self.check: Call = self._check_cache
        generator = torch.Generator(DEVICE).manual_seed(1)
        self._integers = functools.partial(
            torch.randint, dtype=torch.int64, device=DEVICE, generator=generator
        )
        angles = torch.rand((TABLE_ROWS, 32), device=DEVICE, generator=generator) * (2 * math.pi)
        self._table = torch.cat((angles.cos(), angles.sin()), 1)
        self._normal = functools.partial(torch.randn, device=DEVICE, generator=generator)
        if case.kv_format is None:
            self._draw_rope(sets)
        else:
            self._draw_cache(sets)

    def _draw_rope(self, sets: int) -> None:
        case = self.case
        rows = case.rows
        q = self._normal(sets, rows, HEADS, 576, dtype=torch.bfloat16)
        k = self._normal(sets, rows, 576, dtype=torch.bfloat16)
        codes = [torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in (q, k)]
        positions = self._integers(0, TABLE_ROWS, (sets, rows))
        for at in range(sets):
            parts = (q[at, ..., 512:], k[at, :, 512:], q[at, ..., :512], k[at, :, :512])
            outputs = {
                f"{name}_out": codes[which][at, ..., part]
                for which, letter in enumerate("qk")
                for name, part in (
                    (f"{letter}_rope", slice(512, None)),
                    (f"{letter}_nope", slice(None, 512)),
                )
            }
            self.calls.append(self._rope_call(parts, positions[at], outputs))
        inputs = (q[0], k[0], positions[0], codes[0][0], codes[1][0])
        self.check = functools.partial(self._check_rope, *inputs)

    def _rope_call(
        self, parts: tuple[Tensor, ...], positions: Tensor, outputs: dict[str, Tensor]
    ) -> Call:
        options: dict[str, Any] = {"pairing": self.case.pairing, "q_scale": 0.5}
        launch: Callable[..., Any] = mlacast.rope_quantize_fp8
        if self.case.config is None:
            return functools.partial(launch, *parts, self._table, positions, **options, **outputs)
        from mlacast.kernels.triton.rope_quantize_fp8 import launch_rope_quantize_fp8

        q_rope, k_rope, q_nope, k_nope = parts
        wide = {
            name: out.unsqueeze(1) if name.startswith("k") else out for name, out in outputs.items()
        }
        launch_directly: Callable[..., Any] = launch_rope_quantize_fp8
        return functools.partial(
            launch_directly,
            q_rope,
            k_rope.unsqueeze(1),
            q_nope,
            k_nope.unsqueeze(1),
            None,
            self._table,
            positions,
            **wide,
            v_out=None,
            page_table=None,
            kv_scale=1.0,
            config=self.case.config,
            **options,
        )

    def _check_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, q_codes: Tensor, k_codes: Tensor
    ) -> None:
        """Compare the first and last tokens of the first set with the reference on the CPU."""
        for codes in (q_codes, k_codes):
            codes.view(torch.uint8).fill_(0x7F)
        self.calls[0]()
        rows = sorted({0, 1, self.case.rows // 2, self.case.rows - 1} & set(range(self.case.rows)))
        one, other = q[rows].cpu(), k[rows].cpu()
        expected = mlacast.rope_quantize_fp8(
            one[..., 512:],
            other[..., 512:],
            one[..., :512],
            other[..., :512],
            self._table.cpu(),
            positions[rows].cpu(),
            pairing=self.case.pairing,
            q_scale=0.5,
            backend="reference",
        )
        for codes, rope, nope in ((q_codes, *expected[::2]), (k_codes, *expected[1::2])):
            wanted = torch.cat((nope.view(torch.uint8), rope.view(torch.uint8)), -1)
            assert torch.equal(codes.view(torch.uint8)[rows].cpu(), wanted), "codes differ"
            assert not bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()), "unwritten codes"

    def _draw_cache(self, sets: int) -> None:
        case = self.case
        kv_format = case.kv_format
        assert kv_format is not None, "an operation of caches"
        pages = -(-(case.rows + FIRST_POSITION) // PAGE_SIZE)
        width = None if kv_format.d_qk is not None else case.d_qk
        self._cache = kv_format.allocate(sets * pages, PAGE_SIZE, d_qk=width, device=DEVICE)
        if case.op == "kv_cache_gather":
            bits = storage_bytes(self._cache)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, device=DEVICE))
        order = torch.randperm(sets * pages, device=DEVICE).view(sets, pages)
        place = torch.arange(case.rows, device=DEVICE) + FIRST_POSITION
        self._slots = order[:, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        self._latents = self._normal(sets, case.rows, case.d_qk, dtype=torch.bfloat16)
        self._positions = self._integers(0, TABLE_ROWS, (sets, case.rows))
        self._weight = self._normal(512, dtype=torch.bfloat16)
        self._gathered: dict[int, Tensor] = {}
        for at in range(sets):
            self.calls.append(self._cache_call(at))

    def _options(self, at: int) -> dict[str, Any]:
        if not self.case.fused:
            return {"norm_weight": None, "norm_eps": None, "rope": None}
        rope = mlacast.Rope(self._table, self._positions[at])
        return {"norm_weight": self._weight, "norm_eps": 1e-6, "rope": rope}

    def _cache_call(self, at: int) -> Call:
        case, kv_format = self.case, self.case.kv_format
        config: dict[str, Any] = {"kv_format": kv_format}
        functions: tuple[Callable[..., Any], Callable[..., Any]] = (
            mlacast.kv_cache_append,
            mlacast.kv_cache_gather,
        )
        if case.config is not None:
            from mlacast.kernels.triton.kv_cache_append import launch_kv_cache_append
            from mlacast.kernels.triton.kv_cache_gather import launch_kv_cache_gather

            functions = (launch_kv_cache_append, launch_kv_cache_gather)
            config["config"] = case.config
        if case.op == "kv_cache_gather":

            def gather() -> Tensor:
                # Kept, or the next call of a graph would get the same memory, warm.
                made = functions[1](self._cache, self._slots[at], **config)
                rows: Tensor = made if isinstance(made, torch.Tensor) else made.result
                self._gathered[at] = rows
                return rows

            return gather
        return functools.partial(
            functions[0],
            self._latents[at],
            self._slots[at],
            self._cache,
            **config,
            **self._options(at),
        )

    def _check_cache(self) -> None:
        """Compare the rows of two pages of the first set with the reference on the CPU."""
        case, kv_format = self.case, self.case.kv_format
        assert kv_format is not None, "an operation of caches"
        width = None if kv_format.d_qk is not None else case.d_qk
        page_bytes = kv_format.page_bytes(PAGE_SIZE, width)
        if case.op == "kv_cache_append":
            storage_bytes(self._cache).zero_()
        gathered = self.calls[0]()
        slots = self._slots[0]
        for row in {0, case.rows - 1}:
            page = int(slots[row]) // PAGE_SIZE
            rows = (slots // PAGE_SIZE == page).nonzero().flatten()
            local = kv_format.allocate(1, PAGE_SIZE, d_qk=width)
            actual = storage_bytes(self._cache).view(-1, page_bytes)[page].cpu()
            places = (slots[rows] % PAGE_SIZE).cpu()
            if case.op == "kv_cache_gather":
                storage_bytes(local).copy_(actual)
                assert isinstance(gathered, Tensor), "gather returns rows"
                wanted = mlacast.kv_cache_gather(local, places, kv_format, backend="reference")
                found = gathered[rows].cpu()
                assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), "rows differ"
                continue
            options = self._options(0)
            if options["rope"] is not None:
                at = self._positions[0][rows].cpu()
                options["rope"] = mlacast.Rope(self._table.cpu(), at)
                options["norm_weight"] = self._weight.cpu()
            mlacast.kv_cache_append(
                self._latents[0][rows].cpu(),
                places,
                local,
                kv_format,
                backend="reference",
                **options,
            )
            assert torch.equal(actual, storage_bytes(local)), "records differ"


def compile_case(case: Case) -> None:
    """Run a case once, for the compiler's cache on disk; what goes wrong is reported by the run."""
    with contextlib.suppress(Exception):
        Work(case, 1).calls[0]()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
