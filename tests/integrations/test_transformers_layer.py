"""One attention layer at a time, on the same input as the original: no error adds up, bounds hold.

Three claims, from exact to loose: the fused bfloat16 layer is as close to float64 as transformers'
own bfloat16 layer; quantising the output moves the layer's result by no more than the quantiser's
step allows; and the comparison would notice a wrong sink, table or index (mutations must fail).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.cli.demo_layers import LayerCall, record_calls
from mlacast.integrations.transformers import forward, fuse
from mlacast.integrations.transformers.attend import attend
from mlacast.integrations.transformers.inputs import AttentionInputs
from tests.integrations.v4_models import (
    LAYER_TYPES,
    left_padded,
    original,
    relative_error,
    tokens,
)

LAYERS = range(3)
LAYER_IDS = [LAYER_TYPES[i].split("_")[0] + "_" + LAYER_TYPES[i].split("_")[1] for i in LAYERS]
STAGES = ("prefill", "decode", "padded")

# Queries, latents and the output are each rounded to bfloat16 once, with a relative error of at
# most 2**-9; the queries' rotated part twice. Scores have a spread of 1 here, so a relative error
# of the scores is an absolute one of logits and moves the weights by the same fraction. Four such
# errors, all at their bound: 4 * 2**-9.
BF16_LAYER_TOLERANCE = 4 * 2.0**-9


@cache
def recorded(stage: str, dtype: torch.dtype) -> list[LayerCall]:
    """What each layer is given: in a prefill, at one decode step, and in a left-padded prefill."""
    model = original(dtype=dtype)
    if stage == "prefill":
        return record_calls(model, input_ids=tokens(45), use_cache=False)
    if stage == "padded":
        ids, mask = left_padded([29, 7, 22])
        return record_calls(model, input_ids=ids, attention_mask=mask, use_cache=False)
    stream = tokens(38, batch=2)
    with torch.no_grad():
        past = model(input_ids=stream[:, :-1], use_cache=True).cache
    return record_calls(model, input_ids=stream[:, -1:], cache=past, use_cache=True)


def attention(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn


@cache
def eager_and_truth(layer: int, stage: str) -> tuple[Tensor, Tensor]:
    """The original bfloat16 layer's output, and that of the same layer in float64."""
    call = recorded(stage, torch.bfloat16)[layer]
    module = attention(original(dtype=torch.bfloat16), layer)
    return call.run(module), call.run(module.double(), torch.float64)


@cache
def fused_in_bfloat16() -> Any:
    return fuse(original(dtype=torch.bfloat16), out_format=mlacast.Bf16())


