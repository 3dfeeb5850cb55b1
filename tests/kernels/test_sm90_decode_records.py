"""Codes and scales of records as the Hopper decode kernels turn them into 16-bit numbers.

Their programs run on every code beside every scale byte. Where they give bfloat16, shared memory
holds 2**-64 of a key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mlacast.formats import decode_e2m1, decode_e4m3
from tests.kernels.ptx_words import bfloat16_values, run, to_bfloat16

pytest.importorskip("triton", reason="the programs stand in a module of kernels")

# Arrays of uint32; arithmetic of arrays and numbers has wider types for a type checker.
Words = Any
ALL = np.arange(256, dtype=np.uint32)
CODES, SCALES = (axis.reshape(-1) for axis in np.meshgrid(ALL, ALL, indexing="ij"))
UNIT_AND_LANE = [(unit, lane) for unit in range(2) for lane in range(2)]


def _decoded(codes: Words, kind: str) -> NDArray[np.float64]:
    """Values of codes by the formats of the library."""
    decode = decode_e2m1 if kind == "e2m1" else decode_e4m3
    return decode(torch.from_numpy(codes.astype(np.uint8))).double().numpy()


def _in_word(scales: Words, unit: int, lane: int) -> Words:
    """A word of four scale bytes, the wanted one at its place and others around it."""
    place = 2 * unit + lane
    return sum(
        (scales if byte == place else scales ^ np.uint32(0x5A + byte)) << np.uint32(8 * byte)
        for byte in range(4)
    ).astype(np.uint32)


def _assert_same(halves: Words, expected: NDArray[np.float64]) -> None:
    """The same bits, except that every NaN is one."""
    found = bfloat16_values(halves)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal((halves & 0xFFFF)[~nan], to_bfloat16(expected)[~nan])


@pytest.mark.parametrize(("unit", "lane"), UNIT_AND_LANE)
def test_e2m1_times_e4m3_is_exact_for_every_code_and_scale(unit: int, lane: int) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_codes import _write_e2m1_program
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import (
        _E4M3_FIRST,
        _E4M3_SECOND,
        _write_numbers_of_e4m3,
    )

    constants = [np.uint32(number) for number in (_E4M3_FIRST.value, _E4M3_SECOND.value)]
    (multipliers,) = run(
        _write_numbers_of_e4m3(unit), 1, [_in_word(SCALES, unit, lane), *constants]
    )
    scale = _decoded(SCALES, "e4m3")
    for byte in range(4):
        # The other bytes of the word hold other codes.
        words = (CODES << np.uint32(8 * byte)) | (
            (CODES * np.uint32(0x01010101) ^ np.uint32(0xA55A3CC3)) & ~np.uint32(0xFF << (8 * byte))
        )
        values = run(_write_e2m1_program(lane), 4, [words, multipliers])[byte]
        with np.errstate(invalid="ignore"):
            even = _decoded(CODES & 0xF, "e2m1") * scale
            odd = _decoded(CODES >> 4, "e2m1") * scale
        exact = np.where(np.isnan(even), 0.0, even)
        assert (bfloat16_values(to_bfloat16(exact)) == exact).all(), "bfloat16 holds the product"
        _assert_same(values, even * 2.0**-64)
        _assert_same(values >> 16, odd * 2.0**-64)


@pytest.mark.parametrize(("unit", "lane"), UNIT_AND_LANE)
def test_e4m3_times_ue8m0_is_rounded_once(unit: int, lane: int) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_codes import _write_e4m3_program
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import (
        _INFINITE_CODES,
        _write_powers_of_ue8m0,
    )

    limit = np.uint32(_INFINITE_CODES.value)
    (multipliers,) = run(_write_powers_of_ue8m0(unit), 1, [_in_word(SCALES, unit, lane), limit])
    expected = _decoded(CODES, "e4m3")
    # The NaN code is not recognised: it reads 480.
    expected[np.isnan(expected)] = 480.0
    expected[CODES == 0xFF] = -480.0
    expected = expected * np.ldexp(1.0, SCALES.astype(np.int64) - 127 - 64)
    finite = SCALES <= 198
    for byte in range(4):
        words = (CODES << np.uint32(8 * byte)) | np.uint32(0xA55A3CC3 & ~(0xFF << (8 * byte)))
        halves = run(_write_e4m3_program(lane), 2, [words, multipliers])[byte // 2]
        halves = halves >> np.uint32(16 * (byte % 2))
        _assert_same(halves[finite], expected[finite])
        above = ~finite & ((CODES & 0x7F) != 0)
        assert np.isinf(bfloat16_values(halves[above])).all()


def test_e4m3_as_float16_is_exact_and_in_its_place() -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_decode_fp8_dequant import _AS_FLOAT16

    for byte in range(4):
        words = (ALL << np.uint32(8 * byte)) | np.uint32(0xA55A3CC3 & ~(0xFF << (8 * byte)))
        halves = run(_AS_FLOAT16.value, 2, [words])[byte // 2] >> np.uint32(16 * (byte % 2))
        found = (halves & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        # NaN codes are NaN, and zeros have their sign.
        np.testing.assert_array_equal(found, _decoded(ALL, "e4m3"))
        np.testing.assert_array_equal(np.signbit(found[:-1]), ALL[:-1] >= 0x80)
