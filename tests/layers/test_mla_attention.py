"""MLAAttention in bfloat16 against attention in float64 without absorption."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.layers import MLAMetadata
from tests.layers.operations import operations_of
from tests.layers.steps import (
    HEADS,
    LSE_ERROR,
    PAGE,
    Inputs,
    Step,
    assert_close,
    assert_rows,
    draw,
    expected,
    picking_weight,
    slots_of,
)
from tests.oracles import FLOAT32_UNIT, same_bits

STEPS = (
    Step("one_decode", (1,), (6,)),
    Step("decodes", (1, 1, 1), (5, 0, 9)),
    Step("two_tokens_each", (2, 2), (5, 3), threshold=2),
    Step("uneven_decodes", (3, 1, 2), (5, 4, 0), threshold=3),
    Step("one_prefill", (7,), (0,)),
    Step("prefills", (5, 3, 6), (0, 0, 0)),
    Step("mixed", (1, 1, 4, 5), (7, 3, 0, 0)),
    Step("mixed_uneven", (2, 1, 4), (7, 3, 0), threshold=2),
    Step("context", (3, 4), (9, 6)),
    Step("context_in_one_of_three", (3, 4, 2), (0, 6, 0)),
    Step("mixed_context", (1, 3, 4, 5), (8, 9, 0, 6)),
    Step("chunks", (1, 3, 4, 5), (8, 9, 0, 6), workspace=4),
    Step("shared_chunk", (3, 4, 5), (9, 3, 2), workspace=8),
    Step("a_token_a_chunk", (3, 4), (9, 2), workspace=1),
    Step("requests_without_tokens", (0, 1, 3, 0), (4, 5, 3, 2)),
    Step("padded_decodes", (1, 1), (4, 5), padding=3),
    Step("one_padded_row", (1, 1), (4, 5), padding=1),
    Step("padded_prefill", (5, 2), (0, 0), padding=2),
    Step("padded_context", (1, 3, 2), (4, 6, 0), padding=3, workspace=4),
    Step("padded_behind_context", (3,), (6,), padding=3),
)


def run(inputs: Inputs, **arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Make a step into a bfloat16 output full of NaN."""
    shape = (inputs.q.shape[0], inputs.layer.num_heads * 128)
    output = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    result = inputs.layer(*inputs.tensors, output, return_lse=True, **arguments)
    assert isinstance(result, tuple)
    assert result[0] is output
    return output, result[1]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_every_row_attends_to_its_request(step: Step) -> None:
    inputs = draw(step)
    out, lse = run(inputs)
    assert_close(out, lse, inputs)
    padding = out[sum(step.query_lens) :]
    assert padding.shape[0] == step.padding
    assert bool((padding == 0).all())


@pytest.mark.parametrize("kv_format", ["FP8", "V32"])
@pytest.mark.parametrize("step", ["mixed", "mixed_context", "chunks", "uneven_decodes"])
def test_cache_formats(step: str, kv_format: str) -> None:
    base = next(known for known in STEPS if known.id == step)
    changes = {**vars(base), "kv_format": kv_format}
    inputs = draw(Step(**changes))
    assert_close(*run(inputs), inputs)


def test_one_head_and_the_most_heads() -> None:
    for heads in (1, 128):
        inputs = draw(Step("mixed", (1, 3), (2, 2)), heads)
        assert_close(*run(inputs), inputs)


def test_attention_to_one_token_by_hand() -> None:
    """A single key has weight 1 whatever the scores: the output is its value, W_UV times latent."""
    inputs = draw(Step("first_tokens", (1, 1), (0, 0)))
    weight = torch.zeros(HEADS * 256, 512)
    weight[128 + 3, 7], weight[256 + 128 + 3, 7], weight[256 + 128 + 4, 8] = 2.0, -1.0, 0.5
    inputs.layer.kv_b_proj.copy_(weight)
    for request in range(2):
        slot = int(inputs.metadata.block_table[request, 0]) * PAGE
        inputs.kv_cache.view(-1, 576)[slot] = 0
        inputs.kv_cache.view(-1, 576)[slot, 7] = 3.0 + request
        inputs.kv_cache.view(-1, 576)[slot, 8] = 8.0
    out, _ = run(inputs)
    found = {tuple(at): out[tuple(at)].item() for at in out.nonzero().tolist()}
    assert found == {
        (0, 3): 6.0,
        (0, 128 + 3): -3.0,
        (0, 128 + 4): 4.0,
        (1, 3): 8.0,
        (1, 128 + 3): -4.0,
        (1, 128 + 4): 4.0,
    }


