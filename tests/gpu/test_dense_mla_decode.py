"""dense_mla_decode on the device: against float64 on the CPU, one CUDA graph, far offsets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.gpu.cache_steps import kernels_of, replayed
from tests.gpu.steps import CUDA, all_same, copy_storage
from tests.kernels.dense_decode_problems import Problem, make_problem
from tests.scenarios import CACHES, CacheCase, cache_id

pytest.importorskip("triton", reason="the portable kernels need triton")

from mlacast.kernels.triton.dense_mla_decode import launch_dense_mla_decode  # noqa: E402

BF16, FP8 = CacheCase("BF16", 576), CacheCase("FP8", 576)
SM_SCALE = 0.05
# Weights in 16 bits, and tensor cores that drop bits of a sum: out within 2**-7 of the largest.
OUT_TOLERANCE = 2.0**-7
LSE_TOLERANCE = 2e-3


def on_device(problem: Problem) -> Problem:
    """The problem with its cache and tables on the device."""
    return dataclasses.replace(
        problem,
        cache=copy_storage(problem.cache),
        page_table=problem.page_table.to(CUDA),
        seq_lens=problem.seq_lens.to(CUDA),
    )


def draw_query(problem: Problem, per_request: int, heads: int) -> Tensor:
    """A query on the CPU whose requests and tokens lie apart."""
    batch, width = problem.page_table.shape[0], problem.case.d_qk
    return torch.randn(per_request, batch, heads, width).bfloat16().transpose(0, 1)


def run(problem: Problem, q: Tensor, **more: Any) -> tuple[Any, Tensor]:
    """Call the public function on the portable backend."""
    arguments: dict[str, Any] = {"sm_scale": SM_SCALE, "backend": "triton", **more}
    kv_format = mlacast.KvFormat.from_name(problem.case.name)
    return mlacast.dense_mla_decode(
        q, problem.cache, problem.page_table, problem.seq_lens, kv_format=kv_format, **arguments
    )


def assert_right(out: Tensor, lse: Tensor, expected: oracles.AttentionOracle) -> None:
    """Compare [B, Q, H, 512] and [B, Q, H] with float64, by the largest value of a head."""
    actual = out.cpu().double().reshape(expected.out.shape)
    largest = expected.out.abs().amax(-1, keepdim=True)
    allowed = OUT_TOLERANCE * largest + 2.0**-8 * expected.out.abs() + 1e-6
    assert bool(((actual - expected.out).abs() <= allowed).all())
    empty = expected.lse.isneginf()
    flat = lse.cpu().double().reshape(expected.lse.shape)
    assert bool(flat[empty].isneginf().all())
    live = flat[~empty], expected.lse[~empty]
    assert torch.allclose(*live, atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    assert not actual[empty].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CACHES, ids=cache_id)
def test_every_cache_format(case: CacheCase, causal: bool) -> None:
    """Empty, one token, negative, a page table's end, and past it; a page of each is missing."""
    lens = (300, 1, 0, -4, 16 * 20, 5000)
    problem = make_problem(case, lens, page_size=16, max_pages=20, causal=causal)
    q = draw_query(problem, 2, 16)
    out, lse = run(on_device(problem), q.to(CUDA), causal=causal)
    flat = q.float().reshape(-1, 16, case.d_qk)
    assert_right(out, lse, oracles.attend(flat, problem.selected, sm_scale=SM_SCALE))


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7])
@pytest.mark.parametrize(
    ("heads", "per_request", "page_size"), [(1, 1, 1), (16, 4, 64), (64, 1, 53), (128, 2, 64)]
)
@pytest.mark.parametrize("case", [BF16, FP8, CacheCase("V32", 576)], ids=cache_id)
def test_splits_and_heads(
    case: CacheCase, heads: int, per_request: int, page_size: int, num_splits: int | None
) -> None:
    max_pages = -(-700 // page_size)
    problem = make_problem(
        case, (700, 64, 2), per_request=per_request, page_size=page_size, max_pages=max_pages
    )
    q, sink = draw_query(problem, per_request, heads), torch.linspace(-2.0, 3.0, heads)
    there = on_device(problem)
    tokens = 3 * per_request
    out = torch.empty(3, per_request, heads, 512, dtype=torch.bfloat16, device=CUDA)
    lse = torch.empty(3, per_request, heads, device=CUDA)
    data = out.view(tokens, 1, heads * 512)
    launch_dense_mla_decode(
        q.to(CUDA),
        there.cache,
        there.page_table,
        there.seq_lens,
        kv_format=mlacast.KvFormat.from_name(case.name),
        sm_scale=SM_SCALE,
        v_scale=1.0,
        causal=True,
        attn_sink=sink.to(CUDA),
        out=mlacast.QuantizedTensor(data, None, mlacast.Bf16(), 0, tokens),
        lse=lse,
        num_splits=num_splits,
    )
    flat = q.float().reshape(tokens, heads, case.d_qk)
    expected = oracles.attend(flat, problem.selected, sm_scale=SM_SCALE, attn_sink=sink)
    assert_right(out, lse, expected)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["numbers", "tensors"])
