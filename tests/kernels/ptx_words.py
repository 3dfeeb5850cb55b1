"""Straight programs of PTX on words, run by NumPy: what the instructions of a kernel give.

Only the instructions of ``packed_bf16``, ``e2m1_casts``, ``sm90_nvfp4``, ``sm90_division`` and
``sm90_rotation`` of ``mlacast.kernels.common`` and of the keys of the Hopper decode kernels,
written from their description in NVIDIA's PTX ISA. A program sees $0, $1.. and its registers as
arrays of uint32.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_NAN16 = np.uint32(0x7FFF)


def bfloat16_values(halves: Words) -> NDArray[np.float64]:
    """Values of bfloat16 numbers in the lower halves of words."""
    return _floats(halves << np.uint32(16)).astype(np.float64)


def to_bfloat16(values: NDArray[np.float64]) -> Words:
    """The nearest bfloat16 numbers, ties to even, in the lower halves of words; subnormals too.

    By arithmetic of its own, for what programs are compared with.
    """
    exponent = np.maximum(np.frexp(np.where(np.isfinite(values), values, 0.0))[1] - 1, -126)
    step = np.ldexp(1.0, exponent - 7)
    rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
    with np.errstate(over="ignore"):
        words: Words = rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return words


def _floats(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


def _halves(words: Words) -> tuple[Words, Words]:
    return words & np.uint32(0xFFFF), words >> np.uint32(16)


def _by_half(operation: Callable[..., Words]) -> Callable[..., Words]:
    def run(*words: Words) -> Words:
        low, high = (operation(*halves) for halves in zip(*map(_halves, words), strict=True))
        both: Words = low | (high << np.uint32(16))
        return both

    return run


def _product_of_bf16(a: Words, b: Words) -> Words:
    with np.errstate(over="ignore", invalid="ignore"):
        product = _floats(a << np.uint32(16)) * _floats(b << np.uint32(16))
    rounded = torch.from_numpy(product).bfloat16().view(torch.int16).numpy()
    words = rounded.view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(product), _NAN16, words)


def _magnitudes(a: Words, b: Words) -> tuple[Words, Words, Words]:
    """Magnitudes as integers, which are in the order of the numbers, and the sign of the result."""
    mask = np.uint32(0x7FFF)
    return a & mask, b & mask, (a ^ b) & np.uint32(0x8000)


def _max_nan_bf16(a: Words, b: Words) -> Words:
    x, y, sign = _magnitudes(a, b)
    is_nan = (x > 0x7F80) | (y > 0x7F80)
    return np.where(is_nan, _NAN16, np.maximum(x, y) | sign)


def _min_bf16(a: Words, b: Words) -> Words:
    x, y = (words << np.uint32(16) for words in (a, b))
    # A number wins over NaN, as fmin does.
    least: Words = np.fmin(_floats(x), _floats(y)).view(np.uint32) >> np.uint32(16)
    return least


def _min_f16(a: Words, b: Words) -> Words:
    x, y = (words.astype(np.uint16).view(np.float16) for words in (a, b))
    least: Words = np.fmin(x, y).view(np.uint16).astype(np.uint32)
    return least


def _fma_bf16(a: Words, b: Words, c: Words) -> Words:
    x, y, z = (bfloat16_values(words) for words in (a, b, c))
    with np.errstate(invalid="ignore"):
        exact = x * y + z
    return np.where(np.isnan(exact), _NAN16, to_bfloat16(exact))


def _fma_f16(a: Words, b: Words, c: Words) -> Words:
    x, y, z = (words.astype(np.uint16).view(np.float16).astype(np.float64) for words in (a, b, c))
    # Products of 22 bits, and what is added is near them: exact before the one rounding.
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (x * y + z).astype(np.float16)
    return np.where(np.isnan(rounded), _NAN16, rounded.view(np.uint16).astype(np.uint32))


def _fma_sat_f16(a: Words, b: Words, c: Words) -> Words:
    # NaN becomes 0.
    out = _fma_f16(a, b, c)
    value = out.astype(np.uint16).view(np.float16)
    clamped = np.where(np.isnan(value), np.float16(0), np.clip(value, 0, 1)).astype(np.float16)
    words: Words = np.abs(clamped).view(np.uint16).astype(np.uint32)
    return words


def _fma_relu_f16(a: Words, b: Words, c: Words) -> Words:
    # What is negative and NaN become 0.
    out = _fma_f16(a, b, c)
    return np.where((out > 0x7C00) | (out >= 0x8000), np.uint32(0), out)


def _product_of_f16(a: Words, b: Words) -> Words:
    x, y = (words.astype(np.uint16).view(np.float16).astype(np.float64) for words in (a, b))
    words: Words = (x * y).astype(np.float16).view(np.uint16).astype(np.uint32)
    return words


def _fma(a: Words, b: Words, c: Words) -> Words:
    x, y, z = (_floats(words).astype(np.float64) for words in (a, b, c))
    with np.errstate(over="ignore", invalid="ignore"):
        # The product is exact. A sum that is not becomes odd, so that it does not look like a tie.
        product = x * y
        total = product + z
        part = total - product
        rest = (product - (total - part)) + (z - part)
        is_even = (total.view(np.uint64) & np.uint64(1)) == 0
        odd = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
        is_inexact = np.isfinite(rest) & (rest != 0)
        out = np.where(is_inexact & is_even, odd, total).astype(np.float32)
    return _canonical(out)


def _product(a: Words, b: Words) -> Words:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _canonical(_floats(a) * _floats(b))


def _canonical(numbers: NDArray[np.float32]) -> Words:
    """Bits of float32 results; every NaN is the same one."""
    return np.where(np.isnan(numbers), np.uint32(0x7FFFFFFF), numbers.view(np.uint32))


def _saturate(words: Words) -> Words:
    """Numbers from 0 to 1; what is not a number becomes 0."""
    x = _floats(words)
    clamped: Words = np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0)).view(np.uint32)
    return clamped


def _min(a: Words, b: Words) -> Words:
    return _canonical(np.fmin(_floats(a), _floats(b)))


def _max(a: Words, b: Words) -> Words:
    return _canonical(np.fmax(_floats(a), _floats(b)))


def _funnel_left(low: Words, high: Words, count: Words) -> Words:
    """Upper word of two that are shifted left by less than a word, and by more than nothing."""
    out: Words = (high << count) | (low >> (np.uint32(32) - count))
    return out


def _to_f16x2(high: Words, low: Words) -> Words:
    pair = [_floats(words).astype(np.float16).view(np.uint16) for words in (low, high)]
    bits = [np.where((x & 0x7FFF) > 0x7C00, 0x7FFF, x).astype(np.uint32) for x in pair]
    out: Words = bits[0] | (bits[1] << np.uint32(16))
    return out


def _to_e4m3x2(high: Words, low: Words) -> Words:
    codes = []
    for words in (low, high):
        x = torch.from_numpy(_floats(words).copy())
        encoded = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        codes.append(encoded.masked_fill(x.isnan(), 0x7F).numpy().astype(np.uint32))
    out: Words = codes[0] | (codes[1] << np.uint32(8))
    return out


def _halves_to_e4m3x2(pair: Words) -> Words:
    low, high = (half.astype(np.uint16).view(np.float16) for half in _halves(pair))
    return _to_e4m3x2(*(half.astype(np.float32).view(np.uint32) for half in (high, low)))


def _from_e4m3x2(codes: Words) -> Words:
    """Codes of the lower two bytes, sign, four bits of exponent and three, as float16."""
    halves = []
    for place in (0, 8):
        code = (codes >> np.uint32(place)) & np.uint32(0xFF)
        exponent, fraction = (code >> np.uint32(3)) & np.uint32(0xF), code & np.uint32(7)
        size = np.where(exponent == 0, fraction / 512, np.exp2(exponent - 7.0) * (1 + fraction / 8))
        half = size.astype(np.float16).view(np.uint16) | ((code & 0x80) << 8).astype(np.uint16)
        halves.append(np.where((code & 0x7F) == 0x7F, _NAN16, half).astype(np.uint32))
    out: Words = halves[0] | (halves[1] << np.uint32(16))
    return out


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Bytes of two words; bit 3 of a selector repeats the sign of its byte."""
    out = np.zeros_like(a)
    for place in range(4):
        which = int(selector.flat[0]) >> (4 * place) & 0xF
        byte = ((a, b)[which // 4 % 2] >> np.uint32(8 * (which % 4))) & np.uint32(0xFF)
        if which & 8:
            byte = (byte >> np.uint32(7)) * np.uint32(0xFF)
        out |= byte << np.uint32(8 * place)
    return out


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit by bit, what ``table`` says of the three bits."""
    number = int(table.flat[0])
    out = np.zeros_like(a)
    for place in range(8):
        if number >> place & 1:
            chosen = [x if place >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mul.rn.bf16x2": _by_half(_product_of_bf16),
    "abs.bf16x2": lambda x: x & np.uint32(0x7FFF7FFF),
    "abs.f16x2": lambda x: x & np.uint32(0x7FFF7FFF),
    "min.f16x2": _by_half(_min_f16),
    "cvt.rn.satfinite.e4m3x2.f16x2": _halves_to_e4m3x2,
    "min.bf16x2": _by_half(_min_bf16),
    "fma.rn.bf16x2": _by_half(_fma_bf16),
    "fma.rn.f16x2": _by_half(_fma_f16),
    "fma.rn.relu.f16x2": _by_half(_fma_relu_f16),
    "fma.rn.sat.f16x2": _by_half(_fma_sat_f16),
    "add.rn.f16x2": _by_half(lambda x, y: _fma_f16(x, np.full_like(x, 0x3C00), y)),
    "mul.rn.f16x2": _by_half(_product_of_f16),
    "max.NaN.xorsign.abs.bf16x2": _by_half(_max_nan_bf16),
    "mul.rn.f32": _product,
    "fma.rn.f32": _fma,
    "mul.rn.sat.f32": lambda *x: _saturate(_product(*x)),
    "fma.rn.sat.f32": lambda *x: _saturate(_fma(*x)),
    "add.rn.f32": lambda x, y: _canonical(_floats(x) + _floats(y)),
    "sub.rn.f32": lambda x, y: _canonical(_floats(x) - _floats(y)),
    "min.f32": _min,
    "max.f32": _max,
    "abs.f32": lambda x: x & np.uint32(0x7FFFFFFF),
    "neg.f32": lambda x: x ^ np.uint32(0x80000000),
    "shf.l.wrap.b32": _funnel_left,
    "cvt.rn.f16x2.f32": _to_f16x2,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3x2,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3x2,
    "min.u32": np.minimum,
    "min.u16x2": _by_half(np.minimum),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda x, y, z: x * y + z,
    "cvt.rn.f32.s32": lambda x: x.view(np.int32).astype(np.float32).view(np.uint32),
    "cvt.rzi.s32.f32": lambda x: _floats(x).astype(np.int32).view(np.uint32),
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, n: x << n,
    "shr.u32": lambda x, n: x >> n,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "add.u32": lambda x, y: x + y,
    "sub.u32": lambda x, y: x - y,
}


def run(program: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """Run ``program`` on $outputs, $outputs + 1.. and return $0..: arrays of one shape."""
    inputs = list(np.broadcast_arrays(*inputs))
    values = {f"${outputs + at}": words for at, words in enumerate(inputs)}

    def value(name: str) -> Words:
        if name.startswith("{"):
            low, high = (values[part.strip()] for part in name[1:-1].split(","))
            both: Words = low | (high << np.uint32(16))
            return both
        is_number = name[0].isdigit()
        if name.startswith("0f"):
            name = "0x" + name[2:]
        return np.full_like(inputs[0], int(name, 0)) if is_number else values[name]

    for statement in program.strip().removeprefix("{").removesuffix("}").split(";"):
        operation, _, rest = statement.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        result = _OPERATIONS[operation](*(value(name) for name in operands))
        if target.startswith("{"):
            names = [part.strip() for part in target[1:-1].split(",")]
            values.update(zip(names, _halves(result), strict=True))
        else:
            values[target] = result
    return [values[f"${at}"] for at in range(outputs)]
