"""Roles of the Hopper ``grouped_out_project`` kernel: one or two load, two multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _find_tile(tile, shape, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Group, first token and first column of a tile: neighbours share tokens, then weights."""
    num_tokens, num_columns, _ = shape
    across = (num_columns + BLOCK_N - 1) // BLOCK_N
    down = (num_tokens + BLOCK_M - 1) // BLOCK_M
    group = tile // (across * down)
    inside = tile % (across * down)
    return group, inside // across * BLOCK_M, inside % across * BLOCK_N


@gluon.jit
def _count_tiles(shape, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tiles of all groups."""
    num_tokens, num_columns, num_groups = shape
    across = (num_columns + BLOCK_N - 1) // BLOCK_N
    return (num_tokens + BLOCK_M - 1) // BLOCK_M * across * num_groups


@gluon.jit
def _put_scales(smem, raw, PARTS: gl.constexpr, BYTES: gl.constexpr):
    """Store the scales of a step as float32, part after part: [rows] words to [PARTS * rows]."""
    # All parts in one store: the compiler puts a barrier between two.
    LAYOUT: gl.constexpr = gl.BlockedLayout([PARTS, 1], [1, 32], [1, 4], [1, 0])
    raw = gl.convert_layout(raw, gl.SliceLayout(0, LAYOUT))[None, :]
    part = gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))[:, None]  # [PARTS, 1]
    if BYTES:
        byte = (raw >> (8 * part)) & 0xFF  # [PARTS, rows]
        bits = gl.where(byte == 0, 0x400000, gl.where(byte == 255, 0x7FC00000, byte << 23))
        scales = bits.to(gl.float32, bitcast=True)
    else:
        scales = gl.where(part >= 0, raw, 0.0)
    smem.store(gl.reshape(scales, smem.shape))


@gluon.jit
def _load_step(
    step,
    count,
    words,
    load,
    STAGES: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Fill the stage of a step, the ``count``-th, once it is free; ``words`` are its scales.

    Consumes ``free``, produces ``ready``: once where copies are announced, once for the scales.
    """
    place, buffers, barriers, sources = load
    x_words, w_words = words
    x_smem, w_smem, x_scales, w_scales, _ = buffers
    ready, free, _ = barriers
    x_desc, weight_desc = sources[:2]
    first_token, x_column, first_column, w_column = place
    COPIED: gl.constexpr = (x_smem.shape[1] + w_smem.shape[1]) * 128
    stage = count % STAGES
    mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), COPIED)
    tma.async_copy_global_to_shared(
        weight_desc, [first_column, w_column + step * 128], ready.index(stage), w_smem.index(stage)
    )
    tma.async_copy_global_to_shared(
        x_desc, [first_token, x_column + step * 128], ready.index(stage), x_smem.index(stage)
    )
    _put_scales(x_scales.index(stage), x_words, PRODUCT.parts, PRODUCT.x_bytes)
    _put_scales(w_scales.index(stage), w_words, PRODUCT.parts, PRODUCT.weight_bytes)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _load_words(pointers, steps, step, STEPS: gl.constexpr):
    """Scales of a step, or of the last one: those of tokens [BLOCK_M] and of columns [BLOCK_N].

    ``pointers`` [BLOCK_M], [BLOCK_N] are those of step 0, ``steps`` from each to the next.
    """
    x_sf, w_sf = pointers
    x_step, w_step = steps
    x_words = gl.load(x_sf + gl.minimum(step, STEPS - 1).to(gl.int64) * x_step)  # [BLOCK_M]
    return x_words, gl.load(w_sf + gl.minimum(step, STEPS - 1).to(gl.int64) * w_step)


