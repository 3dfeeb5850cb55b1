"""The arguments of one fused call, as the registered ops take them.

The fields are, in order, the arguments of the schemas in ``_fused_ops`` and, up to the output pair,
the parameters of the public functions, so a call is built from an op's positional arguments and
checked as one value. Not frozen: one is made for every call, and a frozen one costs the host 4 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

D_QK = 512
D_V = 512


@dataclass
class FusedCall:
    """What prefill and decode share.

    Attributes:
        q: [s_q, h_q, 512] bfloat16 in "chunk16" order.
    """

    enable_q_norm: bool
    rms_norm_eps: float
    token_positions: torch.Tensor
    is_rope_neox_style: bool
    rope_dim: int
    cos_sin_cache: torch.Tensor
    n_wv_group: int
    num_per_channels: int
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    q: torch.Tensor

    @property
    def q_norm_eps(self) -> float | None:
        """Epsilon as the core ops take it: None without norm."""
        return self.rms_norm_eps if self.enable_q_norm else None

    @property
    def rope_pairing(self) -> str:
        """Pairing as the core ops name it."""
        return "half" if self.is_rope_neox_style else "interleaved"

    @property
    def group_width(self) -> int:
        """Output channels of a group: heads per group times 512."""
        return self.q.shape[1] // self.n_wv_group * D_V


@dataclass
class PrefillCall(FusedCall):
    """Arguments of the fused prefill.

    Attributes:
        kv: [s_kv, 1, 512] bfloat16.
        indices: [s_q, 1, topk] int32.
    """

    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    d_v: int = D_V
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    out_fp8: torch.Tensor | None = None
    out_sf: torch.Tensor | None = None


@dataclass
class DecodeCall(FusedCall):
    """Arguments of the fused decode.

    Attributes:
        k_cache: [num_pages, page_size, 1, 584 or 528] bytes.
        indices_in_kvcache: [s_q, topk] int32 slots.
        v41_placement: "footer" or "inline"; None means the setting of ``set_v41_placement``.
    """

    k_cache: torch.Tensor
    indices_in_kvcache: torch.Tensor
    sm_scale: float
    d_v: int = D_V
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None
    extra_k_cache: torch.Tensor | None = None
    extra_indices_in_kvcache: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    v41_placement: str | None = None
    out_fp8: torch.Tensor | None = None
    out_sf: torch.Tensor | None = None
