"""The Hopper decode of few heads on the device: numbers, neighbours, repeats, batches, caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlacast
from tests.gpu.hopper_cases import (
    EMPTY_TOKEN,
    ENDS,
    MIDDLE,
    MX,
    MX32,
    NVFP4,
    Case,
    Shape,
    case_id,
    on_hopper,
    spoil_angles,
    spoil_query,
)
from tests.gpu.hopper_checks import assert_right, assert_same
from tests.gpu.hopper_decode_calls import check_call, check_decode, draw_decode, draw_growing
from tests.gpu.hopper_pools import Geometry, build_pool, draw_edge_records, minus_zeros
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.gluon.sm90.sparse_mla_decode import launch_sparse_mla_decode  # noqa: E402

pytestmark = on_hopper

V4, V41 = ("V4",), ("V41",)
V4_V4, V41_V41 = ("V4", "V4"), ("V41", "V41")
INLINE, BESIDE = ("V41_INLINE",), ("V41", "V41_INLINE")
PACKED_128 = mlacast.Fp8Group(128, "ue8m0_packed", "mn_major")
POW2_64 = mlacast.Fp8Group(64, "float32_pow2", "row_major")
TENSOR = mlacast.Fp8Tensor(0.002)
CASES = (
    Case("v4-bf16", 16, pools=V4),
    Case("v4-v4-fused", 16, MX, 2, "interleaved", True, True, True, pools=V4_V4, places=ENDS),
    Case("v4-chunk-h8", 8, MX32, 1, "half", True, True, True, "chunk16", V4_V4, ENDS),
    Case("v41-fused", 16, MX, 2, "half", True, True, True, pools=V41_V41, places=ENDS),
    Case("v41-inline-h5", 5, sink=True, lengths=True, pools=INLINE),
    Case("v41-beside-group128", 16, PACKED_128, 2, "interleaved", pools=BESIDE, places=ENDS),
    Case("v4-group64-h12", 12, POW2_64, 3, "half", lengths=True, pools=V4),
    Case("v41-tensor-h8", 8, TENSOR, 4, "interleaved", lengths=True, pools=V41),
    Case("v4-nvfp4", 16, NVFP4, 2, "interleaved", True, True, True, pools=V4_V4, places=MIDDLE),
    Case("v4-bf16-h32", 32, pools=V4),
    Case("v4-v4-fused-h32", 32, MX, 4, "interleaved", True, True, True, pools=V4_V4, places=ENDS),
    Case("v4-chunk-h24", 24, MX32, 3, "half", True, True, True, "chunk16", V4_V4, ENDS),
    Case("v41-fused-h32", 32, MX, 2, "half", True, True, True, pools=V41_V41, places=ENDS),
    Case("v41-inline-h17", 17, sink=True, lengths=True, pools=INLINE),
    Case("v41-beside-group128-h32", 32, PACKED_128, 2, "interleaved", pools=BESIDE, places=ENDS),
    Case("v4-group64-h31", 31, POW2_64, 1, "half", lengths=True, pools=V4),
    Case("v41-tensor-h20", 20, TENSOR, 4, "interleaved", lengths=True, pools=V41),
    Case("v4-nvfp4-h32", 32, NVFP4, 4, "interleaved", True, True, True, pools=V4_V4, places=MIDDLE),
)
EDGES = (
    CASES[0],
    Case("v41-bf16", 16, pools=V41),
    Case("v4-bf16-h32", 32, pools=V4),
    Case("v41-bf16-h24", 24, pools=V41),
)
SMALL = Geometry(8, 17, gap=16)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_against_float64(case: Case) -> None:
    """Lists of one block and many, that are no whole blocks, and none at all."""
    for shape in (
        Shape(6, 128, case.places[0], 512),
        Shape(290, 64, case.places[1], 128),
        Shape(278, 100, case.places[1], 70),
        Shape(6, 0, case.places[1], 128),
        Shape(6, 0, case.places[1], 0),
    ):
        check_decode(launch_sparse_mla_decode, case, shape, CUDA)


@pytest.mark.parametrize("case", EDGES, ids=case_id)
def test_caches(case: Case) -> None:
    """Zeros of both signs, the largest codes, and one slot of which the output is the row."""
    pools = [build_pool(name, SMALL, [5]) for name in case.pools]
    call = draw_decode(case, Shape(6, 128), CUDA, (SMALL,), pools)
    call.indices.fill_(5)
    written = call.run(launch_sparse_mla_decode, case)
    row = call.pools[0].rows[5, :512].bfloat16()
    assert torch.equal(written.out.data.view(6, case.heads, 512), row.expand(6, case.heads, 512))
    assert_right(case, True, written, call.expected())
    shape = Shape(38, 128)
    for draw in (draw_edge_records, minus_zeros):
        pools = [
            build_pool(name, SMALL, range(SMALL.slots), draw(name, SMALL.slots))
            for name in case.pools
        ]
        call = draw_decode(case, shape, CUDA, (SMALL,), pools)
        call.q[:, ::2] = -0.0
        check_call(launch_sparse_mla_decode, case, shape, call)


@pytest.mark.parametrize("case", EDGES, ids=case_id)
def test_scores_that_grow_along_a_row(case: Case) -> None:
    """The base of the weights moves many times, and what came before is rescaled each time."""
    call = draw_growing(case, CUDA)
    assert_right(case, True, call.run(launch_sparse_mla_decode, case), call.expected())


@pytest.mark.parametrize("case", [case for case in CASES if "v41-fused" in case.name], ids=case_id)
def test_rows_do_not_depend_on_their_batch(case: Case) -> None:
    """Lists so short that nothing is split, whatever the number of tokens."""
    call = draw_decode(case, Shape(150, 128, extra_topk=192), CUDA)
    options: dict[str, Any] = {"num_splits": None, "batch_invariant": True}
    together = call.run(launch_sparse_mla_decode, case, **options)
    for row in (0, EMPTY_TOKEN, 149):
        alone = slice(row, row + 1)
        written = call.run(launch_sparse_mla_decode, case, rows=alone, **options)
        assert_same(together.rows(alone), written, "a batch of one")


@pytest.mark.parametrize("case", [case for case in CASES if "v4-v4" in case.name], ids=case_id)
@pytest.mark.parametrize("spoil", ["query", "angles"])
def test_an_empty_token_ignores_what_it_has(spoil: str, case: Case) -> None:
    call = draw_decode(case, Shape(14, 128, extra_topk=64), CUDA)
    if spoil == "angles":
        call = replace(call, options=spoil_angles(call.options))
    spoilt = replace(call, q=spoil_query(call.q)) if spoil == "query" else call
    written = spoilt.run(launch_sparse_mla_decode, case)
    assert_right(case, True, written, call.expected())


@pytest.mark.parametrize("heads", [16, 32])
def test_kernels_in_a_row_see_what_was_written(heads: int) -> None:
    """Each starts before the one in front of it has ended: a writer of the cache, two decodes."""
    torch.manual_seed(3)
    latents = torch.randn(12, 4096, 512, device=CUDA).bfloat16()
    queries = torch.randn(12, 24, heads, 512, device=CUDA).bfloat16()
    cache = mlacast.KvFormat.V41.allocate(64, 64, d_qk=512, device=CUDA)
    slots = torch.arange(4096, device=CUDA)
    indices = torch.randint(0, 4096, (24, 512), dtype=torch.int32, device=CUDA)
    # The last rows too, which the last programs of the kernel before have written.
    indices[:, :8] = torch.arange(4088, 4096, device=CUDA)
    options: dict[str, Any] = {
        "kv_format": mlacast.KvFormat.V41,
        "sm_scale": 0.05,
        "num_splits": 1,
    }
    q = torch.empty_like(queries[0])

    def run(between: Callable[[], None]) -> list[torch.Tensor]:
        found = []
        for latent, query in zip(latents, queries, strict=True):
            q.copy_(query)
            between()
            mlacast.kv_cache_append(latent, slots, cache, options["kv_format"])
            between()
            first, _ = mlacast.sparse_mla_decode(q, cache, indices, **options)
            between()
            assert isinstance(first, torch.Tensor)
            second, _ = mlacast.sparse_mla_decode(first, cache, indices, **options)
            between()
            assert isinstance(second, torch.Tensor)
            found.append(second)
        torch.cuda.synchronize()
        return found

    expected = run(torch.cuda.synchronize)
    for _ in range(4):
        for wanted, result in zip(expected, run(lambda: None), strict=True):
            assert torch.equal(wanted, result)
    assert not torch.equal(expected[0], expected[1])
