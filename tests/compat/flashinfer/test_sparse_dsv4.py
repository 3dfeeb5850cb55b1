"""trtllm_batch_decode_sparse_mla_dsv4: two pools, lengths with the window, FP8 output."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.compat.flashinfer.dsv4_calls import Call, joint_call, separate_call

SINKS = torch.tensor([0.5, -math.inf, 3.0, math.inf, 0.0, 1.0, -2.0, 9.0])


@pytest.mark.parametrize("name", ["FP8", "BF16"])
@pytest.mark.parametrize("heads", [8, 16])
def test_one_list_for_both_pools(name: str, heads: int) -> None:
    """Lengths count the 128 columns of the window, all of which count."""
    call = joint_call(name, heads=heads)
    out = call.run()
    assert out.shape == (2, 2, heads, 512)
    call.assert_right(out)


@pytest.mark.parametrize("page_size", [1, 16])
def test_layouts_of_the_pools(page_size: int) -> None:
    call = joint_call(page_size=page_size)
    pools = {name: call.arguments[name] for name in ("swa_kv_cache", "compressed_kv_cache")}
    expected = call.run()
    call.assert_right(expected)
    nhd = {name: pool.transpose(1, 2) for name, pool in pools.items()}
    assert oracles.same_bits(call.run(kv_layout="NHD", **nhd), expected)
    flat = {name: pool.squeeze(1) for name, pool in pools.items()}
    assert oracles.same_bits(call.run(**flat), expected)


def test_a_layer_with_a_window_alone() -> None:
    call = joint_call(width=128, lengths=(128,) * 4)
    call.assert_right(call.run(compressed_kv_cache=call.arguments["swa_kv_cache"]))


@pytest.mark.parametrize("has_extra", [True, False])
def test_a_list_for_each_pool(has_extra: bool) -> None:
    call = separate_call(has_extra=has_extra)
    out = call.run()
    call.assert_right(out)
    assert not out[0, 1].any()
    assert oracles.same_bits(call.run(backend="sparse"), out)


@pytest.mark.parametrize("listed", [False, True], ids=["tensor", "list"])
@pytest.mark.parametrize("make", [joint_call, separate_call])
def test_sinks(make: object, listed: bool) -> None:
    call = make()  # type: ignore[operator]
    call.assert_right(call.run(sinks=[SINKS] if listed else SINKS), sinks=SINKS)


def test_scales_on_the_device() -> None:
    call = joint_call()
    scales = {"bmm1_scale": torch.tensor([0.0625]), "bmm2_scale": torch.tensor([-1.5])}
    out = call.run(**scales)
    call.assert_right(out, scale=-1.5)
    assert oracles.same_bits(out, call.run(bmm2_scale=-1.5))


def _ragged(call: Call) -> dict[str, Tensor | int]:
    """The four tokens of the call as requests of one and three tokens."""
    return {
        "query": call.arguments["query"].flatten(0, 1),
        "cum_seq_lens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "max_q_len": 3,
    }


@pytest.mark.parametrize("make", [joint_call, separate_call])
def test_a_ragged_query(make: object) -> None:
    call = make()  # type: ignore[operator]
    out = call.run(**_ragged(call))
    assert out.shape == (4, 8, 512)
    call.assert_right(out)


def test_out_is_written_and_returned() -> None:
    call = joint_call()
    out = torch.full((2, 2, 8, 512), 7.0, dtype=torch.bfloat16)
    assert call.run(out=out) is out
    call.assert_right(out)


def test_no_request() -> None:
    call = joint_call()
    names = ("query", "sparse_indices", "sparse_topk_lens", "seq_lens")
    out = call.run(**{name: call.arguments[name][:0] for name in names})
    assert out.shape == (0, 2, 8, 512)


def _turned(call: Call, table: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Output of the oracle with the last 64 dimensions rotated back."""
    out = call.oracle().out.clone()
    for token, position in enumerate(positions):
        for head in range(out.shape[1]):
            out[token, head, 448:] = oracles.rotate(
                out[token, head, 448:], table[position], "interleaved", inverse=True
            )
    return out


