"""What must stand in the output buffer of a drawn call afterwards.

What a quantised buffer may hold follows from bounds of the numbers: rounding does not turn an order
round, so a scale lies between the scales of the smallest and the largest amax, and a code between
the codes of both ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlacast
from tests.fuzz import numbers
from tests.fuzz.outputs import Target
from tests.fuzz.tensors import POISON, raw

BF16_HALF_ULP = 2.0**-8
E4M3_MAX = 448.0
# Rounding of a quotient in float32, or of a reciprocal and a product.
QUOTIENT = 2.0**-22


def check(target: Target, result: Any, expected: Tensor, error: Tensor) -> None:
    """Compare what was written with float64 [T, h, d] to within ``error``; poison stays elsewhere.

    Erases the result.
    """
    if target.plain is not None:
        assert result is target.plain, "a given tensor is not what came back"
        check_bf16(result.reshape(expected.shape), expected, error)
        result.view(torch.int16).fill_(POISON * 0x0101)
        _assert_poison(result)
        return
    if isinstance(result, Tensor):
        assert target.buffer is None
        assert target.format.key == "bf16" and target.groups == 1
        check_bf16(result.reshape(expected.shape), expected, error)
        return
    if target.buffer is not None:
        assert result is target.buffer, "a given buffer is not what came back"
    assert result.num_tokens == expected.shape[0]
    tokens = expected.shape[0]
    shape = (tokens, target.groups, target.features)
    assert (result.num_groups, result.features) == shape[1:]
    compare(result, expected.reshape(shape), error.reshape(shape))
    if target.buffer is None:
        _check_fresh_padding(result)
    else:
        check_surroundings(result, target.whole)


def check_bf16(actual: Tensor, expected: Tensor, error: Tensor) -> None:
    """Numbers of a plain output, in bfloat16 or, interpreted, float32."""
    assert actual.dtype in (torch.bfloat16, torch.float32), actual.dtype
    half_ulp = BF16_HALF_ULP if actual.dtype == torch.bfloat16 else 2.0**-24
    allowed = error + half_ulp * (expected.abs() + error) + 1e-37
    assert_within("out", actual.double(), expected - allowed, expected + allowed)


def assert_within(name: str, actual: Tensor, low: Tensor, high: Tensor) -> None:
    """Every number between its bounds."""
    wrong = ~((actual >= low) & (actual <= high))
    if bool(wrong.any()):
        at = tuple(int(place) for place in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}{list(at)} is {float(actual[at]):.9g}, not within "
            f"[{float(low[at]):.9g}, {float(high[at]):.9g}]; {int(wrong.sum())} are wrong"
        )


def chunk32_places(features: int, unit: int, device: torch.device) -> Tensor:
    """Where the natural block of ``unit`` features stands in chunk32 order, [features / unit]."""
    per_head, heads = 512 // unit, features // 512
    block = torch.arange(features // unit, device=device)
    head, within = block // per_head, block % per_head
    per_chunk = 32 // unit
    return ((within // per_chunk) * heads + head) * per_chunk + within % per_chunk


def swizzled_places(rows: Tensor, columns: int) -> Tensor:
    """Byte of each scale [rows, columns] in the 128x4 layout."""
    c = torch.arange(columns, device=rows.device)[None]
    r = rows[:, None]
    tiles = -(-columns // 4)
    return ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


def read_scales(buffer: mlacast.QuantizedTensor) -> Tensor | None:
    """Scales [T, g, n] float64 in natural order, n per group, by the layout's formulas."""
    fmt, sf = buffer.format, buffer.sf
    if sf is None:
        return None
    tokens, groups = buffer.num_tokens, buffer.num_groups
    count = buffer.features // fmt.sf_vec_size
    if fmt.sf_layout == "swizzled_128x4":
        rows = buffer.row_start + torch.arange(tokens, device=sf.device)
        flat = sf.view(torch.uint8).reshape(-1)
        codes = flat[swizzled_places(rows, groups * count)]
        return numbers.e4m3_numbers(codes).view(tokens, groups, count)
    if fmt.sf_kind != "ue8m0_packed":
        return sf.double()
    words = sf.to(torch.int64) & 0xFFFFFFFF
    codes = torch.stack([(words >> (8 * byte)) & 255 for byte in range(4)], -1).flatten(-2)
    assert not bool(codes[..., count:].any()), "bytes of a word past the last scale are not zero"
    scales = numbers.ue8m0_numbers(codes[..., :count].to(torch.uint8))
    if fmt.order == "chunk32":
        scales = scales[..., chunk32_places(buffer.features, 32, sf.device)]
    return scales


