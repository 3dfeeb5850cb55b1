"""The forward that ``fuse`` gives to each attention module."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import UnsupportedError
from mlacast.integrations.transformers.attend import attend
from mlacast.integrations.transformers.inputs import attention_inputs
from mlacast.integrations.transformers.out_projection import project_output
from mlacast.integrations.transformers.selection import SelectionMemo
from mlacast.integrations.transformers.support import check_attention_implementation


class FusedForward:
    """Callable that stands in for the forward of one attention module.

    An object rather than a closure, so that a fused model can be deep-copied and pickled.

    Attributes:
        module: The attention module it belongs to.
        original: The forward that the module had in its own namespace, or None when that was the
            class's.
        slot: Name of the module attribute this object occupies.
        out_format: Format of the attention output.
        backend: Backend of every core op, or None.
        memo: Shared by all layers of the model.
    """

    def __init__(
        self,
        module: Any,
        original: Any,
        slot: str,
        out_format: OutFormat,
        backend: str | None,
        memo: SelectionMemo,
    ) -> None:
        self.module = module
        self.original = original
        self.slot = slot
        self.out_format = out_format
        self.backend = backend
        self.memo = memo

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of the layer, [batch, s_q, hidden] in and out; it returns no weights.

        Raises:
            UnsupportedError: Attention weights were asked for, or attention dropout would have to
                act.
        """
        module = self.module
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        self._refuse_what_would_be_ignored(kwargs)
        batch, s_q, hidden = hidden_states.shape
        with torch.no_grad():
            step = attention_inputs(
                module,
                hidden_states,
                position_embeddings,
                position_ids,
                attention_mask,
                cache,
                self.memo,
            )
            groups = module.config.o_groups
            out = QuantizedTensor.empty(
                batch * s_q,
                groups,
                module.num_heads * module.head_dim // groups,
                self.out_format,
                hidden_states.device,
            )
            attend(step, out, backend=self.backend)
            output = project_output(module, out, hidden_states.dtype, backend=self.backend)
        output = output.view(batch, s_q, hidden)
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            output = _without_backward(hidden_states, output)
        return output, None

    def _refuse_what_would_be_ignored(self, kwargs: dict[str, Any]) -> None:
        config = self.module.config
        check_attention_implementation("fuse", config)
        if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
            raise UnsupportedError(
                "fuse: output_attentions must be False on a fused model, got True; "
                "fused attention never forms the weights, call unfuse(model) to see them",
                op="fuse",
                missing=("output_attentions",),
            )
        if self.module.training and self.module.attention_dropout:
            raise UnsupportedError(
                "fuse: attention_dropout must be 0 in training mode, got "
                f"{self.module.attention_dropout}; call model.eval()",
                op="fuse",
                missing=("attention_dropout",),
            )


def _without_backward(hidden_states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Tie ``output`` to the graph of ``hidden_states``: a backward pass meets the refusal."""
    apply: Any = _ForwardOnly.apply
    tied: torch.Tensor = apply(hidden_states, output)
    return tied


class _ForwardOnly(torch.autograd.Function):
    """Passes the output on; a backward pass raises instead of losing the attention's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return ``output``, tied to ``hidden_states`` in the graph."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        """Always raise."""
        raise UnsupportedError(
            "fuse: backward must not run through fused attention, it computes forward only; "
            "call unfuse(model) to train",
            op="fuse",
            missing=("backward",),
        )
