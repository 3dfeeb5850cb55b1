"""Whole models: logits of the fused model against transformers' eager attention."""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast.integrations.transformers import fuse
from tests.integrations.v4_models import (
    cosine,
    left_padded,
    logits,
    original,
    relative_error,
    stepwise_logits,
    tokens,
)

# One layer is off by at most 4 * 2**-9 in bfloat16 (test_transformers_layer.py says why). In FP8 a
# value between 1 and 2 is stored in steps of 1/8: an error of 1/8 / sqrt(12) = 0.036 in the root
# mean square, 0.024 of a value in the middle of that range, so at most 2**-5. The errors of the
# four layers are independent and add up to sqrt(4) times one of them.
BF16_MODEL_TOLERANCE = 2 * 4 * 2.0**-9
FP8_MODEL_TOLERANCE = 2 * 2.0**-5

FORMATS = [
    pytest.param(mlacast.Bf16(), BF16_MODEL_TOLERANCE, id="bf16"),
    pytest.param(mlacast.Mxfp8(), FP8_MODEL_TOLERANCE, id="mxfp8"),
]


@pytest.mark.parametrize(("out_format", "tolerance"), FORMATS)
def test_prefill_agrees_with_eager(out_format: mlacast.OutFormat, tolerance: float) -> None:
    model = original(continuous=True)
    expected = logits(model, input_ids=tokens(70, batch=2), use_cache=False)
    fused = logits(
        fuse(model, out_format=out_format), input_ids=tokens(70, batch=2), use_cache=False
    )
    assert fused.shape == expected.shape
    assert fused.dtype == expected.dtype
    assert relative_error(fused, expected) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_format_reaches_cosine_099_with_routing_and_topk(dtype: torch.dtype) -> None:
    # Nothing is made continuous here: an expert or a key may be chosen differently.
    model = original(dtype=dtype)
    expected = logits(model, input_ids=tokens(70, batch=2))
    fused = logits(fuse(model), input_ids=tokens(70, batch=2))
    assert cosine(fused, expected) > 0.99


def test_bfloat16_model_is_as_close_to_float32_as_eager_is() -> None:
    # Layer by layer that is exact (test_transformers_layer.py); over a model the errors of both are
    # random and of one size, hence the quarter.
    stream = tokens(60)
    truth = logits(original(continuous=True), input_ids=stream)
    model = original(continuous=True, dtype=torch.bfloat16)
    assert model.model.layers[0].self_attn.sinks.dtype == torch.bfloat16
    eager = logits(model, input_ids=stream)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), input_ids=stream)
    assert relative_error(fused, truth) <= 1.25 * relative_error(eager, truth)


@pytest.mark.parametrize(("out_format", "tolerance"), FORMATS)
def test_decode_agrees_with_eager_at_every_step(
    out_format: mlacast.OutFormat, tolerance: float
) -> None:
    # From inside the first window to well past it; entries of both compressors complete on the way.
    stream, chunks = tokens(29, batch=2), [13] + [1] * 16
    model = original(continuous=True)
    expected = stepwise_logits(model, chunks, stream, None)
    fused = stepwise_logits(fuse(model, out_format=out_format), chunks, stream, None)
    # A single step is no average: half as much again.
    for step in range(stream.shape[1]):
        assert relative_error(fused[:, step], expected[:, step]) <= 1.5 * tolerance, step
    assert relative_error(fused, expected) <= tolerance


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 3, 21, 1, 8, 1, 1], [30, 10]], ids=str)
def test_chunked_prefill_agrees_with_eager(chunks: list[int]) -> None:
    stream = tokens(sum(chunks))
    model = original(continuous=True)
    expected = stepwise_logits(model, chunks, stream, None)
    fused = stepwise_logits(fuse(model, out_format=mlacast.Bf16()), chunks, stream, None)
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


