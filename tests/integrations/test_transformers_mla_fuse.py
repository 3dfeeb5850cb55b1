"""DeepSeek-V3 and V3.2: what ``fuse`` accepts, refuses, replaces and gives back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlacast
from mlacast.integrations.transformers import fuse, unfuse
from mlacast.integrations.transformers.mla_forward import FusedMlaForward
from mlacast.integrations.transformers.modeling import load_modeling
from tests.integrations.mla_models import attentions, build, original
from tests.integrations.v4_models import relative_error, tokens

STREAM = tokens(24)
MODELS = ("deepseek_v3", "deepseek_v32")
both = pytest.mark.parametrize("model_type", MODELS)


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=STREAM, **inputs).logits
    return output


def is_untouched(model: Any) -> bool:
    return all("forward" not in vars(module) for module in model.modules())


@both
def test_fuse_works_in_place_and_unfuse_restores_every_bit(model_type: str) -> None:
    model = original(model_type)
    names, before = list(model.state_dict()), logits(model)
    assert fuse(model) is model
    assert all(isinstance(module.forward, FusedMlaForward) for module in attentions(model))
    assert list(model.state_dict()) == names
    assert not torch.equal(logits(model), before)
    assert unfuse(model) is model
    assert is_untouched(model)
    assert torch.equal(logits(model), before)


@both
def test_the_default_format_is_fp8_in_groups_of_128(model_type: str) -> None:
    model = fuse(original(model_type))
    assert attentions(model)[0].forward.out_format == mlacast.Fp8Group(128)
    default = logits(model)
    assert torch.equal(logits(fuse(model, out_format=mlacast.Fp8Group(128))), default)
    assert not torch.equal(logits(fuse(model, out_format=mlacast.Bf16())), default)


@both
def test_the_base_model_is_accepted_and_others_are_left_alone(model_type: str) -> None:
    bystander, base = original(model_type), original(model_type).model
    before = logits(bystander)
    with torch.no_grad():
        expected = base(input_ids=STREAM).last_hidden_state
        fused = fuse(base)(input_ids=STREAM).last_hidden_state
    # FP8 makes sqrt(layers) * 2**-5 (test_transformers_mla_model.py). Nothing is made continuous
    # here: other experts and keys may be chosen, which may be a few times that.
    assert 0 < relative_error(fused, expected) < 0.2
    assert is_untouched(bystander)
    assert torch.equal(logits(bystander), before)


@both
@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies_of_a_fused_model_are_fused_models_of_their_own(
    model_type: str, duplicate: str
) -> None:
    model = fuse(original(model_type), out_format=mlacast.Bf16())
    expected = logits(model)
    if duplicate == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        copied = torch.load(stored, weights_only=False)
    assert torch.equal(logits(copied), expected)
    unfuse(copied)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(copied), expected)


@both
@pytest.mark.parametrize(
    ("field", "value", "requirement"),
    [
        ("qk_nope_head_dim", 64, "128"),
        ("v_head_dim", 64, "128"),
        ("kv_lora_rank", 256, "512"),
        ("qk_rope_head_dim", 32, "64"),
    ],
)
def test_another_geometry_is_refused(
    model_type: str, field: str, value: int, requirement: str
) -> None:
    overrides: dict[str, Any] = {field: value}
    model = build(model_type, num_hidden_layers=1, **overrides)
    message = rf"config.{field} must be {requirement}, got {value}; the model is unchanged"
    with pytest.raises(mlacast.UnsupportedError, match=message):
        fuse(model)
    assert is_untouched(model)


@both
def test_another_attention_implementation_is_refused_early_and_late(model_type: str) -> None:
    model = original(model_type)
    model.config._attn_implementation = "flash_attention_2"
    message = r"_attn_implementation must be 'eager' or 'sdpa', got 'flash_attention_2'"
    with pytest.raises(ValueError, match=message):
        fuse(model)
    model.config._attn_implementation = "sdpa"
    fuse(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=message):
        logits(model)


@both
def test_attention_weights_cannot_be_asked_for(model_type: str) -> None:
    model = fuse(original(model_type))
    with pytest.raises(mlacast.UnsupportedError, match="output_attentions must be False"):
        logits(model, output_attentions=True)


@pytest.mark.parametrize(
    ("name", "value"), [("is_causal", False), ("softcap", 30.0), ("position_bias", STREAM)]
)
def test_arguments_of_attention_functions_are_not_ignored(name: str, value: Any) -> None:
    model = fuse(original("deepseek_v3", implementation="sdpa"))
    with pytest.raises(mlacast.UnsupportedError, match=f"{name} must be None on a fused model"):
        logits(model, **{name: value})


@both
def test_attention_dropout_in_training_is_refused(model_type: str) -> None:
    model = fuse(build(model_type, num_hidden_layers=1, attention_dropout=0.1))
    assert torch.isfinite(logits(model)).all()
    with pytest.raises(mlacast.UnsupportedError, match=r"attention_dropout must be 0 in training"):
        logits(model.train())


@both
def test_a_backward_pass_fails_aloud(model_type: str) -> None:
    model = fuse(original(model_type, continuous=True))
    expected = logits(model)
    output = model(input_ids=STREAM, labels=STREAM)
    assert torch.equal(output.logits, expected)
    with pytest.raises(mlacast.UnsupportedError, match="backward must not run"):
        output.loss.backward()
    unfuse(model)(input_ids=STREAM, labels=STREAM).loss.backward()
    assert attentions(model)[0].kv_b_proj.weight.grad is not None


@both
def test_a_named_backend_is_used_by_every_op_and_never_falls_back(model_type: str) -> None:
    expected = logits(fuse(original(model_type)))
    assert torch.equal(logits(fuse(original(model_type), backend="reference")), expected)
    with pytest.raises((mlacast.UnsupportedError, ImportError)):
        logits(fuse(original(model_type), backend="hopper"))


@both
def test_a_transformers_with_another_attention_call_is_refused(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, hidden_states: Tensor) -> None: ...

    model = original(model_type)
    monkeypatch.setattr(type(attentions(model)[0]), "forward", forward)
    with pytest.raises(ImportError, match=r"without position_embeddings, attention_mask, cache"):
        fuse(model)


def test_models_of_the_same_names_from_elsewhere_are_refused() -> None:
    DeepseekV3ForCausalLM = type("DeepseekV3ForCausalLM", (nn.Linear,), {})
    with pytest.raises(TypeError, match="of transformers, got DeepseekV3ForCausalLM"):
        fuse(DeepseekV3ForCausalLM(2, 2))


class Adapted(nn.Module):
    """Stands where an adapter or a quantised linear would: has a weight, means more than it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = 2 * self.base(values)
        return output


