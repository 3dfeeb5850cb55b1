"""Portable products that consume a quantised output: ``grouped_out_project``, ``quantized_linear``.

One launch reads the buffer as it is, whatever its format and element order, and the weights as they
are. Where both sides are e4m3 with scales of whole blocks, the matrix unit multiplies the codes and
the scales multiply its float32 sums; elsewhere codes become numbers first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.fp8_casts import has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.project_operands import (
    BLOCKS_128,
    Activations,
    Weights,
    add_product,
    load_codes,
    load_factors,
    load_weights,
    make_operands,
)
from mlacast.kernels.common.store import FP8_TENSOR, NVFP4
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.grouped_out_project import Variant, plan_product
from mlacast.kernels.config.shared_memory import shared_memory_of

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "row_start",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "num_tokens",
]
_UNALIGNED = ["sf_ptr", "scale_ptr"]
_SOURCE_NUMBERS = (
    "stride_data_token",
    "stride_data_group",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "row_start",
)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _project_kernel(
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    num_tokens,
    weight_ptr,
    stride_weight_group,
    stride_weight_column,
    weight_sf_ptr,
    stride_weight_sf_group,
    stride_weight_sf_column,
    stride_weight_sf_word,
    num_columns,
    out_ptr,
    stride_out_token,
    stride_out_group,
    SUMMED_GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    SOURCE: tl.constexpr,
    PRODUCT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """BLOCK_M tokens by BLOCK_N columns of one group, or of the sum over SUMMED_GROUPS groups.

    Grid: (ceil(T / BLOCK_M) * ceil(d_out / BLOCK_N), groups, or 1 with a sum); neighbours share
    their tokens. Rows and columns past the last one repeat it and are not stored. SOURCE describes
    the buffer that is read.
    """
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    BLOCK_K: tl.constexpr = TILES.block_k
    COMPUTE: tl.constexpr = tl.float32 if PRODUCT.in_float32 else tl.bfloat16
    column_blocks = tl.cdiv(num_columns, BLOCK_N)
    first_token = (tl.program_id(0) // column_blocks) * BLOCK_M
    first_column = (tl.program_id(0) % column_blocks) * BLOCK_N
    token = first_token + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = first_column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row = tl.minimum(token, num_tokens - 1).to(tl.int64)  # [BLOCK_M]
    weight_row = tl.minimum(column, num_columns - 1).to(tl.int64)  # [BLOCK_N]
    data_rows = data_ptr + (row * stride_data_token)[:, None]  # [BLOCK_M, 1]
    weight_rows = weight_ptr + (weight_row * stride_weight_column)[:, None]  # [BLOCK_N, 1]
    # ``weight_sf`` is one pointer of a block of columns, or [BLOCK_N].
    if PRODUCT.weight_kind == BLOCKS_128:
        # A block of columns lies in one block of scales.
        tl.static_assert(128 % BLOCK_N == 0)
        weight_sf = weight_sf_ptr + (first_column // 128).to(tl.int64) * stride_weight_sf_column
    else:
        weight_sf = weight_sf_ptr + weight_row * stride_weight_sf_column
    activations = Activations(
        data_rows,
        stride_data_group,
        sf_ptr,
        row,
        row_start,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
    )
    weights = Weights(
        weight_rows, stride_weight_group, weight_sf, stride_weight_sf_group, stride_weight_sf_word
    )
    F: tl.constexpr = SOURCE.features
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    # Factors are a step ahead: unlike operands, they are not prefetched by the compiler. Those of
    # activations are [BLOCK_M], those of weights [BLOCK_N] or one number.
    x_next, w_next = load_factors(
        activations, weights, tl.program_id(1).to(tl.int64), 0, SOURCE, PRODUCT
    )
    for step in range(0, SUMMED_GROUPS * STEPS):
        group = tl.program_id(1) + step // STEPS
        wide_group = group.to(tl.int64)
        start = step % STEPS * BLOCK_K
        # [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K], half as wide where a byte has two codes.
        x = load_codes(data_rows + wide_group * stride_data_group, start, SOURCE, BLOCK_K)
        w = load_weights(weight_rows + wide_group * stride_weight_group, start, F, BLOCK_K)
        x_factor, w_factor = x_next, w_next
        if PRODUCT.x_factor or PRODUCT.w_factor:
            ahead = tl.minimum(step + 1, SUMMED_GROUPS * STEPS - 1)
            ahead_group = (tl.program_id(1) + ahead // STEPS).to(tl.int64)
            x_next, w_next = load_factors(
                activations, weights, ahead_group, ahead % STEPS * BLOCK_K, SOURCE, PRODUCT
            )
        x, w = make_operands(
            x, w, activations, weights, group, start, SOURCE, PRODUCT, BLOCK_K, COMPUTE, NATIVE
        )
        acc = add_product(acc, x, w, x_factor, w_factor, PRODUCT)
    if SOURCE.kind == FP8_TENSOR:
        acc *= tl.load(scale_ptr)
    elif SOURCE.kind == NVFP4:
        acc = tl.math.div_rn(acc, tl.load(scale_ptr))
    out = out_ptr + tl.program_id(1).to(tl.int64) * stride_out_group
    # [BLOCK_M, BLOCK_N]
    out += (token.to(tl.int64) * stride_out_token)[:, None] + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < num_columns)[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    out: QuantizedTensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    weight_sf: tuple[torch.Tensor, torch.Tensor] | None,
    projected: tuple[torch.Tensor, torch.Tensor],
    summed_groups: int,
    variant: Variant | None,
) -> Launches:
    """Fill ``projected`` [T, g or 1, d_out]; weights [g, d_out, f], their scales likewise.

    Each is given as the tensor of the call and a view of it of that shape.
    """
    device, tokens, columns = out.data.device, out.num_tokens, weight[1].shape[1]
    native = has_fp8_casts(device)
    target = store_target(out)
    source = target.config
    given_sf = None if weight_sf is None else weight_sf[0]
    shared_memory = shared_memory_of(device)
    variant, product = plan_product(
        source, weight[0], given_sf, native, tokens, shared_memory, variant
    )
    launches = Launches(device, target)
    codes = weight[1] if weight_sf is None else weight[1].view(torch.uint8)
    codes = launches.inside(weight[0], codes)
    scales = codes if weight_sf is None else launches.inside(*weight_sf)
    into = launches.inside(*projected)
    numbers = target.numbers
    launches.launch(
        _project_kernel,
        (
            triton.cdiv(tokens, variant.block_m) * triton.cdiv(columns, variant.block_n),
            into.shape[1],
        ),
        *target.tensors.values(),
        *(value for name, value in numbers.items() if name in _SOURCE_NUMBERS),
        tokens,
        codes,
        codes.stride(0),
        codes.stride(1),
        scales,
        scales.stride(0),
        scales.stride(1),
        scales.stride(2),
        columns,
        into,
        into.stride(0),
        into.stride(1),
        SUMMED_GROUPS=summed_groups,
        TILES=variant,
        SOURCE=source,
        PRODUCT=product,
        NATIVE=native,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        enable_fp_fusion=False,
    )
    return launches


def _words(weight_sf: torch.Tensor) -> torch.Tensor:
    """Scales per 32 features as packed words, if they are not."""
    return weight_sf.view(torch.int32) if weight_sf.dtype == torch.uint8 else weight_sf


def _by_group(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """View [rows, g * n] as [g, rows, n]."""
    rows, width = tensor.shape[0], tensor.shape[1] // groups
    strides = (width * tensor.stride(1), *tensor.stride())
    return tensor.as_strided((groups, rows, width), strides)


def launch_grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    *,
    projected: torch.Tensor,
    variant: Variant | None = None,
) -> Launches:
    """Fill ``projected`` [T, g, d_out]; arguments as in ``mlacast.grouped_out_project``."""
    scales = None if weight_sf is None else (weight_sf, _words(weight_sf))
    return _launch(out, (weight, weight), scales, (projected, projected), 1, variant)


def launch_quantized_linear(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    *,
    projected: torch.Tensor,
    variant: Variant | None = None,
) -> Launches:
    """Fill ``projected`` [T, d_out]; arguments as in ``mlacast.quantized_linear``."""
    groups = out.num_groups
    scales = None
    if weight_sf is not None:
        scales = (weight_sf, _by_group(_words(weight_sf), groups))
    weights = (weight, _by_group(weight, groups))
    return _launch(out, weights, scales, (projected, projected[:, None]), groups, variant)
