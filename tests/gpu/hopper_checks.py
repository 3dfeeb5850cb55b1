"""What a Hopper kernel must have written, for every output format.

The yardstick is attention in float32 with weights rounded to bfloat16 (``low_precision``), stored
by the reference in the same format: the kernel's errors may be as large as the yardstick's, and as
many codes may differ from those of the exact output. Beside these statistics every single number
is bounded, so that one wrong scale among many does not get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.layouts.sf_swizzled_128x4 import gather_swizzled, scatter_swizzled
from tests import oracles
from tests.gpu.hopper_cases import POISON, Case, poisoned_rows, storage_of
from tests.gpu.low_precision import assert_as_accurate, assert_logarithms, weigh_in_bf16

# A weight is rounded by at most 2**-8 of itself. As much again for the scores: they would have to
# be off by 2**-8 for it, and `assert_logarithms` lets them off by a fraction of that.
WEIGHT_ERROR = 2.0**-7
# Weights that are no normal numbers of float32 may vanish. Where the exact output is zero, any is.
TINY = 2.0**-100
# The kernels move the base of their weights only after large growth: mostly it is the largest score
# of the first block.
BLOCK_KEYS = 64
# Room for the share of codes that differ: 1.5 times the yardstick's for two draws of one
# distribution, and this where there are few codes.
SHARE_ROOM = 0.002


@dataclass(frozen=True)
class Expected:
    """Float64 results, and what the yardstick makes of the same inputs.

    Attributes:
        out: [s_q, h, 512] float64, exact.
        lse: [s_q, h] float64.
        max_logits: [s_q, h] float64; None for decode.
        low: [s_q, h, 512] float32, the yardstick before any rounding of the output.
        slack: [s_q, h, 512] float64, how far an un-rounded element may be from the exact one.
        size: Upper bound of |scale| |q| |k|.
        d_qk: Width of the query.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None
    low: Tensor
    slack: Tensor
    size: float
    d_qk: int


def expect(
    exact: Sequence[Tensor],
    q: Tensor,
    selected: Sequence[Tensor],
    options: dict[str, Any],
) -> Expected:
    """Bounds for ``exact``, (out, max_logits, lse) or (out, lse) of the reference in float64.

    ``selected`` are the keys of every token, ``options`` the arguments of ``weigh_in_bf16``.
    """
    low, magnitude = weigh_in_bf16(q, selected, base_keys=BLOCK_KEYS, **options)
    largest = max((float(rows.norm(dim=1).amax()) for rows in selected if len(rows)), default=0.0)
    # A normed query has the length sqrt(512); a rotation by the exact table at most doubles one.
    length = 23.0 if options["q_norm_eps"] else float(q.double().norm(dim=2).max())
    return Expected(
        out=exact[0],
        lse=exact[-1],
        max_logits=exact[1] if len(exact) == 3 else None,
        low=low,
        slack=WEIGHT_ERROR * magnitude.double() + TINY * (exact[0] != 0),
        size=2 * options["sm_scale"] * length * largest,
        d_qk=q.shape[2],
    )


@dataclass(frozen=True)
class Written:
    """What a launch filled."""

    out: mlacast.QuantizedTensor
    lse: Tensor
    max_logits: Tensor | None = None

    def rows(self, rows: slice) -> Written:
        """Those of some tokens."""
        peak = None if self.max_logits is None else self.max_logits[rows]
        return Written(self.out[rows], self.lse[rows], peak)


