"""The portable decode kernels, interpreted: every cache format, two pools, splits, one epilogue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.common.combine_splits import combine_splits
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.attention import EndConfig
from tests import oracles
from tests.cache_writers import FilledCache
from tests.format_cases import FAMILIES, MXFP8_CHUNK32, FormatCase, case_id
from tests.kernels import launches, store_cases
from tests.scenarios import CACHES, CacheCase, cache_id, draw_indices, used_rows

V4 = CacheCase("V4", 512)
# (page size, pages): at least 20 slots.
PAGINGS = {1: 20, 5: 5, 64: 2}


@dataclass(frozen=True)
class Pool:
    """One cache as the kernel and the reference take it, its indices and its lengths.

    The kernel gets the same bytes, but float32 instead of bfloat16 rows.
    """

    case: CacheCase
    filled: FilledCache
    cache: Tensor
    indices: Tensor
    lengths: Tensor | None

    @property
    def kv_format(self) -> mlacast.KvFormat:
        return mlacast.KvFormat.from_name(self.case.name)

    @property
    def selected(self) -> list[Tensor]:
        return oracles.select_rows(self.filled.rows, self.indices, self.lengths)


def widen_pages(cache: Tensor, padding: int) -> Tensor:
    """The same pages, ``padding`` elements further apart, with NaN (or bytes 0xFF) between."""
    pages, page_size, _, width = cache.shape
    payload, step = page_size * width, cache.stride(0) + padding
    fill = 0xFF if cache.dtype == torch.uint8 else float("nan")
    flat = torch.full((pages * step,), fill, dtype=torch.float32).to(cache.dtype)
    wide = flat.view(pages, step)
    source = cache.as_strided((pages, payload), (cache.stride(0), 1))
    wide[:, :payload].copy_(source)
    return flat.as_strided((pages, page_size, 1, width), (step, width, width, 1))


def make_pool(
    case: CacheCase,
    topk: int,
    page_size: int,
    lengths: tuple[int, ...] | None = None,
    padding: int = 0,
    tokens: int = 3,
) -> Pool:
    """A pool whose unselected slots are NaN."""
    pages = PAGINGS[page_size]
    indices = draw_indices(tokens, topk, pages * page_size)
    counted = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    used = sorted(used_rows(indices, pages * page_size, counted))
    filled = case.fill(num_pages=pages, page_size=page_size, slots=used or [0])
    cache = filled.cache
    if padding:
        raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        cache = widen_pages(raw, padding)
    return Pool(case, filled, cache, indices, counted)


def for_kernel(pool: Pool) -> Tensor:
    """The cache tensor for the launcher: bfloat16 rows become float32."""
    if pool.cache.dtype != torch.bfloat16:
        return pool.cache
    pages, page_size, _, width = pool.cache.shape
    step = pool.cache.stride(0)
    flat = pool.cache.as_strided((pages * step,), (1,)).float()
    return flat.as_strided((pages, page_size, 1, width), (step, width, width, 1))


def check(
    main: Pool, extra: Pool | None, heads: int, num_splits: int | None, **options: Any
) -> None:
    """Run both sides and compare."""
    tokens, width = main.indices.shape[0], main.case.d_qk
    natural = torch.randn(tokens, heads, width)
    permuted = options.get("q_order") == "chunk16"
    q = oracles.chunk16_from_head_order(natural) if permuted else natural
    arguments: dict[str, Any] = {
        **options,
        "kv_format": main.kv_format,
        "topk_length": main.lengths,
        "num_splits": num_splits,
    }
    selected = main.selected
    if extra is not None:
        arguments.update(
            extra_kv_format=extra.kv_format,
            extra_indices=extra.indices,
            extra_topk_length=extra.lengths,
        )
        selected = oracles.join_selections(selected, extra.selected)
    reference_cache = {} if extra is None else {"extra_k_cache": extra.cache}
    out, lse = mlacast.reference.sparse_mla_decode(
        q,
        main.cache,
        main.indices,
        sm_scale=launches.SM_SCALE,
        compute_dtype=torch.float64,
        **reference_cache,
        **arguments,
    )
    expected = launches.oracle(
        (out, lse, None),
        natural,
        selected,
        q_norm_eps=options.get("q_norm_eps"),
        has_rope=options.get("rope") is not None,
    )
    kernel_cache = {} if extra is None else {"extra_k_cache": for_kernel(extra)}
    result = launches.decode(
        q,
        for_kernel(main),
        main.indices,
        launches.float32_buffer(tokens, heads),
        **kernel_cache,
        **arguments,
    )
    launches.assert_matches(result, expected)


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("case", CACHES, ids=cache_id)
def test_every_format_as_the_main_cache(case: CacheCase, page_size: int) -> None:
    num_splits = {1: 1, 5: 2, 64: 1}[page_size]
    padding = {1: 0, 5: 32, 64: 0}[page_size]
    pool = make_pool(case, 34, page_size, (34, 0, 9), padding)
    check(pool, None, 2, num_splits)


@pytest.mark.parametrize(
    ("name", "data_bytes", "scale_bytes"),
    [("V4", 576, 8), ("V41", 512, 16), ("NVFP4_384", 352, 32)],
)
def test_one_page_of_more_than_two_gigabytes(name: str, data_bytes: int, scale_bytes: int) -> None:
    """Scales stand behind the last token of a page: past 2**31 bytes from its start."""
    small = make_pool(CacheCase(name, 512), 20, 64)
    slots = 2**31 // data_bytes + 64
    kv_format = small.kv_format
    # Memory that nobody touches costs nothing.
    big = torch.empty(kv_format.page_bytes(slots), dtype=torch.uint8)
    flat = small.cache.as_strided((kv_format.page_bytes(64),), (1,))
    big[: 64 * data_bytes] = flat[: 64 * data_bytes]
    big[slots * data_bytes :][: 64 * scale_bytes] = flat[64 * data_bytes :][: 64 * scale_bytes]
    width = small.cache.shape[-1]
    far = big.as_strided((1, slots, 1, width), (big.numel(), width, width, 1))
    indices = torch.where(small.indices < 64, small.indices, -1)
    q = torch.randn(indices.shape[0], 2, 512)
    results = [
        launches.decode(
            q,
            cache,
            indices,
            launches.float32_buffer(q.shape[0], 2),
            kv_format=kv_format,
            num_splits=1,
        )
        for cache in (small.cache, far)
    ]
    assert torch.equal(results[0].out.data, results[1].out.data)
    assert torch.equal(results[0].lse, results[1].lse)


@pytest.mark.parametrize("case", CACHES, ids=cache_id)
def test_every_format_as_the_extra_cache(case: CacheCase) -> None:
    partners = [other for other in CACHES if other.d_qk == case.d_qk and other != case]
    main = make_pool(partners[len(case.name) % len(partners)], 33, 5, (33, 3, 0))
    extra = make_pool(case, 40, 64, (0, 40, 5))
    check(main, extra, 2, 2)


@pytest.mark.parametrize(
    ("num_splits", "heads", "pairing", "order"),
    [
        (1, 20, "half", "head"),
        (2, 3, "interleaved", "chunk16"),
        (3, 17, "half", "chunk16"),
        (8, 3, "interleaved", "head"),
    ],
)
def test_splits_of_two_pools_with_every_option(
    num_splits: int, heads: int, pairing: str, order: str
) -> None:
    """At 8 splits most are empty; the sink must count once, whatever the split it would be in."""
    check(
        make_pool(V4, 70, 5, (70, 0, 33)),
        make_pool(CacheCase("V41_FP4", 512), 33, 5, (33, 0, 1)),
        heads,
        num_splits,
        attn_sink=launches.sinks(heads),
        q_norm_eps=0.75,
        rope=mlacast.Rope(launches.unit_table(9), launches.POSITIONS, pairing),
        q_order=order,
    )


@pytest.mark.parametrize("topk", [0, 1, 33])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_any_width_of_the_lists(topk: int, num_splits: int) -> None:
    main = make_pool(CacheCase("V41", 512), topk, 5)
    check(main, None, 1, num_splits, attn_sink=torch.zeros(1))
    check(main, make_pool(V4, 33 - topk, 5), 1, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("name", ["V32", "BF16", "FP8"])
def test_rope_and_sink_on_576(name: str, num_splits: int) -> None:
    rope = mlacast.Rope(launches.unit_table(9), launches.POSITIONS, "half")
    pool = make_pool(CacheCase(name, 576), 40, 5)
    check(pool, None, 3, num_splits, rope=rope, attn_sink=launches.sinks(3))


def test_a_cache_without_pages() -> None:
    indices = torch.tensor([[-1, 0, 5]], dtype=torch.int32)
    cache = mlacast.KvFormat.V4.allocate(0, 64)
    for num_splits in (1, 2):
        result = launches.decode(
            torch.randn(1, 2, 512),
            cache,
            indices,
            launches.float32_buffer(1, 2),
            kv_format=mlacast.KvFormat.V4,
            num_splits=num_splits,
        )
        assert not result.out.data.any()
        assert bool((result.lse == -float("inf")).all())


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_bytes_are_those_of_the_float32_output(case: FormatCase, num_splits: int) -> None:
    pool = make_pool(V4, 70, 5, (70, 0, 40))
    q = torch.randn(3, 4, 512)
    options: dict[str, Any] = {
        "kv_format": pool.kv_format,
        "topk_length": pool.lengths,
        "num_splits": num_splits,
        "rope": mlacast.Rope(launches.unit_table(9), launches.POSITIONS),
        "attn_sink": torch.randn(4),
    }
    buffer = launches.float32_buffer(3, 4)
    exact = launches.decode(q, pool.cache, pool.indices, buffer, **options).out.data
    # A range that ends its buffer, and one inside.
    start, total = {1: (1, 9), 3: (2, 5)}[num_splits]
    actual = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
    expected = store_cases.empty_buffer(case, total, 2, 1024, "cpu")
    launches.decode(q, pool.cache, pool.indices, actual[start : start + 3], **options)
    mlacast.reference.quantize_output(exact.reshape(3, 2, 1024), expected[start : start + 3])
    store_cases.assert_same_storages(actual, expected)


def test_many_rows_are_merged_like_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of four heads, of which the last has two, give the bits of programs of one."""
    pool = make_pool(V4, 150, 64)
    q = torch.randn(3, 6, 512)
    options: dict[str, Any] = {
        "kv_format": pool.kv_format,
        "num_splits": 3,
        "rope": mlacast.Rope(launches.unit_table(9), launches.POSITIONS),
        "attn_sink": torch.randn(6),
    }
    results = []
    for few_rows in (1024, 0):
        monkeypatch.setattr("mlacast.kernels.config.sparse_attention._FEW_ROWS", few_rows)
        buffer = store_cases.empty_buffer(MXFP8_CHUNK32, 3, 2, 1536, "cpu")
        lse = launches.decode(q, pool.cache, pool.indices, buffer, **options).lse
        results.append((buffer, lse))
    store_cases.assert_same_storages(results[1][0], results[0][0])
    assert oracles.same_bits(results[1][1], results[0][1])