@pytest.mark.parametrize("padding", [0, 3])
def test_zero_requests(padding: int) -> None:
    inputs = draw(Step("nothing", (), (), padding=padding))
    out, lse = run(inputs)
    assert out.shape == (padding, HEADS * 128)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_the_size_of_the_workspace_changes_rounding_only() -> None:
    inputs = draw(Step("whole", (3, 4, 2), (9, 0, 14)))
    wanted, _ = expected(inputs)
    for workspace in (1, 2, 3, 5, 22, 23, 24):
        inputs.layer.context_workspace_tokens = workspace
        out, lse = run(inputs)
        assert_close(out, lse, inputs)
        assert out.view(wanted.shape).isfinite().all()


def test_outputs_of_three_dimensions_and_of_strided_rows() -> None:
    inputs = draw(Step("mixed_context", (1, 3, 4), (8, 9, 0), padding=1))
    out, _ = run(inputs)
    cube = torch.empty(9, HEADS, 128, dtype=torch.bfloat16)
    assert inputs.layer(*inputs.tensors, cube) is cube
    assert same_bits(cube.view(out.shape), out)
    wide = torch.full((9, HEADS * 128 + 8), 7.0, dtype=torch.bfloat16)
    inputs.layer(*inputs.tensors, wide[:, 8:])
    assert same_bits(wide[:, 8:].contiguous(), out)
    assert bool((wide[:, :8] == 7.0).all())


def test_decode_rows_attend_to_the_slots_they_name() -> None:
    inputs = draw(Step("mixed", (1, 1, 4), (7, 3, 0)))
    table = inputs.metadata.block_table
    picked = [[0, 7, 3], [2, 2]]
    indices = torch.full((2, 4), -1, dtype=torch.int32)
    for token, positions in enumerate(picked):
        slots = slots_of(table, token, torch.tensor(positions))
        indices[token, : len(positions)] = slots.to(torch.int32)
    out, lse = run(inputs, indices=indices, topk_length=torch.tensor([2, 4], dtype=torch.int32))
    dense, dense_lse = expected(inputs)
    sparse, sparse_lse = expected(inputs, [[0, 7], [2, 2], [], [], [], []])
    assert_rows(out[:2], sparse[:2])
    assert_rows(out[2:], dense[2:])
    assert float((lse[:2] - sparse_lse[:2]).abs().max()) <= LSE_ERROR
    assert float((lse[2:] - dense_lse[2:]).abs().max()) <= LSE_ERROR


@pytest.mark.parametrize("rows_for_padding", [0, 2])
def test_indices_of_every_row_make_prefills_sparse_too(rows_for_padding: int) -> None:
    inputs = draw(Step("mixed", (1, 3), (7, 6), padding=2))
    picked = [[0, 5, 7], [0, 6], [1, 3, 7], []]
    indices = torch.full((4 + rows_for_padding, 3), -1, dtype=torch.int32)
    for token, positions in enumerate(picked):
        slots = slots_of(inputs.metadata.block_table, min(token, 1), torch.tensor(positions).long())
        indices[token, : len(positions)] = slots.to(torch.int32)
    # What rows of padding name does not matter.
    indices[4:] = int(inputs.metadata.block_table[0, 0]) * PAGE
    out, lse = run(inputs, indices=indices)
    wanted, wanted_lse = expected(inputs, picked)
    assert_rows(out, wanted)
    live = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), live)


def test_fp8_queries_have_a_scale_of_their_own() -> None:
    """Queries of a power of two are exact in e4m3, so casting them changes nothing but the path."""
    inputs = draw(Step("decodes", (1, 1), (5, 9), kv_format="FP8"))
    layer = inputs.layer
    layer.kv_b_proj[: 2 * 256].view(HEADS, 256, 512)[:, :128] = 0
    inputs.q[..., 128:] = 2.0 * torch.randn(2, HEADS, 64).sign()
    plain, plain_lse = run(inputs)
    for q_scale in (0.25, torch.tensor([0.25]), torch.ones(1)):
        layer.q_scale = q_scale
        out, lse = run(inputs)
        assert_rows(out, plain.double())
        # Only the rotary part of a query is not zero: 64 products of codes by a power of two, whose
        # sum float32 holds. What is rounded are scales, at most ten exponentials and their sum.
        allowed = 2 * FLOAT32_UNIT * (4 * plain_lse.abs() + 10 + 8)
        assert bool(((lse - plain_lse).abs() <= allowed).all())


def test_scales_on_the_device_are_those_of_numbers() -> None:
    inputs = draw(Step("mixed_context", (1, 3), (8, 9), kv_format="FP8"))
    number, _ = run(inputs)
    inputs.layer.k_scale = torch.tensor([inputs.layer.k_scale])
    assert same_bits(run(inputs)[0], number)


