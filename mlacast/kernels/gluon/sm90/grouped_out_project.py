"""Hopper products of e4m3 codes by e4m3 codes, scaled in float32.

The matrix unit multiplies codes and sums as many features as share a scale; the scales multiply its
sums. A load role keeps a ring of codes full through the copy engine and turns scales into float32,
two consumers multiply: halves of the tile's rows or columns, or with few tokens every other step of
the same tile, whose sums are added at the end. Two load roles can take steps in turn as well.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.hopper_grouped_out_project import Variant, choose_product
from mlacast.kernels.config.hopper_grouped_out_project_few import FewPlan
from mlacast.kernels.config.sparse_attention import num_multiprocessors
from mlacast.kernels.gluon.sm90.grouped_out_project_few import launch_few
from mlacast.kernels.gluon.sm90.grouped_out_project_roles import run_load_role, run_multiply_role

_SIZES = (
    "stride_x_group",
    "stride_weight_group",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "stride_weight_sf_group",
    "stride_weight_sf_column",
    "stride_weight_sf_word",
    "stride_out_token",
    "stride_out_group",
    "num_tokens",
    "num_columns",
    "num_groups",
)


@gluon.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=("sf_ptr", "weight_sf_ptr"))
def project_kernel(
    x_desc,
    weight_desc,
    stride_x_group,
    stride_weight_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    weight_sf_ptr,
    stride_weight_sf_group,
    stride_weight_sf_column,
    stride_weight_sf_word,
    out_ptr,
    stride_out_token,
    stride_out_group,
    num_tokens,
    num_columns,
    num_groups,
    TILES: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """BLOCK_M tokens by BLOCK_N columns of a group, tile after tile at a stride of the grid.

    Grid: (programs,). TILES is a `Variant`, PRODUCT a `ProductConfig`.

    Barriers (producer -> consumer): ``ready`` load -> multiply, ``free`` multiply -> load. With
    steps split, ``summed`` 0 from consumer 1 to consumer 0, ``summed`` 1 back.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_M: gl.constexpr = TILES.block_m
    BLOCK_N: gl.constexpr = TILES.block_n
    STAGES: gl.constexpr = TILES.stages
    PARTS: gl.constexpr = PRODUCT.parts
    BY_STEPS: gl.constexpr = TILES.split == "steps"
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, 128], TILE)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], TILE)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, PARTS * BLOCK_M], PLAIN)
    w_scales = gl.allocate_shared_memory(gl.float32, [STAGES, PARTS * BLOCK_N], PLAIN)
    SUM_ROWS: gl.constexpr = BLOCK_M if BY_STEPS else 1
    sums = gl.allocate_shared_memory(
        gl.float32, [SUM_ROWS, BLOCK_N], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        # Once where the copies are announced, once where the scales are stored.
        mbarrier.init(ready.index(i), count=2)
        # Split by steps, one consumer reads a stage, else both.
        mbarrier.init(free.index(i), count=1 if BY_STEPS else 2)
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    buffers = (x_smem, w_smem, x_scales, w_scales, sums)
    barriers = (ready, free, summed)
    shape = (num_tokens, num_columns, num_groups)
    sources = (
        x_desc,
        weight_desc,
        stride_x_group,
        stride_weight_group,
        (sf_ptr, stride_sf_token, stride_sf_group, stride_sf_word),
        (
            weight_sf_ptr,
            stride_weight_sf_column,
            stride_weight_sf_group,
            stride_weight_sf_word,
        ),
    )
    target = (out_ptr, stride_out_token, stride_out_group)
    if TILES.loaders == 1:
        gl.warp_specialize(
            [
                (run_multiply_role, (buffers, barriers, target, shape, 0, TILES, PRODUCT)),
                (run_multiply_role, (buffers, barriers, target, shape, 1, TILES, PRODUCT)),
                (run_load_role, (buffers, barriers, sources, shape, 0, TILES, PRODUCT)),
            ],
            [4, 4],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (run_multiply_role, (buffers, barriers, target, shape, 0, TILES, PRODUCT)),
                (run_multiply_role, (buffers, barriers, target, shape, 1, TILES, PRODUCT)),
                (run_load_role, (buffers, barriers, sources, shape, 0, TILES, PRODUCT)),
                (run_load_role, (buffers, barriers, sources, shape, 1, TILES, PRODUCT)),
            ],
            [4, 4, 4],
            [216, 40, 40],
        )


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """Describe e4m3 [rows, groups, width] as rows of all groups, copied 128 columns at a time."""
    count, groups, width = tensor.shape
    columns = (groups - 1) * tensor.stride(1) + width
    layout = gl.NVMMASharedLayout(128, 8, 2)
    return TensorDescriptor(tensor, [count, columns], [tensor.stride(0), 1], [rows, 128], layout)