def test_more_splits_than_are_read_at_a_time() -> None:
    """Split 50 of 70 has the largest maximum; some saw no key, and of one row none did.

    Relative to another maximum its weight would not be a float32.
    """
    splits, tokens, heads = 70, 2, 3
    outs = torch.randn(splits, tokens, heads, 512)
    maxima, sums = torch.randn(splits, tokens, heads) * 3, torch.rand(splits, tokens, heads) + 0.5
    maxima[50] += 300
    maxima[::7], sums[::7], outs[::7] = -float("inf"), 0.0, 0.0
    maxima[:, 1, 2], sums[:, 1, 2], outs[:, 1, 2] = -float("inf"), 0.0, 0.0
    lse = torch.full((tokens, heads), launches.POISON)
    buffer = launches.float32_buffer(tokens, heads)
    target = store_target(buffer)
    combine_splits(
        Launches(lse.device, target),
        [outs, maxima, sums],
        [lse, lse, 0, 0, lse, 0],
        lse,
        target,
        tokens,
        heads,
        splits,
        EndConfig(),
    )
    base = maxima.double().amax(0).nan_to_num(neginf=0.0)
    weights = torch.exp2(maxima.double() - base)
    total = (weights * sums).sum(0)
    shares = (weights / total.clamp_min(1e-30))[..., None]
    expected, size = (shares * outs).sum(0), (shares * outs.abs()).sum(0)
    # Numerator and denominator are sums of one term a split, with a weight of its own each.
    roundings = (splits + 8) * oracles.FLOAT32_UNIT
    assert bool(((buffer.data.double() - expected).abs() <= 2 * roundings * size).all())
    expected_lse = (base + torch.log2(total)) * math.log(2.0)
    live = expected_lse.isfinite()
    # The relative error of the sum, and three roundings of numbers as large as the result.
    allowed = roundings + 3 * oracles.FLOAT32_UNIT * expected_lse[live].abs()
    assert bool(((lse.double() - expected_lse)[live].abs() <= allowed).all())
    assert lse[1, 2] == -float("inf") and not buffer.data[1, 2].any()


