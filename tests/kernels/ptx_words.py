"""Straight programs of PTX on words, run by NumPy: what the instructions of a kernel give.

Only the instructions that ``mlacast.kernels.common.packed_bf16`` uses, written from their
description in NVIDIA's PTX ISA. A program sees $0, $1.. and its registers as arrays of uint32.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_NAN16 = np.uint32(0x7FFF)


def _floats(words: Words) -> NDArray[np.float32]:
    return words.view(np.float32)


def _halves(words: Words) -> tuple[Words, Words]:
    return words & np.uint32(0xFFFF), words >> np.uint32(16)


def _by_half(operation: Callable[[Words, Words], Words]) -> Callable[[Words, Words], Words]:
    def run(a: Words, b: Words) -> Words:
        low, high = (operation(x, y) for x, y in zip(_halves(a), _halves(b), strict=True))
        both: Words = low | (high << np.uint32(16))
        return both

    return run


def _product_of_bf16(a: Words, b: Words) -> Words:
    with np.errstate(over="ignore"):
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


def _min_f16(a: Words, b: Words) -> Words:
    x, y, sign = _magnitudes(a, b)
    least = np.where(x > 0x7C00, y, np.where(y > 0x7C00, x, np.minimum(x, y)))
    out: Words = least | sign
    return out


def _fma(a: Words, b: Words, c: Words) -> Words:
    # Exact in float64 before the one rounding, for factors of 24 bits and sums with a zero.
    x, y, z = (_floats(words).astype(np.float64) for words in (a, b, c))
    assert not z.any(), "a sum with anything but a zero may round twice"
    out: Words = (x * y + z).astype(np.float32).view(np.uint32)
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


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    out = np.zeros_like(a)
    for place in range(4):
        which = int(selector.flat[0]) >> (4 * place) & 0xF
        assert which < 8, "signs are not spread"
        byte = ((a, b)[which // 4] >> np.uint32(8 * (which % 4))) & np.uint32(0xFF)
        out |= byte << np.uint32(8 * place)
    return out


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "mul.rn.bf16x2": _by_half(_product_of_bf16),
    "max.NaN.xorsign.abs.bf16x2": _by_half(_max_nan_bf16),
    "min.xorsign.abs.f16x2": _by_half(_min_f16),
    "fma.rn.f32": _fma,
    "cvt.rn.f16x2.f32": _to_f16x2,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3x2,
    "prmt.b32": _prmt,
    "mov.b32": lambda x: x,
    "shl.b32": lambda x, n: x << n,
    "shr.u32": lambda x, n: x >> n,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "add.u32": lambda x, y: x + y,
}


def run(program: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """Run ``program`` on $outputs, $outputs + 1.. and return $0..: arrays of one shape."""
    values = {f"${outputs + at}": words for at, words in enumerate(inputs)}

    def value(name: str) -> Words:
        if name.startswith("{"):
            low, high = (values[part.strip()] for part in name[1:-1].split(","))
            both: Words = low | (high << np.uint32(16))
            return both
        is_number = name[0].isdigit()
        return np.full_like(inputs[0], int(name, 0)) if is_number else values[name]

    for statement in program.strip().removeprefix("{").removesuffix("}").split(";"):
        operation, _, rest = statement.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        values[target] = _OPERATIONS[operation](*(value(name) for name in operands))
    return [values[f"${at}"] for at in range(outputs)]
