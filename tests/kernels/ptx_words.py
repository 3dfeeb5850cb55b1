"""The few PTX instructions that decode codes in a Hopper kernel, on arrays of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Arrays of uint32; arithmetic of arrays and numbers has wider types for a type checker.
Words = Any


def bfloat16_values(halves: Words) -> NDArray[np.float64]:
    """Values of bfloat16 numbers in the lower halves of words."""
    values: NDArray[np.float64] = ((halves & 0xFFFF) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64)


def to_bfloat16(values: NDArray[np.float64]) -> Words:
    """The nearest bfloat16 numbers, ties to even, in the lower halves of words; subnormals too."""
    exponent = np.maximum(np.frexp(np.where(np.isfinite(values), values, 0.0))[1] - 1, -126)
    step = np.ldexp(1.0, exponent - 7)
    rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
    with np.errstate(over="ignore"):
        return rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)


def _bytes_of(low: Words, high: Words, selectors: Words) -> Words:
    """``prmt.b32`` in its default mode: bit 3 of a selector repeats the sign of its byte."""
    result = np.uint32(0)
    for place in range(4):
        selector = int(selectors) >> (4 * place) & 0xF
        byte = (high if selector & 4 else low) >> np.uint32(8 * (selector & 3)) & np.uint32(0xFF)
        if selector & 8:
            byte = (byte >> np.uint32(7)) * np.uint32(0xFF)
        result = result | byte << np.uint32(8 * place)
    return result


def _product(first: Words, second: Words) -> Words:
    """``mul.rn.bf16x2``."""
    with np.errstate(invalid="ignore"):
        low = to_bfloat16(bfloat16_values(first) * bfloat16_values(second))
        high = to_bfloat16(bfloat16_values(first >> 16) * bfloat16_values(second >> 16))
    return low | (high << np.uint32(16))


def _minimum(first: Words, second: Words) -> Words:
    """``min.u16x2``."""
    low = np.minimum(first & 0xFFFF, second & 0xFFFF)
    return low | (np.minimum(first >> 16, second >> 16) << np.uint32(16))


_OPERATIONS: dict[str, Callable[..., Words]] = {
    "prmt.b32": _bytes_of,
    "shl.b32": lambda x, count: x << count,
    "and.b32": lambda x, y: x & y,
    "add.u32": lambda x, y: x + y,
    "mad.lo.u32": lambda x, y, z: x * y + z,
    "mul.rn.bf16x2": _product,
    "min.u16x2": _minimum,
}


def run(program: str, inputs: list[Words], outputs: int) -> list[Words]:
    """Run an inline program whose operands are ``outputs`` results, then ``inputs``."""
    values = {f"${outputs + place}": words for place, words in enumerate(inputs)}

    def read(operand: str) -> Words:
        if operand in values:
            return values[operand]
        return np.uint32(int(operand, 0))

    for line in program.strip().strip("{}").split(";"):
        text = line.strip()
        if not text or text.startswith(".reg"):
            continue
        operation, _, rest = text.partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if operation == "mov.b32" and operands[0].startswith("{"):
            low, high = operands[0].strip("{}").replace(" ", "").split(",")
            values[low], values[high] = read(operands[1]) & 0xFFFF, read(operands[1]) >> 16
        elif operation == "mov.b32":
            low, high = operands[1].strip("{}").replace(" ", "").split(",")
            values[operands[0]] = values[low] | (values[high] << np.uint32(16))
        elif operation == "lop3.b32":
            assert operands[4] == "0xEA", "(a & b) | c"
            first, mask, added = (read(operand) for operand in operands[1:4])
            values[operands[0]] = (first & mask) | added
        else:
            values[operands[0]] = _OPERATIONS[operation](*(read(x) for x in operands[1:]))
    return [values[f"${place}"] for place in range(outputs)]
