"""The Hopper dense prefill kernel against float64: ragged batches, masks, every output format.

A test item is one compiled variant with all its problems.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mlacast
from tests.gpu import dense_prefill_cases as cases
from tests.gpu.hopper_cases import on_hopper

pytestmark = on_hopper

DEVICE = "cuda"
CAUSAL = (
    cases.RAGGED,
    cases.PADDED,
    cases.ALIGNED,
    cases.NO_SEQUENCES,
    cases.NO_KEYS,
    cases.LONG,
)


def run(problem: cases.Problem, inputs: cases.Inputs, output: cases.Output) -> cases.Written:
    """Launch the kernel and wait for it."""
    from mlacast.kernels.gluon.sm90.dense_mla_prefill import launch_dense_mla_prefill

    written = cases.launch(launch_dense_mla_prefill, problem, inputs, output.format, output.groups)
    torch.cuda.synchronize()
    return written


def check(problem: cases.Problem, output: cases.Output) -> None:
    """Two launches with the same inputs are right, and the same."""
    torch.manual_seed(1)
    inputs = cases.draw(problem, DEVICE)
    expected = cases.expect(problem, inputs)
    first = run(problem, inputs, output)
    cases.assert_right(problem, output.groups, first, expected)
    cases.assert_same(first, run(problem, inputs, output))


BF16 = cases.Output(mlacast.Bf16())


def test_causal_bf16() -> None:
    for problem in CAUSAL:
        check(problem, BF16)


def test_more_sequences_than_a_warp_has_lanes() -> None:
    check(cases.MANY, BF16)


def test_without_a_mask() -> None:
    check(cases.CROSS, BF16)


@pytest.mark.parametrize("output", cases.OUTPUTS, ids=lambda output: output.id)
def test_formats(output: cases.Output) -> None:
    for problem in (cases.ENDING, cases.INSIDE):
        check(problem, output)


def test_nvfp4_scales_far_from_one() -> None:
    """Scales and codes are found otherwise past 2**100. A power of two changes no byte."""
    torch.manual_seed(1)
    inputs = cases.draw(cases.LONG, DEVICE)
    # Groups of the scale zero, with an infinity and with a NaN, and codes of all sizes.
    size = torch.exp2(torch.arange(inputs.v.shape[2], device=DEVICE) % 10 - 4.0)
    size[:16] = 0.0
    inputs.v.mul_(size)
    inputs.v[-1, 0, 100], inputs.v[-1, 1, 50] = float("inf"), float("nan")

    def store(exponent: int) -> list[torch.Tensor]:
        scaled = dataclasses.replace(inputs, v=inputs.v * 2.0**-exponent)
        written = run(cases.LONG, scaled, cases.Output(mlacast.Nvfp4(50.0 * 2.0**exponent)))
        assert written.out.sf is not None
        return [cases.storage_of(part) for part in (written.out.data, written.out.sf)]

    near = store(0)
    assert all(4 * int(part.count_nonzero()) > part.numel() for part in near)
    for exponent in (-110, -90, 90, 96):
        assert all(map(torch.equal, store(exponent), near))


def test_a_sequence_does_not_depend_on_the_others() -> None:
    lengths = (333, 64, 1500)
    together = cases.Problem(lengths, lengths, before=0)
    inputs = cases.draw(together, DEVICE)
    written = run(together, inputs, BF16)
    for length, ((start, stop), _) in zip(lengths, cases.bounds(together), strict=True):
        single = cases.Problem((length,), (length,), before=0)
        bounds = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        q, k, v = (tensor[start:stop] for tensor in (inputs.q, inputs.k, inputs.v))
        alone = run(single, cases.Inputs(q, k, v, bounds, bounds), BF16)
        part = cases.Written(written.out[start:stop], written.lse[:, start:stop])
        cases.assert_same(alone, part)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_rows_that_are_all_the_same_memory(argument: str) -> None:
    """Expanded over the tokens, at the distance 0: the bits of a copy."""
    inputs = cases.draw(cases.RAGGED, DEVICE)
    rows = getattr(inputs, argument)
    expanded = rows[:1].expand(rows.shape)
    copied = run(
        cases.RAGGED, dataclasses.replace(inputs, **{argument: expanded.contiguous()}), BF16
    )
    found = run(cases.RAGGED, dataclasses.replace(inputs, **{argument: expanded}), BF16)
    cases.assert_same(found, copied)


def test_long_sequences_many_times() -> None:
    """Races would show as different bits; a tile order that loses a tile, as poison."""
    problem = cases.Problem((4096, 4000), (4096, 4096), before=0)
    inputs = cases.draw(problem, DEVICE)
    expected = cases.expect(problem, inputs)
    first = run(problem, inputs, BF16)
    for _ in range(10):
        cases.assert_same(first, run(problem, inputs, BF16))
    cases.assert_right(problem, 1, first, expected)
