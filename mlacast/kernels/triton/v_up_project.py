"""Portable ``v_up_project``: a matrix product whose epilogue quantises."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.dependents import overlaps_launches, wait_for_previous_kernel
from mlacast.kernels.common.fp8_casts import has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.store import Padding, Target, packs_products, store_rows
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.v_up_project import VUpConfig, v_up_config

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "num_tokens",
    "row_start",
    "padding_rows",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
# Nor must where a slice of a bigger buffer happens to start.
_UNALIGNED = ["sf_ptr", "scale_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _v_up_project_kernel(
    latent_ptr,
    stride_latent_token,
    stride_latent_head,
    weight_ptr,
    stride_weight_head,
    stride_weight_latent,
    stride_weight_value,
    num_tokens,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    padding_rows,
    TILES: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """BLOCK_M tokens of one head.

    Grid: (ceil(T / BLOCK_M) * h,), the blocks of a head side by side, because they share its
    weights.
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_K: tl.constexpr = TILES.block_k
    wait_for_previous_kernel(PDL)
    blocks = tl.cdiv(num_tokens, BLOCK_M)
    head = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK_M
    lane = tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    token = first + lane  # [BLOCK_M, 1]
    in_range = token < num_tokens  # [BLOCK_M, 1]
    token = token.to(tl.int64)
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    n = tl.arange(0, 128)  # [128]
    step = BLOCK_K
    # Offsets within a tile, else in 32 bits: they reach as far as ``v_up_config`` has looked.
    if TILES.is_wide:
        k, n, step = k.to(tl.int64), n.to(tl.int64), tl.cast(BLOCK_K, tl.int64)
    latent = latent_ptr + (token * stride_latent_token + head.to(tl.int64) * stride_latent_head)
    latent += k[None, :]  # [BLOCK_M, BLOCK_K]
    weight = weight_ptr + head.to(tl.int64) * stride_weight_head
    weight += k[:, None] * stride_weight_latent + n[None, :] * stride_weight_value  # [BLOCK_K, 128]
    acc = tl.zeros((BLOCK_M, 128), tl.float32)
    for _ in range(0, 512, BLOCK_K):
        x = tl.load(latent, mask=in_range, other=0.0)  # [BLOCK_M, BLOCK_K]
        acc = tl.dot(x, tl.load(weight), acc, input_precision="ieee")  # [BLOCK_M, 128]
        latent += BLOCK_K
        weight += step * stride_weight_latent
    target = Target(
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
    )
    end = num_tokens.to(tl.int64)
    padding = Padding(
        end, tl.where(first + BLOCK_M >= num_tokens, padding_rows, 0), lane, lane >= 0
    )
    FAST: tl.constexpr = NATIVE and packs_products(OUTPUT)
    store_rows(acc, head, token, in_range, 0, target, padding, 128, OUTPUT, 0, BLOCK_M, FAST)


def launch_v_up_project(
    latent_out: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    out: QuantizedTensor,
    config: VUpConfig | None = None,
) -> Launches:
    """Fill ``out``; arguments as in ``mlacast.v_up_project``.

    ``config`` is for measurements: None takes the usual one.
    """
    num_tokens, num_heads, _ = latent_out.shape
    target = store_target(out)
    config = config or v_up_config(num_tokens, *w_uv.stride()[1:])
    launches = Launches(latent_out.device, target)
    overlaps = overlaps_launches(latent_out.device)
    launches.launch(
        _v_up_project_kernel,
        (triton.cdiv(num_tokens, config.block_m) * num_heads,),
        latent_out,
        latent_out.stride(0),
        latent_out.stride(1),
        w_uv,
        w_uv.stride(0),
        w_uv.stride(1),
        w_uv.stride(2),
        num_tokens,
        *target.tensors.values(),
        *target.numbers.values(),
        TILES=config,
        NATIVE=has_fp8_casts(latent_out.device),
        PDL=overlaps,
        OUTPUT=target.config,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
    return launches
