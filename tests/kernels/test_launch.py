"""What a repeated call launches is what Triton would have launched for it.

The launch itself is recorded (``fake_gpu``); binding and specialisation are Triton's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mlacast
from mlacast.compat.flash_mla import fused_norm_rope_attn_rope_cast as fused
from tests.kernels.fake_gpu import FakeGpu, fake_gpu
from tests.kernels.repeated import assert_repeated

pytest.importorskip("triton", reason="the portable kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from triton import knobs  # noqa: E402

from mlacast.kernels.common.launch import Launches, Plan  # noqa: E402
from mlacast.kernels.triton.sparse_mla_prefill import (  # noqa: E402
    _sparse_mla_prefill_kernel as PREFILL_KERNEL,
)
from mlacast.ops import known_calls, signature  # noqa: E402
from mlacast.ops.known_call import KnownCall  # noqa: E402


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as fake:
        yield fake


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a call may differ in."""

    tokens: int = 3
    heads: int = 5
    topk: int = 6
    rows: int = 32
    row_step: int = 512
    shift: int = 0
    index_shift: int = 0
    lengths: bool = True
    sink: bool = True
    sm_scale: float = 0.1
    q_norm_eps: float | None = 1e-6
    out: str = "mxfp8"
    first_row: int = 0


SHAPES = (
    Shape(),
    Shape(tokens=1),
    Shape(tokens=16),
    Shape(heads=1),
    Shape(heads=16),
    Shape(topk=1),
    Shape(topk=16),
    Shape(rows=1),
    Shape(row_step=513),
    Shape(row_step=528),
    Shape(shift=1),
    Shape(shift=8),
    Shape(index_shift=1),
    Shape(index_shift=4),
    Shape(lengths=False),
    Shape(sink=False),
    Shape(sm_scale=-0.1),
    Shape(q_norm_eps=None),
    Shape(out="fp8_tensor"),
    Shape(out="nvfp4"),
    Shape(out="bf16"),
    Shape(first_row=1),
    Shape(first_row=16),
)


