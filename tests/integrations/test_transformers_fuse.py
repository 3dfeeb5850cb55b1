"""Installing and removing: what ``fuse`` accepts, refuses, changes and gives back."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlacast
from mlacast.cli.demo_model import build_model
from mlacast.integrations.transformers import fuse, unfuse
from mlacast.integrations.transformers.forward import FusedForward
from mlacast.integrations.transformers.modeling import load_modeling
from tests.integrations.v4_models import original, relative_error, tokens

STREAM = tokens(24)


def current_transformers() -> Any:
    # transformers exchanges its lazy top module while it loads, so ask again each time.
    return importlib.import_module("transformers")


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=STREAM, **inputs).logits
    return output


def attentions(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, load_modeling().DeepseekV4Attention)]


def is_untouched(model: Any) -> bool:
    return all("forward" not in vars(module) for module in model.modules())


def test_fuse_works_in_place_and_returns_the_model() -> None:
    model = original()
    names = list(model.state_dict())
    assert fuse(model) is model
    assert all(isinstance(module.forward, FusedForward) for module in attentions(model))
    assert list(model.state_dict()) == names


def test_fusing_twice_is_fusing_once() -> None:
    model = fuse(original())
    installed = [module.forward for module in attentions(model)]
    once = logits(model)
    assert fuse(model) is model
    assert [module.forward for module in attentions(model)] == installed
    assert torch.equal(logits(model), once)
    unfuse(model)
    assert is_untouched(model)


def test_fusing_again_changes_the_format() -> None:
    in_bf16 = logits(fuse(original(), out_format=mlacast.Bf16()))
    model = fuse(original())
    assert not torch.equal(logits(model), in_bf16)
    assert torch.equal(logits(fuse(model, out_format=mlacast.Bf16())), in_bf16)


def test_unfuse_restores_the_logits_bit_for_bit() -> None:
    model = original()
    before = logits(model)
    assert not torch.equal(logits(fuse(model)), before)
    assert unfuse(model) is model
    assert torch.equal(logits(model), before)
    assert is_untouched(model)
    assert torch.equal(logits(unfuse(model)), before)


def test_a_forward_of_the_users_own_comes_back() -> None:
    model = original()
    module = attentions(model)[0]
    own = MethodType(
        lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), module
    )
    module.forward = own
    unfuse(fuse(model))
    assert vars(module)["forward"] is own


def test_other_models_of_the_same_class_are_left_alone() -> None:
    bystander, model = original(), original()
    before = logits(bystander)
    class_forward = load_modeling().DeepseekV4Attention.forward
    fuse(model)
    assert is_untouched(bystander)
    assert load_modeling().DeepseekV4Attention.forward is class_forward
    assert torch.equal(logits(bystander), before)


def test_the_base_model_is_accepted() -> None:
    base = original().model
    with torch.no_grad():
        expected = base(input_ids=STREAM).last_hidden_state
        fused = fuse(base)(input_ids=STREAM).last_hidden_state
    # MXFP8 makes 2 * 2**-5 (test_transformers_model.py); another expert may be chosen beside it.
    assert 0 < relative_error(fused, expected) < 0.1


@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies_of_a_fused_model_are_fused_models_of_their_own(duplicate: str) -> None:
    model = fuse(original(), out_format=mlacast.Bf16())
    expected = logits(model)
    if duplicate == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        copied = torch.load(stored, weights_only=False)
    assert torch.equal(logits(copied), expected)
    assert all(module.forward.module is module for module in attentions(copied))
    unfuse(copied)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(copied), expected)


@pytest.mark.parametrize("undo", [False, True], ids=["fuse", "unfuse"])
def test_other_models_are_refused_by_name(undo: bool) -> None:
    transformers = current_transformers()
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    function = unfuse if undo else fuse
    supported = r"must be one of DeepseekV3ForCausalLM, .*DeepseekV4Model of transformers, got "
    for other in (llama, nn.Linear(2, 2), attentions(original())[0], None, "deepseek"):
        with pytest.raises(TypeError, match=supported + type(other).__name__):
            function(other)
    assert is_untouched(llama)


def test_another_head_size_is_refused() -> None:
    model = build_model(layer_types=["sliding_attention"], head_dim=256)
    with pytest.raises(
        mlacast.UnsupportedError, match=r"config.head_dim must be 512, got 256; .*unchanged"
    ):
        fuse(model)
    assert is_untouched(model)


def test_another_rotary_width_is_refused() -> None:
    model = build_model(
        layer_types=["sliding_attention"], partial_rotary_factor=32 / 512, rope_parameters=None
    )
    with pytest.raises(
        mlacast.UnsupportedError, match=r"config.qk_rope_head_dim must be 64, got 32"
    ):
        fuse(model)
    assert is_untouched(model)


def test_too_many_heads_are_refused() -> None:
    model = build_model(layer_types=["sliding_attention"], num_attention_heads=130)
    with pytest.raises(
        mlacast.UnsupportedError, match=r"num_attention_heads must be at most 128, got 130"
    ):
        fuse(model)


@pytest.mark.parametrize("out_format", ["mxfp8", torch.float8_e4m3fn, mlacast.Mxfp8])
def test_an_output_format_that_is_none_is_refused(out_format: Any) -> None:
    model = original()
    with pytest.raises(TypeError, match=r"fuse: out_format must be an OutFormat or None, got"):
        fuse(model, out_format=out_format)
    assert is_untouched(model)


def test_an_unknown_backend_is_refused() -> None:
    model = original()
    with pytest.raises(ValueError, match=r"fuse: backend must be one of .*got 'cuda'"):
        fuse(model, backend="cuda")
    assert is_untouched(model)


def test_a_named_backend_is_used_by_every_op_and_never_falls_back() -> None:
    expected = logits(fuse(original()))
    assert torch.equal(logits(fuse(original(), backend="reference")), expected)
    with pytest.raises((mlacast.UnsupportedError, ImportError)):
        logits(fuse(original(), backend="hopper"))


@pytest.mark.parametrize("version", ["5.23.1", "4.57.0", "5.9"])
def test_an_old_transformers_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = original()
    monkeypatch.setattr(current_transformers(), "__version__", version)
    with pytest.raises(ImportError, match=rf"needs transformers>=5\.24.*found {version}"):
        fuse(model)
    assert is_untouched(model)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.0.dev0", "5.100", "6.0.0"])
def test_a_new_enough_transformers_is_accepted(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_transformers(), "__version__", version)
    assert load_modeling() is not None


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers>=5\.24.*pip install.*found none"):
        fuse(nn.Linear(2, 2))


def test_a_transformers_with_another_attention_call_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, hidden_states: Tensor, attention_mask: Tensor) -> None: ...

    model = original()
    monkeypatch.setattr(load_modeling().DeepseekV4Attention, "forward", forward)
    with pytest.raises(ImportError, match=r"without position_embeddings, position_ids, cache"):
        fuse(model)


def test_another_attention_implementation_is_refused_early_and_late() -> None:
    model = original()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"_attn_implementation must be 'eager', got 'sdpa'"):
        fuse(model)
    model.config._attn_implementation = "eager"
    fuse(model)
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(ValueError, match=r"_attn_implementation must be 'eager', got 'paged"):
        logits(model)


def test_attention_weights_cannot_be_asked_for() -> None:
    model = fuse(original())
    with pytest.raises(mlacast.UnsupportedError, match="output_attentions must be False"):
        logits(model, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(mlacast.UnsupportedError, match="output_attentions must be False"):
        logits(model)
    assert len(logits(unfuse(model))) == 1


def test_hidden_states_can_be_asked_for() -> None:
    model = fuse(original())
    with torch.no_grad():
        output = model(input_ids=STREAM, output_hidden_states=True)
    assert len(output.hidden_states) == len(attentions(model)) + 1


def test_attention_dropout_in_training_is_refused() -> None:
    model = fuse(build_model(layer_types=["sliding_attention"], attention_dropout=0.1))
    assert torch.isfinite(logits(model)).all()
    with pytest.raises(mlacast.UnsupportedError, match=r"attention_dropout must be 0 in training"):
        logits(model.train())


def test_a_backward_pass_fails_aloud() -> None:
    model = fuse(original())
    loss = model(input_ids=STREAM, labels=STREAM).loss
    with pytest.raises(mlacast.UnsupportedError, match="backward must not run"):
        loss.backward()
    unfuse(model)(input_ids=STREAM, labels=STREAM).loss.backward()
    assert attentions(model)[0].sinks.grad is not None


def test_grad_mode_does_not_change_the_logits() -> None:
    model = fuse(original())
    expected = logits(model)
    assert torch.equal(model(input_ids=STREAM).logits, expected)


def test_offloading_hooks_stay_around_the_fused_forward() -> None:
    # The shape accelerate gives a hooked module: ``forward`` calls ``_old_forward``.
    model = original()
    plain = logits(fuse(copy.deepcopy(model)))
    before = logits(model)
    entered: list[Any] = []
    for module in attentions(model):
        module._hf_hook = object()
        module._old_forward = module.forward

        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            entered.append(self)
            return self._old_forward(*args, **kwargs)

        module.forward = MethodType(hooked, module)
    assert torch.equal(logits(fuse(model)), plain)
    assert entered == attentions(model)
    assert torch.equal(logits(unfuse(model)), before)


class Adapted(nn.Module):
    """Stands where an adapter or a quantised linear would: has a weight, means more than it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.inputs: list[Tensor] = []

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    def forward(self, values: Tensor) -> Tensor:
        self.inputs.append(values)
        output: Tensor = 2 * self.base(values)
        return output