def generated_logits(model: Any) -> Tensor:
    """Logits of a prompt and two cached steps: both forms of attention."""
    with torch.no_grad():
        first = model(input_ids=STREAM[:, :-2], use_cache=True)
        parts = [first.logits]
        for column in (-2, -1):
            step = STREAM[:, column:][:, :1]
            output = model(input_ids=step, cache=first.cache, use_cache=True)
            parts.append(output.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32_selected"])
@pytest.mark.parametrize("name", ["o_proj", "kv_b_proj"])
def test_a_replaced_projection_is_called(model_type: str, name: str) -> None:
    model = original(model_type, continuous=True)
    plain = generated_logits(fuse(copy.deepcopy(model), out_format=mlacast.Bf16()))
    doubled = copy.deepcopy(model)
    for module in attentions(doubled):
        with torch.no_grad():
            getattr(module, name).weight.mul_(2)
    for module in attentions(model):
        setattr(module, name, Adapted(getattr(module, name)))
    wrapped = generated_logits(fuse(model, out_format=mlacast.Bf16()))
    expected = generated_logits(fuse(doubled, out_format=mlacast.Bf16()))
    # The factor is exact, but float32 sums in another order may round a bfloat16 differently.
    assert relative_error(wrapped, expected) < 2.0**-9
    assert relative_error(plain, expected) > 0.05


def test_a_bias_of_the_up_projection_is_refused_where_it_would_be_lost() -> None:
    model = fuse(original("deepseek_v3", continuous=True))
    for module in attentions(model):
        module.kv_b_proj.bias = nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    assert torch.isfinite(logits(model, use_cache=False)).all()
    with pytest.raises(mlacast.UnsupportedError, match="kv_b_proj must have no bias"):
        generated_logits(model)


@both
def test_biases_of_the_other_projections_count(model_type: str) -> None:
    overrides: dict[str, Any] = {"attention_bias": True, "first_k_dense_replace": 1}
    if model_type == "deepseek_v32":
        overrides["index_topk"] = 512
    model = build(model_type, num_hidden_layers=1, **overrides)
    assert attentions(model)[0].o_proj.bias.abs().max() > 0.1
    expected = generated_logits(model)
    fused = generated_logits(fuse(model, out_format=mlacast.Bf16()))
    # One layer: four roundings to bfloat16 (test_transformers_mla_model.py), the same below.
    assert relative_error(fused, expected) <= 4 * 2.0**-9


@pytest.mark.parametrize("overrides", [{"q_lora_rank": None}, {"rope_interleave": False}], ids=str)
def test_variants_of_v3(overrides: dict[str, Any]) -> None:
    model = build("deepseek_v3", num_hidden_layers=1, **overrides)
    expected = generated_logits(model)
    fused = generated_logits(fuse(model, out_format=mlacast.Bf16()))
    assert relative_error(fused, expected) <= 4 * 2.0**-9


@both
def test_half_precision_weights(model_type: str) -> None:
    model = original(model_type, continuous=True, dtype=torch.float16)
    expected = generated_logits(model)
    fused = generated_logits(fuse(model))
    assert fused.dtype == torch.float16
    # Three layers of e4m3's 2**-5; float16 adds nothing to it.
    assert relative_error(fused, expected) < 3**0.5 * 2.0**-5


def test_the_modeling_of_each_model_is_known() -> None:
    for model_type, name in (
        ("deepseek_v3", "DeepseekV3Attention"),
        ("deepseek_v32", "DeepseekV32Attention"),
    ):
        assert isinstance(
            attentions(original(model_type))[0], getattr(load_modeling(model_type), name)
        )