def _strided(rows: int, width: int, step: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] at ``step`` elements, ``shift`` elements past an aligned address."""
    storage = torch.zeros(rows * step + shift + 64, dtype=dtype)
    start = -storage.data_ptr() // storage.element_size() % (64 // storage.element_size())
    return storage.as_strided((rows, width), (step, 1), start + shift)


def _format(name: str) -> mlacast.OutFormat:
    formats = {
        "mxfp8": mlacast.Mxfp8(),
        "fp8_tensor": mlacast.Fp8Tensor(torch.ones(1)),
        "nvfp4": mlacast.Nvfp4(torch.ones(1)),
        "bf16": mlacast.Bf16(),
    }
    return formats[name]


def _prefill(shape: Shape) -> dict[str, Any]:
    """Arguments of a call with tensors of its own."""
    queries = _strided(shape.tokens, shape.heads * 512, shape.heads * 512, shape.shift, BF16)
    buffer = mlacast.QuantizedTensor.empty(
        shape.tokens + shape.first_row + 2, 1, shape.heads * 512, _format(shape.out)
    )
    positions = torch.zeros(shape.tokens, dtype=torch.int64)
    return {
        "q": queries.view(shape.tokens, shape.heads, 512),
        "kv": _strided(shape.rows, 512, shape.row_step, 0, BF16),
        "indices": _strided(shape.tokens, shape.topk, shape.topk, shape.index_shift, torch.int32),
        "sm_scale": shape.sm_scale,
        "topk_length": torch.zeros(shape.tokens, dtype=torch.int32) if shape.lengths else None,
        "attn_sink": torch.zeros(shape.heads) if shape.sink else None,
        "q_norm_eps": shape.q_norm_eps,
        "rope": mlacast.Rope(torch.zeros(9, 64), positions),
        "out": buffer[shape.first_row : shape.first_row + shape.tokens],
        "backend": "triton",
    }


BF16 = torch.bfloat16


def _decode(shape: Shape) -> dict[str, Any]:
    arguments = _prefill(dataclasses.replace(shape, row_step=512))
    del arguments["kv"]
    pages = max(shape.rows // 4, 1)
    return {
        **arguments,
        "k_cache": mlacast.KvFormat.V4.allocate(pages, 4),
        "kv_format": mlacast.KvFormat.V4,
        "extra_k_cache": mlacast.KvFormat.V41.allocate(2, 8),
        "extra_indices": _strided(shape.tokens, 3, 3, shape.index_shift, torch.int32),
        "extra_topk_length": arguments["topk_length"],
        "extra_kv_format": mlacast.KvFormat.V41,
        "workspace": torch.empty(3 * shape.tokens * shape.heads * 2056, dtype=torch.uint8)
        if shape.lengths
        else None,
    }


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Shape], dict[str, Any]]]] = {
    "prefill": (mlacast.sparse_mla_prefill, _prefill),
    "decode": (mlacast.sparse_mla_decode, _decode),
}


def _fused(shape: Shape) -> dict[str, Any]:
    """What the fused functions share; ``shape.out`` "bf16" stands for outputs to be allocated."""
    arguments = _prefill(shape)
    groups, width = 2, shape.heads * 256
    codes = torch.empty(shape.tokens, groups, width, dtype=torch.float8_e4m3fn)
    column = shape.tokens + shape.first_row
    strides = (1, width // 128 * column, column)
    words = torch.empty_strided((shape.tokens, groups, width // 128), strides, dtype=torch.int32)
    return {
        "enable_q_norm": shape.q_norm_eps is not None,
        "rms_norm_eps": 1e-6,
        "token_positions": arguments["rope"].positions,
        "is_rope_neox_style": False,
        "rope_dim": 64,
        "cos_sin_cache": arguments["rope"].cos_sin_cache,
        "n_wv_group": groups,
        "num_per_channels": 32,
        "use_tma_aligned_col_major_sf": True,
        "round_sf": True,
        "use_packed_ue8m0": True,
        "q": arguments["q"],
        "sm_scale": shape.sm_scale,
        "attn_sink": arguments["attn_sink"],
        "topk_length": arguments["topk_length"],
        "out": None if shape.out == "bf16" else (codes, words),
    }


def _fused_prefill(shape: Shape) -> dict[str, Any]:
    kv = _strided(shape.rows, 512, shape.row_step, 0, BF16)
    indices = _strided(shape.tokens, shape.topk, shape.topk, shape.index_shift, torch.int32)
    return {**_fused(shape), "kv": kv[:, None], "indices": indices[:, None]}


def _fused_decode(shape: Shape) -> dict[str, Any]:
    indices = _strided(shape.tokens, shape.topk, shape.topk, shape.index_shift, torch.int32)
    cache = mlacast.KvFormat.V4.allocate(3, 4)
    extra = {
        "extra_k_cache": mlacast.KvFormat.V4.allocate(2, 8),
        "extra_indices_in_kvcache": _strided(shape.tokens, 3, 3, 0, torch.int32),
    }
    more = extra if shape.lengths else {}
    return {**_fused(shape), "k_cache": cache, "indices_in_kvcache": indices, **more}


FUSED_CALLS: dict[str, tuple[Callable[..., Any], Callable[[Shape], dict[str, Any]]]] = {
    "fused_prefill": (fused.prefill, _fused_prefill),
    "fused_decode": (fused.decode, _fused_decode),
}
FUSED_SHAPES = [
    dataclasses.replace(shape, heads=8)
    for shape in SHAPES
    if shape.heads == 5 and shape.out[0] != "n"
]
REPEATED = [(*CALLS[name], shape) for name in CALLS for shape in SHAPES]
REPEATED += [(*FUSED_CALLS[name], shape) for name in FUSED_CALLS for shape in FUSED_SHAPES]


def _id(value: object) -> str:
    """A name that is the same in every process, which the address of a function is not."""
    return getattr(value, "__qualname__", str(value))


@pytest.mark.parametrize(("call", "make", "shape"), REPEATED, ids=_id)
def test_a_repeated_call_launches_what_triton_launches(
    call: Callable[..., Any],
    make: Callable[[Shape], dict[str, Any]],
    shape: Shape,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    allocates_scales = call in (fused.prefill, fused.decode) and shape.out == "bf16"
    assert_repeated(call, lambda: make(shape), gpu, monkeypatch, is_straight=not allocates_scales)


@pytest.mark.parametrize("name", CALLS)
def test_any_order_of_calls_runs_the_variants_that_triton_picks(
    name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BC-49, on a GPU that is none: the counting hook sees the same variants in any order."""
    call, make = CALLS[name]
    calls = [make(shape) for shape in (*SHAPES, *reversed(SHAPES))]

    def variants() -> list[int]:
        gpu.runs.clear()
        for arguments in calls:
            call(**arguments)
        return [kernel.function for kernel, _ in gpu.runs]

    remembered = variants()
    monkeypatch.setattr(known_calls, "describe", lambda op, values: None)
    assert variants() == remembered
    assert len(set(remembered)) > 8, "the shapes tell variants apart"


