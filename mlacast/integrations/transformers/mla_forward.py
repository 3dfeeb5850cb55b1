"""The forward that ``fuse`` gives to each attention module of a DeepSeek-V3 or V3.2 model."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import UnsupportedError
from mlacast.integrations.transformers.mla_attend import attend
from mlacast.integrations.transformers.mla_inputs import mla_inputs
from mlacast.integrations.transformers.module_forward import ModuleForward
from mlacast.integrations.transformers.out_projection import project_dense_output

# What the attention functions of transformers take beyond the mask, and would change the result.
_NOT_READ = ("is_causal", "position_bias", "softcap")


class FusedMlaForward(ModuleForward):
    """Forward of a ``DeepseekV3Attention`` or ``DeepseekV32Attention``."""

    implementations = ("eager", "sdpa")

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of the layer, [batch, s_q, hidden] in and out; it returns no weights.

        Raises:
            UnsupportedError: Attention weights were asked for, attention dropout would have to act,
                or an argument of transformers' attention functions beyond the mask was given.
        """
        module = self.module
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        for name in _NOT_READ:
            if kwargs.get(name) is not None:
                raise UnsupportedError(
                    f"fuse: {name} must be None on a fused model, got {kwargs[name]!r}; "
                    "fused attention reads the mask alone",
                    op="fuse",
                    missing=(name,),
                )

        def attention() -> torch.Tensor:
            batch, s_q, hidden = hidden_states.shape
            step = mla_inputs(
                module,
                hidden_states,
                position_embeddings,
                attention_mask,
                cache,
                position_ids,
                self.memo,
                kwargs,
            )
            out = QuantizedTensor.empty(
                batch * s_q,
                1,
                step.q.shape[2] * module.v_head_dim,
                self.out_format,
                hidden_states.device,
            )
            attend(step, module.kv_b_proj, out, backend=self.backend)
            output = project_dense_output(module, out, hidden_states.dtype, backend=self.backend)
            return output.view(batch, s_q, hidden)

        return self.run(hidden_states, kwargs, attention), None
