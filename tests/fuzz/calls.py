"""A drawn call of an attention operation, and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from tests.fuzz import output_checks
from tests.fuzz.attention import Expected, assert_logarithms
from tests.fuzz.draw import Draw
from tests.fuzz.outputs import Target, draw_target
from tests.fuzz.tensors import assert_unchanged, snapshot
from tests.fuzz.under import Under, all_tensors

# From the third call of a signature on, another function runs it.
REPEATS = 3


@dataclass(frozen=True)
class Call:
    """Arguments without an output, and what must come of them.

    Attributes:
        op: Operation.
        arguments: By name.
        shape: Of the result, [..., h, d].
        expected: Float64 results of the flattened tokens.
        logarithms: What each result after the output is: names of ``Expected``.
        heads_first: The logarithms are [h, T].
    """

    op: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    expected: Expected
    logarithms: tuple[str, ...] = ("lse",)
    heads_first: bool = False


def written(result: Any) -> list[Tensor]:
    """Copies of what a result holds, the same for every place and layout it may stand in."""
    if isinstance(result, Tensor):
        return [result.flatten(0, -3).reshape(-1, result.shape[-2] * result.shape[-1]).clone()]
    codes = output_checks.read_codes(result).clone().flatten(1)
    scales = output_checks.read_scales(result)
    return [codes] if scales is None else [codes, scales.clone()]


def assert_same(first: list[Tensor], second: list[Tensor], what: str) -> None:
    """Equal in every bit that matters: NaN is equal to NaN."""
    for left, right in zip(first, second, strict=True):
        equal = torch.equal(left.double().nan_to_num(1e300), right.double().nan_to_num(1e300))
        assert equal, f"{what} gives other numbers"


def _results(under: Under, call: Call, place: dict[str, Any]) -> tuple[Any, ...]:
    results = under.call(call.op, **call.arguments, **place)
    return results if isinstance(results, tuple) else (results,)


def check(draw: Draw, under: Under, call: Call) -> None:
    """Run a call into a drawn place, and again; compare with float64 and with each other."""
    tokens = call.expected.lse.shape[0]
    target = draw_target(draw, under, tokens, call.shape)
    inputs = all_tensors(call.arguments)
    watch = draw.integer(0, 99) < under.exact_share
    before = snapshot(inputs) if watch else []
    result, *logarithms = _results(under, call, target.arguments)
    for name, actual in zip(call.logarithms, logarithms, strict=True):
        found = actual.t() if call.heads_first else actual.flatten(0, -2)
        error = call.expected.logit_error
        assert_logarithms(name, found, getattr(call.expected, name), error)
    if draw.chance(25):
        _check_repeat(under, call, target, result, logarithms)
    output_checks.check(target, result, call.expected.out, call.expected.out_error)
    if watch:
        assert_unchanged(inputs, before)


def _check_repeat(
    under: Under, call: Call, target: Target, result: Any, logarithms: list[Tensor]
) -> None:
    """The same call, as often as known calls need, and one with a buffer of the library."""
    first = written(result)
    for _ in range(REPEATS):
        same, *sums = _results(under, call, target.arguments)
        assert_same(first, written(same), "a repeat")
        for old, new in zip(logarithms, sums, strict=True):
            assert torch.equal(old, new), "a repeat has other logarithms"
    fmt = result.format if isinstance(result, mlacast.QuantizedTensor) else target.format
    groups = 1 if target.plain is not None else target.groups
    again = _results(under, call, {"out_format": fmt, "num_groups": groups})
    assert_same(first, written(again[0]), "a repeat into another place")
    for old, new in zip(logarithms, again[1:], strict=True):
        assert torch.equal(old, new), "another place has other logarithms"
