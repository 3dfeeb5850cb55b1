"""Single attention layers: record what each one is given, and run it again on exactly that."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from mlacast.integrations.transformers.inputs import AttentionInputs, attention_inputs
from mlacast.integrations.transformers.selection import SelectionMemo


@dataclass(frozen=True)
class LayerCall:
    """Arguments that one attention module was called with; the cache among them is a copy.

    Attributes:
        hidden_states: [batch, s_q, hidden].
        kwargs: The keyword arguments, before the call changed anything.
    """

    hidden_states: torch.Tensor
    kwargs: dict[str, Any]

    def run(self, module: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Call ``module`` with the arguments, as often as wanted.

        Args:
            module: An attention module, fused or not.
            dtype: Convert states, tables and mask to it first.

        Returns:
            [batch, s_q, hidden].
        """
        hidden, kwargs = self.hidden_states, copy.deepcopy(self.kwargs)
        if dtype is not None:
            hidden = hidden.to(dtype)
            kwargs["attention_mask"] = kwargs["attention_mask"].to(dtype)
            kwargs["position_embeddings"] = {
                name: (cos.to(dtype), sin.to(dtype))
                for name, (cos, sin) in kwargs["position_embeddings"].items()
            }
        with torch.no_grad():
            output: torch.Tensor = module(hidden, **kwargs)[0]
        return output

    def inputs(self, module: Any) -> AttentionInputs:
        """Run the layer up to its core attention and return what the core ops need."""
        kwargs = copy.deepcopy(self.kwargs)
        with torch.no_grad():
            return attention_inputs(
                module,
                self.hidden_states,
                kwargs["position_embeddings"],
                kwargs["position_ids"],
                kwargs["attention_mask"],
                kwargs.get("cache"),
                SelectionMemo(),
            )


def record_calls(model: Any, **inputs: Any) -> list[LayerCall]:
    """Run the model once and return the call of each attention layer, in order.

    Args:
        model: A DeepseekV4ForCausalLM.
        **inputs: Arguments of its forward; a cache among them is advanced by the run.
    """
    calls: list[LayerCall] = []

    def record(_: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(args[0].clone(), copy.deepcopy(kwargs)))

    hooks = [
        layer.self_attn.register_forward_pre_hook(record, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