def _decoded(out: Tensor, scales: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Values [T, H, 512] of layout A, element by element, and the scale of each."""
    groups, columns = scales.shape[0], scales.shape[2]
    values = torch.zeros(tokens, groups * 8, 512, dtype=torch.float64)
    steps = torch.zeros_like(values)
    codes, words = out.float().double(), scales.view(torch.uint8).view(groups, 8, columns, 4)
    for token in range(tokens):
        for head in range(groups * 8):
            for block in range(4):
                span = slice(128 * block, 128 * block + 128)
                step = 2.0 ** (int(words[head // 8, head % 8, token, block]) - 127)
                values[token, head, span] = codes[head // 8, token, head % 8, span] * step
                steps[token, head, span] = step
    return values, steps


@pytest.mark.parametrize("make", [joint_call, separate_call])
@pytest.mark.parametrize("given", [True, False], ids=["given", "new"])
@pytest.mark.parametrize("ragged", [False, True], ids=["by_request", "ragged"])
def test_output_in_fp8(make: object, given: bool, ragged: bool) -> None:
    """Each value is within half a step of its code from the rotated oracle."""
    call = make(heads=16)  # type: ignore[operator]
    table = oracles.exact_rope_table(12)
    seq_lens = torch.tensor([7, 5], dtype=torch.int32)
    out = torch.full((2, 4, 8, 512), 7.0).to(torch.float8_e4m3fn) if given else None
    scales = torch.full((2, 8, 4), 0x5A5A5A5A, dtype=torch.int32)
    result = call.run(
        out=out,
        out_scales=scales,
        cos_sin_cache=table,
        seq_lens=seq_lens,
        **(_ragged(call) if ragged else {}),
    )
    assert result.shape == (2, 4, 8, 512) and result.dtype == torch.float8_e4m3fn
    assert out is None or result is out
    positions = (6, 2, 3, 4) if ragged else (5, 6, 3, 4)
    expected = _turned(call, table, positions)
    values, steps = _decoded(result, scales, 4)
    # Half a step of e4m3, 2**-4 of the value and 2**-10 of the scale, beside the float32 error.
    allowed = 2.0**-4 * expected.abs() + 2.0**-10 * steps + 1e-4 * expected.abs().amax()
    assert bool(((values - expected).abs() <= allowed).all())
    peaks = expected.abs().view(4, 16, 4, 128).amax(-1)
    ratio = (peaks / 448).clamp(min=1e-10 / 448)
    found = steps.view(4, 16, 4, 128)[..., 0]
    assert bool(((found >= ratio * (1 - 1e-4)) & (found < 2 * ratio * (1 + 1e-4))).all())


def test_the_padding_of_the_scales_becomes_zero() -> None:
    call = joint_call(batch=1, q_len=2, lengths=(150, 128))
    scales = torch.full((1, 8, 4), -1, dtype=torch.int32)
    call.run(out_scales=scales, cos_sin_cache=torch.ones(9, 64))
    assert not scales[:, :, 2:].any() and bool((scales[:, :, :2] != -1).all())


def test_the_scale_of_the_output_comes_before_its_cast() -> None:
    """Twice the scale, a power of two, gives the same codes with exponents one up."""
    call = joint_call()
    scales = [torch.zeros(1, 8, 4, dtype=torch.int32) for _ in range(2)]
    outs = [
        call.run(out_scales=scale, cos_sin_cache=torch.ones(9, 64), bmm2_scale=factor)
        for scale, factor in zip(scales, (1.0, 2.0), strict=True)
    ]
    assert oracles.same_bits(*outs)
    assert torch.equal(scales[0] + 0x01010101, scales[1])


def test_values_are_checked_on_request(validate: None) -> None:
    call = joint_call()
    clean = {
        "sparse_indices": call.arguments["sparse_indices"].clamp(-1, 15),
    }
    call.run(**clean)
    lengths = call.arguments["sparse_topk_lens"]
    for wrong in (127, 161):
        lens = torch.where(lengths == 133, wrong, lengths).int()
        with pytest.raises(ValueError, match=r"sparse_topk_lens must have values in \[128, 160\]"):
            call.run(sparse_topk_lens=lens, **clean)
    with pytest.raises(ValueError, match="seq_lens must have values of at least 2, .* got 1"):
        call.run(seq_lens=torch.tensor([7, 1], dtype=torch.int32), **clean)


def test_layout_b_is_explained_as_not_built() -> None:
    text = str(mlacast.explain("trtllm_batch_decode_sparse_mla_dsv4"))
    assert "dsv4_output_scale" in text and "not built" in text
    assert "sparse_mla_decode" in text and "reference" in text