def _launch(
    out: QuantizedTensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    weight_sf: tuple[torch.Tensor, torch.Tensor],
    projected: tuple[torch.Tensor, torch.Tensor],
    variant: Variant | FewPlan | None,
) -> Launches:
    """Fill ``projected`` [T, g, d_out]; weights [g, d_out, f], their scales likewise.

    Each is given as the tensor of the call and a view of it of that shape. Where g is 1, all groups
    of the buffer are one.
    """
    groups, columns, features = weight[1].shape
    tokens = out.num_tokens
    target = store_target(out)
    launches = Launches(weight[0].device, target)
    sf, numbers = target.tensors["sf_ptr"], target.numbers
    scales = launches.inside(*weight_sf)
    into = launches.inside(*projected)
    # Its columns are those of the weights.
    rows = launches.inside(weight[0], weight[1].transpose(0, 1))
    sizes = (tokens, columns, groups, features)
    multiprocessors = num_multiprocessors(out.data.device)
    plan = choose_product(sizes, sf.dtype, scales.dtype, multiprocessors, variant)
    tile = plan if isinstance(plan, FewPlan) else plan.variant
    arguments = [
        _descriptor(out.data, tile.block_m),
        _descriptor(rows, tile.block_n),
        numbers["stride_data_group"],
        rows.stride(1),
        sf,
        numbers["stride_sf_token"],
        numbers["stride_sf_group"],
        numbers["stride_sf_word"],
        scales,
        scales.stride(0),
        scales.stride(1),
        scales.stride(2),
        into,
        into.stride(0),
        into.stride(1),
        tokens,
        columns,
    ]
    if isinstance(plan, FewPlan):
        launch_few(launches, plan, (columns, groups), arguments)
        return launches
    launches.launch(
        project_kernel,
        (plan.num_programs,),
        *arguments,
        groups,
        TILES=plan.variant,
        PRODUCT=plan.product,
        num_warps=4,
        maxnreg=plan.max_registers,
    )
    return launches


def _words(weight_sf: torch.Tensor) -> torch.Tensor:
    """Scales per 32 features as packed words, if they are not."""
    return weight_sf.view(torch.int32) if weight_sf.dtype == torch.uint8 else weight_sf


def launch_grouped_out_project(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    *,
    projected: torch.Tensor,
    variant: Variant | FewPlan | None = None,
) -> Launches:
    """Fill ``projected`` [T, g, d_out] bfloat16; arguments as in ``mlacast.grouped_out_project``.

    Dispatch sends here e4m3 codes in head order with a scale per 32 or 128 features on either side,
    128-feature steps, and codes at multiples of 16 bytes.
    """
    scales = (weight_sf, _words(weight_sf))
    return _launch(out, (weight, weight), scales, (projected, projected), variant)


def launch_quantized_linear(
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    *,
    projected: torch.Tensor,
    variant: Variant | FewPlan | None = None,
) -> Launches:
    """Fill ``projected`` [T, d_out] bfloat16; arguments as in ``mlacast.quantized_linear``.

    As above; and the groups of a token are neighbours, codes and scales alike.
    """
    scales = (weight_sf, _words(weight_sf)[None])
    return _launch(out, (weight, weight[None]), scales, (projected, projected[:, None]), variant)
