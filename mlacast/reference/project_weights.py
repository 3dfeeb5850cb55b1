"""Weights of the consumers of quantised outputs, as numbers."""

from __future__ import annotations

import torch

from mlacast.formats import decode_e4m3, decode_ue8m0, unpack_ue8m0_words

BLOCK = 128
GROUP = 32


def weight_values(
    weight: torch.Tensor, weight_sf: torch.Tensor | None, compute_dtype: torch.dtype
) -> torch.Tensor:
    """Return weights [..., d_out, K] in ``compute_dtype``.

    Args:
        weight: Plain numbers, or e4m3 codes with ``weight_sf``.
        weight_sf: float32 [..., ceil(d_out / 128), ceil(K / 128)], uint8 [..., d_out, K / 32], or
            int32 words of four such bytes [..., d_out, K / 128].
        compute_dtype: Of the result.
    """
    if weight_sf is None:
        return weight.to(compute_dtype)
    rows, columns = weight.shape[-2:]
    codes = decode_e4m3(weight).to(compute_dtype)
    if weight_sf.dtype == torch.float32:
        scales = weight_sf.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return codes * scales[..., :rows, :columns].to(compute_dtype)
    if weight_sf.dtype == torch.int32:
        weight_sf = unpack_ue8m0_words(weight_sf, columns // GROUP)
    return codes * decode_ue8m0(weight_sf).repeat_interleave(GROUP, -1).to(compute_dtype)
