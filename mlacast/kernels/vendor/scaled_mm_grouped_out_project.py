"""``grouped_out_project`` by torch's block-wise ``scaled_mm``, one product per group."""

from __future__ import annotations

import torch
from torch.nn import functional

from mlacast.descriptors.quantized_tensor import QuantizedTensor


def launch_grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    *,
    projected: torch.Tensor,
) -> None:
    """Fill ``projected`` [T, g, d_out] bfloat16; arguments as in ``mlacast.grouped_out_project``.

    Dispatch sends here what cuBLASLt takes without copies: float32 scales per 128 features,
    MN-major for exactly these tokens, a multiple of 4, and of 128x128 blocks, a multiple of 4 along
    the features.
    """
    kinds = functional.ScalingType
    sf = out.sf
    assert sf is not None, "dispatch checks the format"
    products = [
        functional.scaled_mm(
            out.data[:, group],
            weight[group].t(),
            sf[:, group],
            kinds.BlockWise1x128,
            weight_sf[group].t(),
            kinds.BlockWise128x128,
        )
        for group in range(weight.shape[0])
    ]
    torch.stack(products, dim=1, out=projected)
