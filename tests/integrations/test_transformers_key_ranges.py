"""Key ranges read from masks: compared with loops over the mask, entry by entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlacast.integrations.transformers.key_ranges import (
    KeyRanges,
    read_keys,
    selected_columns,
)

CPU = torch.device("cpu")
LOWEST = torch.finfo(torch.float32).min


def causal(lengths: list[int], s_q: int, kv_len: int, tail: int = 0) -> Tensor:
    """[B, 1, s_q, kv_len] bool: keys of each request end before a tail of the columns."""
    allowed = torch.zeros(len(lengths), 1, s_q, kv_len, dtype=torch.bool)
    stop = kv_len - tail
    for request, length in enumerate(lengths):
        for query in range(s_q):
            for column in range(stop - length, stop):
                allowed[request, 0, query, column] = column <= stop - s_q + query
    return allowed


def additive(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, LOWEST)


def seen(keys: object, batch: int, s_q: int) -> list[list[list[int]]]:
    """Columns of each query, spelled out."""
    if isinstance(keys, Tensor):
        return [[[c for c in row if c >= 0] for row in request] for request in keys.tolist()]
    assert isinstance(keys, KeyRanges)
    return [
        [
            list(range(keys.first[request], max(keys.stop[request] - (s_q - 1 - query), 0)))
            for query in range(s_q)
        ]
        for request in range(batch)
    ]


def spelled_out(allowed: Tensor) -> list[list[list[int]]]:
    return [
        [[c for c, is_open in enumerate(row) if is_open] for row in request[0]]
        for request in allowed.tolist()
    ]


@pytest.mark.parametrize("is_sdpa", [False, True], ids=["eager", "sdpa"])
@pytest.mark.parametrize(
    ("lengths", "s_q", "kv_len", "tail"),
    [
        ([5, 5], 5, 5, 0),
        ([9, 3, 6], 9, 9, 0),
        ([9, 4], 2, 9, 0),
        ([7, 7], 1, 7, 0),
        ([4, 2], 3, 10, 6),
        ([0, 3], 3, 3, 0),
    ],
)
def test_prompts_and_steps_are_ranges(
    lengths: list[int], s_q: int, kv_len: int, tail: int, is_sdpa: bool
) -> None:
    allowed = causal(lengths, s_q, kv_len, tail)
    mask = allowed if is_sdpa else additive(allowed)
    keys = read_keys(mask, len(lengths), s_q, kv_len, CPU, is_sdpa=is_sdpa)
    assert isinstance(keys, KeyRanges)
    assert keys.lengths == lengths
    assert seen(keys, len(lengths), s_q) == spelled_out(allowed)


def test_what_is_no_range_becomes_columns() -> None:
    padded_right = causal([6, 6], 6, 6)
    padded_right[1, :, :, 4:] = False
    packed = causal([6], 6, 6)
    packed[0, 0, 3:, :3] = False
    hole = causal([6], 6, 6)
    hole[0, 0, 5, 2] = False
    full = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    for allowed in (padded_right, packed, hole, full):
        batch, _, s_q, kv_len = allowed.shape
        keys = read_keys(additive(allowed), batch, s_q, kv_len, CPU, is_sdpa=False)
        assert isinstance(keys, Tensor)
        assert seen(keys, batch, s_q) == spelled_out(allowed)


def test_a_mask_for_one_request_serves_the_batch() -> None:
    keys = read_keys(causal([4], 4, 4), 3, 4, 4, CPU, is_sdpa=True)
    assert isinstance(keys, KeyRanges)
    assert keys.lengths == [4, 4, 4]


def test_no_mask() -> None:
    # "sdpa" is then causal from the first key on, for one query it is not; "eager" never is.
    prompt = read_keys(None, 2, 3, 5, CPU, is_sdpa=True)
    assert seen(prompt, 2, 3) == [[[0], [0, 1], [0, 1, 2]]] * 2
    for is_sdpa in (False, True):
        step = read_keys(None, 2, 1, 5, CPU, is_sdpa=is_sdpa)
        assert seen(step, 2, 1) == [[[0, 1, 2, 3, 4]]] * 2
    everything = read_keys(None, 2, 3, 5, CPU, is_sdpa=False)
    assert seen(everything, 2, 3) == [[[0, 1, 2, 3, 4]] * 3] * 2


def test_tensors_of_ranges() -> None:
    keys = read_keys(causal([4, 2], 4, 4), 2, 4, 4, CPU, is_sdpa=True)
    assert isinstance(keys, KeyRanges)
    assert keys.seq_lens.tolist() == [4, 2]
    assert keys.cu_seqlens_q.tolist() == [0, 4, 8]
    assert keys.cu_seqlens_k.tolist() == [0, 4, 6]
    assert keys.packed_rows is not None
    assert keys.packed_rows.tolist() == [0, 1, 2, 3, 6, 7]
    assert keys.aligned_rows is not None
    assert keys.aligned_rows[0].tolist() == [0, 1, 2, 3]
    assert keys.aligned_rows[1, :2].tolist() == [6, 7]
    assert int(keys.aligned_rows.max()) < 8

    whole = read_keys(causal([4, 4], 2, 4), 2, 2, 4, CPU, is_sdpa=True)
    assert isinstance(whole, KeyRanges)
    assert whole.packed_rows is None
    assert whole.aligned_rows is None


@pytest.mark.parametrize("bias", [1.0, -0.5, torch.nan])
def test_a_bias_is_refused(bias: float) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must hold only 0 and values of -10000"):
        read_keys(torch.tensor([[[[0.0, bias]]]]), 1, 1, 2, CPU, is_sdpa=True)


def test_a_boolean_mask_means_something_else_in_eager_attention() -> None:
    with pytest.raises(ValueError, match=r"attention_mask must be additive.*got bool"):
        read_keys(causal([2], 2, 2), 1, 2, 2, CPU, is_sdpa=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_another_shape_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[2 or 1, 1, 3, 4\]"):
        read_keys(torch.ones(2, 1, 3, 5).to(dtype), 2, 3, 4, CPU, is_sdpa=True)


def test_columns_of_the_indexer_that_the_mask_closes_become_holes() -> None:
    topk = torch.tensor([[[0, 3, 1], [2, 0, 3]]], dtype=torch.int32)
    allowed = torch.tensor([[[True, False, False, False], [True, True, True, False]]])
    assert selected_columns(topk, allowed).tolist() == [[[0, -1, -1], [2, 0, -1]]]
