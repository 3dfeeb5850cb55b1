"""The portable dense prefill, interpreted: batches, masks, tiles, outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.config import dense_prefill as config
from mlacast.kernels.triton.dense_mla_prefill import launch_dense_mla_prefill
from tests import dense_prefill, oracles
from tests.dense_prefill import CASES, Packed, PackedCase, draw, packed_id
from tests.format_cases import FAMILIES, NVFP4, QUANTISED, FormatCase, case_id
from tests.kernels import launches, store_cases

SCALE = 192**-0.5
TILES = (
    PackedCase("across_tiles", (130, 1, 70), (200, 90, 70), heads=2, kv_heads=1),
    PackedCase("across_tiles_full", (130, 1, 70), (200, 90, 70), heads=2, kv_heads=1, causal=False),
    PackedCase("exact_tiles", (128, 256), (128, 256), heads=1, kv_heads=1),
    PackedCase("first_tile_without_keys", (200,), (70,), heads=1, kv_heads=1),
    PackedCase("short_queries_long_context", (3, 1), (193, 128), heads=2, kv_heads=2),
    PackedCase(
        "many_sequences",
        (1,) + (0,) * 126 + (2, 1) + (0,) * 130 + (1,),
        (2,) + (1,) * 126 + (2, 3) + (0,) * 130 + (4,),
        heads=1,
        kv_heads=1,
        q_tail=3,
    ),
)


def run(packed: Packed, out: mlacast.QuantizedTensor, **more: Any) -> Tensor:
    """Run the launcher; returns lse."""
    lse = torch.full((packed.case.heads, packed.q.shape[0]), launches.POISON)
    options = packed.arguments | {"softmax_scale": SCALE} | more
    launch_dense_mla_prefill(**options, out=out, lse=lse)
    return lse


def attend(packed: Packed, **more: Any) -> tuple[Tensor, Tensor]:
    """The kernel's float32 output and lse."""
    buffer = launches.float32_buffer(packed.q.shape[0], packed.case.heads, features=128)
    lse = run(packed, buffer, **more)
    return buffer.data, lse


def check(packed: Packed, scale: float = SCALE) -> None:
    """Compare with float64; products of float16 inputs have float16 weights."""
    out, lse = attend(packed, softmax_scale=scale)
    expected = dense_prefill.attend(packed, scale)
    if packed.q.dtype == torch.float16:
        expected = dataclasses.replace(expected, out_error=expected.out_error + 2.0**-10 * 5)
    oracles.assert_matches(out, lse.t(), expected)


@pytest.mark.parametrize(
    "case", [case for case in CASES if sum(case.q_lens) + case.q_tail], ids=packed_id
)
def test_every_batch(case: PackedCase) -> None:
    check(draw(case, torch.float32))


@pytest.mark.parametrize("case", TILES, ids=packed_id)
def test_tiles_and_tails(case: PackedCase) -> None:
    check(draw(case, torch.float32))


def test_float16_inputs() -> None:
    check(draw(TILES[0], torch.float16))


# As numbers of float32 the last but one is 0, and the last is not.
@pytest.mark.parametrize("scale", [0.3, 0.0, -0.1, -1e-50, 1e-45])
def test_any_scale(scale: float) -> None:
    check(draw(CASES[3], torch.float32), scale)


@pytest.mark.parametrize("shared_memory", [64 << 10, 227 << 10])
def test_the_tile_of_a_small_gpu(shared_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mlacast.kernels.triton.dense_mla_prefill.shared_memory_of", lambda device: shared_memory
    )
    check(draw(TILES[0], torch.float32))