def read_codes(buffer: mlacast.QuantizedTensor) -> Tensor:
    """Codes as float64 [T, g, f] in natural order."""
    if buffer.data.dtype in (torch.bfloat16, torch.float32):
        return buffer.data.double()
    data = buffer.data.view(torch.uint8)
    if buffer.format.key == "nvfp4":
        return numbers.e2m1_numbers(data)
    codes = numbers.e4m3_numbers(data)
    if buffer.format.order == "chunk32":
        codes = codes[..., chunk32_places(buffer.features, 1, data.device)]
    return codes


def format_scale(fmt: mlacast.OutFormat) -> float:
    """The scale that a descriptor holds, as float32 has it."""
    value = fmt.scale if isinstance(fmt, mlacast.Fp8Tensor) else 1.0
    if isinstance(fmt, mlacast.Nvfp4):
        value = fmt.global_scale
    return float(torch.as_tensor(value, dtype=torch.float32))


def values_of(buffer: mlacast.QuantizedTensor) -> Tensor:
    """What a buffer means, float64 [T, g, f]."""
    codes, scales, fmt = read_codes(buffer), read_scales(buffer), buffer.format
    if scales is not None:
        codes = codes * scales.repeat_interleave(fmt.sf_vec_size, -1)
    if isinstance(fmt, mlacast.Nvfp4):
        return codes / format_scale(fmt)
    return codes * format_scale(fmt)


def scale_of(fmt: mlacast.OutFormat, amax: Tensor) -> Tensor:
    """Scale of a group with this largest magnitude, both float64."""
    if isinstance(fmt, mlacast.Nvfp4):
        scaled = format_scale(fmt) * (amax / 6)
        return numbers.round_e4m3(scaled)
    floor = float(torch.tensor(fmt.amax_floor, dtype=torch.float32))
    ratio = (amax.clamp_min(floor) / E4M3_MAX).clamp(2.0**-126, numbers.FLOAT32_MAX)
    return ratio if fmt.sf_kind == "float32" else numbers.power_of_two_above(ratio)


