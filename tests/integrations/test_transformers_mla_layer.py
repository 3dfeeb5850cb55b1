"""One attention layer of DeepSeek-V3 or V3.2 at a time, on the same input as the original.

The fused bfloat16 layer is about as close to float64 as transformers' own bfloat16 layer, with the
real indexer too, and the comparison would notice a mistake in what the core ops are given.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlacast
from mlacast.integrations.transformers import fuse, mla_forward
from mlacast.integrations.transformers.key_ranges import KeyRanges
from mlacast.integrations.transformers.mla_attend import attend
from mlacast.integrations.transformers.mla_inputs import MlaInputs
from tests.integrations.mla_models import TOPK, attentions, original
from tests.integrations.v4_models import left_padded, relative_error, tokens

# "deepseek_v32" keeps 8 keys a query here, chosen by its own indexer.
MODELS = ("deepseek_v3", "deepseek_v32")
STAGES = ("prefill", "decode", "padded")
LAYER = 1

# See BF16_MODEL_TOLERANCE of test_transformers_mla_model.py, for one layer.
BF16_LAYER_TOLERANCE = 4 * 2.0**-9


@cache
def recorded(model_type: str, stage: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the second layer of the original, its cache as it was before."""
    model = original(model_type, dtype=dtype)
    inputs: dict[str, Any]
    if stage == "padded":
        ids, mask = left_padded([29, 7, 22])
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    elif stage == "prefill":
        inputs = {"input_ids": tokens(45), "use_cache": False}
    else:
        stream = tokens(38, batch=2)
        with torch.no_grad():
            past = model(input_ids=stream[:, :-1], use_cache=True).cache
        inputs = {"input_ids": stream[:, -1:], "cache": past, "use_cache": True}
    calls: list[dict[str, Any]] = []
    hook = attentions(model)[LAYER].register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(copy.deepcopy(kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return calls[0]


def run(module: Any, call: dict[str, Any]) -> Tensor:
    """Output of the rows that are no padding."""
    with torch.no_grad():
        output: Tensor = module(**copy.deepcopy(call))[0]
    if output.shape[0] < 3:
        return output
    return torch.cat([output[row, -length:] for row, length in enumerate((29, 7, 22))])


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    """The call with states, tables and cache converted."""
    call = copy.deepcopy(call)
    call["hidden_states"] = call["hidden_states"].double()
    call["position_embeddings"] = tuple(table.double() for table in call["position_embeddings"])
    if call["attention_mask"] is not None:
        call["attention_mask"] = call["attention_mask"].double()
    past = call["cache"]
    if past is not None:
        layer = past.layers[LAYER]
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    return call


class Recorded(nn.Module):
    """Gives the answer that another indexer gave."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.answer


@cache
def eager_and_truth(model_type: str, stage: str) -> tuple[Tensor, Tensor]:
    """The original bfloat16 layer's output, and that of the same layer in float64."""
    call = recorded(model_type, stage, torch.bfloat16)
    module = attentions(original(model_type, dtype=torch.bfloat16))[LAYER]
    answers: list[Tensor] = []
    if model_type == "deepseek_v32":
        # In float64 the indexer might choose other keys.
        module.indexer.register_forward_hook(lambda *hooked: answers.append(hooked[2]))
    eager = run(module, call)
    if answers:
        module.indexer = Recorded(answers[0])
    return eager, run(module.double(), in_float64(call))


@cache
def fused_in_bfloat16(model_type: str) -> Any:
    return fuse(original(model_type, dtype=torch.bfloat16), out_format=mlacast.Bf16())


def check_against_float64(model_type: str, stage: str) -> None:
    """Fail unless the fused bfloat16 layer is about as accurate as the original bfloat16 layer.

    Both round keys, values and the output to bfloat16; the original rounds weights of attention
    too, absorbed form rounds queries that stand for keys. The quarter is for the difference.
    """
    eager, truth = eager_and_truth(model_type, stage)
    call = recorded(model_type, stage, torch.bfloat16)
    fused = run(attentions(fused_in_bfloat16(model_type))[LAYER], call)
    assert fused.dtype == torch.bfloat16
    assert relative_error(fused, truth) <= 1.25 * relative_error(eager, truth)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_layer_is_as_close_to_float64_as_the_original(model_type: str, stage: str) -> None:
    check_against_float64(model_type, stage)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model_type", MODELS)
def test_float32_layer_differs_by_bfloat16_rounding_only(
    model_type: str, stage: str, implementation: str
) -> None:
    call = recorded(model_type, stage, torch.float32)
    model = original(model_type)
    eager = run(attentions(model)[LAYER], call)
    if implementation == "sdpa":
        call = dict(call, attention_mask=call["attention_mask"] == 0)
        model = original(model_type, implementation="sdpa")
    fused = run(attentions(fuse(model, out_format=mlacast.Bf16()))[LAYER], call)
    assert fused.dtype == torch.float32
    assert relative_error(fused, eager) <= BF16_LAYER_TOLERANCE


def without_first_key(step: MlaInputs) -> MlaInputs:
    keys = step.keys
    if isinstance(keys, KeyRanges):
        first = tuple(column + 1 for column in keys.first)
        return dataclasses.replace(step, keys=dataclasses.replace(keys, first=first))
    keys = keys.clone()
    keys[..., 0] = -1
    return dataclasses.replace(step, keys=keys)


def with_keys_shifted(step: MlaInputs) -> MlaInputs:
    return dataclasses.replace(step, latent=step.latent.roll(1, dims=1))


def without_rotary_keys(step: MlaInputs) -> MlaInputs:
    return dataclasses.replace(step, k_pe=torch.zeros_like(step.k_pe))


def with_queries_of_other_heads(step: MlaInputs) -> MlaInputs:
    return dataclasses.replace(step, q=step.q.roll(1, dims=2))


def with_another_scale(step: MlaInputs) -> MlaInputs:
    # What a layer without YaRN's factor would use.
    return dataclasses.replace(step, sm_scale=192**-0.5)


MUTATIONS: tuple[Callable[[MlaInputs], MlaInputs], ...] = (
    without_first_key,
    with_keys_shifted,
    without_rotary_keys,
    with_queries_of_other_heads,
    with_another_scale,
)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_mistake_in_the_inputs_is_noticed(
    mutate: Callable[[MlaInputs], MlaInputs],
    model_type: str,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend_wrongly(step: MlaInputs, *args: Any, **kwargs: Any) -> None:
        attend(mutate(step), *args, **kwargs)

    monkeypatch.setattr(mla_forward, "attend", attend_wrongly)
    with pytest.raises(AssertionError):
        check_against_float64(model_type, stage)


@pytest.mark.parametrize(
    ("model_type", "stage", "ops"),
    [
        ("deepseek_v3", "prefill", ["dense_mla_prefill"]),
        ("deepseek_v3", "decode", ["dense_mla_decode", "v_up_project"]),
        ("deepseek_v32", "prefill", ["sparse_mla_prefill", "v_up_project"]),
        ("deepseek_v32", "decode", ["sparse_mla_decode", "v_up_project"]),
    ],
)
def test_ops_of_a_layer(
    model_type: str, stage: str, ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def count(name: str) -> Callable[..., Any]:
        op = getattr(mlacast, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            if name == "sparse_mla_decode":
                # A request's page holds the selected rows only, not its 38 cached tokens.
                assert args[2].shape == (2, TOPK)
                assert args[2].max() < 64 + TOPK
            return op(*args, **kwargs)

        return counted

    names = (
        "dense_mla_prefill",
        "dense_mla_decode",
        "sparse_mla_prefill",
        "sparse_mla_decode",
        "v_up_project",
        "quantized_linear",
    )
    for name in names:
        monkeypatch.setattr(mlacast, name, count(name))
    module = attentions(fuse(original(model_type)))[LAYER]
    run(module, recorded(model_type, stage, torch.float32))
    assert called == [*ops, "quantized_linear"]


def test_short_contexts_of_v32_are_dense() -> None:
    # With no more keys than the indexer keeps, all are selected.
    model = original("deepseek_v32", continuous=True)
    steps: list[MlaInputs] = []
    with pytest.MonkeyPatch.context() as patch:

        def attend_and_keep(step: MlaInputs, *args: Any, **kwargs: Any) -> None:
            steps.append(step)
            attend(step, *args, **kwargs)

        patch.setattr(mla_forward, "attend", attend_and_keep)
        with torch.no_grad():
            past = fuse(model)(input_ids=tokens(20), use_cache=True).cache
    assert all(isinstance(step.keys, KeyRanges) for step in steps)
    # The indexer kept its keys for later steps all the same.
    assert past.layers[0].indexer_keys.shape[1] == 20


def test_a_layer_with_an_indexer_needs_a_mask() -> None:
    call = dict(recorded("deepseek_v32", "prefill", torch.float32), attention_mask=None)
    module = attentions(fuse(original("deepseek_v32")))[LAYER]
    with pytest.raises(ValueError, match=r"attention_mask must be a tensor.*indexer, got None"):
        run(module, call)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_without_a_mask_eager_attention_sees_every_key(stage: str) -> None:
    call = dict(recorded("deepseek_v3", stage, torch.float32), attention_mask=None)
    model = original("deepseek_v3")
    eager = run(attentions(model)[LAYER], call)
    fused = run(attentions(fuse(model, out_format=mlacast.Bf16()))[LAYER], call)
    assert relative_error(fused, eager) <= BF16_LAYER_TOLERANCE