def check_against_float64(layer: int, stage: str) -> None:
    """Fail unless the fused bfloat16 layer is as accurate as the original bfloat16 layer.

    Both get the same bfloat16 weights, states and tables; the truth is the original layer with all
    of them in float64.
    """
    eager, truth = eager_and_truth(layer, stage)
    fused = recorded(stage, torch.bfloat16)[layer].run(attention(fused_in_bfloat16(), layer))
    assert fused.dtype == torch.bfloat16
    assert relative_error(fused, truth) <= relative_error(eager, truth)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_bfloat16_layer_is_as_close_to_float64_as_the_original(layer: int, stage: str) -> None:
    check_against_float64(layer, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_float32_layer_differs_by_bfloat16_rounding_only(layer: int, stage: str) -> None:
    call = recorded(stage, torch.float32)[layer]
    model = original()
    eager = call.run(attention(model, layer))
    fused = call.run(attention(fuse(model, out_format=mlacast.Bf16()), layer))
    assert fused.dtype == torch.float32
    assert relative_error(fused, eager) <= BF16_LAYER_TOLERANCE


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_without_a_mask_every_key_and_entry_counts(layer: int, stage: str) -> None:
    # What the original does when the layer itself is called with None.
    call = recorded(stage, torch.float32)[layer]
    open_call = LayerCall(call.hidden_states, {**call.kwargs, "attention_mask": None})
    model = original()
    eager = open_call.run(attention(model, layer))
    if stage == "prefill":
        assert relative_error(eager, call.run(attention(model, layer))) > 0.05
    fused = open_call.run(attention(fuse(model, out_format=mlacast.Bf16()), layer))
    assert relative_error(fused, eager) <= BF16_LAYER_TOLERANCE


def without_sinks(step: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(step, attn_sink=torch.full_like(step.attn_sink, -torch.inf))


def with_sinks_of_other_heads(step: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(step, attn_sink=step.attn_sink.roll(1))


def with_half_split_pairs(step: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(step, rope=dataclasses.replace(step.rope, pairing="half"))


def with_positions_off_by_one(step: AttentionInputs) -> AttentionInputs:
    table = step.rope.cos_sin_cache
    cos, sin = table[:, :32], table[:, 32:]
    # One more step of an angle each pair turns by per position, about that of the first pairs.
    turn = torch.logspace(0, -4, 32)
    turned = torch.cat(
        (cos * turn.cos() - sin * turn.sin(), sin * turn.cos() + cos * turn.sin()), dim=1
    )
    return dataclasses.replace(step, rope=dataclasses.replace(step.rope, cos_sin_cache=turned))


def with_window_shifted(step: AttentionInputs) -> AttentionInputs:
    shifted = torch.where(step.window_columns > 0, step.window_columns - 1, step.window_columns)
    return dataclasses.replace(step, window_columns=shifted)


def without_oldest_key(step: AttentionInputs) -> AttentionInputs:
    columns = step.window_columns.clone()
    columns[..., 0] = -1
    return dataclasses.replace(step, window_columns=columns)


def with_entries_shifted(step: AttentionInputs) -> AttentionInputs:
    shifted = torch.where(step.compressed_columns > 0, step.compressed_columns - 1, -1)
    return dataclasses.replace(step, compressed_columns=shifted)


def with_wrong_norm_eps(step: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(step, q_norm_eps=1.0)


MUTATIONS: tuple[Callable[[AttentionInputs], AttentionInputs], ...] = (
    without_sinks,
    with_sinks_of_other_heads,
    with_half_split_pairs,
    with_positions_off_by_one,
    with_window_shifted,
    without_oldest_key,
    with_entries_shifted,
    with_wrong_norm_eps,
)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_mistake_in_the_inputs_is_noticed(
    mutate: Callable[[AttentionInputs], AttentionInputs],
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend_wrongly(step: AttentionInputs, *args: Any, **kwargs: Any) -> None:
        attend(mutate(step), *args, **kwargs)

    monkeypatch.setattr(forward, "attend", attend_wrongly)
    compressed_only = mutate is with_entries_shifted
    for layer in LAYERS:
        if compressed_only and LAYER_TYPES[layer] == "sliding_attention":
            continue
        with pytest.raises(AssertionError):
            check_against_float64(layer, stage)


def mxfp8_step(values: Tensor) -> Tensor:
    """Largest rounding error of each value in Mxfp8, derived from the format.

    The scale of a block of 32 is the smallest power of two of at least amax / 448. A normal e4m3
    code has 3 mantissa bits, so it is off by at most 2**-4 of the value; below 2**-6 codes are
    2**-9 apart and off by at most 2**-10 of the scale.
    """
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return torch.maximum(blocks.abs() * 2.0**-4, scale * 2.0**-10).flatten(-2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layer", LAYERS, ids=LAYER_IDS)
def test_the_cast_to_fp8_stays_within_its_step(
    layer: int, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """|difference of the outputs| <= |W_b| (|W_a| (FP8 error + bf16 error of each element))."""
    buffers: list[Tensor] = []

    def attend_and_keep(step: AttentionInputs, out: Any, **kwargs: Any) -> None:
        attend(step, out, **kwargs)
        buffers.append(out.dequantize())

    monkeypatch.setattr(forward, "attend", attend_and_keep)
    call = recorded(stage, torch.float32)[layer]
    module = attention(fuse(original(), out_format=mlacast.Bf16()), layer)
    with_bf16 = call.run(module)
    fuse_again = attention(fuse(original(), out_format=mlacast.Mxfp8()), layer)
    with_fp8 = call.run(fuse_again)

    in_bf16, in_fp8 = buffers
    # The bf16 buffer is itself off by 2**-9 of the value; the quantiser saw the value before that.
    allowed = mxfp8_step(in_bf16 * (1 + 2.0**-8)) + in_bf16.abs() * 2.0**-8
    assert ((in_fp8 - in_bf16).abs() <= allowed).all()
    assert not torch.equal(in_fp8, in_bf16)

    weight_a = module.o_a_proj.weight.detach().view(in_bf16.shape[1], -1, in_bf16.shape[2]).abs()
    bound = torch.einsum("tgf,gdf->tgd", allowed, weight_a).flatten(1)
    bound = bound @ module.o_b_proj.weight.detach().abs().T
    difference = (with_fp8 - with_bf16).abs().flatten(0, 1)
    # 1e-6 of the largest output: float32 accumulation of the two matrix products.
    assert (difference <= bound + 1e-6 * with_bf16.abs().max()).all()
    # Errors of single elements are independent, so what arrives is far below the worst case.
    assert relative_error(with_fp8, with_bf16) <= 2.0**-4


def test_decode_reads_the_model_cache_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttentionInputs] = []

    def attend_and_keep(step: AttentionInputs, *args: Any, **kwargs: Any) -> None:
        seen.append(step)
        attend(step, *args, **kwargs)

    monkeypatch.setattr(forward, "attend", attend_and_keep)
    model = fuse(original(dtype=torch.bfloat16))
    with torch.no_grad():
        past = model(input_ids=tokens(20), use_cache=True).cache
        seen.clear()
        model(input_ids=tokens(1), cache=past, use_cache=True)
    assert len(seen) == len(LAYER_TYPES)
    for step, layer in zip(seen, past.layers, strict=True):
        assert (
            step.window_kv.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
        )
        if hasattr(layer, "compressed_kv"):
            entries = layer.compressed_kv["compressor"]
            assert step.compressed_kv.data_ptr() == entries.data_ptr()