def assert_right(case: Case, ends: bool, written: Written, expected: Expected) -> None:
    """Every row that was written, and everything around it; the rows are erased at the end."""
    _assert_logarithms(written, expected)
    values = written.out.dequantize().reshape(expected.out.shape).double()
    empty = expected.lse.isneginf()
    assert not bool(values[empty].any()), "a row without keys is not zero"
    exact, low, smaller, larger = (
        _stored(case, ends, rows)
        for rows in (
            expected.out,
            expected.low,
            _resized(expected, lambda size, slack: (size - slack).clamp_min(0)),
            _resized(expected, lambda size, slack: size + slack),
        )
    )
    assert_as_accurate(values, low.dequantize().reshape(values.shape), expected.out)
    if case.out_format.key == "bf16":
        allowed = expected.slack + oracles.BF16_HALF_ULP * (expected.out.abs() + expected.slack)
        worst = float(((values - expected.out).abs() - allowed).max())
        assert worst <= 0, f"an element is {worst:.3e} further off than all errors together"
    else:
        _assert_nearest_codes(written.out, values, expected)
        _assert_scales_between(smaller, written.out, larger)
        _assert_few_differ(written.out, low, exact)
    _assert_padding_is_zero(written.out)
    assert_nothing_else_written(written.out)


def _assert_logarithms(written: Written, expected: Expected) -> None:
    pairs = [(written.lse, expected.lse)]
    if expected.max_logits is not None:
        assert written.max_logits is not None
        pairs.append((written.max_logits, expected.max_logits))
    for actual, exact in pairs:
        assert_logarithms(actual, exact.cpu(), expected.d_qk, expected.size)