def test_rows_do_not_depend_on_the_batch() -> None:
    inputs = draw(Step("mixed", (1, 1, 4), (7, 3, 0)))
    together, _ = run(inputs)
    first = 0
    for request, new in enumerate(inputs.metadata.query_lens):
        rows = slice(first, first + new)
        alone = MLAMetadata.build(
            [new],
            [inputs.metadata.context_lens[request]],
            inputs.metadata.block_table[request : request + 1],
            PAGE,
        )
        out = torch.empty(new, HEADS * 128, dtype=torch.bfloat16)
        tensors = (inputs.q[rows], inputs.kv_c[rows], inputs.k_pe[rows], inputs.kv_cache)
        inputs.layer(*tensors, alone, out)
        assert same_bits(out, together[rows])
        first += new


def test_a_captured_step_is_given_other_requests_through_its_tensors() -> None:
    """What a graph of a decode would read: the same metadata after copies into it."""
    first, second = (
        draw(Step("decodes", (1, 1, 1), lengths)) for lengths in ((5, 2, 8), (8, 7, 0))
    )
    metadata = first.metadata
    metadata.decode_table.copy_(second.metadata.block_table)
    metadata.decode_seq_lens.copy_(torch.tensor([9, 8, 0]))
    out = torch.empty(3, HEADS * 128, dtype=torch.bfloat16)
    second.layer(second.q, second.kv_c, second.k_pe, second.kv_cache, metadata, out)
    wanted, _ = expected(second)
    assert_rows(out[:2], wanted[:2])
    assert bool((out[2] == 0).all())


def test_the_weight_is_shared_and_not_saved() -> None:
    inputs = draw(Step("one_decode", (1,), (6,)))
    weight = torch.zeros(HEADS * 256, 512, dtype=torch.bfloat16)
    layer = mlacast.layers.MLAAttention(HEADS, scale=1.0, kv_b_proj=weight)
    assert layer.kv_b_proj.data_ptr() == weight.data_ptr()
    assert layer.state_dict() == {}
    assert list(inputs.layer.parameters()) == []


def test_a_row_has_the_same_bits_whatever_context_its_batch_has() -> None:
    """Chunks are cut the same way for a request alone; the weight leaves no products to round."""
    step = Step("chunks", (2, 3, 4, 5), (8, 11, 0, 6), workspace=5)
    inputs = draw(step, HEADS, picking_weight(HEADS))
    together, _ = run(inputs)
    first = 0
    for request, new in enumerate(step.query_lens):
        rows = slice(first, first + new)
        table = inputs.metadata.block_table[request : request + 1]
        alone = MLAMetadata.build([new], [step.context_lens[request]], table, PAGE)
        out = torch.empty(new, HEADS * 128, dtype=torch.bfloat16)
        tensors = (inputs.q[rows], inputs.kv_c[rows], inputs.k_pe[rows], inputs.kv_cache)
        inputs.layer(*tensors, alone, out)
        assert same_bits(out, together[rows])
        first += new


def test_no_graph_is_kept() -> None:
    inputs = draw(Step("mixed_context", (1, 3), (8, 9)))
    inputs.q.requires_grad_()
    out, lse = run(inputs)
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("step", ["mixed", "mixed_context", "chunks", "padded_context"])
def test_quantising_takes_no_more_operations_than_bfloat16(step: str) -> None:
    """Whatever is last for a row casts it: nothing reads a finished output again."""
    inputs = draw(next(known for known in STEPS if known.id == step))
    operators = []
    for fmt in (mlacast.Bf16(), mlacast.Fp8Group(128), mlacast.Nvfp4(torch.ones(1))):
        buffer = mlacast.QuantizedTensor.empty(inputs.q.shape[0], 1, HEADS * 128, fmt)
        operators.append(operations_of(functools.partial(inputs.layer, *inputs.tensors, buffer)))
    assert operators[0] == operators[1] == operators[2]
    assert len(operators[0]) > 0
    assert not any("quantize_output" in name for name in operators[0])


def test_padding_behind_a_prompt_takes_no_launch_of_its_own() -> None:
    counts = []
    for padding in (0, 3):
        inputs = draw(Step("prompt", (1, 4), (3, 0), padding=padding))
        output = torch.empty(5 + padding, HEADS * 128, dtype=torch.bfloat16)
        counts.append(len(operations_of(functools.partial(inputs.layer, *inputs.tensors, output))))
    assert counts[0] == counts[1] > 0


@pytest.mark.usefixtures("validate")
@pytest.mark.parametrize("step", ["uneven_decodes", "mixed_context", "padded_context"])
def test_no_value_is_out_of_range(step: str) -> None:
    """The checks of values find nothing in lengths, pages and slots that the layer makes."""
    inputs = draw(next(known for known in STEPS if known.id == step))
    assert_close(*run(inputs), inputs)
