"""Divisions of the Hopper kernels on the device: the bits of IEEE division, for every float32.

Expected are PyTorch's quotients of two tensors: a number as the divisor would become a product.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.hopper_cases import on_hopper
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from tests.kernels import sm90_probes  # noqa: E402

pytestmark = on_hopper

CHUNK = 1 << 27
LEAST_NORMAL = 2.0**-126
CONSTANTS = {"divide_by_448": 448.0, "divide_by_6": 6.0, "divide_by_6_in_float32": 6.0}
WAYS = (
    "invert",
    "invert_normal",
    "divide_by_448",
    "divide_by_6",
    "divide_by_6_in_float32",
    "divide_numbers",
    "divide_by_short",
)


@pytest.mark.parametrize("way", WAYS)
def test_bits_of_every_number(way: str) -> None:
    codes = torch.arange(1, 127, dtype=torch.uint8, device=CUDA)
    scales = codes.view(torch.float8_e4m3fn).float()
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        bits = torch.arange(start, start + CHUNK, device=CUDA)
        x = bits.to(torch.int32).view(torch.float32)
        y = torch.full_like(x, CONSTANTS.get(way, 1.0))
        if way in ("divide_numbers", "divide_by_short"):
            y = scales[(bits * 31 + bits // 4096) % len(scales)]
        found = sm90_probes.divide(way, x, y)
        expected = y / x if way.startswith("invert") else x / y
        same = found.view(torch.int32) == expected.view(torch.int32)
        same |= found.isnan() & expected.isnan()
        if way == "divide_by_448":
            same |= ~(x >= 1e-10) | x.isinf()
        elif way == "divide_by_6_in_float32":
            same |= ~(x >= 2.0**-120) | x.isinf()
        elif way == "divide_by_short":
            same |= ~((x.abs() >= 2.0**-108) & (x.abs() <= 2.0**100))
        elif way == "invert_normal":
            is_normal = (x.abs() >= LEAST_NORMAL) & (expected.abs() >= LEAST_NORMAL)
            same |= ~is_normal & ~x.isnan()
        wrong = (~same).nonzero().flatten()[:4]
        words = [t[wrong].view(torch.int32).tolist() for t in (x, y, found, expected)]
        assert wrong.numel() == 0, f"dividend or operand, divisor, found, expected: {words}"