def _resized(expected: Expected, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Exact rows with other magnitudes, made of the magnitudes and the slack."""
    return torch.copysign(change(expected.out.abs(), expected.slack), expected.out)


def _stored(case: Case, ends: bool, rows: Tensor) -> mlacast.QuantizedTensor:
    """Rows as the reference stores them, in the place where the kernel had to."""
    out = poisoned_rows(case, rows.shape[0], ends, str(rows.device))
    mlacast.reference.quantize_output(rows.float().reshape(len(rows), case.groups, -1), out)
    return out


def nvfp4_scales(out: mlacast.QuantizedTensor) -> Tensor:
    """What the codes of each element are multiplied by, float64 [num_tokens, features]."""
    assert isinstance(out.format, mlacast.Nvfp4)
    rows = swizzled_rows(out, out.num_tokens).view(torch.float8_e4m3fn).double()
    return rows.repeat_interleave(16, 1) / float(out.format.global_scale)


def swizzled_rows(out: mlacast.QuantizedTensor, count: int) -> Tensor:
    """Scale bytes [count, columns] of rows from the range's first on."""
    assert out.sf is not None
    return gather_swizzled(out.sf.view(torch.uint8), out.row_start, count, out.sf.shape[1])


def _assert_nearest_codes(out: mlacast.QuantizedTensor, values: Tensor, expected: Expected) -> None:
    """Each value is the nearest one to some number within the slack.

    Half a step of e4m3 is 2**-4 of the value, and 2**-10 of the scale among subnormal codes; a
    scale is at most twice the largest magnitude over 448, or what the floor makes of it. Half a
    step of e2m1 is a quarter of the value, or of the scale below it.
    """
    exact, fmt = expected.out, out.format
    if isinstance(fmt, mlacast.Nvfp4):
        scales = nvfp4_scales(out).reshape(exact.shape)
        exact = torch.copysign(torch.minimum(exact.abs(), 6 * scales), exact)
        half_step = torch.maximum(values.abs(), scales) / 4
    elif isinstance(fmt, mlacast.Fp8Tensor):
        scale = float(fmt.scale)
        # Whatever is beyond the largest number of the format clips.
        exact = exact.clamp(-448 * scale, 448 * scale)
        half_step = (values.abs() / 16).clamp_min(scale * 2.0**-10)
    else:
        size = fmt.sf_vec_size
        grouped = (exact.abs() + expected.slack).reshape(*exact.shape[:2], -1, size)
        largest = grouped.amax(3).clamp_min(fmt.amax_floor)
        scales = (2 * largest / 448).repeat_interleave(size, 2)
        half_step = torch.maximum(values.abs() / 16, scales * 2.0**-10)
    excess = (values - exact).abs() - half_step - expected.slack
    worst = float(excess.max())
    # Nothing but the rounding of these lines.
    assert worst <= 1e-9, f"a code is {worst:.3e} further from its number than any rounding"


def _assert_scales_between(
    smaller: mlacast.QuantizedTensor,
    actual: mlacast.QuantizedTensor,
    larger: mlacast.QuantizedTensor,
) -> None:
    """Every scale is one of rows within the slack; so are all bytes around, which are equal."""
    if actual.sf is None:
        return
    dtype = torch.float32 if actual.format.sf_dtype == torch.float32 else torch.uint8
    parts = [
        storage_of(part.sf).view(dtype) for part in (smaller, actual, larger) if part.sf is not None
    ]
    assert bool((parts[0] <= parts[1]).all()), "a scale is too small, or moved"
    assert bool((parts[1] <= parts[2]).all()), "a scale is too large, or moved"


def _assert_few_differ(
    actual: mlacast.QuantizedTensor, low: mlacast.QuantizedTensor, exact: mlacast.QuantizedTensor
) -> None:
    """No more codes and exponents differ from the exact ones than the yardstick's."""
    parts = {"codes": [out.data for out in (actual, low, exact)]}
    if actual.format.sf_kind != "float32":
        # A float32 scale nearly always differs in its last bits.
        parts["scales"] = [out.sf for out in (actual, low, exact) if out.sf is not None]
    for name, tensors in parts.items():
        if not tensors:
            continue
        *compared, right = (storage_of(tensor) for tensor in tensors)
        share, allowed = (float((raw != right).float().mean()) for raw in compared)
        assert share <= 1.5 * allowed + SHARE_ROOM, (
            f"{share:.4f} of the {name} differ, {allowed:.4f} of the yardstick's"
        )


def _assert_padding_is_zero(out: mlacast.QuantizedTensor) -> None:
    rows = out.sf_rows_with_padding()
    if rows is not None:
        if isinstance(out.format, mlacast.Nvfp4):
            rows = swizzled_rows(out, _swizzled_count(out))
        assert not bool(rows[out.num_tokens :].any()), "padding of the scales is not zero"


def _swizzled_count(out: mlacast.QuantizedTensor) -> int:
    """Rows of swizzled scales that are the range's, padding behind the last token among them."""
    assert out.sf is not None
    return out.sf.shape[0] - out.row_start if out.ends_buffer else out.num_tokens


def assert_nothing_else_written(out: mlacast.QuantizedTensor) -> None:
    """With the rows of ``out``, and the padding that is theirs, erased, only poison is left."""
    out.data.view(torch.uint8).fill_(POISON)
    rows = out.sf_rows_with_padding()
    if rows is not None and isinstance(out.format, mlacast.Nvfp4):
        poison = torch.full_like(swizzled_rows(out, _swizzled_count(out)), POISON)
        scatter_swizzled(rows, poison, out.row_start)
    elif rows is not None:
        rows.view(torch.int32).fill_(POISON * 0x01010101)
    for part in (out.data, out.sf):
        if part is not None:
            changed = int((storage_of(part) != POISON).sum())
            assert changed == 0, f"{changed} bytes of somebody else changed"


def assert_same(first: Written, second: Written, what: str = "a repeat") -> None:
    """Two launches gave the same bits; the second may have written to another place."""
    codes = [written.out.data.view(torch.uint8) for written in (first, second)]
    assert torch.equal(*codes), f"{what} has other codes"
    if first.out.sf is not None and second.out.sf is not None:
        if isinstance(first.out.format, mlacast.Nvfp4):
            scales = [swizzled_rows(part.out, part.out.num_tokens) for part in (first, second)]
        else:
            scales = [sf.contiguous().view(torch.int32) for sf in (first.out.sf, second.out.sf)]
        assert torch.equal(*scales), f"{what} has other scales"
    assert oracles.same_bits(first.lse, second.lse), f"{what} has another lse"
    if first.max_logits is not None:
        same = oracles.same_bits(first.max_logits, second.max_logits)
        assert same, f"{what} has other max_logits"
