"""What stands in for the forward of an attention module, whichever model it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.errors import UnsupportedError
from mlacast.integrations.transformers.selection import SelectionMemo
from mlacast.integrations.transformers.support import check_attention_implementation


class ModuleForward:
    """Callable in the place of the forward of one attention module; models have subclasses.

    An object rather than a closure, so that a fused model can be deep-copied and pickled.

    Attributes:
        implementations: Attention implementations whose masks it reads.
        module: The attention module it belongs to.
        original: The forward that the module had in its own namespace, or None when that was the
            class's.
        slot: Name of the module attribute this object occupies.
        out_format: Format of the attention output.
        backend: Backend of every core op, or None.
        memo: Shared by all layers of the model.
    """

    implementations: tuple[str, ...] = ("eager",)

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

    def run(
        self,
        hidden_states: torch.Tensor,
        kwargs: dict[str, Any],
        attention: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return the result of ``attention``, without a graph that would lack its gradient.

        Args:
            hidden_states: [batch, s_q, hidden] states that the layer was given.
            kwargs: What else it was given; checked for what would be ignored.
            attention: Computes [batch, s_q, hidden].

        Raises:
            UnsupportedError: Attention weights were asked for, or attention dropout would have to
                act.
        """
        self._refuse_what_would_be_ignored(kwargs)
        with torch.no_grad():
            output = attention()
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            output = _without_backward(hidden_states, output)
        return output

    def _refuse_what_would_be_ignored(self, kwargs: dict[str, Any]) -> None:
        config = self.module.config
        check_attention_implementation("fuse", config, self.implementations)
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
