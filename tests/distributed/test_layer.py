"""MLAAttention on 2 and 4 processes that share a cache, against one with all of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests.distributed.float32_rows import float32_rows
from tests.distributed.ranks import Found, found_by_ranks
from tests.distributed.sharded_steps import ShardedStep, heads_of_all
from tests.distributed.work import (
    CAST,
    CONTEXT_ON_RANKS,
    FP8_QUERIES,
    Q_SCALE,
    SELECTED,
    SHORT_IN_PAIRS,
    STEPS,
    everything,
    parts,
)
from tests.format_cases import FormatCase, assert_buffer_holds, storage_bytes
from tests.layers.steps import LSE_ERROR, Inputs, assert_close, assert_rows, expected
from tests.oracles import FLOAT32_UNIT, same_bits


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of so many processes found."""
    world = int(request.param)
    return found_by_ranks(everything, world, tmp_path_factory.mktemp(f"world{world}"))


def on_one_rank(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What one process with all heads and the whole cache makes of a step."""
    shape = (inputs.q.shape[0], inputs.layer.num_heads, 128)
    output = torch.empty(shape, dtype=torch.bfloat16)
    result = inputs.layer(*inputs.tensors, output, return_lse=True)
    assert isinstance(result, tuple)
    return output, result[1]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.id)
def test_every_row_attends_to_the_tokens_of_all_ranks(
    ranks: list[Found], case: ShardedStep
) -> None:
    inputs = case.whole(len(ranks))
    out, lse = heads_of_all([found["rows"][case.id] for found in ranks])
    assert_close(out, lse, inputs)
    assert not out[sum(case.step.query_lens) :].any()


@pytest.mark.parametrize("case", SELECTED, ids=lambda case: case.id)
def test_every_row_attends_to_its_selection_on_all_ranks(
    ranks: list[Found], case: ShardedStep
) -> None:
    inputs = case.whole(len(ranks))
    out, lse = heads_of_all([found["rows"][case.id] for found in ranks])
    tokens = sum(case.step.query_lens)
    wanted, wanted_lse = expected(inputs, case.selection())
    if case.sparse == "decodes":
        rest = slice(inputs.metadata.num_decode_tokens, tokens)
        dense, dense_lse = expected(inputs)
        wanted[rest], wanted_lse[rest] = dense[rest], dense_lse[rest]
    assert_rows(out, wanted)
    assert float((lse[:tokens] - wanted_lse[:tokens]).abs().max()) <= LSE_ERROR
    assert bool((lse[tokens:] == -math.inf).all())


@pytest.mark.parametrize(("case", "fmt"), CAST, ids=lambda part: part.id)
def test_rows_have_the_bytes_of_one_cast(
    ranks: list[Found], case: ShardedStep, fmt: FormatCase
) -> None:
    world, heads = len(ranks), case.heads
    rows = float32_rows(case.whole(world), world, case.interleave)
    for rank, found in enumerate(ranks):
        data, sf = found["bytes"][case.id, fmt.id]
        buffer = mlacast.QuantizedTensor.empty(rows.shape[0], 1, heads * 128, fmt.build())
        storage_bytes(buffer.data).copy_(data)
        if buffer.sf is not None:
            storage_bytes(buffer.sf).copy_(sf)
        own = rows[:, rank * heads : (rank + 1) * heads].reshape(-1, 1, heads * 128)
        assert_buffer_holds(buffer, fmt.expect(own), fmt)


def test_the_same_step_gives_the_same_bits(ranks: list[Found]) -> None:
    for found in ranks:
        for once, again in zip(found["rows"][CONTEXT_ON_RANKS.id], found["again"], strict=True):
            assert same_bits(once, again)


def test_a_compiled_step_has_the_same_bits(ranks: list[Found]) -> None:
    if len(ranks) != 2:
        pytest.skip("compiled in a world of two alone, to save time")
    for found in ranks:
        direct = found["rows"][CONTEXT_ON_RANKS.id]
        for compiled, wanted in zip(found["compiled"], direct, strict=True):
            assert same_bits(compiled, wanted)


def test_fp8_queries(ranks: list[Found]) -> None:
    """Their codes are those of one rank, so that only the merge rounds anew."""
    inputs = FP8_QUERIES.whole(len(ranks))
    inputs.layer.q_scale = Q_SCALE
    wanted, wanted_lse = on_one_rank(inputs)
    out, lse = heads_of_all([found["fp8 queries"] for found in ranks])
    assert_rows(out, wanted.double())
    # Both sum 576 products of codes in float32, in any order: roundings at random of partial sums
    # as large as the root of the summed squares, here SCALE * sqrt(512 + 4 * 64) = 2 (4 is room for
    # a bad draw). At most 16 exponentials and their sum, then those of the merge, are rounded once.
    allowed = 2 * FLOAT32_UNIT * (4 * 576**0.5 * 2 + 4 * wanted_lse.abs() + 16 + 8)
    assert bool(((lse - wanted_lse).abs() <= allowed).all())
    inputs.layer.q_scale = 1.0
    _, uncast_lse = on_one_rank(inputs)
    # Codes of three bits behind the point move a logit by 2**-5 of its terms: they were used.
    assert float((lse - uncast_lse).abs().max()) > 1e-2


def test_a_captured_step_is_given_other_requests_through_its_tensors(ranks: list[Found]) -> None:
    for found in ranks:
        direct = found["rows"][SHORT_IN_PAIRS.id]
        for replayed, wanted in zip(found["replayed"], direct, strict=True):
            assert same_bits(replayed, wanted)


def test_quantising_takes_no_more_operations_than_bfloat16(ranks: list[Found]) -> None:
    for found in ranks:
        quantised, plain = found["operators"]
        assert quantised == plain
        assert "mlacast::v_up_project" in plain
        assert "c10d::alltoall_base_" in plain
        assert "mlacast::quantize_output" not in plain


def test_a_profiling_run_gives_zeros(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["profiling"].numel() > 0
        assert not found["profiling"].any()


def test_any_group_will_do(ranks: list[Found]) -> None:
    """Pairs of processes of a bigger world, and processes alone in theirs."""
    world = len(ranks)
    for at in range(world // 2):
        pair = [ranks[at]["pair"], ranks[at + world // 2]["pair"]]
        assert_close(*heads_of_all(pair), CONTEXT_ON_RANKS.whole(2))
    one, one_lse = on_one_rank(CONTEXT_ON_RANKS.whole(1))
    for found in ranks:
        out, lse = found["alone"]
        assert same_bits(out, one)
        assert same_bits(lse, one_lse)


def test_parts_without_keys_are_not_read(ranks: list[Found]) -> None:
    outs, lses = parts(len(ranks))
    lses = torch.where(lses.isinf(), -math.inf, lses).double()
    wanted_lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses.isinf(), 0.0, (lses - wanted_lse).exp())
    wanted = (weights[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    out, lse = heads_of_all([found["merged"] for found in ranks])
    # Rounded to bfloat16 once, after sums in float32 of values up to about 8.
    assert bool(((out - wanted).abs() <= 2**-8 * wanted.abs() + 2**-18).all())
    live = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), live)
    assert float((lse[live] - wanted_lse[live]).abs().max()) <= 2**-16
    assert bool((lse[~live] == -math.inf).all())
    assert not out[3].any()
    assert same_bits(out[2], outs[0, 2])


def test_heads_and_rows_come_in_order_of_ranks(ranks: list[Found]) -> None:
    own = torch.arange(3 * 2 * 4).view(3, 2, 4)
    of_ranks = [(own + 100 * rank).bfloat16() for rank in range(len(ranks))]
    wanted = torch.cat(of_ranks, 1)
    for found in ranks:
        contiguous, turned, codes, nothing, rows = found["heads"]
        assert same_bits(contiguous.contiguous(), wanted)
        assert same_bits(turned.contiguous(), wanted)
        assert torch.equal(codes.float(), wanted.to(torch.float8_e4m3fn).float())
        assert nothing.shape == (0, 2 * len(ranks), 4)
        assert same_bits(rows, torch.cat([part[:, 0] for part in of_ranks]))


def test_what_does_not_fit_the_group_is_refused(ranks: list[Found]) -> None:
    world = len(ranks)
    for rank, found in enumerate(ranks):
        said = found["refused"]
        wanted = f"metadata must have dcp_rank={rank} and dcp_world_size={world} like the dcp_group"
        assert wanted in said["rank"]
        assert wanted in said["world"]
        assert f"num_heads must be at most {128 // world}" in said["heads"]
        assert "dcp_group must be a torch.distributed.ProcessGroup" in found["stranger"]
        assert not any("after writing" in words for words in said.values())


def test_ranks_that_differ_are_found_by_validation(ranks: list[Found]) -> None:
    for found in ranks:
        for subject in ("lengths", "interleave"):
            said = found["refused"][subject]
            assert f"the same on all ranks; [{len(ranks) - 1}] differ from rank 0" in said
        assert found["refused"]["agreed"] == "nothing"
