"""Decode, prefill, context and padding rows in one quantised buffer, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import (
    FAMILIES,
    NVFP4,
    QUANTISED,
    FormatCase,
    assert_buffer_holds,
    case_id,
    poisoned_buffer,
)
from tests.layers.float32_rows import float32_rows
from tests.layers.steps import Step, draw, expected, picking_weight, slots_of

HEADS = 4
FEATURES = HEADS * 128

DECODES = Step("decodes", (1, 1, 1), (5, 0, 9))
DECODES_OF_TWO = Step("decodes_of_two", (2, 2), (5, 3), threshold=2, padding=1)
PREFILLS = Step("prefills", (5, 3), (0, 0))
MIXED = Step("mixed", (1, 1, 4, 5), (7, 3, 0, 0), padding=2)
CONTEXT = Step("context", (1, 2, 3, 4, 3), (8, 0, 9, 6, 0))
CHUNKS = Step("chunks", (1, 3, 4, 5), (8, 19, 0, 6), padding=1, workspace=3)
SHARED_CHUNK = Step("shared_chunk", (3, 4, 5), (9, 3, 2), workspace=8)
FP8_CACHE = Step("fp8_cache", (1, 3, 4), (8, 9, 0), kv_format="FP8")
V32_CACHE = Step("v32_cache", (1, 3, 4), (8, 9, 0), kv_format="V32")
NOTHING = Step("nothing", (), (), padding=3)
STEPS = (
    DECODES,
    DECODES_OF_TWO,
    PREFILLS,
    MIXED,
    CONTEXT,
    CHUNKS,
    SHARED_CHUNK,
    FP8_CACHE,
    V32_CACHE,
    NOTHING,
)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_all_rows_have_the_bytes_of_one_cast(step: Step, case: FormatCase) -> None:
    inputs = draw(step, HEADS, picking_weight(HEADS))
    buffer = poisoned_buffer(case, inputs.q.shape[0], 1, FEATURES)
    assert inputs.layer(*inputs.tensors, buffer) is buffer
    rows = float32_rows(inputs).view(-1, 1, FEATURES)
    assert_buffer_holds(buffer, case.expect(rows), case)


@pytest.mark.parametrize("case", [case for case in QUANTISED if case not in FAMILIES], ids=case_id)
def test_every_other_format(case: FormatCase) -> None:
    inputs = draw(MIXED, HEADS, picking_weight(HEADS))
    buffer = poisoned_buffer(case, inputs.q.shape[0], 1, FEATURES)
    inputs.layer(*inputs.tensors, buffer)
    assert_buffer_holds(buffer, case.expect(float32_rows(inputs).view(-1, 1, FEATURES)), case)


@pytest.mark.parametrize("first", [3, 127])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_step_in_a_range_of_a_bigger_buffer(case: FormatCase, first: int) -> None:
    """Rows around it, in the same tile of scales, keep their bytes."""
    inputs = draw(CHUNKS, HEADS, picking_weight(HEADS))
    stop = first + inputs.q.shape[0]
    filler = torch.randn(stop + 2, FEATURES)
    buffer = poisoned_buffer(case, stop + 2, 1, FEATURES)
    mlacast.quantize_output(filler, case.build(), out=buffer)
    inputs.layer(*inputs.tensors, buffer[first:stop])
    whole = filler.view(-1, 1, FEATURES).clone()
    whole[first:stop] = float32_rows(inputs).view(-1, 1, FEATURES)
    assert_buffer_holds(buffer, case.expect(whole), case)


def test_groups_of_the_buffer_may_be_heads() -> None:
    inputs = draw(MIXED, HEADS, picking_weight(HEADS))
    case = FormatCase("Fp8Group", 128, "float32", "mn_major")
    buffer = poisoned_buffer(case, inputs.q.shape[0], HEADS, 128)
    inputs.layer(*inputs.tensors, buffer)
    assert_buffer_holds(buffer, case.expect(float32_rows(inputs)), case)


@pytest.mark.parametrize("case", [*FAMILIES[:3], NVFP4], ids=case_id)
def test_values_are_those_of_the_layer_in_float64(case: FormatCase) -> None:
    """The expected bytes above come from references; these values do not."""
    inputs = draw(CHUNKS, HEADS)
    buffer = poisoned_buffer(case, inputs.q.shape[0], 1, FEATURES)
    inputs.layer(*inputs.tensors, buffer)
    assert_values(buffer, expected(inputs)[0], case)
    assert not buffer.dequantize()[sum(CHUNKS.query_lens) :].any()


@pytest.mark.parametrize("case", [*FAMILIES[:3], NVFP4], ids=case_id)
def test_prompts_longer_than_their_selection_are_cast_as_well(case: FormatCase) -> None:
    """Every row attends to two slots that it names, decodes and prompts alike."""
    inputs = draw(MIXED, HEADS)
    picked, owners = [], []
    for request, new in enumerate(MIXED.query_lens):
        for token in range(new):
            last = MIXED.context_lens[request] + token
            picked.append([0, last] if last else [0])
            owners.append(request)
    indices = torch.full((len(picked), 2), -1, dtype=torch.int32)
    for token, positions in enumerate(picked):
        slots = slots_of(inputs.metadata.block_table, owners[token], torch.tensor(positions))
        indices[token, : len(positions)] = slots.to(torch.int32)
    buffer = poisoned_buffer(case, inputs.q.shape[0], 1, FEATURES)
    inputs.layer(*inputs.tensors, buffer, indices=indices)
    assert_values(buffer, expected(inputs, picked)[0], case)
    assert not buffer.dequantize()[len(picked) :].any()


def assert_values(buffer: mlacast.QuantizedTensor, wanted: Tensor, case: FormatCase) -> None:
    wanted = wanted.view(-1, FEATURES)
    error = (buffer.dequantize().view(-1, FEATURES).double() - wanted).norm(dim=-1)
    # Rounding to codes of three or one mantissa bits is uniform within a step: 2**-4 / sqrt(3) of a
    # value at most on average, and four times that for e2m1 below its largest.
    share = 0.2 if case == NVFP4 else 0.06
    assert bool((error <= share * wanted.norm(dim=-1)).all())