def test_any_number_of_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of one head, of three (the last one not full), of all; the order changes no bit."""
    packed = draw(PackedCase("", (130, 3), (140, 3), heads=4, kv_heads=4), torch.float32)
    results = []
    for heads in (1, 3, 4):
        monkeypatch.setattr(
            "mlacast.kernels.config.dense_prefill.heads_at_a_time",
            lambda num_heads, kv_heads, longest, heads=heads: heads,
        )
        results.append(attend(packed))
    for out, lse in results[1:]:
        assert oracles.same_bits(out, results[0][0])
        assert oracles.same_bits(lse, results[0][1])


def test_strided_inputs_and_bounds_outside_of_the_tensors() -> None:
    packed = draw(PackedCase("", (3, 4), (5, 4), heads=2), torch.float32)
    expected = attend(packed)
    wrong = dataclasses.replace(
        packed,
        q=packed.q.transpose(0, 1).contiguous().transpose(0, 1),
        k=torch.cat((packed.k, packed.k), -1)[..., :192],
        cu_seqlens_q=torch.tensor([-7, 3, 2**31 - 1], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([-(2**31), 5, 900], dtype=torch.int32),
    )
    for one, other in zip(attend(wrong), expected, strict=True):
        assert oracles.same_bits(one, other)


def test_hidden_infinities_leave_rows_without_keys_alone() -> None:
    packed = draw(PackedCase("", (3,), (2,), heads=1, kv_heads=1), torch.float32)
    packed.v[1] = float("inf")
    out, lse = attend(packed)
    assert not out[0].any() and float(lse[0, 0]) == -float("inf")


def check_store(case: FormatCase, packed: Packed, first: int, total: int) -> None:
    """Rows ``first``.. of a buffer: codes and scales of the float32 output, nothing else."""
    tokens, heads = packed.q.shape[:2]
    actual, expected = (
        store_cases.empty_buffer(case, total, 1, heads * 128, "cpu") for _ in range(2)
    )
    run(packed, actual[first : first + tokens])
    values = attend(packed)[0].reshape(tokens, 1, heads * 128)
    mlacast.reference.quantize_output(values, expected[first : first + tokens])
    store_cases.assert_same_storages(actual, expected)


def heads_for(case: FormatCase) -> int:
    """As few heads as the format takes; two leave the last word of packed scales unfilled."""
    return 4 if case.order == "chunk32" else 2


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_bytes_of_every_format_in_a_range(case: FormatCase) -> None:
    check_store(case, draw(PackedCase("", (3,), (5,), heads=heads_for(case)), torch.float32), 2, 9)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_the_range_that_ends_the_buffer_clears_the_padding(case: FormatCase) -> None:
    """The last tokens are those of a sequence, or of none."""
    for tail in (0, 2):
        heads = heads_for(case)
        packed = draw(PackedCase("", (2, 1), (2, 3), heads=heads, q_tail=tail), torch.float32)
        check_store(case, packed, 66, 69 + tail)


@pytest.mark.parametrize(
    ("lengths", "first"), [((129, 5), 0), ((129, 5), 120), ((5, 128), 1)], ids=str
)
def test_swizzled_scales_across_tiles_of_rows(lengths: tuple[int, ...], first: int) -> None:
    packed = draw(PackedCase("", lengths, lengths, heads=1, kv_heads=1), torch.float32)
    check_store(NVFP4, packed, first, first + sum(lengths))


def test_there_are_tiles_enough_for_any_lengths() -> None:
    for lengths in ([0], [1], [128], [129, 0, 1], [1] * 300, [127, 128, 129, 257]):
        for outside in ((0, 0), (3, 0), (1, 200)):
            needed = sum(-(-length // 128) for length in (*lengths, *outside))
            tokens = sum(lengths) + sum(outside)
            assert needed <= config.max_tiles(tokens, len(lengths), 128) <= tokens


@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "expected"),
    [(16, 16, 8192, 3), (16, 16, 100000, 1), (16, 16, 1, 16), (128, 1, 8192, 128), (8, 2, 0, 8)],
)
def test_heads_whose_keys_fit_the_cache(
    heads: int, kv_heads: int, keys: int, expected: int
) -> None:
    """16 MiB hold the 640 bytes of 26214 keys."""
    assert config.heads_at_a_time(heads, kv_heads, keys) == expected
