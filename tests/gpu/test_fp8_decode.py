"""FP8 decodes on the device: against float64 on the CPU, metadata, one CUDA graph, no sync."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat import flashinfer, mate
from mlacast.compat.mate.metadata import DecodeMetadata
from mlacast.ops.decode_metadata import decode_metadata
from tests import fp8_unit, oracles
from tests.compat.flashinfer import mla_calls
from tests.compat.flashinfer.dsv4_calls import joint_call, separate_call
from tests.compat.mate.calls import draw_call
from tests.gpu.steps import CUDA
from tests.schedules import walk

# Weights in 16 bits, and tensor cores that drop bits of a sum: out within 2**-7 of the largest.
OUT_TOLERANCE = 2.0**-7
# Of queries in bfloat16; codes times codes are sums of a unit that keeps fewer bits
# (``tests.fp8_unit``), and what MATE's own tests allow there is what users of its function expect.
LSE_TOLERANCE: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}
CODES_LSE_TOLERANCE: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-2}


def to_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the device."""
    return {
        name: value.to(CUDA) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def assert_close(out: Tensor, expected: Tensor, tolerance: float = OUT_TOLERANCE) -> None:
    """Compare [.., H, 512] with float64 by the largest value of each head."""
    actual = out.cpu().double().reshape(expected.shape)
    allowed = tolerance * expected.abs().amax(-1, keepdim=True) + 2.0**-8 * expected.abs() + 1e-6
    assert bool(((actual - expected).abs() <= allowed).all())


@pytest.mark.parametrize("page_size", [1, 53, 64])
@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (16, 2), (64, 1), (128, 3), (192, 1)])
def test_mate_decode(heads: int, q_len: int, page_size: int) -> None:
    call = draw_call(
        (1024, 1, 0, 700, 5000),
        q_len=q_len,
        heads=heads,
        page_size=page_size,
        topk=1024,
        pages=128 // page_size,
    )
    arguments = to_gpu(call.arguments)
    metadata = mate.get_batch_decode_metadata_mla(arguments["query"], arguments["seq_lens"], 1024)
    results: list[Any] = [
        mate.sparse_mla_fp8_decode(**arguments, return_lse=True, metadata=given)
        for given in (None, metadata, metadata)
    ]
    for out, lse in results[1:]:
        assert oracles.same_bits(out.cpu(), results[0][0].cpu())
        assert oracles.same_bits(lse.cpu(), results[0][1].cpu())
    out, lse = results[0]
    assert_close(out, call.oracle.out)
    empty = call.oracle.lse.isneginf()
    assert bool((lse.cpu()[empty] == float("inf")).all())
    live = lse.cpu().double()[~empty], call.oracle.lse[~empty]
    assert torch.allclose(*live, **CODES_LSE_TOLERANCE)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("width", [512, 576])
def test_scores_of_codes_are_as_good_as_the_unit_that_sums_them(
    width: int, num_splits: int
) -> None:
    """A row of one key: lse is its score, and the output its value to the bit."""
    keys = (2 * torch.randn(256, width)).to(torch.float8_e4m3fn)
    q = torch.randn(40, 64, width).to(torch.float8_e4m3fn)
    chosen = torch.randint(0, 256, (40,))
    indices = torch.full((40, 130), -1, dtype=torch.int32)
    indices[torch.arange(40), torch.randint(0, 130, (40,))] = chosen.int()
    out, lse = mlacast.sparse_mla_decode(
        q.to(CUDA),
        keys.view(torch.uint8).view(16, 16, width).to(CUDA),
        indices.to(CUDA),
        kv_format=mlacast.KvFormat.FP8,
        sm_scale=1.0,
        num_splits=num_splits,
        backend="hopper",
    )
    own = keys[chosen].float()
    # The sum with the zeros of absent keys: -0 becomes 0.
    values = (own[:, None, :512] + 0.0).expand(40, 64, 512).bfloat16()
    assert oracles.same_bits(oracles.plain(out).cpu(), values)
    exact = torch.einsum("thd,td->th", q.double(), own.double())
    error = (lse.cpu().double() - exact).abs()
    bound = fp8_unit.score_errors(q.float(), own[:, None])[..., 0] + 2.0**-20 * exact.abs()
    assert bool((error <= bound).all())
    model = torch.stack([fp8_unit.scores(q[t].float(), own[t : t + 1])[:, 0] for t in range(40)])
    # A unit that dropped a bit more would be twice as far off.
    assert float(error.mean()) <= 1.5 * float((model - exact).abs().mean())


def _one_hot_decode(
    keys: Tensor, indices: Tensor, sm_scale: float, num_splits: int
) -> tuple[Tensor, Tensor]:
    """Decode for queries of one 1 and zeros: a key's score is ``sm_scale`` times its first number.

    Args:
        keys: [n, 576] e4m3.
        indices: [tokens, topk] int32.
        sm_scale: Multiplies the scores.
        num_splits: Of the call.

    Returns:
        The output [tokens, 64, 512] and the logarithms [tokens, 64], on the CPU.
    """
    query = torch.zeros(len(indices), 64, 576)
    query[..., 0] = 1.0
    out, lse = mlacast.sparse_mla_decode(
        query.to(torch.float8_e4m3fn).to(CUDA),
        keys.view(torch.uint8).view(1, -1, 576).to(CUDA),
        indices.to(CUDA),
        kv_format=mlacast.KvFormat.FP8,
        sm_scale=sm_scale,
        num_splits=num_splits,
        backend="hopper",
    )
    return oracles.plain(out).cpu(), lse.cpu()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("growth", [7.9, 8.1, -8.0])
