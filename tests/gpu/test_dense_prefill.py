"""dense_mla_prefill through the portable kernel on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import dense_prefill, oracles
from tests.dense_prefill import CASES, Packed, PackedCase, cumulative, draw, packed_id
from tests.format_cases import FAMILIES, FormatCase, case_id
from tests.gpu.cache_steps import kernels_of, nothing_compiles, replayed
from tests.gpu.steps import CUDA, all_same

pytest.importorskip("triton", reason="the portable kernels need triton")

from mlacast.kernels.triton.dense_mla_prefill import launch_dense_mla_prefill  # noqa: E402
from tests.kernels import launches, store_cases  # noqa: E402

TILES = (
    PackedCase("across_tiles", (130, 1, 70), (200, 90, 70), heads=4, kv_heads=2),
    PackedCase("across_tiles_full", (130, 1, 70), (200, 90, 70), heads=4, causal=False),
    PackedCase("exact_tiles", (128, 256), (128, 256), heads=1, kv_heads=1),
    PackedCase("first_tile_without_keys", (200,), (70,), heads=1, kv_heads=1),
    PackedCase("many_sequences", (1, 0, 2) * 60, (2, 1, 1) * 60, heads=3, kv_heads=3, q_tail=5),
)


def run(packed: Packed, **more: Any) -> tuple[Any, ...]:
    """Call the public function."""
    return tuple(mlacast.dense_mla_prefill(**packed.arguments, backend="triton", **more))


def assert_close(packed: Packed, out: Tensor, lse: Tensor) -> None:
    """Compare with float64 on the CPU.

    Logits and sums as in ``tests.oracles.attend`` with an accumulation unit of 2**-22, four times
    float32's: tensor cores drop two bits of the summands of a step. Softmax weights are rounded to
    bfloat16, each by at most 2**-9 of itself, which moves an output by 2**-9 of its largest value.
    """
    exact = dense_prefill.attend(packed)
    largest = float(packed.v.nan_to_num().abs().max()) if packed.v.numel() else 0.0
    expected = dataclasses.replace(
        exact,
        logit_error=4 * exact.logit_error,
        out_error=4 * exact.out_error + 2.0**-9 * largest,
    )
    oracles.assert_matches(out.cpu(), lse.t().cpu(), expected)


@pytest.mark.parametrize("case", CASES + TILES, ids=packed_id)
def test_every_batch_matches_float64(case: PackedCase) -> None:
    packed = draw(case)
    out, lse = run(packed.to(CUDA))
    assert_close(packed, out, lse)


def test_long_sequences_match_float32() -> None:
    """8192 and 5000 tokens; torch on the device, one head at a time."""
    lengths = (8192, 5000)
    bounds = cumulative(lengths).to(CUDA)
    q, k = (torch.randn(sum(lengths), 2, 192, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    v = torch.randn(sum(lengths), 2, 256, dtype=torch.bfloat16, device=CUDA)[..., 128:]
    out, lse = mlacast.dense_mla_prefill(
        q,
        k,
        v,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=8192,
        max_seqlen_k=8192,
        backend="triton",
    )
    for first, last in ((0, 8192), (8192, 13192)):
        hidden = torch.ones(last - first, last - first, device=CUDA).triu(1).bool()
        for head in range(2):
            rows = slice(first, last)
            logits = q[rows, head].float() @ k[rows, head].float().T * 192**-0.5
            logits.masked_fill_(hidden, -torch.inf)
            expected = logits.softmax(-1) @ v[rows, head].float()
            found = oracles.plain(out)[rows, head].float()
            # Half a bf16 step of the output, and bf16 weights, which average out over many keys.
            worst = ((found - expected).abs() - 2.0**-8 * expected.abs()).max()
            assert float(worst) < 2.0**-9 * float(v.abs().max())
            assert float((found - expected).norm() / expected.norm()) < 6e-3
            assert float((lse[head, rows] - logits.logsumexp(-1)).abs().max()) < 1e-4


def test_sequences_do_not_depend_on_each_other() -> None:
    """Neither on the others nor on the tile that the longest of them picks."""
    packed = draw(PackedCase("", (40, 300, 9), (60, 300, 9), heads=4, kv_heads=2)).to(CUDA)
    out, lse = run(packed)
    for first, last, first_key, last_key in (
        (0, 40, 0, 60),
        (40, 340, 60, 360),
        (340, 349, 360, 369),
    ):
        q_len, k_len = last - first, last_key - first_key
        alone = Packed(
            PackedCase("", (q_len,), (k_len,)),
            packed.q[first:last],
            packed.k[first_key:last_key],
            packed.v[first_key:last_key],
            cumulative((q_len,)).to(CUDA),
            cumulative((k_len,)).to(CUDA),
        )
        assert all_same(run(alone), (out[first:last], lse[:, first:last]))


def test_the_same_call_gives_the_same_bits() -> None:
    packed = draw(TILES[0]).to(CUDA)
    first = run(packed, out_format=mlacast.Fp8Group(128))
    for _ in range(20):
        assert all_same(run(packed, out_format=mlacast.Fp8Group(128)), first)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_every_format_into_a_range_of_a_shared_buffer(case: FormatCase) -> None:
    """Other rows and their scales keep their bytes, those of the range are the float32 output's.

    A kernel with another epilogue is another program: scales may differ by a rounding of their
    largest element, and a few codes by one step.
    """
    packed = draw(PackedCase("", (130, 7), (130, 9), heads=8, kv_heads=8)).to(CUDA)
    exact = launches.float32_buffer(137, 8, CUDA, 128)
    lse = torch.empty(8, 137, device=CUDA)
    launch_dense_mla_prefill(**packed.arguments, softmax_scale=192**-0.5, out=exact, lse=lse)
    for first, total in ((0, 137), (3, 150), (120, 257)):
        actual = store_cases.empty_buffer(case, total, 2, 512, CUDA)
        expected = store_cases.empty_buffer(case, total, 2, 512, "cpu")
        run(packed, out=actual[first : first + 137])
        rows = exact.data.cpu().view(137, 2, 512)
        mlacast.reference.quantize_output(rows, expected[first : first + 137])
        for got, want in zip(
            store_cases.storages(actual), store_cases.storages(expected), strict=True
        ):
            # A number within 2**-20 of itself of the middle between two codes may have either: one
            # in some thousand, as steps are at least 2**-4 of it and sums have cancelling terms.
            assert float((got != want).float().mean()) <= 0.002
        outside = torch.ones(total, dtype=torch.bool)
        outside[first : first + 137] = False
        codes = actual.data.view(torch.uint8).cpu()
        assert bool((codes[outside] == store_cases.POISON).all())
        difference = actual[first : first + 137].dequantize().cpu() - rows
        step = expected[first : first + 137].dequantize() - rows
        # A code that is one step off, beside a number in the middle, is hardly further from it. The
        # rest is for bfloat16 outputs of zeros.
        assert float(difference.norm()) <= 1.001 * float(step.norm()) + 1e-6


def test_one_launch_that_a_graph_replays_with_other_lengths() -> None:
    packed = draw(PackedCase("", (64, 0, 36), (80, 0, 36), heads=4, q_tail=28)).to(CUDA)
    buffer = mlacast.QuantizedTensor.empty(128, 1, 512, mlacast.Nvfp4(448.0), CUDA)
    arguments = packed.arguments | {"max_seqlen_q": 128, "max_seqlen_k": 128}

    def call() -> tuple[Any, ...]:
        return tuple(mlacast.dense_mla_prefill(**arguments, out=buffer, backend="triton"))

    names = kernels_of(call)
    assert names and all("dense_mla_prefill" in name for name in names), names
    graph = replayed(call)
    for q_lens, k_lens in (
        ((1, 2, 3), (1, 2, 3)),
        ((0, 0, 0), (9, 9, 9)),
        ((28, 50, 50), (1, 50, 60)),
    ):
        packed.cu_seqlens_q.copy_(cumulative(q_lens))
        packed.cu_seqlens_k.copy_(cumulative(k_lens))
        packed.q.copy_(torch.randn_like(packed.q))
        packed.k.copy_(torch.randn_like(packed.k))
        packed.v.copy_(torch.randn_like(packed.v))
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        replay = [part.clone() for part in store_cases.storages(buffer)]
        call()
        for left, right in zip(replay, store_cases.storages(buffer), strict=True):
            assert torch.equal(left, right)


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, sequences, rows of a buffer and where bounds start may change."""
    fmt = mlacast.Mxfp8()
    whole = mlacast.QuantizedTensor.empty(700, 1, 512, fmt, CUDA)

    def call(*lengths: int, first: int = 0, shift: int = 0) -> None:
        packed = draw(PackedCase("", lengths, lengths, heads=4)).to(CUDA)
        wide = torch.empty(len(lengths) + 1 + shift, dtype=torch.int32, device=CUDA)
        wide[shift:] = packed.cu_seqlens_q
        packed = dataclasses.replace(packed, cu_seqlens_q=wide[shift:])
        run(packed, out=whole[first : first + sum(lengths)])

    call(16)
    call(100, 1)
    with nothing_compiles(monkeypatch):
        for lengths in ((1,), (2, 3), (65,), (17, 200, 0), (1,) * 33):
            call(*lengths)
        for first in (1, 3, 16):
            call(20, 5, first=first)
        for shift in (1, 2, 3):
            call(300, 5, shift=shift)


def test_rows_past_two_to_the_31st_element() -> None:
    """The last of many sequences, whose rows lie past 2**31 elements of q, k and v."""
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip(f"needs 40 GB of free device memory, has {free / 1e9:.1f}")
    heads, count = 128, 1200
    tokens = 128 * count
    bounds = torch.arange(0, tokens + 1, 128, dtype=torch.int32, device=CUDA)
    q, k = (torch.empty(tokens, heads, 192, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    v = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=CUDA)
    for tensor in (q, k, v):
        tensor.zero_()
        tensor[-128:].normal_()
    assert v.numel() > 2**31
    longest: dict[str, Any] = {"max_seqlen_q": 128, "max_seqlen_k": 128}
    whole = mlacast.dense_mla_prefill(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **longest, backend="triton"
    )
    alone = mlacast.dense_mla_prefill(
        q[-128:],
        k[-128:],
        v[-128:],
        cu_seqlens_q=bounds[:2],
        cu_seqlens_k=bounds[:2],
        **longest,
        backend="triton",
    )
    assert oracles.same_bits(oracles.plain(whole[0])[-128:], alone[0])
    assert oracles.same_bits(whole[1][:, -128:], alone[1])
    assert not oracles.plain(whole[0])[:-128].any()
