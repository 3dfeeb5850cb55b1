"""Roles of the Hopper ``grouped_out_project`` kernel for few tokens: one loads, two multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mlacast.kernels.common.sm90_rotation import hide_value


@gluon.jit
def _spread(bytes_):
    """Powers of two as bfloat16 in both halves of a word; ``bytes_`` are two of their ue8m0 codes.

    Words of any shape.

    0 is 2**-127, a subnormal number, and 255 NaN: both have one bit beside the code.
    """
    is_other = (((bytes_ + 0x00010001) & 0x00FE00FE) + 0x00FE00FE) & 0x01000100
    return (bytes_ << 7) | ((is_other ^ 0x01000100) >> 2)


@gluon.jit
def _start_scales(source, first_row, num_rows, scales, FIRST: gl.constexpr, STOP: gl.constexpr):
    """Load the words of scales of rows for steps FIRST, FIRST + 2.., [steps, rows].

    ``source`` is the pointer to a group's first word and the strides of rows and of steps, and
    ``scales`` where they belong, [steps, 2, rows].
    """
    pointer, stride_row, stride_step = source
    COUNT: gl.constexpr = scales.shape[0]
    ROWS: gl.constexpr = scales.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    # [ROWS]
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), num_rows - 1)
    step = FIRST + 2 * gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT))  # [COUNT]
    pointers = pointer + (row.to(gl.int64) * stride_row)[None, :]  # [1, ROWS]
    pointers += (step.to(gl.int64) * stride_step)[:, None]  # [COUNT, ROWS]
    return gl.load(pointers, mask=(step < STOP)[:, None], other=0)


@gluon.jit
def _put_scales(words, scales):
    """Store the scales of words [steps, rows] as bfloat16: of parts 0 and 2, then of 1 and 3."""
    # [steps, rows] each; as they are stored [steps, 2, rows].
    even, odd = _spread(words & 0x00FF00FF), _spread((words >> 8) & 0x00FF00FF)
    scales.store(gl.permute(gl.join(even, odd), (0, 2, 1)))


@gluon.jit
def _find_scales(scales, i, PAIR: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [rows] of a step's parts PAIR and PAIR + 2."""
    COUNT: gl.constexpr = scales.shape[0]
    ROWS: gl.constexpr = scales.shape[2]
    pairs = scales._reinterpret(gl.int32, [2 * COUNT, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return pairs.index(2 * i + PAIR).load(LAYOUT)


@gluon.jit
def _widen_scales(words, IS_SECOND: gl.constexpr):
    """Float32 scales of the first or the second part of a pair, of the shape of ``words``."""
    bits = words & -0x10000 if IS_SECOND else words << 16
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def run_load_role(buffers, barriers, sources, place, PLAN: gl.constexpr):
    """Keep the ring of codes full. Produces ``ready``, consumes ``free``."""
    w_smem, x_smem = buffers[:2]
    ready, free, _ = barriers
    weight_desc, x_desc = sources
    first_column, w_feature, x_feature = place
    for i in range(PLAN.steps):
        stage = i % PLAN.stages
        mbarrier.wait(free.index(stage), ((i // PLAN.stages) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), (64 + PLAN.block_m) * 128)
        tma.async_copy_global_to_shared(
            weight_desc,
            [first_column, w_feature + i * 128],
            ready.index(stage),
            w_smem.index(stage),
        )
        tma.async_copy_global_to_shared(
            x_desc, [0, x_feature + i * 128], ready.index(stage), x_smem.index(stage)
        )


@gluon.jit
def _start_product(w, x, into, PART: gl.constexpr):
    """Start the product of 32 features: columns [64, 128] by tokens [TOKENS, 128]."""
    left = w.slice(32 * PART, 32, dim=1)
    right = x.slice(32 * PART, 32, dim=1)
    return warpgroup_mma(left, right.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, product, columns, tokens, IS_SECOND: gl.constexpr):
    """Add the product [64, TOKENS] of a part, scaled: rows by columns' scales, columns by tokens'.

    ``columns`` [64] and ``tokens`` [TOKENS] are words of two scales.
    """
    scale, product = gl.broadcast(_widen_scales(tokens, IS_SECOND)[None, :], product)
    return gl.fma(product * _widen_scales(columns, IS_SECOND)[:, None], scale, acc)


@gluon.jit
def _store_sums(acc, target, shape, first_column):
    """Store sums [64 columns, TOKENS] as bfloat16, those that are inside the output."""
    out_ptr, stride_out_token = target
    num_tokens, num_columns = shape
    LAYOUT: gl.constexpr = acc.type.layout
    column = first_column + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))  # [64]
    token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))  # [TOKENS]
    # [64, TOKENS]
    out = out_ptr + (token.to(gl.int64) * stride_out_token)[None, :] + column[:, None]
    mask = (column < num_columns)[:, None] & (token < num_tokens)[None, :]  # [64, TOKENS]
    gl.store(out, acc.to(gl.bfloat16), mask=mask)


@gluon.jit
def run_multiply_role(work, CONSUMER: gl.constexpr, PLAN: gl.constexpr):
    """Multiply every other step of 64 columns by the tokens, and store or pass on the sums.

    Consumes ``ready``, produces ``free``; consumer 1 produces ``summed``, consumer 0 consumes it.
    """
    buffers, barriers, column_sf, token_sf, target, shape, first_column = work
    w_smem, x_smem, all_column_scales, all_token_scales, sums = buffers
    ready, free, summed = barriers
    TOKENS: gl.constexpr = PLAN.block_m
    STAGES: gl.constexpr = PLAN.stages
    STEPS: gl.constexpr = PLAN.steps
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    column_scales = all_column_scales.index(CONSUMER)
    token_scales = all_token_scales.index(CONSUMER)
    # [ROOM, 64] and [ROOM, TOKENS].
    column_words = _start_scales(column_sf, first_column, shape[1], column_scales, CONSUMER, STEPS)
    token_words = _start_scales(token_sf, 0, shape[0], token_scales, CONSUMER, STEPS)
    _put_scales(column_words, column_scales)
    _put_scales(token_words, token_scales)
    gl.thread_barrier()
    acc = gl.zeros((64, TOKENS), gl.float32, MMA)
    left = gl.zeros((64, TOKENS), gl.float32, MMA)
    right = gl.zeros((64, TOKENS), gl.float32, MMA)
    # A loop of a known length starts from constants, which get registers that products wait for.
    for i in range(CONSUMER, hide_value(STEPS), 2):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        w, x = w_smem.index(stage), x_smem.index(stage)  # [64, 128] and [TOKENS, 128]
        left = _start_product(w, x, left, 0)
        right = _start_product(w, x, right, 2)
        columns = _find_scales(column_scales, i // 2, 0, ROW)  # [64]
        tokens = _find_scales(token_scales, i // 2, 0, COLUMN)  # [TOKENS]
        left = warpgroup_mma_wait(1, deps=[left])
        acc = _add(acc, left, columns, tokens, False)
        left = _start_product(w, x, left, 1)
        right = warpgroup_mma_wait(1, deps=[right])
        acc = _add(acc, right, columns, tokens, True)
        right = _start_product(w, x, right, 3)
        columns = _find_scales(column_scales, i // 2, 1, ROW)
        tokens = _find_scales(token_scales, i // 2, 1, COLUMN)
        left = warpgroup_mma_wait(1, deps=[left])
        acc = _add(acc, left, columns, tokens, False)
        right = warpgroup_mma_wait(0, deps=[right])
        acc = _add(acc, right, columns, tokens, True)
        mbarrier.arrive(free.index(stage), count=1)
    if CONSUMER == 1:
        sums.store(acc)
        gl.thread_barrier()
        mbarrier.arrive(summed.index(0), count=1)
    else:
        mbarrier.wait(summed.index(0), 0)
        acc += sums.load(MMA)
        _store_sums(acc, target, shape, first_column)
