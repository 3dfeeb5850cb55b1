"""Straight programs of PTX on words, run by NumPy: what the instructions of a kernel give.

Only the instructions of ``mlacast.kernels.common.packed_bf16``, ``e2m1_casts`` and of the Hopper
decode kernel's records, written from their description in NVIDIA's PTX ISA. A program sees $0, $1..
and its registers as arrays of uint32.
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


def _to_e4m3x2(high: Words, low: Words) -> Words:
    codes = []
    for words in (low, high):
        x = torch.from_numpy(_floats(words).copy())
        encoded = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        codes.append(encoded.masked_fill(x.isnan(), 0x7F).numpy().astype(np.uint32))
    out: Words = codes[0] | (codes[1] << np.uint32(8))
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
    number = int(table.flat[0])
    assert number in (0xEA, 0xF8), "(a & b) | c, a | (b & c)"
    out: Words = (a & b) | c if number == 0xEA else a | (b & c)
    return out


def _float32(operation: Callable[..., NDArray[np.float32]]) -> Callable[..., Words]:
    """Rounded once, as NumPy rounds."""

    def run(*operands: Words) -> Words:
        with np.errstate(over="ignore", invalid="ignore"):
            words: Words = operation(*(_floats(words) for words in operands)).view(np.uint32)
            return words

    return run


def _product_of_f16(a: Words, b: Words) -> Words:
    x, y = (words.astype(np.uint16).view(np.float16).astype(np.float64) for words in (a, b))
    words: Words = (x * y).astype(np.float16).view(np.uint16).astype(np.uint32)
    return words


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mul.rn.bf16x2": _by_half(_product_of_bf16),
    "max.NaN.xorsign.abs.bf16x2": _by_half(_max_nan_bf16),
    "abs.bf16x2": lambda x: x & np.uint32(0x7FFF7FFF),
    "min.bf16x2": _by_half(_min_bf16),
    "fma.rn.bf16x2": _by_half(_fma_bf16),
    "fma.rn.f16x2": _by_half(_fma_f16),
    "fma.rn.sat.f16x2": _by_half(_fma_sat_f16),
    "add.rn.f16x2": _by_half(lambda x, y: _fma_f16(x, np.full_like(x, 0x3C00), y)),
    "min.xorsign.abs.f16x2": _by_half(_min_f16),
    "mul.rn.f16x2": _by_half(_product_of_f16),
    "fma.rn.f32": _fma,
    "abs.f32": lambda x: x & np.uint32(0x7FFFFFFF),
    "mul.rn.f32": _float32(np.multiply),
    "add.rn.f32": _float32(np.add),
    "sub.rn.f32": _float32(np.subtract),
    # The number, where one of two is none.
    "min.f32": _float32(np.fmin),
    "max.f32": _float32(np.fmax),
    "cvt.rn.f16x2.f32": _to_f16x2,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3x2,
    "min.u16x2": _by_half(np.minimum),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda x, y, z: x * y + z,
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, n: x << n,
    "shr.u32": lambda x, n: x >> n,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "add.u32": lambda x, y: x + y,
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
        if name.startswith("0f"):
            return np.full_like(inputs[0], int(name[2:], 16))
        is_number = name[0].isdigit()
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
