"""Scales at powers of two, and groups that are zero or tiny."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import quantizers
from tests.cache_writers import float32_bytes
from tests.format_cases import (
    QUANTISED,
    FormatCase,
    assert_buffer_holds,
    bytes_of,
    case_id,
)


def _next_float32(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))


EXPONENTS = [
    (448.0, 127),
    (3.5, 120),
    (7.0, 121),
    (0.875, 118),
    (448.0 * 2.0**-20, 107),
    (3.0, 120),
    (449.0, 128),
    (_next_float32(448.0), 128),
    (458752.0, 137),
    (_next_float32(458752.0), 138),
]


@pytest.mark.parametrize(("amax", "byte"), EXPONENTS, ids=lambda value: f"{value:.9g}")
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_exponent_bytes_at_and_beside_powers_of_two(
    amax: float, byte: int, sign: float, group: int, backend: str
) -> None:
    """BC-14, sgl-project/sglang#31210: float32 log2 and ceil loses the last bit, frexp returns one
    too many.
    """
    x = torch.zeros(1, 512)
    x[0, 5] = sign * amax
    packed = mlacast.quantize_output(x, mlacast.Fp8Group(group, "ue8m0_packed"), backend=backend)
    assert packed.sf is not None
    assert int(packed.sf[0, 0, 0]) & 0xFF == byte
    powers = mlacast.quantize_output(x, mlacast.Fp8Group(group, "float32_pow2"), backend=backend)
    assert powers.sf is not None
    assert float(powers.sf[0, 0, 0]) == 2.0 ** (byte - 127)
    if group == 32:
        words = mlacast.quantize_output(x, mlacast.Mxfp8(), backend=backend).sf
        assert words is not None
        assert int(words[0, 0, 0]) & 0xFF == byte


@pytest.mark.parametrize("num_splits", [1, 2])
def test_exponent_bytes_end_to_end_from_a_656_byte_cache(num_splits: int, backend: str) -> None:
    """BC-14: one live key whose value carries five amax values exactly, one per group of 32."""
    cache = torch.zeros(1, 2, 1, 656, dtype=torch.uint8)
    # 448 = 0x7E, 3.5 = 0x46, 7 = 0x4E, 0.875 = 0x36; the second tile scales 448 by 2**-20.
    for group, code in enumerate([0x7E, 0x46, 0x4E, 0x36, 0x7E]):
        cache[0, 1, 0, 32 * group + 3] = code
    cache[0, 1, 0, 512:528] = torch.tensor(
        float32_bytes([1.0, 2.0**-20, 1.0, 1.0]), dtype=torch.uint8
    )
    out, _ = mlacast.sparse_mla_decode(
        torch.zeros(1, 1, 576, dtype=torch.bfloat16),
        cache,
        torch.tensor([[1, -1]], dtype=torch.int32),
        kv_format=mlacast.KvFormat.V32,
        sm_scale=1.0,
        rope=mlacast.Rope(
            torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1), torch.zeros(1, dtype=torch.int32)
        ),
        num_splits=num_splits,
        out_format=mlacast.Mxfp8(),
        backend=backend,
    )
    assert isinstance(out, mlacast.QuantizedTensor) and out.sf is not None
    words = [int(word) & 0xFFFFFFFF for word in out.sf[0, 0]]
    assert [words[0] >> shift & 0xFF for shift in (0, 8, 16, 24)] == [127, 120, 121, 118]
    assert words[1] & 0xFF == 107
    # The other groups are zero: 1e-4 / 448 lies between 2**-23 and 2**-22.
    assert [words[1] >> shift & 0xFF for shift in (8, 16, 24)] == [105] * 3
    codes = out.data.view(torch.uint8)[0, 0]
    assert codes[[3, 35, 67, 99, 131]].tolist() == [0x7E] * 5


def _tiny_groups() -> Tensor:
    """[2, 512]: groups of 128 that are 0, -0, one 5e-37 among zeros, amax 2**-126; the second row
    1e-30.
    """
    x = torch.zeros(2, 512)
    x[0, 128:256] = -0.0
    x[0, 256 + 7] = 5e-37
    x[0, 384:] = torch.tensor([2.0**-126, -(2.0**-127)] * 64)
    x[1] = torch.tensor([1e-30, -3e-31] * 256)
    return x


def _assert_tiny_groups_are_finite(
    buffer: mlacast.QuantizedTensor, x: Tensor, case: FormatCase
) -> None:
    codes = buffer.data.view(torch.uint8)
    if case.kind != "Nvfp4":
        assert not bool(((codes & 0x7F) == 0x7F).any()), "no NaN code"
        assert not bool(((codes & 0x7F) == 0x7E).any()), (
            "no code of 448: the floor keeps the scale larger"
        )
    if buffer.sf is not None:
        scale_bytes = bytes_of(buffer.sf)
        if buffer.sf.dtype == torch.float32:
            assert bool(buffer.sf.isfinite().all()) and bool((buffer.sf > 0).all())
        else:
            assert not bool((scale_bytes == 0xFF).any()) and not bool((scale_bytes == 0x7F).any())
    back = buffer.dequantize().view(x.shape)
    error = (back - x).abs()
    assert bool((error <= quantizers.group_amax(x, 128)).all())
    amax = quantizers.group_amax(x, 16)
    assert bool((back[amax == 0] == 0).all()), "a group of zeros dequantises to exactly zero"


@pytest.mark.parametrize("flush", [False, True], ids=["denormals_kept", "denormals_flushed"])
@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_zero_and_tiny_groups(case: FormatCase, flush: bool, backend: str) -> None:
    """BC-16, flashinfer-ai/flashinfer#2440: 0/0 gave NaN codes, flushed scales gave +-448."""
    x = _tiny_groups()
    torch.set_flush_denormal(flush)
    try:
        result = mlacast.quantize_output(x, case.build(), backend=backend)
    finally:
        torch.set_flush_denormal(False)
    _assert_tiny_groups_are_finite(result, x, case)
    if not flush:
        assert_buffer_holds(result, case.expect(x.view(2, 1, 512)), case)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_zero_and_tiny_values_through_attention(case: FormatCase, backend: str) -> None:
    """BC-16: the same values as V rows, one live key per token; an empty third row stands for
    padding.
    """
    kv = _tiny_groups().bfloat16()
    out = mlacast.sparse_mla_prefill(
        torch.zeros(3, 1, 512, dtype=torch.bfloat16),
        kv,
        torch.tensor([[0], [1], [-1]], dtype=torch.int32),
        sm_scale=1.0,
        out_format=case.build(),
        backend=backend,
    )[0]
    assert isinstance(out, mlacast.QuantizedTensor)
    x = torch.cat((kv.float(), torch.zeros(1, 512)))
    _assert_tiny_groups_are_finite(out, x, case)


