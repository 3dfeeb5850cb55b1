"""What launchers tell kernels of an output range."""

from __future__ import annotations

import pytest

import mlacast

pytest.importorskip("triton", reason="the launchers' package imports triton")

from mlacast.kernels.common.targets import store_target  # noqa: E402


def test_swizzled_scales_are_counted_from_the_start_of_the_range() -> None:
    """Kernels for sm90 find that row in place of a stride that swizzled scales do not have."""
    buffer = mlacast.QuantizedTensor.empty(300, 2, 512, mlacast.Nvfp4(448.0))
    for first in (0, 3, 131):
        numbers = store_target(buffer[first : first + 9]).numbers
        assert numbers["stride_sf_word"] == numbers["row_start"] == first
        assert numbers["stride_sf_token"] == numbers["stride_sf_group"] == 0


def test_other_scales_have_their_strides() -> None:
    buffer = mlacast.QuantizedTensor.empty(300, 2, 512, mlacast.Mxfp8())
    assert buffer.sf is not None
    numbers = store_target(buffer[3:12]).numbers
    names = ("stride_sf_token", "stride_sf_group", "stride_sf_word")
    assert tuple(numbers[name] for name in names) == buffer.sf.stride()
