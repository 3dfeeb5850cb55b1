"""quantize_output on every backend: bytes against the independent quantisers, for every format."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import quantizers
from tests.format_cases import (
    NVFP4,
    QUANTISED,
    FormatCase,
    assert_buffer_holds,
    case_id,
)


def _nasty_values(tokens: int, width: int) -> Tensor:
    """Values over many binades, with zeros of both signs, zero groups, ties and saturation."""
    x = torch.randn(tokens, width) * torch.exp2(torch.randint(-12, 10, (tokens, 1)).float())
    x[0, :128] = 0.0
    x[1 % tokens, :64] = -0.0
    x[2 % tokens, 5] = 1e6
    x[2 % tokens, 130] = -1e6
    x[:, 256:288] = torch.arange(-16, 16).float() / 8.0
    return x


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_bytes_equal_the_independent_quantiser(
    case: FormatCase, num_groups: int, backend: str
) -> None:
    x = _nasty_values(5, 2048)
    result = mlacast.quantize_output(x, case.build(), num_groups=num_groups, backend=backend)
    assert isinstance(result, mlacast.QuantizedTensor)
    assert_buffer_holds(result, case.expect(x.view(5, num_groups, -1)), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", QUANTISED[:4] + QUANTISED[-3:], ids=case_id)
def test_narrow_inputs_are_quantised_by_value(
    case: FormatCase, dtype: torch.dtype, backend: str
) -> None:
    x = torch.randn(3, 1024).to(dtype)
    result = mlacast.quantize_output(x, case.build(), backend=backend)
    assert_buffer_holds(result, case.expect(x.float().view(3, 1, 1024)), case)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_nan_marks_its_group_and_infinity_saturates(case: FormatCase, backend: str) -> None:
    x = torch.randn(2, 512)
    x[0, 3] = math.nan
    x[1, 200], x[1, 201] = math.inf, -math.inf
    result = mlacast.quantize_output(x, case.build(), backend=backend)
    codes = result.data.view(torch.uint8)[:, 0]
    if case.kind == "Nvfp4":
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        assert nibbles[0, :16].tolist() == [0x7] * 16
        assert nibbles[1, 200:202].tolist() == [0x7, 0xF]
        assert result.sf is not None
        flat = result.sf.view(torch.uint8).flatten()
        assert int(flat[quantizers.swizzled_offset(0, 0, 32)]) == 0x7F
        assert int(flat[quantizers.swizzled_offset(1, 200 // 16, 32)]) == 0x7E
        return
    if case.kind == "Fp8Tensor":
        # No group: the NaN code stands where the NaN stood, and nowhere else.
        assert int(codes[0, 3]) == 0x7F
        assert (codes[0] == 0x7F).sum() == 1
    else:
        group = 32 if case.kind == "Mxfp8" else case.group
        assert codes[0, :group].tolist() == [0x7F] * group
        assert not bool(((codes[0, group:] & 0x7F) == 0x7F).any())
        assert result.sf is not None
        if case.sf == "ue8m0_packed" or case.kind == "Mxfp8":
            assert (int(result.sf[0, 0, 0]) & 0xFF) == 254
        else:
            first = float(result.sf[0, 0, 0])
            assert math.isnan(first) if case.sf == "float32" else first == 2.0**127
    assert codes[1, 200:202].tolist() == [0x7E, 0xFE]
    assert not bool(((codes[1] & 0x7F) == 0x7F).any())


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_the_sign_of_zero_is_kept(case: FormatCase, backend: str) -> None:
    x = torch.ones(1, 512)
    x[0, 0], x[0, 1] = 0.0, -0.0
    codes = mlacast.quantize_output(x, case.build(), backend=backend).data.view(torch.uint8)[0, 0]
    assert (int(codes[0]) == 0x80) if case.kind == "Nvfp4" else (codes[:2].tolist() == [0x00, 0x80])


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_dequantize_gives_code_times_scale_in_natural_order(case: FormatCase, backend: str) -> None:
    x = torch.randn(3, 2048)
    result = mlacast.quantize_output(x, case.build(), num_groups=2, backend=backend)
    back = result.dequantize()
    assert (back.dtype, back.shape) == (torch.float32, (3, 2, 1024))
    x = x.view(3, 2, 1024)
    # Half a step: e4m3 has a relative half step of 2**-4 down to its subnormals (2**-10 of the
    # scale); e2m1 at worst half of 4..6, one sixth of the amax, plus the rounding of the scale to
    # e4m3 (2**-4).
    if case.kind == "Nvfp4":
        amax = quantizers.group_amax(x, 16)
        bound = amax * (1 / 6 + 2.0**-4) * 1.01
    elif case.kind == "Fp8Tensor":
        bound = x.abs() * 2.0**-4 * 1.001 + case.scale * 2.0**-10
    else:
        bound = x.abs() * 2.0**-4 * 1.001 + 2.0**-9 * x.abs().amax() / 224
    assert bool(((back - x).abs() <= bound).all())


def test_bf16_is_a_format_too(backend: str) -> None:
    x = torch.randn(3, 1024)
    result = mlacast.quantize_output(x, mlacast.Bf16(), num_groups=2, backend=backend)
    assert result.sf is None
    assert torch.equal(result.data, x.bfloat16().view(3, 2, 512))


def test_a_strided_input_is_read_through_its_strides(backend: str) -> None:
    wide = torch.randn(4, 1100)
    x = wide[:, :1024]
    left = mlacast.quantize_output(x, mlacast.Fp8Group(128), backend=backend)
    right = mlacast.quantize_output(x.contiguous(), mlacast.Fp8Group(128), backend=backend)
    assert torch.equal(left.data.view(torch.uint8), right.data.view(torch.uint8))
    assert left.sf is not None and right.sf is not None
    assert torch.equal(left.sf, right.sf)


def test_writing_into_a_range_of_a_shared_buffer(backend: str) -> None:
    x = torch.randn(131, 512)
    whole = mlacast.quantize_output(x, NVFP4.build(), backend=backend)
    shared = mlacast.QuantizedTensor.empty(131, 1, 512, NVFP4.build())
    for first, last in ((0, 5), (5, 130), (130, 131)):
        view = shared[first:last]
        assert (
            mlacast.quantize_output(x[first:last], NVFP4.build(), out=view, backend=backend) is view
        )
    assert torch.equal(shared.data, whole.data)
    assert shared.sf is not None and whole.sf is not None
    assert torch.equal(shared.sf.view(torch.uint8), whole.sf.view(torch.uint8))