def test_an_nvfp4_block_whose_scale_rounds_to_zero_has_zero_codes(backend: str) -> None:
    """BC-16, BC-20: gs * amax / 6 of 2**-10 ties to the even code 0; just above it the smallest
    scale survives.
    """
    x = torch.zeros(1, 512)
    x[0, :16] = 6 * 2.0**-10
    x[0, 16:32] = 6 * 2.0**-10 * (1 + 2.0**-10)
    x[0, 32:48] = -6 * 2.0**-10
    result = mlacast.quantize_output(x, mlacast.Nvfp4(1.0), backend=backend)
    assert result.sf is not None
    assert result.sf.view(torch.uint8).flatten()[[0, 1, 2]].tolist() == [0, 1, 0]
    codes = result.data.view(torch.uint8)[0, 0]
    assert not codes[:8].any() and not codes[16:24].any()
    # (6 * 2**-10) / 2**-9 = 3: code 5 in both nibbles.
    assert set(codes[8:16].tolist()) == {0x55}


@pytest.mark.parametrize("value", [447.0, 448.0, 448.00003, 464.0, 465.0, 1000.0, 1e38])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_values_above_the_e4m3_maximum_saturate(sign: float, value: float, backend: str) -> None:
    """BC-18, pytorch/ao#1912: with a forced scale of 1 the code is that of 448, never NaN."""
    x = torch.full((1, 512), sign * value)
    result = mlacast.quantize_output(x, mlacast.Fp8Tensor(1.0), backend=backend)
    assert set(result.data.view(torch.uint8).flatten().tolist()) == {0x7E if sign > 0 else 0xFE}


def _four_blocks() -> Tensor:
    """Blocks of 16 with amax 4000, 0.005 and 6, the rest zero."""
    x = torch.zeros(1, 512)
    for block, amax in enumerate([4000.0, 0.005, 6.0]):
        x[0, 16 * block : 16 * block + 8] = amax * torch.tensor([1, -1, 0.6, 0.3, -0.2, 0.1, 0, 1])
    return x


def test_nvfp4_scales_overflow_and_underflow_as_documented(backend: str) -> None:
    """BC-20, NVIDIA/Model-Optimizer#1633: 4000 / 6 saturates at 448, 0.005 / 6 < 2**-10 rounds to
    0.
    """
    result = mlacast.quantize_output(_four_blocks(), mlacast.Nvfp4(1.0), backend=backend)
    assert result.sf is not None
    # 6 / 6 = 1 is code 0x38.
    assert result.sf.view(torch.uint8).flatten()[[0, 1, 2, 3]].tolist() == [0x7E, 0x00, 0x38, 0x00]
    codes = result.data.view(torch.uint8)[0, 0]
    # The block of 4000: both leading elements saturate at code 6 (2688), signs kept.
    assert int(codes[0]) == 0xF7
    assert not codes[8:16].any() and not codes[24:].any()
    assert result.dequantize()[0, 0, :2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize(("reciprocal", "holds"), [(False, True), (True, False)])
def test_direction_of_the_nvfp4_global_scale(reciprocal: bool, holds: bool, backend: str) -> None:
    """BC-20: with 2688 / amax every block is within half a step; its reciprocal must not be."""
    x = torch.randn(4, 512) * torch.tensor([[1000.0], [30.0], [1.0], [0.1]])
    global_scale = 2688.0 / float(x.abs().max())
    if reciprocal:
        global_scale = 1.0 / global_scale
    result = mlacast.quantize_output(x, mlacast.Nvfp4(global_scale), backend=backend)
    error = (result.dequantize().view(x.shape) - x).abs()
    # Half of the widest step, 4..6, is a sixth of the block's amax; rounding the scale to e4m3
    # moves it by up to 2**-4.
    bound = quantizers.group_amax(x, 16) * (1 / 6 + 2.0**-4)
    assert bool((error <= bound).all()) == holds