def test_batch_invariant_rows_have_the_same_bits_alone_and_together() -> None:
    pool = make_pool(V4, 150, 64, tokens=4)
    q = torch.randn(4, 2, 512)

    def run(first: int, last: int) -> launches.Result:
        return launches.decode(
            q[first:last],
            pool.cache,
            pool.indices[first:last],
            launches.float32_buffer(last - first, 2),
            kv_format=pool.kv_format,
            batch_invariant=True,
        )

    together = run(0, 4)
    for row in range(4):
        alone = run(row, row + 1)
        assert oracles.same_bits(alone.out.data, together.out.data[row : row + 1])
        assert oracles.same_bits(alone.lse, together.lse[row : row + 1])


def test_a_planned_workspace_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher allocates no more than ``workspace_size`` says, so a planned workspace holds its
    partials, and the bytes behind it stay as they are.
    """
    pool = make_pool(V4, 70, 5)
    q = torch.randn(3, 2, 512)
    schedule = mlacast.plan_sparse_decode(3, 2, 70, kv_format=pool.kv_format, num_splits=3)
    needed = mlacast.workspace_size(schedule)
    options: dict[str, Any] = {"kv_format": pool.kv_format, "num_splits": 3}
    buffers = [launches.float32_buffer(3, 2), launches.float32_buffer(3, 2)]
    allocated: list[int] = []
    allocate = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        allocated.append(tensor.numel() * tensor.element_size())
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counting)
        own = launches.decode(q, pool.cache, pool.indices, buffers[0], **options)
    assert sum(allocated) <= needed
    scratch = torch.full((needed + 4096,), 0x5A, dtype=torch.uint8)
    given = launches.decode(
        q, pool.cache, pool.indices, buffers[1], workspace=scratch[:needed], **options
    )
    assert oracles.same_bits(own.out.data, given.out.data)
    assert bool((scratch[needed:] == 0x5A).all())
