"""Independent quantisers: nearest-code searches over tables built bit by bit, sharing no code with
the library.

Scales follow the normative rules (IEEE float32 division, amax on float32, exact powers of two
through frexp). They are slow on purpose and take float32 ``[T, g, f]`` in natural head order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAGNITUDES = [
    (mantissa / 8.0) * 2.0**-6 if exponent == 0 else (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:127]
"""Values of the codes 0x00..0x7E; code 0x7F is NaN."""

E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Quantized:
    """Expected bytes: ``data`` [T, g, f or f/2] uint8; ``sf`` logical scales or None.

    sf is float32 [T, g, n], int32 words [T, g, n] (packed exponents) or, for Nvfp4, uint8 [T,
    g*f/16].
    """

    data: Tensor
    sf: Tensor | None


def nearest_code(values: Tensor, magnitudes: list[float], sign_bit: int, nan_code: int) -> Tensor:
    """Nearest table entry, ties to the even code, saturating; the sign of zero is kept; uint8."""
    table = torch.tensor(magnitudes, dtype=torch.float64)
    wanted = values.double().abs().clamp_max(magnitudes[-1]).nan_to_num(0.0)
    below = (torch.searchsorted(table, wanted.contiguous(), right=True) - 1).clamp(
        0, len(magnitudes) - 1
    )
    above = (below + 1).clamp_max(len(magnitudes) - 1)
    middle = (table[below] + table[above]) / 2.0
    goes_up = (wanted > middle) | ((wanted == middle) & (below % 2 == 1))
    code = torch.where(goes_up, above, below) + torch.signbit(values).long() * sign_bit
    return torch.where(values.isnan(), torch.full_like(code, nan_code), code).to(torch.uint8)


def e4m3_codes(values: Tensor) -> Tensor:
    """float32 -> e4m3 codes, clamped to +-448."""
    return nearest_code(values, E4M3_MAGNITUDES, 0x80, 0x7F)


def e4m3_values(codes: Tensor) -> Tensor:
    """e4m3 codes -> float64."""
    table = torch.tensor(E4M3_MAGNITUDES + [math.nan], dtype=torch.float64)
    magnitude = table[(codes.to(torch.int64) & 0x7F)]
    return torch.where(codes.to(torch.int64) >= 0x80, -magnitude, magnitude)


def e2m1_codes(values: Tensor) -> Tensor:
    """float32 -> e2m1 codes 0..15."""
    return nearest_code(values, E2M1_MAGNITUDES, 0x8, 0x7)


def e2m1_values(codes: Tensor) -> Tensor:
    """e2m1 codes 0..15 -> float64."""
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    magnitude = table[(codes.to(torch.int64) & 0x7)]
    return torch.where(codes.to(torch.int64) >= 0x8, -magnitude, magnitude)


def power_of_two_byte(ratio: float) -> int:
    """Biased exponent of the smallest power of two >= ``ratio``, clamped to 1..254."""
    if math.isnan(ratio) or math.isinf(ratio):
        return 254
    mantissa, exponent = math.frexp(ratio)
    return min(max(exponent - (1 if mantissa == 0.5 else 0) + 127, 1), 254)


def group_amax(x: Tensor, group: int) -> Tensor:
    """The largest magnitude of every element's group, in the shape of ``x``."""
    groups = x.abs().view(*x.shape[:-1], -1, group)
    return groups.amax(-1).repeat_interleave(group, -1)


def group_scales(x: Tensor, group: int, sf: str, amax_floor: float) -> Tensor:
    """Scales [.., K/group]: float32 values, or exponent bytes (int64) for sf="ue8m0_packed"."""
    groups = x.float().view(*x.shape[:-1], -1, group)
    amax = groups.abs().amax(-1)
    floor = torch.tensor(amax_floor, dtype=torch.float32)
    ratio = torch.maximum(amax, floor) / torch.tensor(448.0, dtype=torch.float32)
    if sf == "float32":
        return ratio
    flat = [power_of_two_byte(value) for value in ratio.reshape(-1).tolist()]
    exponents = torch.tensor(flat, dtype=torch.int64).view(ratio.shape)
    if sf == "ue8m0_packed":
        return exponents
    return torch.ldexp(torch.ones_like(ratio), (exponents - 127).to(torch.int32))


