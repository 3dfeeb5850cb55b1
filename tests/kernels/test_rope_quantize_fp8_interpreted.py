"""The RoPE and FP8 kernel, interpreted: bytes equal those of steps in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlacast.kernels.triton.rope_quantize_fp8 import launch_rope_quantize_fp8
from mlacast.reference.rope_quantize_fp8 import rope_quantize_fp8 as reference
from tests.ops.rejections import poisoned
from tests.rope_quantize_cases import CASES, RopeQuantizeCase, case_id, draw, expected


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_slices_of_wider_rows(case: RopeQuantizeCase) -> None:
    inputs, nope = draw(case, tokens=11), case.nope
    q, k = inputs.q, inputs.k if inputs.k.dim() == 3 else inputs.k.unsqueeze(1)
    q_out, k_out = (
        poisoned(*x.shape[:2], x.shape[2] + 24, dtype=torch.uint8).view(case.dtype) for x in (q, k)
    )
    launch_rope_quantize_fp8(
        q[..., nope:],
        k[..., nope:],
        q[..., :nope],
        k[..., :nope],
        None,
        inputs.table,
        inputs.positions,
        q_rope_out=q_out[..., nope : nope + case.rope],
        k_rope_out=k_out[..., nope : nope + case.rope],
        q_nope_out=q_out[..., :nope],
        k_nope_out=k_out[..., :nope],
        v_out=None,
        page_table=None,
        pairing=case.pairing,
        q_scale=1.7,
        kv_scale=0.3,
    )
    wanted = expected(case, inputs, 1.7, 0.3)
    for out, codes in zip((q_out, k_out), wanted, strict=True):
        raw = out.view(torch.uint8)
        assert torch.equal(raw[..., : nope + case.rope], codes.view(raw.shape[0], raw.shape[1], -1))
        assert bool((raw[..., nope + case.rope :] == 0x5A).all())


@pytest.mark.parametrize(
    "case",
    [
        RopeQuantizeCase(kv_heads=1),
        RopeQuantizeCase(kv_heads=2, rope=12, nope=20, pairing="interleaved", inputs=torch.float16),
    ],
    ids=case_id,
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_equal_the_reference(case: RopeQuantizeCase, index: torch.dtype) -> None:
    """Keys and values go to pages; tokens that are skipped or have no place write nothing."""
    inputs, nope = draw(case, tokens=13), case.nope
    v = torch.randn(13, case.kv_heads, 24).to(case.inputs)
    page_table = tuple(
        torch.tensor(values, dtype=index)
        for values in (
            # An entry of no request stands behind the others; request 2 is one past the last.
            [2, 0, 9, 1, 3],
            [0, 2, 4],
            [0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1, 2, 1],
            [0, 1, 2, 3, 4, 5, 6, 0, 5, 6, -1, 0, 70],
        )
    )
    results = []
    for run in (launch_rope_quantize_fp8, reference):
        q_out = poisoned(*inputs.q.shape, dtype=torch.uint8).view(case.dtype)
        k_out, v_out = (
            poisoned(4, 4, case.kv_heads, width, dtype=torch.uint8).view(case.dtype)
            for width in (nope + case.rope, 24)
        )
        options: dict[str, Any] = {
            "q_rope_out": q_out[..., nope:],
            "k_rope_out": k_out[..., nope:],
            "q_nope_out": q_out[..., :nope],
            "k_nope_out": k_out[..., :nope],
            "v_out": v_out,
            "page_table": page_table,
            "pairing": case.pairing,
            "q_scale": 1.0,
            "kv_scale": 2.0,
        }
        parts = (inputs.q[..., nope:], inputs.k[..., nope:], inputs.q[..., :nope])
        run(*parts, inputs.k[..., :nope], v, inputs.table, inputs.positions, **options)
        results.append([out.view(torch.uint8) for out in (q_out, k_out, v_out)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