def compare(buffer: mlacast.QuantizedTensor, expected: Tensor, error: Tensor) -> None:
    """Codes and scales [T, g, f] are those of some numbers within ``error`` of the expected."""
    fmt = buffer.format
    if fmt.key == "bf16":
        check_bf16(buffer.data, expected, error)
        return
    codes, scales = read_codes(buffer), read_scales(buffer)
    assert not bool(codes.isnan().any()), "a code is NaN"
    low, high = expected - error, expected + error
    if scales is not None:
        size = fmt.sf_vec_size
        groups = (*expected.shape[:2], expected.shape[2] // size, size)
        least = torch.maximum(torch.maximum(low, -high), torch.zeros_like(low))
        most = torch.maximum(low.abs(), high.abs())
        bounds = [
            scale_of(fmt, part.reshape(groups).amax(-1) * factor)
            for part, factor in ((least, 1 - QUOTIENT), (most, 1 + QUOTIENT))
        ]
        if fmt.sf_kind == "float32":
            bounds = [bounds[0] * (1 - QUOTIENT), bounds[1] * (1 + QUOTIENT)]
        assert_within("scale", scales, *bounds)
        factors = scales.repeat_interleave(size, -1)
    else:
        factors = torch.full_like(low, format_scale(fmt))
    if isinstance(fmt, mlacast.Nvfp4):
        gone = factors == 0
        factors = torch.where(gone, 1.0, factors) / format_scale(fmt)
        low, high = torch.where(gone, 0.0, low), torch.where(gone, 0.0, high)
    ends = (low / factors, high / factors)
    rounding = numbers.round_e2m1 if isinstance(fmt, mlacast.Nvfp4) else numbers.round_e4m3
    # Subnormal numbers of float32 may count as zero.
    slack = [end.abs() * QUOTIENT + 2.0**-126 / factors for end in ends]
    assert_within("code", codes, rounding(ends[0] - slack[0]), rounding(ends[1] + slack[1]))


def _assert_poison(tensor: Tensor) -> None:
    changed = int((raw(tensor) != POISON).sum())
    assert changed == 0, f"{changed} bytes around the result changed"


def _padding_rows(sf: Tensor, rows: int, total: int) -> Tensor | None:
    """The rows that pad MN-major columns, where memory has room for them."""
    tokens, groups, words = sf.shape
    column = -(-total // 4) * 4
    if column == total or tokens == 0:
        return None
    if words > 1 and sf.stride(2) < column:
        return None
    if groups > 1 and sf.stride(1) < (words - 1) * sf.stride(2) + column:
        return None
    first = sf.storage_offset() + rows
    last = first + (groups - 1) * sf.stride(1) + (words - 1) * sf.stride(2) + column - total
    if last * sf.element_size() > sf.untyped_storage().nbytes():
        return None
    strides = (1, sf.stride(1), sf.stride(2))
    return sf.as_strided((column - total, groups, words), strides, first)


def _check_fresh_padding(buffer: mlacast.QuantizedTensor) -> None:
    """Scale padding of a buffer that the library made is zero."""
    sf, fmt, tokens = buffer.sf, buffer.format, buffer.num_tokens
    if sf is None:
        return
    if fmt.sf_layout == "mn_major":
        padding = _padding_rows(sf, tokens, tokens)
        assert padding is None or not bool(padding.any()), "padding of scales is not zero"
    elif fmt.sf_layout == "swizzled_128x4":
        flat = sf.view(torch.uint8).reshape(-1).clone()
        columns = buffer.num_groups * fmt.sf_words(buffer.features)
        flat[swizzled_places(torch.arange(tokens, device=sf.device), columns)] = 0
        assert not bool(flat.any()), "padding of scales is not zero"


def check_surroundings(buffer: mlacast.QuantizedTensor, whole: int | None) -> None:
    """Erase the rows, and padding that had to be zeroed; only poison may be left."""
    tokens, sf, fmt = buffer.num_tokens, buffer.sf, buffer.format
    stop = buffer.row_start + tokens
    ends = whole == stop and tokens > 0
    if buffer.data.dtype.itemsize == 1:
        buffer.data.view(torch.uint8).fill_(POISON)
    else:
        buffer.data.view(torch.int16).fill_(POISON * 0x0101)
    _assert_poison(buffer.data)
    if sf is None:
        return
    if fmt.sf_layout == "swizzled_128x4":
        columns = buffer.num_groups * fmt.sf_words(buffer.features)
        flat = sf.view(torch.uint8).reshape(-1)
        first = torch.arange(buffer.row_start, stop, device=sf.device)
        if ends:
            # Every row of the last tiles from the range's end on, and the columns of its rows.
            rows = torch.arange(buffer.row_start, sf.shape[0], device=sf.device)
            places = swizzled_places(rows, sf.shape[1])
            mask = torch.ones_like(places, dtype=torch.bool)
            mask[:tokens, :columns] = False
            assert not bool(flat[places][mask].any()), "padding of scales is not zero"
            flat[places] = POISON
        else:
            flat[swizzled_places(first, columns)] = POISON
            if sf.shape[1] > columns:
                # Padding columns of its own rows: whoever writes them writes zeros.
                places = swizzled_places(first, sf.shape[1])[:, columns:]
                held = flat[places]
                assert bool(((held == 0) | (held == POISON)).all()), "padding columns hold numbers"
                flat[places] = POISON
    else:
        if ends and fmt.sf_layout == "mn_major":
            padding = _padding_rows(sf, tokens, stop)
            if padding is not None:
                assert not bool(padding.any()), "padding of scales is not zero"
                padding.view(torch.int32).fill_(POISON * 0x01010101)
        sf.view(torch.int32).fill_(POISON * 0x01010101)
    _assert_poison(sf)