def pack_words(exponents: Tensor) -> Tensor:
    """Exponent bytes [.., n] -> int32 words [.., ceil(n/4)]; byte j of word w belongs to scale 4w +
    j.
    """
    count = exponents.shape[-1]
    words = []
    for first in range(0, count, 4):
        word = torch.zeros(exponents.shape[:-1], dtype=torch.int64)
        for j in range(min(4, count - first)):
            word += exponents[..., first + j] << (8 * j)
        words.append(torch.where(word >= 2**31, word - 2**32, word))
    return torch.stack(words, -1).to(torch.int32)


def chunk32_order(values: Tensor, per_head: int, chunk: int) -> Tensor:
    """Reorder [T, g, w*per_head]: chunk c of head h moves to position c*w + h inside the group."""
    width = values.shape[-1] // per_head
    result = torch.empty_like(values)
    for head in range(width):
        for index in range(per_head // chunk):
            source = head * per_head + index * chunk
            target = (index * width + head) * chunk
            result[..., target : target + chunk] = values[..., source : source + chunk]
    return result


def quantize_fp8_tensor(x: Tensor, scale: float) -> Quantized:
    """code = e4m3(x * (1 / scale)), the reciprocal and the product in float32."""
    reciprocal = torch.tensor(1.0, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return Quantized(e4m3_codes(x.float() * reciprocal), None)


def quantize_fp8_group(
    x: Tensor, group: int, sf: str, *, chunk32: bool = False, floor: float = 1e-10
) -> Quantized:
    """Per-group e4m3 with float32, power-of-two float32 or packed ue8m0 scales."""
    scales = group_scales(x, group, sf, floor)
    divisor = scales
    if sf == "ue8m0_packed":
        divisor = torch.ldexp(
            torch.ones(scales.shape, dtype=torch.float32), (scales - 127).to(torch.int32)
        )
    codes = e4m3_codes(x.float() / divisor.repeat_interleave(group, -1))
    if chunk32:
        codes, scales = chunk32_order(codes, 512, 32), chunk32_order(scales, 16, 1)
    return Quantized(codes, pack_words(scales) if sf == "ue8m0_packed" else scales)


def quantize_nvfp4(x: Tensor, global_scale: float) -> Quantized:
    """sf = e4m3(min(gs * (amax / 6), 448)), code = e2m1(x * (gs / sf)), packed with the even
    element low.
    """
    factor = torch.tensor(global_scale, dtype=torch.float32)
    blocks = x.float().view(*x.shape[:-1], -1, 16)
    amax = blocks.abs().amax(-1)
    ratio = torch.minimum(factor * (amax / torch.tensor(6.0)), torch.tensor(448.0))
    sf_codes = e4m3_codes(ratio)
    sf_values = e4m3_values(sf_codes).float()
    multiplier = factor / sf_values
    codes = e2m1_codes(blocks * multiplier.unsqueeze(-1))
    codes = torch.where((sf_codes == 0).unsqueeze(-1), torch.zeros_like(codes), codes).flatten(-2)
    packed = codes[..., 0::2].to(torch.int64) | (codes[..., 1::2].to(torch.int64) << 4)
    return Quantized(packed.to(torch.uint8), sf_codes.flatten(1))


def swizzled_offset(row: int, column: int, columns: int) -> int:
    """Byte of the scale (row, column) in the 128x4 layout with ``columns`` logical columns."""
    tiles = (columns + 3) // 4
    return (
        ((row // 128) * tiles + column // 4) * 512
        + (row % 32) * 16
        + (row % 128) // 32 * 4
        + column % 4
    )


def swizzled_buffer(sf: Tensor) -> Tensor:
    """Logical scales [M, C] uint8 -> the padded buffer [ceil128(M), ceil4(C)], zero elsewhere."""
    rows, columns = sf.shape
    padded_rows, padded_columns = (rows + 127) // 128 * 128, (columns + 3) // 4 * 4
    flat = [0] * (padded_rows * padded_columns)
    for row, line in enumerate(sf.tolist()):
        for column, value in enumerate(line):
            flat[swizzled_offset(row, column, columns)] = value
    return torch.tensor(flat, dtype=torch.uint8).view(padded_rows, padded_columns)
