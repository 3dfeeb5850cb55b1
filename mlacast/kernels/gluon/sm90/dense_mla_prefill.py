"""Hopper ``dense_mla_prefill``: consumers of 64 rows each and a load role, one program per SM.

The roles are in the neighbouring files: ``dense_mla_prefill_load``, ``dense_mla_prefill_attend``;
``dense_mla_prefill_tiles`` has the order of the tiles. Dispatch sends here only what the copy
engine and the storing code are laid out for: rows and heads at multiples of 8 elements from
16-byte addresses, scales from 4-byte addresses, heads less than 2**31 elements apart, whole heads
in groups, a score scale above zero.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.sm90_store import NVFP4
from mlacast.kernels.common.sm90_token_nvfp4 import STAGE_LAYOUT
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.dense_prefill_sections import hopper_prefill_plan
from mlacast.kernels.config.sparse_attention import num_multiprocessors
from mlacast.kernels.gluon.sm90.dense_mla_prefill_attend import run_attend_role
from mlacast.kernels.gluon.sm90.dense_mla_prefill_load import run_load_role
from mlacast.kernels.gluon.sm90.dense_mla_prefill_tiles import (
    BLOCK_N,
    CONSUMERS,
    LOG2_E,
    STAGES,
    TILE_WORDS,
    V_ARRIVALS,
)

# The registers of all roles use up the register file.
OPTIONS = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
COUNTER_OPTIONS = {"num_warps": 1, "launch_pdl": True}


@gluon.jit(do_not_specialize=("ticket",))
def set_counter_kernel(counter_ptr, ticket):
    """Set the next ticket to be taken. Grid: (1,)."""
    # The kernel before may still be at work on this memory.
    gdc_wait()
    gdc_launch_dependents()
    gl.store(counter_ptr.to(gl.pointer_type(gl.int32), bitcast=True), ticket)


# Sizes, which would make a variant each if they are 1 or a multiple of 16.
_SIZES = (
    "stride_q_head",
    "stride_k_head",
    "stride_v_head",
    "stride_v_key",
    "heads_per_key_head",
    "batch",
    "num_rows",
    "num_heads",
    "sections",
    "head_sections",
    "section_batch",
    "section_heads",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "row_start",
    "padding_rows",
    "group_heads",
    "sf_column_tiles",
)
_SCALAR_ACCESS = (
    "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr",
    "counter_ptr",
    "lse_ptr",
    "sf_ptr",
    "scale_ptr",
)


@gluon.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SCALAR_ACCESS)
def dense_mla_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    v_ptr,
    stride_q_head,
    stride_k_head,
    stride_v_head,
    stride_v_key,
    heads_per_key_head,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    counter_ptr,
    batch,
    num_rows,
    num_heads,
    sections,
    head_sections,
    section_batch,
    section_heads,
    lse_ptr,
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
    group_heads,
    sf_column_tiles,
    softmax_scale,
    SEQUENCES: gl.constexpr,
    CAUSAL: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Tiles of 128 rows of one head, as many as it takes tickets for. Grid: (programs,).

    Barriers (producer -> consumer): ``q_ready``, ``k_ready``, ``v_ready`` load -> attend,
    ``q_free``, ``k_free``, ``v_free`` attend -> load, ``turns`` between the attend roles.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS * 3, 64, 64], TILE)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 3, BLOCK_N, 64], TILE)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, 128], TILE)
    words_smem = gl.allocate_shared_memory(
        gl.int32, [2, TILE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    stages = ()
    if OUTPUT.kind == NVFP4:
        stages = (
            gl.allocate_shared_memory(gl.float32, [64, 32], STAGE_LAYOUT),
            gl.allocate_shared_memory(gl.float32, [64, 32], STAGE_LAYOUT),
        )
    q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_ready.index(i), count=2)
        mbarrier.init(q_free.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(v_ready.index(i), count=V_ARRIVALS)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    # Everything above runs while the kernel before this one ends.
    gdc_wait()
    gdc_launch_dependents()
    buffers = (q_smem, k_smem, v_smem, words_smem)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    strides = (stride_q_head, stride_k_head, stride_v_head, stride_v_key, heads_per_key_head)
    sources = (q_desc, k_desc, v_desc, v_ptr, cu_seqlens_k_ptr, strides)
    order = (
        cu_seqlens_q_ptr,
        batch,
        num_rows,
        num_heads,
        sections,
        head_sections,
        section_batch,
        section_heads,
    )
    scales = (
        sf_ptr,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
        sf_column_tiles,
        num_rows,
        padding_rows,
    )
    target = ((data_ptr, stride_data_token, stride_data_group), scales, scale_ptr, group_heads)
    rows = (buffers, barriers, turns, stages, target, lse_ptr, num_rows, softmax_scale * LOG2_E)
    load = (buffers, barriers, sources, order, counter_ptr)
    gl.warp_specialize(
        [
            (run_attend_role, (rows, 0, OUTPUT)),
            (run_attend_role, (rows, 1, OUTPUT)),
            (run_load_role, (load, SEQUENCES, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Describe [rows, heads, width] as rows of all heads, to be copied in blocks."""
    rows, heads, width = tensor.shape
    columns = (heads - 1) * tensor.stride(1) + width if heads > 1 else width
    # A single row has no distance to a next one; what the tensor carries there may be anything,
    # while the copy engine wants multiples of 16 bytes.
    step = tensor.stride(0) if rows > 1 else -(-columns // 8) * 8
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(tensor, [rows, columns], [step, 1], block, layout)


def launch_dense_mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out: QuantizedTensor,
    lse: torch.Tensor,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.dense_mla_prefill``.

    The bounds on the lengths are not needed: programs count the tiles that there are.
    """
    del max_seqlen_q, max_seqlen_k
    num_rows, heads, _ = q.shape
    num_keys, kv_heads, _ = k.shape
    batch = cu_seqlens_q.shape[0] - 1
    target = store_target(out)
    launches = Launches(q.device, target)
    multiprocessors = num_multiprocessors(q.device)
    plan = hopper_prefill_plan(
        num_rows, num_keys, batch, heads, kv_heads, out.features, multiprocessors
    )
    counter = launches.scratch(1)
    # The first tickets are the programs' own numbers.
    launches.launch(set_counter_kernel, (1,), counter, plan.num_programs, **COUNTER_OPTIONS)
    # Without any key nothing of them is used; a descriptor needs an address all the same.
    keys, values = (k, v) if num_keys else (q, q[:, :, :128])
    launches.launch(
        dense_mla_prefill_kernel,
        (plan.num_programs,),
        _descriptor(q, [64, 64]),
        _descriptor(keys, [128, 64]),
        _descriptor(values, [128, 128]),
        values,
        q.stride(1),
        keys.stride(1),
        values.stride(1),
        values.stride(0),
        plan.heads_per_key_head,
        cu_seqlens_q,
        cu_seqlens_k,
        counter,
        batch,
        num_rows,
        heads,
        plan.sections.total,
        plan.sections.head_sections,
        plan.sections.sequences,
        plan.sections.heads,
        lse,
        *target.tensors.values(),
        *target.numbers.values(),
        plan.group_heads,
        target.config.sf_column_tiles,
        softmax_scale,
        SEQUENCES=plan.sequences_at_once,
        CAUSAL=causal,
        OUTPUT=target.token_config,
        **OPTIONS,
    )
    return launches
