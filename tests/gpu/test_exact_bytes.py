"""Bit for bit on the device: number formats, and the storing epilogue for given float32 rows.

The fused kernels are compared with themselves: a buffer of float32 rows shows their output before
rounding, and every format must hold the numbers that the reference makes of those rows. Not bit for
bit: a kernel with another epilogue is another program, whose sums may run in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import FAMILIES, QUANTISED, FormatCase, case_id
from tests.gpu.steps import copy_storage
from tests.scenarios import CacheCase, draw_indices

pytest.importorskip("triton", reason="the portable kernels need triton")

from tests.kernels import launches, number_cases, store_cases  # noqa: E402

CUDA = "cuda"


@pytest.mark.parametrize(
    ("helper", "count"), [("decode_e4m3", 256), ("decode_e2m1", 16), ("decode_ue8m0", 256)]
)
def test_every_code_decodes_like_the_library(helper: str, count: int) -> None:
    number_cases.assert_decodes_like_the_library(helper, count, CUDA)


@pytest.mark.parametrize(
    "check",
    [
        number_cases.check_encode_e4m3,
        number_cases.check_encode_e2m1,
        number_cases.check_encode_ue8m0,
    ],
)
def test_every_boundary_encodes_like_the_library(check: Callable[[str], None]) -> None:
    check(CUDA)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_groups_around_every_power_of_two(case: FormatCase) -> None:
    group = {"Mxfp8": 32, "Nvfp4": 16, "Fp8Tensor": 64}.get(case.kind, case.group)
    x = store_cases.hostile_rows(group, 16)
    store_cases.check_store(case, x, 1, CUDA, block_h=16)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_ranges_of_a_shared_buffer(case: FormatCase) -> None:
    store_cases.check_store(case, torch.randn(5, 6, 512), 2, CUDA, bounds=(0, 2, 3, 5), total=7)
    store_cases.check_store(case, torch.randn(5, 6, 512), 2, CUDA, bounds=(0, 2, 5))


def _slack(max_logits: Tensor, lse: Tensor, largest_value: float) -> Tensor:
    """How far outputs [s_q, h, 1] of two programs for the same rows may be apart.

    Sums of another order move a score by a rounding, which can push a softmax weight across the
    boundary between two bfloat16 numbers: one ulp, 2**-7 of the weight at most, times a value. Of
    many weights that flip at random the largest share rules the sum.
    """
    share = torch.exp(max_logits - lse).nan_to_num(0.0)
    return (2.0**-7 * largest_value * share).float().cpu()[..., None]


def _assert_explained(
    case: FormatCase,
    exact: Tensor,
    slack: Tensor,
    run: Callable[[mlacast.QuantizedTensor], object],
) -> None:
    """``run`` writes rows 2..5 of a buffer of 5; compare with the quantised ``exact`` rows.

    Scales lie between those of rows that are smaller and larger by ``slack``, which also says that
    nothing else was written. Nearly all codes are equal, and each is the nearest one of some number
    within ``slack``: half a step of e4m3 is 2**-4 of the value (2**-10 of the scale for subnormal
    codes), half a step of e2m1 a quarter of the value or of the scale.
    """
    rows = exact.cpu()
    magnitude = rows.abs()
    buffers = [store_cases.empty_buffer(case, 5, 2, 2048, "cpu") for _ in range(3)]
    variants = ((magnitude - slack).clamp_min(0), magnitude, magnitude + slack)
    for buffer, variant in zip(buffers, variants, strict=True):
        signed = torch.copysign(variant, rows).reshape(3, 2, 2048)
        mlacast.reference.quantize_output(signed, buffer[2:5])
    actual = store_cases.empty_buffer(case, 5, 2, 2048, CUDA)
    run(actual[2:5])
    got = store_cases.storages(actual)
    low, equal, high = (store_cases.storages(buffer) for buffer in buffers)
    if len(got) == 2:
        kind = torch.float32 if case.build().sf_dtype == torch.float32 else torch.uint8
        scales = got[1].view(kind)
        assert bool((low[1].view(kind) <= scales).all())
        assert bool((scales <= high[1].view(kind)).all())
    unwritten = 2 * equal[0].numel() // 5
    assert torch.equal(got[0][:unwritten], equal[0][:unwritten])
    # A number within the slack of the middle between two codes may have either; steps are at least
    # 2**-4 of a number, so that is one in thousands. A wrong factor moves several per cent of them.
    assert float((got[0] != equal[0]).float().mean()) <= 0.01
    values = actual[2:5].dequantize().cpu().view(rows.shape)
    if case.kind == "Nvfp4":
        # The largest number of the format is 448 * 6 over the global scale; beyond it all clip.
        limit = 2688.0 / case.scale
        rows = rows.clamp(-limit, limit)
        half_step = values.abs() / 4 + magnitude.view(3, 8, 32, 16).amax(-1).repeat_interleave(
            16, -1
        ) / (4 * 6 * 0.9)
    elif case.kind == "Fp8Tensor":
        half_step = values.abs() / 16 + 2.0**-10 * case.scale
    else:
        half_step = values.abs() / 16 + 2.0**-9 * magnitude.amax(-1, keepdim=True) / 448
    error = (values - rows).abs()
    worst = float((error - half_step - slack).max())
    # Nothing but the rounding of these lines.
    assert worst <= 1e-9, f"a code is {worst:.3e} further from its number than any rounding"


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_prefill_stores_its_float32_output(case: FormatCase) -> None:
    q = torch.randn(3, 8, 512, dtype=torch.bfloat16, device=CUDA)
    kv = torch.randn(200, 512, dtype=torch.bfloat16, device=CUDA)
    indices = draw_indices(3, 150, 200).to(CUDA)
    indices[1] = -1
    rope = mlacast.Rope(
        launches.unit_table(9).to(CUDA), torch.tensor([3, 50, 1], device=CUDA), "half"
    )
    options: dict[str, Any] = {
        "rope": rope,
        "q_norm_eps": 0.75,
        "attn_sink": torch.randn(8, device=CUDA),
    }
    exact = launches.prefill(q, kv, indices, launches.float32_buffer(3, 8, CUDA), **options)
    assert exact.max_logits is not None
    _assert_explained(
        case,
        exact.out.data,
        _slack(exact.max_logits, exact.lse, float(kv.abs().max())),
        lambda out: mlacast.sparse_mla_prefill(
            q, kv, indices, sm_scale=launches.SM_SCALE, out=out, backend="triton", **options
        ),
    )


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_decode_stores_its_float32_output(case: FormatCase) -> None:
    q = torch.randn(3, 8, 512).bfloat16()
    filled = CacheCase("V4", 512).fill(num_pages=2, page_size=64, slots=range(128))
    indices = draw_indices(3, 150, 128)
    rows = filled.rows.bfloat16()
    _, max_logits, lse = mlacast.reference.sparse_mla_prefill(
        q, rows, indices, sm_scale=launches.SM_SCALE
    )
    cache = copy_storage(filled.cache)
    options: dict[str, Any] = {
        "kv_format": mlacast.KvFormat.V4,
        "attn_sink": torch.randn(8, device=CUDA),
        "num_splits": 3,
    }
    arguments = (q.to(CUDA), cache, indices.to(CUDA))
    buffer = launches.float32_buffer(3, 8, CUDA)
    exact = launches.decode(*arguments, buffer, **options).out.data
    _assert_explained(
        case,
        exact,
        _slack(max_logits, lse, float(rows.abs().max())),
        lambda out: mlacast.sparse_mla_decode(
            *arguments, sm_scale=launches.SM_SCALE, out=out, backend="triton", **options
        ),
    )
