"""Sums of products of e4m3 codes in Hopper's FP8 matrix unit: a model of it, and its errors.

The unit takes 32 dimensions a step. It aligns their products and the sum so far to the largest
exponent among them and keeps 13 bits of the fraction, and as many of the new sum: what DeepSeek-V3
(technical report, section 3.3.2, "about 14 bits") and DeepGEMM found, which therefore promote sums
to float32. NVIDIA documents none of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STEP = 32
FRACTION_BITS = 13
# First dimensions of the sums that the decode kernel adds in float32: the last takes what is left.
SUM_STARTS = (0, 128, 256, 384)
# Of a step: products, the sum before it, the sum after it.
ROUNDINGS = STEP + 2
# As in ``tests.oracles.attend``: a violation is improbable.
LAMBDA = 4.0


def _sums(width: int) -> Iterator[range]:
    """First dimensions of the steps of each sum."""
    for first, end in zip(SUM_STARTS, (*SUM_STARTS[1:], width), strict=True):
        yield range(first, end, STEP)


def _letters(keys: Tensor) -> str:
    return "k" if keys.dim() == 2 else "tk"


def score_errors(q: Tensor, keys: Tensor) -> Tensor:
    """How far scores [T, h, K] of ``q`` [T, h, d] and ``keys`` [T, K, d] or [K, d] may be off.

    Each of a step's 34 roundings drops less than 2**-13 of M, the largest of its products and sums.
    The products of drawn queries and codes have either sign, and so have the errors, n of which add
    up to less than lambda * sqrt(n) of one (Higham and Mary 2019), lambda = 4:

        4 * 2**-13 * sqrt(34 * sum of M**2 over all steps)

    with the product of the largest query and key element for the largest product.
    """
    query, keys = q.double(), keys.double()
    own = _letters(keys)
    squares = torch.zeros((), dtype=torch.float64, device=q.device)
    for steps in _sums(query.shape[-1]):
        total = torch.zeros((), dtype=torch.float64, device=q.device)
        for first in steps:
            left, right = query[..., first : first + STEP], keys[..., first : first + STEP]
            pair = left.abs().amax(-1), right.abs().amax(-1)
            largest = torch.einsum(f"th,{own}->thk", *pair)
            after = total + torch.einsum(f"thd,{own}d->thk", left, right)
            largest = torch.maximum(largest, torch.maximum(total.abs(), after.abs()))
            squares = squares + largest.square()
            total = after
    return LAMBDA * 2.0**-FRACTION_BITS * (ROUNDINGS * squares).sqrt()


def _cut(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Drop what is below ``bits`` bits of the fraction of ``largest``."""
    # The fraction of frexp is in [1/2, 1).
    unit = torch.exp2(torch.frexp(largest)[1].double() - 1 - bits)
    return torch.trunc(values / unit) * unit


def scores(
    q: Tensor, keys: Tensor, bits: int = FRACTION_BITS, sums: int = len(SUM_STARTS)
) -> Tensor:
    """Scores [h, K] of ``q`` [h, d] and ``keys`` [K, d] as the unit has them.

    With one of ``sums`` everything is in one; with all of them in those of the kernel.
    """
    query, keys = q.double(), keys.double()
    width = query.shape[-1]
    parts = _sums(width) if sums > 1 else iter((range(0, width, STEP),))
    result = torch.zeros(len(query), len(keys), dtype=torch.float64)
    for steps in parts:
        total = torch.zeros_like(result)
        for first in steps:
            products = query[:, None, first : first + STEP] * keys[None, :, first : first + STEP]
            largest = torch.maximum(products.abs().amax(-1), total.abs())
            aligned = _cut(products, largest[..., None], bits).sum(-1) + _cut(total, largest, bits)
            total = _cut(aligned, aligned.abs(), bits)
        result += total.float().double()
    return result
