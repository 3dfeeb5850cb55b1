"""Hopper products of e4m3 codes for few tokens, powers of two per 32 features on both sides.

The matrix unit multiplies codes; the scales multiply its float32 sums. Columns are the rows of its
product and tokens the columns, which can be as few as 8: work on scales falls with the tokens. Two
consumers take every other step of 128 features, and keep the scales of their steps as bfloat16.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.kernels.common.launch import Launches
from mlacast.kernels.config.hopper_grouped_out_project_few import FEW_REGISTERS, FewPlan
from mlacast.kernels.gluon.sm90.grouped_out_project_few_roles import (
    run_load_role,
    run_multiply_role,
)

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
)


@gluon.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=("sf_ptr", "weight_sf_ptr"))
def project_few_kernel(
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
    PLAN: gl.constexpr,
):
    """Few tokens by 64 columns of one group. Grid: (tiles of columns, groups).

    PLAN is a `FewPlan`. Barriers: ``ready`` load -> multiply, ``free`` multiply -> load, ``summed``
    consumer 1 -> 0.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    TOKENS: gl.constexpr = PLAN.block_m
    STAGES: gl.constexpr = PLAN.stages
    ROOM: gl.constexpr = PLAN.room
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], CODES)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], CODES)
    column_scales = gl.allocate_shared_memory(gl.int32, [2, ROOM, 2, 64], SCALES)
    token_scales = gl.allocate_shared_memory(gl.int32, [2, ROOM, 2, TOKENS], SCALES)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(
        4 if TOKENS >= 32 else 1, 1, 8 if TOKENS >= 32 else 1, [1, 0]
    )
    sums = gl.allocate_shared_memory(gl.float32, [64, TOKENS], SUMS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(summed.index(0), count=1)
    # Everything above runs while the kernel before this one ends.
    gdc_wait()
    gdc_launch_dependents()
    buffers = (w_smem, x_smem, column_scales, token_scales, sums)
    barriers = (ready, free, summed)
    group = gl.program_id(1)
    wide_group = group.to(gl.int64)
    first_column = gl.program_id(0) * 64
    column_sf = (
        weight_sf_ptr + wide_group * stride_weight_sf_group,
        stride_weight_sf_column,
        stride_weight_sf_word,
    )
    token_sf = (sf_ptr + wide_group * stride_sf_group, stride_sf_token, stride_sf_word)
    target = (out_ptr + wide_group * stride_out_group, stride_out_token)
    shape = (num_tokens, num_columns)
    sources = (weight_desc, x_desc)
    # Columns of the copy engine, int32: groups end less than 2**31 elements from the first
    # (``operands:far_apart`` in ``ops.project_weights``).
    place = (first_column, group * stride_weight_group, group * stride_x_group)
    work = (buffers, barriers, column_sf, token_sf, target, shape, first_column)
    gl.warp_specialize(
        [
            (run_multiply_role, (work, 0, PLAN)),
            (run_multiply_role, (work, 1, PLAN)),
            (run_load_role, (buffers, barriers, sources, place, PLAN)),
        ],
        [4, 4],
        [208, 40],
    )


def launch_few(
    launches: Launches, plan: FewPlan, shape: tuple[int, int], arguments: list[Any]
) -> None:
    """Launch the kernel with all of its arguments but the plan; ``shape`` is columns and groups."""
    columns, groups = shape
    launches.launch(
        project_few_kernel,
        (-(-columns // plan.block_n), groups),
        *arguments,
        PLAN=plan,
        num_warps=4,
        maxnreg=FEW_REGISTERS,
        launch_pdl=True,
    )