@pytest.mark.parametrize("in_python", [False, True])
def test_equal_signatures_mean_equal_specialisations(
    in_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers and pointers as Triton sees them, against which calls are taken for the same."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    if in_python:
        monkeypatch.setattr(
            known_calls, "metadata_of", lambda tensors: signature.PlainMetadata(*tensors)
        )
    numbers = [0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**63, True, False, 0.0, 1.0, 16.0]
    storage = torch.zeros(1024, dtype=torch.uint8)
    start = -storage.data_ptr() % 64
    tensors = [
        storage[start + by : start + by + 64].view(dtype)
        for by in (0, 4, 8, 12, 16, 20, 32, 48)
        for dtype in (torch.int32, torch.float32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn)
    ]
    seen: list[tuple[Any, Any]] = []
    for value in [*numbers, *tensors]:
        kind = native_specialize_impl(BaseBackend, value, False, True, True)
        calls = known_calls.Calls()
        calls.remember("op", [value], KnownCall(None, [value]))
        for other, other_kind in seen:
            assert calls.find("op", [other]) is None or kind == other_kind, (value, other)
        assert calls.find("op", [value]) is not None
        seen.append((value, kind))


def test_hooks_are_called_with_the_metadata_of_the_launch(gpu: FakeGpu) -> None:
    for _ in range(3):
        mlacast.sparse_mla_prefill(**_prefill(Shape()))
    chain = knobs.runtime.launch_enter_hook
    gpu.runs.clear()
    mlacast.sparse_mla_prefill(**_prefill(Shape()))
    assert gpu.runs[0][1][6:9] == (None, None, None)

    def hook(metadata: Any) -> None:
        raise AssertionError("the fake kernel calls no hook")

    chain.add(hook)
    try:
        mlacast.sparse_mla_prefill(**_prefill(Shape()))
    finally:
        chain.remove(hook)
    metadata, enter, leave = gpu.runs[1][1][6:9]
    assert metadata[0] == "metadata"
    assert enter is chain
    assert leave is knobs.runtime.launch_exit_hook


def test_pre_run_hooks_are_called(gpu: FakeGpu) -> None:
    seen: list[Any] = []
    for calls_before in (0, 3):
        for _ in range(calls_before):
            mlacast.sparse_mla_prefill(**_prefill(Shape()))
        PREFILL_KERNEL.add_pre_run_hook(lambda *arguments, **options: seen.append(arguments))
        try:
            for _ in range(3):
                mlacast.sparse_mla_prefill(**_prefill(Shape()))
        finally:
            PREFILL_KERNEL.pre_run_hooks.clear()
    assert len(seen) == 6


def test_launches_of_a_strange_tensor_or_triton_are_not_bound(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, calls = PREFILL_KERNEL, []
    mlacast.sparse_mla_prefill(**_prefill(Shape()))
    run = [0 if isinstance(v, torch.Tensor) else v for v in gpu.runs[0][1][9:]]
    count = sum(not parameter.is_constexpr for parameter in kernel.params)
    known = torch.zeros(1, dtype=BF16)
    constants = dict(zip(kernel.arg_names[count:], run[count:], strict=True))
    for first in (known, torch.zeros(1, dtype=BF16)):
        launches = Launches(known.device)
        launches.launch(kernel, (1,), first, *run[1:count], **constants, num_warps=4)
        calls.append(launches)
    assert isinstance(calls[0].bind([known]), Plan)
    assert calls[1].bind([known]) is None
    monkeypatch.setattr("triton.__version__", "4.0.0")
    assert calls[0].bind([known]) is None


HOPPER = "mlacast.kernels.gluon.sm90"


@pytest.mark.parametrize("name", ["sparse_mla_prefill", "sparse_mla_prefill_576"])
def test_launches_of_the_hopper_prefills_are_bound(name: str, gpu: FakeGpu) -> None:
    launch = getattr(importlib.import_module(f"{HOPPER}.{name}"), f"launch_{name}")
    d_qk = 576 if name.endswith("576") else 512
    q, kv = torch.zeros(2, 64, d_qk, dtype=BF16), torch.zeros(8, d_qk, dtype=BF16)
    indices, lse, max_logits = torch.zeros(2, 4, dtype=torch.int32), *torch.zeros(2, 2, 64)
    buffer = mlacast.QuantizedTensor.empty(2, 1, 64 * 512, mlacast.Mxfp8())
    launches = launch(
        q,
        kv,
        indices,
        sm_scale=0.1,
        topk_length=None,
        attn_sink=None,
        q_norm_eps=None,
        rope=None,
        q_order="head",
        out=buffer,
        max_logits=max_logits,
        lse=lse,
    )
    rows = buffer.sf_rows_with_padding()
    assert rows is not None
    _assert_bound(launches, [q, kv, indices, buffer.data, rows, max_logits, lse], gpu)


@pytest.mark.parametrize("name", ["V4", "FP8"])
def test_launches_of_the_hopper_decode_are_bound(name: str, gpu: FakeGpu) -> None:
    """Over V4 with queries in bfloat16, over FP8 with codes."""
    kv_format = mlacast.KvFormat.from_name(name)
    q, width = torch.zeros(2, 64, 512, dtype=BF16), None
    if name == "FP8":
        q, width = q.to(torch.float8_e4m3fn), 512
    cache, indices = kv_format.allocate(3, 8, d_qk=width), torch.zeros(2, 400, dtype=torch.int32)
    buffer = mlacast.QuantizedTensor.empty(2, 1, 64 * 512, mlacast.Mxfp8())
    launches, lse = _launch_hopper_decode(q, cache, indices, buffer, kv_format, num_splits=3)
    rows = buffer.sf_rows_with_padding()
    assert rows is not None
    assert len(gpu.runs) == 2, "attention and merge"
    _assert_bound(launches, [q, cache, indices, buffer.data, rows, lse], gpu)


def _launch_hopper_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    buffer: mlacast.QuantizedTensor,
    kv_format: mlacast.KvFormat,
    **options: Any,
) -> tuple[Launches, torch.Tensor]:
    """Launch; the launches and lse."""
    module = importlib.import_module(f"{HOPPER}.sparse_mla_decode")
    plain: dict[str, Any] = {
        "topk_length": None,
        "extra_k_cache": None,
        "extra_indices": None,
        "extra_topk_length": None,
        "extra_kv_format": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "workspace": None,
    }
    lse = torch.zeros(q.shape[:2])
    launches = module.launch_sparse_mla_decode(
        q,
        cache,
        indices,
        kv_format=kv_format,
        sm_scale=0.1,
        q_order="head",
        batch_invariant=False,
        out=buffer,
        lse=lse,
        **{**plain, **options},
    )
    return launches, lse


@pytest.mark.parametrize(
    ("width", "asked", "splits"),
    # Blocks of 32 entries; a list of one block is cut in two as well.
    [(640, 3, 3), (640, 70, 20), (641, 70, 21), (32, 70, 2), (640, 1, 1)],
)
def test_a_list_has_no_more_splits_than_blocks(
    gpu: FakeGpu, width: int, asked: int, splits: int
) -> None:
    mlacast.sparse_mla_decode(
        torch.zeros(2, 16, 512, dtype=torch.bfloat16),
        mlacast.KvFormat.V41.allocate(2, 64, d_qk=512),
        torch.zeros(2, width, dtype=torch.int32),
        kv_format=mlacast.KvFormat.V41,
        sm_scale=0.1,
        num_splits=asked,
        backend="triton",
    )
    _, arguments = gpu.runs[0]
    assert arguments[:3] == (2, splits, 1)


def test_decodes_of_codes_compile_once_whatever_the_sizes(gpu: FakeGpu) -> None:
    """Tokens, pages, lists, and where the rows of a bigger buffer start: no other variant."""
    sizes = [(16, 4, 64, 576, 0), (1, 1, 1, 592, 1), (17, 3, 65, 640, 2), (5, 33, 151, 1152, 3)]
    for splits in (1, 3):
        gpu.compiled.clear()
        for tokens, pages, topk, step, first in sizes:
            q = torch.zeros(tokens, 8, step).to(torch.float8_e4m3fn)[..., :576]
            wide = torch.zeros(tokens + first, topk + 4, dtype=torch.int32)
            _launch_hopper_decode(
                q,
                mlacast.KvFormat.FP8.allocate(pages, 16, d_qk=576),
                wide[first:, first : first + topk],
                mlacast.QuantizedTensor.empty(tokens, 1, 8 * 512, mlacast.Bf16()),
                mlacast.KvFormat.FP8,
                topk_length=torch.zeros(tokens + first, dtype=torch.int32)[first:],
                num_splits=splits,
            )
        # With splits a merge as well.
        assert len(gpu.compiled) == (1 if splits == 1 else 2)


def _assert_bound(launches: Launches, tensors: list[torch.Tensor], gpu: FakeGpu) -> None:
    """A plan of the launches runs the same variants with the same numbers and addresses."""
    first = list(gpu.runs)
    plan = launches.bind(tensors)
    assert plan is not None
    gpu.runs.clear()
    plan([tensor.data_ptr() for tensor in tensors])
    known = {tensor.data_ptr() for tensor in tensors}
    assert len(gpu.runs) == len(first)
    for (kernel, arguments), (again, repeated) in zip(first, gpu.runs, strict=True):
        assert kernel is again
        for before, after in zip(arguments[9:], repeated[9:], strict=True):
            if isinstance(before, torch.Tensor):
                # Scratch is allocated anew.
                assert after == before.data_ptr() or before.data_ptr() not in known
            else:
                assert after == before