def test_a_replaced_out_projection_is_called() -> None:
    model = original()
    doubled = copy.deepcopy(model)
    for module in attentions(doubled):
        with torch.no_grad():
            module.o_a_proj.weight.mul_(2)
    for module in attentions(model):
        module.o_a_proj = Adapted(module.o_a_proj)
    wrapped = logits(fuse(model))
    assert all(module.o_a_proj.inputs[0].shape == (24, 2, 2048) for module in attentions(model))
    # float32 sums in another order: far below the effect of the factor 2.
    assert relative_error(wrapped, logits(fuse(doubled))) < 1e-4


def test_a_hook_on_the_out_projection_runs() -> None:
    model = fuse(original())
    expected = logits(model)
    seen: list[Any] = []
    attentions(model)[1].o_a_proj.register_forward_hook(lambda *_: seen.append(1))
    # At most float32 sums in another order, as above.
    assert relative_error(logits(model), expected) < 1e-4
    assert seen == [1]


def test_half_precision_weights() -> None:
    model = original(dtype=torch.float16)
    expected = logits(model)
    fused = logits(fuse(model))
    assert fused.dtype == torch.float16
    # As for the base model above: float16 is finer than the 2 * 2**-5 of MXFP8.
    assert relative_error(fused, expected) < 0.1


def test_signatures() -> None:
    assert str(inspect.signature(fuse)) == (
        "(model: 'Model', *, out_format: 'OutFormat | None' = None, "
        "backend: 'str | None' = None) -> 'Model'"
    )
    assert str(inspect.signature(unfuse)) == "(model: 'Model') -> 'Model'"