@gluon.jit
def run_load_role(
    buffers,
    barriers,
    sources,
    shape,
    LOADER: gl.constexpr,
    TILES: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Keep the ring full: codes of a step by the copy engine, their scales by way of registers.

    Takes the steps ``LOADER``, ``LOADER + loaders``.. of every tile. Produces ``ready``, consumes
    ``free``. Scales are loaded four such steps ahead into registers of their own: moving them on
    would wait for them.
    """
    x_smem, w_smem, _, _, _ = buffers
    stride_x_group, stride_weight_group = sources[2:4]
    sf_ptr, stride_sf_token, stride_sf_group, x_step = sources[4]
    weight_sf_ptr, stride_weight_sf_column, stride_weight_sf_group, w_step = sources[5]
    num_tokens, num_columns, _ = shape
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BLOCK_N: gl.constexpr = w_smem.shape[1]
    LOADERS: gl.constexpr = TILES.loaders
    STAGES: gl.constexpr = TILES.stages
    STEPS: gl.constexpr = PRODUCT.steps
    ROUND: gl.constexpr = 4 * LOADERS
    count = 0
    for tile in range(gl.program_id(0), _count_tiles(shape, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        group, first_token, first_column = _find_tile(tile, shape, BLOCK_M, BLOCK_N)
        wide_group = group.to(gl.int64)
        token = gl.minimum(first_token + gl.arange(0, BLOCK_M, _ONE), num_tokens - 1)  # [BLOCK_M]
        # [BLOCK_N]
        column = gl.minimum(first_column + gl.arange(0, BLOCK_N, _ONE), num_columns - 1)
        if not PRODUCT.weight_bytes:
            column = column // 128
        x_sf = sf_ptr + wide_group * stride_sf_group + token.to(gl.int64) * stride_sf_token
        w_sf = weight_sf_ptr + wide_group * stride_weight_sf_group
        w_sf += column.to(gl.int64) * stride_weight_sf_column
        first = group * 0 + LOADER
        pointers, steps = (x_sf, w_sf), (x_step, w_step)
        words0 = _load_words(pointers, steps, first, STEPS)
        words1 = _load_words(pointers, steps, first + LOADERS, STEPS)
        words2 = _load_words(pointers, steps, first + 2 * LOADERS, STEPS)
        words3 = _load_words(pointers, steps, first + 3 * LOADERS, STEPS)
        # Columns of the copy engine, int32: groups end less than 2**31 elements from the first
        # (``operands:far_apart`` in ``ops.project_weights``).
        place = (first_token, group * stride_x_group, first_column, group * stride_weight_group)
        load = (place, buffers, barriers, sources)
        for step in range(LOADER, STEPS, ROUND):
            at = count + step
            _load_step(step, at, words0, load, STAGES, PRODUCT)
            words0 = _load_words(pointers, steps, step + ROUND, STEPS)
            if STEPS % ROUND == 0 or step + LOADERS < STEPS:
                _load_step(step + LOADERS, at + LOADERS, words1, load, STAGES, PRODUCT)
            words1 = _load_words(pointers, steps, step + ROUND + LOADERS, STEPS)
            if STEPS % ROUND == 0 or step + 2 * LOADERS < STEPS:
                _load_step(step + 2 * LOADERS, at + 2 * LOADERS, words2, load, STAGES, PRODUCT)
            words2 = _load_words(pointers, steps, step + ROUND + 2 * LOADERS, STEPS)
            if STEPS % ROUND == 0 or step + 3 * LOADERS < STEPS:
                _load_step(step + 3 * LOADERS, at + 3 * LOADERS, words3, load, STAGES, PRODUCT)
            words3 = _load_words(pointers, steps, step + ROUND + 3 * LOADERS, STEPS)
        count += STEPS


@gluon.jit
def _start_product(x, w, into, part, PARTS: gl.constexpr):
    """Start the product [ROWS, COLUMNS] of a part of a step's features.

    ``x`` is [ROWS, 128], ``w`` [COLUMNS, 128], ``into`` what is written over.
    """
    WIDTH: gl.constexpr = 128 // PARTS
    left = x.slice(part * WIDTH, WIDTH, dim=1) if PARTS > 1 else x
    right = w.slice(part * WIDTH, WIDTH, dim=1) if PARTS > 1 else w
    return warpgroup_mma(left, right.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, product, x_scale, w_scale, LAYOUT: gl.constexpr):
    """Add the product [ROWS, COLUMNS], scaled by ``x_scale`` and ``w_scale``, both in memory."""
    rows = x_scale.load(gl.SliceLayout(1, LAYOUT))
    columns = w_scale.load(gl.SliceLayout(0, LAYOUT))
    columns, product = gl.broadcast(columns[None, :], product)
    return gl.fma(product * rows[:, None], columns, acc)


@gluon.jit
def _add_other_steps(acc, sums, summed, turn, CONSUMER: gl.constexpr):
    """Both consumers' sums for consumer 0; consumer 1 leaves its own [ROWS, COLUMNS] in memory.

    ``summed`` 0 says that they are there, 1 that they have been taken.
    """
    if CONSUMER == 1:
        mbarrier.wait(summed.index(1), (turn & 1) ^ 1)
        sums.store(acc)
        gl.thread_barrier()
        mbarrier.arrive(summed.index(0), count=1)
    else:
        mbarrier.wait(summed.index(0), turn & 1)
        acc += sums.load(acc.type.layout)
        gl.thread_barrier()
        mbarrier.arrive(summed.index(1), count=1)
    return acc


@gluon.jit
def _store_tile(acc, target, shape, group, first_token, first_column):
    """Store sums [ROWS, COLUMNS] as bfloat16, those that are inside the output."""
    out_ptr, stride_out_token, stride_out_group = target
    num_tokens, num_columns, _ = shape
    MMA: gl.constexpr = acc.type.layout
    token = first_token + gl.arange(0, acc.shape[0], gl.SliceLayout(1, MMA))  # [ROWS]
    column = first_column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, MMA))  # [COLUMNS]
    out = out_ptr + group.to(gl.int64) * stride_out_group
    out += (token.to(gl.int64) * stride_out_token)[:, None] + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < num_columns)[None, :]  # [ROWS, COLUMNS]
    gl.store(out, acc.to(gl.bfloat16), mask=mask)


@gluon.jit
def run_multiply_role(
    buffers,
    barriers,
    target,
    shape,
    CONSUMER: gl.constexpr,
    TILES: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Multiply a consumer's rows, columns or steps of every tile, and store what it sums.

    Consumes ``ready``, produces ``free``. Where the consumers share the steps, ``summed`` 0 goes
    from consumer 1 to 0, which adds the sums and stores, and ``summed`` 1 back.
    """
    x_smem, w_smem, x_scales, w_scales, sums = buffers
    ready, free, summed = barriers
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BLOCK_N: gl.constexpr = w_smem.shape[1]
    STEPS: gl.constexpr = PRODUCT.steps
    PARTS: gl.constexpr = PRODUCT.parts
    STAGES: gl.constexpr = TILES.stages
    BANKS: gl.constexpr = TILES.banks
    ROWS: gl.constexpr = BLOCK_M // 2 if TILES.split == "rows" else BLOCK_M
    COLUMNS: gl.constexpr = BLOCK_N // 2 if TILES.split == "columns" else BLOCK_N
    FIRST_ROW: gl.constexpr = CONSUMER * ROWS if TILES.split == "rows" else 0
    FIRST_COLUMN: gl.constexpr = CONSUMER * COLUMNS if TILES.split == "columns" else 0
    BY_STEPS: gl.constexpr = TILES.split == "steps"
    EVERY: gl.constexpr = 2 if BY_STEPS else 1
    FIRST_STEP: gl.constexpr = CONSUMER if BY_STEPS else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    count = 0
    even = gl.zeros((ROWS, COLUMNS), gl.float32, MMA)
    odd = gl.zeros((ROWS, COLUMNS), gl.float32, MMA)
    for tile in range(gl.program_id(0), _count_tiles(shape, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, MMA)
        for step in range(FIRST_STEP, STEPS, EVERY):
            at = count + step
            stage = at % STAGES
            mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
            x = x_smem.index(stage).slice(FIRST_ROW, ROWS, dim=0)  # [ROWS, 128]
            w = w_smem.index(stage).slice(FIRST_COLUMN, COLUMNS, dim=0)  # [COLUMNS, 128]
            even = _start_product(x, w, even, 0, PARTS)
            for part in gl.static_range(PARTS):
                if part % 2 == 0:
                    if part + 1 < PARTS and BANKS == 2:
                        odd = _start_product(x, w, odd, part + 1, PARTS)
                        even = warpgroup_mma_wait(1, deps=[even])
                    else:
                        even = warpgroup_mma_wait(0, deps=[even])
                    current = even
                else:
                    if BANKS == 1:
                        odd = _start_product(x, w, odd, part, PARTS)
                        odd = warpgroup_mma_wait(0, deps=[odd])
                    elif part + 1 < PARTS:
                        even = _start_product(x, w, even, part + 1, PARTS)
                        odd = warpgroup_mma_wait(1, deps=[odd])
                    else:
                        odd = warpgroup_mma_wait(0, deps=[odd])
                    current = odd
                acc = _add(
                    acc,
                    current,
                    x_scales.index(stage).slice(part * BLOCK_M + FIRST_ROW, ROWS, dim=0),
                    w_scales.index(stage).slice(part * BLOCK_N + FIRST_COLUMN, COLUMNS, dim=0),
                    MMA,
                )
                if part % 2 == 1 and part + 1 < PARTS and BANKS == 1:
                    even = _start_product(x, w, even, part + 1, PARTS)
            mbarrier.arrive(free.index(stage), count=1)
        count += STEPS
        group, first_token, first_column = _find_tile(tile, shape, BLOCK_M, BLOCK_N)
        if BY_STEPS:
            acc = _add_other_steps(acc, sums, summed, turn, CONSUMER)
        if not BY_STEPS or CONSUMER == 0:
            first_token += FIRST_ROW
            _store_tile(acc, target, shape, group, first_token, first_column + FIRST_COLUMN)
