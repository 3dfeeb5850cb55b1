"""DeepSeek-V3 and V3.2: logits of the fused model against transformers' own attention.

Rows of padding are left out of comparisons: transformers lets them attend something, here they are
zeros, and nothing reads them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.integrations.transformers import fuse
from tests.integrations.mla_models import LAYERS, MODELS, attentions, original
from tests.integrations.v4_models import (
    left_padded,
    logits,
    relative_error,
    stepwise_logits,
    tokens,
)

# Per layer, in units of bfloat16's 2**-9, the largest relative error of one rounding: queries,
# keys, values (or latents and the absorbed queries) and the output are rounded once each. Scores
# have a spread of about 1, so a relative error of theirs moves the weights by the same fraction.
# Layers are independent and add up to sqrt(LAYERS) times one of them.
BF16_MODEL_TOLERANCE = LAYERS**0.5 * 4 * 2.0**-9
# Root mean square of e4m3's rounding: at most 2**-5 of a value, see test_transformers_model.py.
FP8_MODEL_TOLERANCE = LAYERS**0.5 * 2.0**-5

FORMATS = [
    pytest.param(mlacast.Bf16(), BF16_MODEL_TOLERANCE, id="bf16"),
    pytest.param(None, FP8_MODEL_TOLERANCE, id="default"),
]

pytestmark = pytest.mark.parametrize("model_type", MODELS)
both = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@both
@pytest.mark.parametrize(("out_format", "tolerance"), FORMATS)
def test_prefill_agrees(
    model_type: str, implementation: str, out_format: mlacast.OutFormat, tolerance: float
) -> None:
    model = original(model_type, continuous=True, implementation=implementation)
    inputs = {"input_ids": tokens(70, batch=2), "use_cache": False}
    expected = logits(model, **inputs)
    fused = logits(fuse(model, out_format=out_format), **inputs)
    assert fused.shape == expected.shape
    assert fused.dtype == expected.dtype
    assert 0 < relative_error(fused, expected) <= tolerance


@both
@pytest.mark.parametrize(("out_format", "tolerance"), FORMATS)
def test_decode_agrees_at_every_step(
    model_type: str, implementation: str, out_format: mlacast.OutFormat, tolerance: float
) -> None:
    # Past 64 tokens, where a request of the joined cache gets a second page.
    stream, chunks = tokens(70, batch=2), [58] + [1] * 12
    model = original(model_type, continuous=True, implementation=implementation)
    expected = stepwise_logits(model, chunks, stream, None)
    fused = stepwise_logits(fuse(model, out_format=out_format), chunks, stream, None)
    # A single step is no average: half as much again.
    for step in range(58, 70):
        assert relative_error(fused[:, step], expected[:, step]) <= 1.5 * tolerance, step
    assert relative_error(fused, expected) <= tolerance


@both
@pytest.mark.parametrize("chunks", [[5, 3, 21, 1, 8, 1, 1], [30, 10]], ids=str)
def test_chunked_prefill_agrees(model_type: str, implementation: str, chunks: list[int]) -> None:
    stream = tokens(sum(chunks))
    model = original(model_type, continuous=True, implementation=implementation)
    expected = stepwise_logits(model, chunks, stream, None)
    fused = stepwise_logits(fuse(model, out_format=mlacast.Bf16()), chunks, stream, None)
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


@both
@pytest.mark.parametrize(
    "chunks", [[33], [24] + [1] * 9, [24, 9]], ids=["prompt", "steps", "chunks"]
)
def test_left_padding_agrees(model_type: str, implementation: str, chunks: list[int]) -> None:
    ids, mask = left_padded([33, 12, 25])
    model = original(model_type, continuous=True, implementation=implementation)
    expected = stepwise_logits(model, chunks, ids, mask)
    fused = stepwise_logits(fuse(model, out_format=mlacast.Bf16()), chunks, ids, mask)
    assert torch.isfinite(fused).all()
    for row, length in enumerate((33, 12, 25)):
        error = relative_error(fused[row, -length:], expected[row, -length:])
        assert error <= BF16_MODEL_TOLERANCE, row


def test_padding_matters_to_the_comparison(model_type: str) -> None:
    ids, mask = left_padded([33, 12, 25])
    model = fuse(original(model_type, continuous=True), out_format=mlacast.Bf16())
    with_mask = logits(model, input_ids=ids, attention_mask=mask, use_cache=False)
    without = logits(model, input_ids=ids, use_cache=False)
    assert relative_error(without[1, -12:], with_mask[1, -12:]) > 10 * BF16_MODEL_TOLERANCE


@both
def test_right_padding_agrees(model_type: str, implementation: str) -> None:
    ids, mask = tokens(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    mask[1, 17:] = 0
    model = original(model_type, continuous=True, implementation=implementation)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    expected = logits(model, **inputs)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), **inputs)
    for row, length in enumerate((30, 17)):
        error = relative_error(fused[row, :length], expected[row, :length])
        assert error <= BF16_MODEL_TOLERANCE, row


@both
def test_custom_mask_is_followed(model_type: str, implementation: str) -> None:
    # Two documents packed into one row.
    allowed = torch.ones(30, 30, dtype=torch.bool).tril()
    allowed[14:, :14] = False
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    model = original(model_type, continuous=True, implementation=implementation)
    inputs = {"input_ids": tokens(30), "attention_mask": mask, "use_cache": False}
    expected = logits(model, **inputs)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), **inputs)
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


@both
def test_static_cache_agrees(model_type: str, implementation: str) -> None:
    transformers = importlib.import_module("transformers")
    stream = tokens(30, batch=2)
    model = original(model_type, continuous=True, implementation=implementation)

    def run() -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=48)
        steps = [stream[:, :20], *(stream[:, i : i + 1] for i in range(20, 30))]
        return torch.cat([logits(model, input_ids=part, cache=cache) for part in steps], dim=1)

    expected = run()
    fuse(model, out_format=mlacast.Bf16())
    assert relative_error(run(), expected) <= BF16_MODEL_TOLERANCE


def with_rounded_outputs(model: Any) -> Any:
    """The original, with what enters each ``o_proj`` rounded to the default format."""

    def round_input(_: Any, args: tuple[Tensor]) -> Tensor:
        rows = args[0].flatten(0, -2).float()
        rounded = mlacast.quantize_output(rows, mlacast.Fp8Group(128)).dequantize()
        return rounded.view(args[0].shape).to(args[0].dtype)

    for module in attentions(model):
        module.o_proj.register_forward_pre_hook(round_input)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_model_with_routing_and_topk(model_type: str, dtype: torch.dtype) -> None:
    # Nothing is made continuous here: an expert or a key may be chosen differently, as in the
    # original once its attention output is rounded. Both depart from it at random, hence the 2.
    inputs = {"input_ids": tokens(70, batch=2)}
    expected = logits(original(model_type, dtype=dtype), **inputs)
    rounded = logits(with_rounded_outputs(original(model_type, dtype=dtype)), **inputs)
    fused = logits(fuse(original(model_type, dtype=dtype)), **inputs)
    assert fused.dtype == dtype
    assert relative_error(fused, expected) <= 2 * relative_error(rounded, expected)


def test_bfloat16_model_is_as_close_to_float32_as_eager_is(model_type: str) -> None:
    # Over a model the errors of both are random and of one size, hence the quarter.
    stream = tokens(60)
    truth = logits(original(model_type, continuous=True), input_ids=stream)
    model = original(model_type, continuous=True, dtype=torch.bfloat16)
    eager = logits(model, input_ids=stream)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), input_ids=stream)
    assert relative_error(fused, truth) <= 1.25 * relative_error(eager, truth)


@pytest.mark.parametrize(
    "out_format",
    [
        mlacast.Fp8Group(128, "float32", "mn_major"),
        mlacast.Fp8Group(64, "ue8m0_packed", "row_major"),
        mlacast.Mxfp8(),
        # Attention outputs stay below 14 here.
        mlacast.Fp8Tensor(2.0**-5),
    ],
    ids=lambda fmt: fmt.key,
)
def test_other_fp8_formats_reach_the_projection(
    model_type: str, out_format: mlacast.OutFormat
) -> None:
    model = original(model_type, continuous=True)
    expected = logits(model, input_ids=tokens(30))
    fused = logits(fuse(model, out_format=out_format), input_ids=tokens(30))
    assert relative_error(fused, expected) <= FP8_MODEL_TOLERANCE


def test_fp4_is_coarser_than_fp8_and_still_right(model_type: str) -> None:
    # e2m1 is off by at most a quarter of a value against 2**-4 for e4m3: four times the tolerance.
    model = original(model_type, continuous=True)
    expected = logits(model, input_ids=tokens(30))
    fused = logits(
        fuse(model, out_format=mlacast.Nvfp4(global_scale=2688 / 16)), input_ids=tokens(30)
    )
    assert FP8_MODEL_TOLERANCE / 2 < relative_error(fused, expected) <= 4 * FP8_MODEL_TOLERANCE


def test_one_token_prompt(model_type: str) -> None:
    model = original(model_type, continuous=True)
    inputs = {"input_ids": tokens(1, batch=3), "use_cache": False}
    expected = logits(model, **inputs)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), **inputs)
    assert relative_error(fused, expected) <= BF16_MODEL_TOLERANCE


def test_inference_mode(model_type: str) -> None:
    model = fuse(original(model_type, continuous=True))
    expected = logits(model, input_ids=tokens(20))
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens(20)).logits, expected)