def test_an_e4m3_query_and_its_scales(on_gpu: bool) -> None:
    """Scales that are tensors are read on the device only."""
    problem = make_problem(FP8, (600, 0, 33), page_size=64, max_pages=10)
    q = draw_query(problem, 2, 32).float().to(torch.float8_e4m3fn)
    scales: dict[str, Any] = {"sm_scale": 0.0625, "v_scale": -2.5}
    if on_gpu:
        scales = {name: torch.tensor([value], device=CUDA) for name, value in scales.items()}
    there, query = on_device(problem), q.to(CUDA)
    run(there, query, **scales)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = run(there, query, **scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    flat = q.float().reshape(-1, 32, 576)
    plain = oracles.attend(flat, problem.selected, sm_scale=0.0625)
    assert_right(out, lse, dataclasses.replace(plain, out=plain.out * -2.5))


@pytest.mark.parametrize("case", [BF16, FP8], ids=cache_id)
def test_one_graph_replays_with_other_lengths(case: CacheCase) -> None:
    problem = on_device(make_problem(case, (600, 64, 0, 1), page_size=64, max_pages=10))
    q = draw_query(problem, 1, 16).to(CUDA)
    out = torch.empty(4, 1, 16, 512, dtype=torch.bfloat16, device=CUDA)
    lse: list[Tensor] = []
    graph = replayed(lambda: lse.append(run(problem, q, out=out)[1]))
    problem.seq_lens.copy_(torch.tensor([3, 0, 640, 500], dtype=torch.int32))
    out.fill_(7.0)
    graph.replay()
    expected = run(problem, q)
    assert all_same((out, lse[-1]), expected)


def test_one_or_two_launches() -> None:
    """Attention, and the merge of its splits."""
    problem = on_device(make_problem(BF16, (600, 64), page_size=64, max_pages=10))
    q = draw_query(problem, 1, 16).to(CUDA)
    names = kernels_of(lambda: run(problem, q))
    assert len(names) <= 2 and "dense_mla_decode" in names[0], names


@pytest.mark.parametrize("case", CACHES, ids=cache_id)
def test_pages_past_two_to_the_31_bytes(case: CacheCase) -> None:
    """The same pages, some of them behind the first 2 GiB of a cache, give the same bits."""
    kv_format = mlacast.KvFormat.from_name(case.name)
    width = None if kv_format.d_qk is not None else case.d_qk
    page_bytes = kv_format.page_bytes(64, width)
    pages = 5 * 2**30 // page_bytes
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * 2**30:
        pytest.skip(f"needs 6 GiB of free device memory, has {free / 2**30:.1f}")
    problem = on_device(make_problem(case, (300, 64), page_size=64, max_pages=5))
    near = 2**31 // page_bytes
    places = torch.tensor([0, near - 1, near, near + 1, *range(pages - 6, pages)], device=CUDA)
    big = kv_format.allocate(pages, 64, d_qk=width, device=CUDA)
    bits = (torch.int16 if big.dtype == torch.bfloat16 else torch.uint8,)
    flat = big.as_strided((pages, big.stride(0)), (big.stride(0), 1)).view(*bits)
    small = problem.cache.as_strided((10, big.stride(0)), (big.stride(0), 1)).view(*bits)
    flat[places] = small
    table = problem.page_table.long()
    known = (table >= 0) & (table < 10)
    moved = torch.where(known, places[table.clamp(0, 9)], -1).int()
    q = draw_query(problem, 2, 16).to(CUDA)
    far = dataclasses.replace(problem, cache=big, page_table=moved)
    assert all_same(run(problem, q), run(far, q))


def test_tokens_at_any_distance_in_an_output_past_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 11 * 2**30:
        pytest.skip(f"needs 11 GiB of free device memory, has {free / 2**30:.1f}")
    problem = on_device(make_problem(BF16, (64, 3, 9), page_size=64, max_pages=2, per_request=1))
    memory = torch.empty(5 * 2**30, dtype=torch.bfloat16, device=CUDA)
    step = 2_300_000_000
    out = memory.as_strided((3, 1, 8, 512), (step, step, 512, 1))
    q = draw_query(problem, 1, 8).to(CUDA)
    expected = run(problem, q)
    actual = run(problem, q, out=out)
    assert all_same((actual[0].contiguous(), actual[1]), expected)