def test_weights_of_growing_scores_stay_in_float16(growth: float, num_splits: int) -> None:
    """A maximum that grows (or falls) by about 2**8 a block, where the base of weights moves."""
    steps = torch.arange(12.0).repeat_interleave(64)
    keys = torch.randn(12 * 64, 576)
    keys[:, 0] = steps
    codes = keys.to(torch.float8_e4m3fn)
    indices = torch.arange(12 * 64, dtype=torch.int32)[None]
    sm_scale = abs(growth) * math.log(2.0)
    if growth < 0:
        indices = indices.flip(1)
    out, lse = _one_hot_decode(codes, indices, sm_scale, num_splits)
    values = codes.double()
    scores = values[:, 0] * sm_scale
    assert_close(out, (scores.softmax(0) @ values[:, :512]).expand(1, 64, 512))
    assert torch.allclose(lse.double(), scores.logsumexp(0).expand(1, 64), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_many_small_weights_count(last: bool, num_splits: int) -> None:
    """2**16 keys of weight 2**-26 beside one: each alone is nothing in float16 beside a one."""
    keys = torch.zeros(2, 576)
    keys[0, 0] = 1.0
    keys[1, 1:512] = 448.0
    indices = torch.ones(1, 2**16 + 1, dtype=torch.int32)
    indices[0, -1 if last else 0] = 0
    out, lse = _one_hot_decode(
        keys.to(torch.float8_e4m3fn), indices, 26 * math.log(2.0), num_splits
    )
    expected = torch.full((1, 64, 512), 448.0 * 2.0**-10 / (1 + 2.0**-10), dtype=torch.float64)
    expected[..., 0] = 1 / (1 + 2.0**-10)
    assert torch.allclose(out.double(), expected, rtol=2.0**-8, atol=0.0)
    exact = 26 * math.log(2.0) + math.log1p(2.0**-10)
    assert torch.allclose(lse.double(), torch.full((1, 64), exact).double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("place", [3, 575])
def test_nan_codes_reach_who_selects_them_and_nobody_else(place: int) -> None:
    keys = torch.randn(192, 576).to(torch.float8_e4m3fn)
    keys.view(torch.uint8)[100, place] = 0x7F
    rows = torch.stack((torch.arange(40, 170), torch.arange(130) % 100)).int()
    out, lse = _one_hot_decode(keys, rows, 0.5, num_splits=1)
    assert bool(out[0].isnan().all())
    assert bool(lse[0].isnan().all())
    values = keys[rows[1]].double()
    weights = (values[:, 0] * 0.5).softmax(0)
    assert_close(out[1], (weights @ values[:, :512]).expand(64, 512))
    assert bool(lse[1].isfinite().all())


@pytest.mark.parametrize("batch", [1, 60, 700, 5000, 9000])
def test_schedules_are_those_of_the_cpu(batch: int) -> None:
    lengths = torch.randint(-3, 3000, (batch,), dtype=torch.int32)
    parts, num_splits = decode_metadata(lengths.to(CUDA), num_parts=132, topk=2048)
    rows, expected = walk(lengths.tolist(), 132, 2048, 5)
    assert [tuple(row) for row in parts[:, :5].tolist()] == rows
    assert num_splits.tolist() == expected


def test_metadata_and_decode_replay_in_one_graph_with_other_lengths() -> None:
    call = draw_call((64, 10, 0), topk=64, heads=16)
    arguments = to_gpu(call.arguments)
    out = torch.zeros(3, 1, 16, 512, dtype=torch.bfloat16, device=CUDA)
    lse = torch.zeros(3, 16, device=CUDA)

    def step() -> DecodeMetadata:
        metadata = mate.get_batch_decode_metadata_mla(arguments["query"], arguments["seq_lens"], 64)
        for _ in range(2):
            mate.sparse_mla_fp8_decode(**arguments, out=out, lse=lse, metadata=metadata)
        return metadata

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = step()
    arguments["seq_lens"].copy_(torch.tensor([3, 0, 64], dtype=torch.int32))
    out.fill_(7.0)
    graph.replay()
    plain: Any = mate.sparse_mla_fp8_decode(**arguments, return_lse=True)
    assert oracles.same_bits(out.cpu(), plain[0].cpu())
    assert oracles.same_bits(lse.cpu(), plain[1].cpu())
    fresh = mate.get_batch_decode_metadata_mla(arguments["query"], arguments["seq_lens"], 64)
    assert torch.equal(metadata.scheduler_metadata, fresh.scheduler_metadata)
    assert torch.equal(metadata.num_splits, fresh.num_splits)


@pytest.mark.parametrize("mode", ["sparse", "dense", "ragged", "packed"])
@pytest.mark.parametrize("name", ["BF16", "FP8"])
def test_flashinfer_decode(name: str, mode: str) -> None:
    if mode == "packed" and name == "FP8":
        pytest.skip("a packed cache has a bfloat16 query")
    call = {
        "sparse": lambda: mla_calls.sparse_call(name, heads=16, topk=512, page_size=64),
        "packed": lambda: mla_calls.sparse_call("V32", heads=16, topk=512, page_size=64),
        "dense": lambda: mla_calls.dense_call(name, heads=16, seq_lens=(900, 2, 1), page_size=64),
        "ragged": lambda: mla_calls.dense_call(
            name, heads=16, q_lens=(1, 4), seq_lens=(900, 50), page_size=32, ragged=True
        ),
    }[mode]()
    decode = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    out, lse = decode(**to_gpu(call.arguments), return_lse=True)
    assert_close(out, call.oracle.out)
    expected = call.oracle.lse * mla_calls.LOG2_E
    is_codes = name == "FP8" and mode == "sparse"
    tolerance = CODES_LSE_TOLERANCE if is_codes else LSE_TOLERANCE
    assert torch.allclose(lse.cpu().double(), expected, **tolerance, equal_nan=True)


@pytest.mark.parametrize("make", [joint_call, separate_call])
def test_deepseek_v4_in_both_outputs(make: Any) -> None:
    call = make(heads=64)
    arguments = to_gpu(call.arguments)
    out = flashinfer.trtllm_batch_decode_sparse_mla_dsv4(**arguments)
    assert_close(out, call.oracle().out)
    arguments["seq_lens"] = torch.tensor([7, 5], dtype=torch.int32, device=CUDA)
    # Cosines of one and sines of zero: the rotation changes nothing.
    table = torch.cat((torch.ones(9, 32), torch.zeros(9, 32)), 1).to(CUDA)
    scales = torch.full((8, 8, 4), -1, dtype=torch.int32, device=CUDA)
    codes = flashinfer.trtllm_batch_decode_sparse_mla_dsv4(
        **arguments, out_scales=scales, cos_sin_cache=table
    )
    factors = torch.exp2(scales.cpu().view(torch.uint8).view(8, 8, 4, 4).double() - 127)
    values = codes.cpu().double().view(8, 4, 8, 4, 128)
    decoded = (values * factors.permute(0, 2, 1, 3)[..., None]).permute(1, 0, 2, 3, 4)
    assert_close(decoded.reshape(4, 64, 512), call.oracle().out, OUT_TOLERANCE + 2.0**-4)


def test_scales_on_the_device_are_not_read_on_the_host() -> None:
    call = mla_calls.sparse_call("FP8", heads=16, topk=256, page_size=64)
    arguments = to_gpu(call.arguments)
    scale, twice = torch.tensor([0.0625], device=CUDA), torch.tensor(2.0, device=CUDA)
    decode = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    expected = oracles.plain(decode(**arguments))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = oracles.plain(decode(**{**arguments, "bmm1_scale": scale, "bmm2_scale": twice}))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Twice a number is exact in every format on the way.
    assert oracles.same_bits(out.cpu(), (expected * 2).cpu())


def test_rows_far_into_a_large_cache() -> None:
    """Byte offsets past 2**31 in an FP8 cache of 576 bytes a token."""
    rows = 2**31 // 576 + 100
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * rows * 576:
        pytest.skip("needs 4 GB of free GPU memory")
    cache = torch.zeros(rows, 1, 576, dtype=torch.uint8, device=CUDA)
    cache[-64:] = torch.randint(0, 100, (64, 1, 576), dtype=torch.uint8, device=CUDA)
    ids = torch.arange(rows - 64, rows, dtype=torch.int32, device=CUDA).view(1, 1, 64)
    query = torch.randn(1, 1, 16, 576, device=CUDA).to(torch.float8_e4m3fn)
    common: dict[str, Any] = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "max_seq_len": 64,
        "bmm1_scale": 0.01,
    }
    lens = torch.tensor([64], dtype=torch.int32, device=CUDA)
    results = [
        mate.sparse_mla_fp8_decode(
            query,
            pool.view(torch.float8_e4m3fn),
            None,
            128,
            block_tables=table,
            seq_lens=lens,
            sparse_mla_top_k=64,
            **common,
        )
        for pool, table in ((cache, ids), (cache[-64:].contiguous(), ids - (rows - 64)))
    ]
    assert torch.equal(oracles.plain(results[0]), oracles.plain(results[1]))


def test_the_portable_backend_runs_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    call = draw_call((64,), heads=4)
    mate.sparse_mla_fp8_decode(**to_gpu(call.arguments))
    dense = mla_calls.dense_call("FP8", heads=4)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**to_gpu(dense.arguments))
    lengths = torch.tensor([5], dtype=torch.int32, device=CUDA)
    assert mlacast.explain("decode_metadata", lengths, num_parts=3).backend == "triton"