def test_cached_and_uncached_passes_agree() -> None:
    stream = tokens(32)
    model = fuse(original(continuous=True), out_format=mlacast.Bf16())
    at_once = logits(model, input_ids=stream, use_cache=False)
    in_steps = stepwise_logits(model, [20] + [1] * 12, stream, None)
    assert relative_error(in_steps, at_once) <= BF16_MODEL_TOLERANCE


def test_left_padding_agrees_with_eager_on_every_row() -> None:
    # Rows of padding included: their states reach the compressors of the next layer.
    ids, mask = left_padded([33, 12, 25])
    model = original(continuous=True)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    expected = logits(model, **inputs)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), **inputs)
    assert torch.isfinite(fused).all()
    for row in range(3):
        assert relative_error(fused[row], expected[row]) <= BF16_MODEL_TOLERANCE, row


def test_left_padding_agrees_with_eager_in_decode() -> None:
    ids, mask = left_padded([28, 9, 21])
    model = original(continuous=True)
    chunks = [18] + [1] * 10
    expected = stepwise_logits(model, chunks, ids, mask)
    fused = stepwise_logits(fuse(model, out_format=mlacast.Bf16()), chunks, ids, mask)
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


def test_padding_matters_to_the_comparison() -> None:
    # The tests above must not pass because the mask is ignored on both sides.
    ids, mask = left_padded([33, 12, 25])
    model = fuse(original(continuous=True), out_format=mlacast.Bf16())
    with_mask = logits(model, input_ids=ids, attention_mask=mask, use_cache=False)
    without = logits(model, input_ids=ids, use_cache=False)
    assert relative_error(without[1], with_mask[1]) > 10 * BF16_MODEL_TOLERANCE


def test_custom_mask_is_followed() -> None:
    # A mask of one's own, [batch, 1, s_q, s_q]: here two documents packed into one row.
    allowed = torch.ones(30, 30, dtype=torch.bool).tril()
    allowed[14:, :14] = False
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    model = original(continuous=True)
    expected = logits(model, input_ids=tokens(30), attention_mask=mask, use_cache=False)
    fused = logits(
        fuse(model, out_format=mlacast.Bf16()),
        input_ids=tokens(30),
        attention_mask=mask,
        use_cache=False,
    )
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


@pytest.mark.parametrize(
    "out_format",
    [
        mlacast.Fp8Group(128, "float32", "mn_major"),
        mlacast.Fp8Group(64, "ue8m0_packed", "row_major"),
        mlacast.Mxfp8(order="chunk32"),
    ],
    ids=lambda fmt: fmt.key,
)
def test_other_fp8_formats_reach_the_projection(out_format: mlacast.OutFormat) -> None:
    model = original(continuous=True)
    expected = logits(model, input_ids=tokens(30))
    fused = logits(fuse(model, out_format=out_format), input_ids=tokens(30))
    assert relative_error(fused, expected) <= FP8_MODEL_TOLERANCE


def test_fp4_is_coarser_than_fp8_and_still_right() -> None:
    # Attention outputs stay below 16 here: global_scale 2688 / 16. e2m1 is off by at most a quarter
    # of the value (between 1 and 1.5: 0.25 / 1), against 2**-4 for e4m3: four times the tolerance.
    model = original(continuous=True)
    expected = logits(model, input_ids=tokens(30))
    fused = logits(
        fuse(model, out_format=mlacast.Nvfp4(global_scale=2688 / 16)), input_ids=tokens(30)
    )
    assert FP8_MODEL_TOLERANCE / 2 < relative_error(fused, expected) <= 4 * FP8_MODEL_TOLERANCE


def test_one_token_prompt() -> None:
    model = original(continuous=True)
    expected = logits(model, input_ids=tokens(1, batch=3), use_cache=False)
    fused = logits(
        fuse(model, out_format=mlacast.Bf16()), input_ids=tokens(1, batch=3), use_cache=False
    )
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


def test_inference_mode() -> None:
    model = fuse(original(continuous=True))
    expected = logits(model, input_ids=tokens(20))
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens(20)).logits, expected)
