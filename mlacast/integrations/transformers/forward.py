"""The forward that ``fuse`` gives to each attention module of a DeepSeek-V4 model."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.integrations.transformers.attend import attend
from mlacast.integrations.transformers.inputs import attention_inputs
from mlacast.integrations.transformers.module_forward import ModuleForward
from mlacast.integrations.transformers.out_projection import project_output


class FusedForward(ModuleForward):
    """Forward of a ``DeepseekV4Attention``."""

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

        def attention() -> torch.Tensor:
            batch, s_q, hidden = hidden_states.shape
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
            return output.view(batch, s_q, hidden)

        return self.run(hidden_states, kwargs, attention), None
