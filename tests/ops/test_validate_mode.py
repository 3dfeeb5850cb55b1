"""MLACAST_VALIDATE=1 turns bad values into errors; without it they are masked or clamped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.ops.rejections import (
    Arguments,
    Rejection,
    assert_rejected,
    good_decode,
    good_dense,
    good_prefill,
    of,
    rejection_id,
    wrong_arguments,
)


def _with(position: tuple[int, ...], value: int) -> object:
    """Change one element of the good tensor."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[position] = value
        return changed

    return of(change)


def _rope(*positions: int) -> mlacast.Rope:
    return mlacast.Rope(torch.zeros(5, 64), torch.tensor(positions, dtype=torch.int32))


BAD_VALUES = (
    Rejection("index_at_the_end", {"indices": _with((0, 3), 100)}, "indices", "", "100"),
    Rejection("index_below_minus_one", {"indices": _with((1, 0), -2)}, "indices", "", "-2"),
    Rejection("index_int_min", {"indices": _with((1, 1), -(2**31))}, "indices", "", "-2147483648"),
    Rejection("negative_length", {"topk_length": _with((1,), -1)}, "topk_length", "", "-1"),
    Rejection("length_past_the_list", {"topk_length": _with((1,), 5)}, "topk_length", "", "5"),
    Rejection("position_past_the_table", {"rope": _rope(0, 5, 0)}, "rope.positions", "", "5"),
    Rejection("negative_position", {"rope": _rope(-1, 0, 0)}, "rope.positions", "", "-1"),
)
BAD_EXTRA_VALUES = (
    Rejection(
        "extra_index_at_the_end", {"extra_indices": _with((0, 4), 6)}, "extra_indices", "", "6"
    ),
    Rejection(
        "negative_extra_length",
        {"extra_topk_length": _with((0,), -7)},
        "extra_topk_length",
        "",
        "-7",
    ),
)


@pytest.mark.parametrize("rejection", BAD_VALUES, ids=rejection_id)
def test_prefill_reports_bad_values(rejection: Rejection, validate: None) -> None:
    assert_rejected("sparse_mla_prefill", wrong_arguments(good_prefill(), rejection), rejection)


@pytest.mark.parametrize("rejection", BAD_VALUES + BAD_EXTRA_VALUES, ids=rejection_id)
def test_decode_reports_bad_values(rejection: Rejection, validate: None) -> None:
    assert_rejected("sparse_mla_decode", wrong_arguments(good_decode(), rejection), rejection)


@pytest.mark.parametrize(
    "rejection",
    [
        Rejection("negative_length", {"seq_lens": _with((1,), -1)}, "seq_lens", "", "-1"),
        Rejection("length_past_the_table", {"seq_lens": _with((1,), 9)}, "seq_lens", "", "9"),
        Rejection("page_past_the_cache", {"page_table": _with((0, 1), 3)}, "page_table", "", "3"),
    ],
    ids=rejection_id,
)
def test_dense_reports_bad_values(rejection: Rejection, validate: None) -> None:
    assert_rejected("dense_mla_decode", wrong_arguments(good_dense(), rejection), rejection)


@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
def test_an_output_over_the_query_is_reported(op: str, validate: None) -> None:
    arguments: Arguments = good_prefill() if op == "sparse_mla_prefill" else good_decode()
    q = arguments["q"]
    before = q.clone()
    with pytest.raises(ValueError, match=rf"{op}: out must .*q.*overlap"):
        getattr(mlacast, op)(**(arguments | {"out": q}))
    assert torch.equal(q, before)


def test_an_output_over_itself_is_reported(validate: None) -> None:
    arguments = good_prefill()
    row = torch.zeros(1, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sparse_mla_prefill: out must .*overlap"):
        mlacast.sparse_mla_prefill(**(arguments | {"out": row.expand(3, 2, 512)}))
    assert not row.any()


@dataclass(frozen=True)
class Harmless:
    """Values that stay legal in validate mode."""

    id: str
    change: Arguments


@pytest.mark.parametrize(
    "harmless",
    [
        Harmless("minus_one", {"indices": _with((0, 0), -1)}),
        # Row 1 has the length 2: entries 2 and 3 are past it.
        Harmless("first_leftover_past_the_length", {"indices": _with((1, 2), 2**31 - 1)}),
        Harmless("leftovers_past_the_length", {"indices": _with((1, 3), 2**31 - 1)}),
        Harmless("last_row_and_last_position", {"rope": _rope(4, 0, 4)}),
        Harmless("nothing_special", {}),
    ],
    ids=lambda harmless: harmless.id,
)
@pytest.mark.parametrize("op", ["sparse_mla_prefill", "sparse_mla_decode"])
def test_legal_values_pass(op: str, harmless: Harmless, validate: None) -> None:
    good = good_prefill() if op == "sparse_mla_prefill" else good_decode()
    arguments = wrong_arguments(good, Rejection("", harmless.change, "", ""))
    assert getattr(mlacast, op)(**arguments)[0] is arguments["out"]


def test_validation_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = good_prefill() | {"out": None}
    plain = mlacast.sparse_mla_prefill(**arguments)
    monkeypatch.setenv("MLACAST_VALIDATE", "1")
    for left, right in zip(plain, mlacast.sparse_mla_prefill(**arguments), strict=True):
        assert oracles.same_bits(left, right)


@pytest.mark.parametrize("rejection", BAD_VALUES, ids=rejection_id)
def test_without_it_bad_values_are_masked_or_clamped(rejection: Rejection) -> None:
    """Each bad value has a legal twin that gives the same bits."""
    twins: dict[str, Arguments] = {
        "index_at_the_end": {"indices": _with((0, 3), -1)},
        "index_below_minus_one": {"indices": _with((1, 0), -1)},
        "index_int_min": {"indices": _with((1, 1), -1)},
        "negative_length": {"topk_length": _with((1,), 0)},
        "length_past_the_list": {"topk_length": _with((1,), 4)},
        "position_past_the_table": {"rope": _rope(0, 4, 0)},
        "negative_position": {"rope": _rope(0, 0, 0)},
    }
    good = good_prefill() | {"out": None}
    bad = mlacast.sparse_mla_prefill(**wrong_arguments(good, rejection))
    twin = Rejection("", twins[rejection.id], "", "")
    legal = mlacast.sparse_mla_prefill(**wrong_arguments(good, twin))
    for left, right in zip(bad, legal, strict=True):
        assert oracles.same_bits(left, right)
