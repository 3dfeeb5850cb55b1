"""Decoding roles of the Hopper decode of few heads: records to values, and their part of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mlacast.kernels.common.sm90_rotation import hide_value
from mlacast.kernels.gluon.sm90.sparse_mla_decode_codes import (
    decode_e4m3,
    multiply_by_2_to_minus_64,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_end import end_chunk
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_layouts import (
    BLOCK_N,
    BY_THREAD,
    ROW,
    SCALES,
    WORDS_16,
    WORDS_32,
    make_operand_layout,
    make_product_layout,
    order_group,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_few_ring import (
    count_chunks,
    find_chunk,
    wait_for_chunk,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_layouts import STAGE_16
from mlacast.kernels.gluon.sm90.sparse_mla_decode_records import (
    PLAIN_UNIT,
    count_scale_words,
    find_unit_words,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_scales import (
    choose_bytes,
    make_unit_multipliers,
    repeat_by_thread,
    select_bytes,
    split_columns,
)
from mlacast.kernels.gluon.sm90.sparse_mla_decode_slots import load_slots, locate
from mlacast.kernels.gluon.sm90.sparse_mla_decode_tiles import find_work_range
from mlacast.kernels.gluon.sm90.sparse_mla_decode_unit import store_words


@gluon.constexpr_function
def list_units(FORMAT, HALF):
    """Units of a record that one decoding role takes: two of codes, or a half of "v4"."""
    if HALF == 0:
        return (0, 1)
    return (2, 3, 4) if FORMAT == "v4" else (2, 3)


@gluon.constexpr_function
def list_waits(FORMAT, HALF):
    """Copies that may be on their way when each of ``list_units`` is read.

    Those asked for after its own: two blocks are, but of the last unit of "v4" one.
    """
    return (4, 4, 2) if FORMAT == "v4" and HALF == 1 else (3, 3)


@gluon.constexpr_function
def find_group(UNIT, NUMBER):
    """Group of 64 dimensions, of eight, that is group ``NUMBER`` of a unit."""
    return 7 if UNIT == PLAIN_UNIT else 2 * UNIT + NUMBER


@gluon.jit
def _fetch(
    stage, scale_stage, places, UNIT: gl.constexpr, WITH_SCALES: gl.constexpr, FORMAT: gl.constexpr
):
    """Start copying one unit of 64 records, with the first their scales; invalid ones: zeros.

    ``places`` are addresses of codes and scales, and which records exist; all [64].
    """
    row_ptr, scale_ptr, valid = places
    FIRST: gl.constexpr = find_unit_words(FORMAT, UNIT)[0]
    WIDTH: gl.constexpr = find_unit_words(FORMAT, UNIT)[1]
    LAYOUT: gl.constexpr = WORDS_32 if WIDTH == 32 else WORDS_16
    WORD_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))  # [WIDTH]
    pointers = gl.convert_layout(row_ptr, WORD_ROW, assert_trivial=True)[:, None]
    pointers = pointers + column[None, :]  # [64, WIDTH]
    mask = gl.convert_layout(valid, WORD_ROW, assert_trivial=True)[:, None]  # [64, 1]
    async_copy.async_copy_global_to_shared(stage, pointers, mask=mask)
    if WITH_SCALES:
        SCALE_ROW: gl.constexpr = gl.SliceLayout(1, SCALES)
        # Of "v41" two of four words are of this half.
        SKIPPED: gl.constexpr = UNIT if count_scale_words(FORMAT) == 4 else 0
        word = SKIPPED + gl.arange(0, 2, gl.SliceLayout(0, SCALES))  # [2]
        pointers = gl.convert_layout(scale_ptr, SCALE_ROW, assert_trivial=True)[:, None]
        pointers = pointers + word[None, :]  # [64, 2]
        mask = gl.convert_layout(valid, SCALE_ROW, assert_trivial=True)[:, None]  # [64, 1]
        async_copy.async_copy_global_to_shared(scale_stage, pointers, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _read_scales(scale_stage, HALF: gl.constexpr, FORMAT: gl.constexpr):
    """Scale bytes [64, 4] of the thread's dimensions, two a unit of codes of this half."""
    first, second = split_columns(scale_stage.load(SCALES), 2, ROW)  # [64] each
    chosen = select_bytes(BY_THREAD)  # [1, 4]
    if FORMAT == "v41":
        return choose_bytes(first, second, chosen)
    else:
        return repeat_by_thread(first if HALF == 0 else second, chosen)


@gluon.jit
def _read_codes(stage, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Words of a staged unit: halves [64, 16], or the unscaled dimensions [64, 32]."""
    if FORMAT == "v4" and UNIT == PLAIN_UNIT:
        return (stage.load(WORDS_32),)
    elif FORMAT == "v4" and UNIT == 3:
        return (stage.load(WORDS_16),)
    else:
        halves = stage._reinterpret(gl.int32, [2, BLOCK_N, 16], STAGE_16)
        return (halves.index(0).load(WORDS_16), halves.index(1).load(WORDS_16))


@gluon.jit
def _decode(codes, scales, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of a unit to bfloat16, 2**-64 of their value.

    Returns:
        groups of 64 dimensions as words [64, 32] of two.
    """
    if FORMAT == "v4" and UNIT == PLAIN_UNIT:
        return (multiply_by_2_to_minus_64(codes[0]),)
    else:
        multipliers = make_unit_multipliers((scales, scales), UNIT, FORMAT)
        left = decode_e4m3(codes[0], multipliers, 0)
        if FORMAT == "v4" and UNIT == 3:
            return (left,)
        else:
            return (left, decode_e4m3(codes[1], multipliers, 1))


@gluon.jit
def _store_values(groups, target, UNIT: gl.constexpr):
    """Groups of a unit to their place in ``target``, the int32 view [64, 64] of a chunk."""
    if len(groups) == 2:
        # One store: between two to the same tile there would be a barrier.
        values = gl.permute(gl.join(groups[0], groups[1]), (0, 2, 1))  # [64, 2, 32]
        store_words(target, gl.reshape(values, (BLOCK_N, 64)))
    else:
        target.slice(32 if UNIT == PLAIN_UNIT else 0, 32, dim=1).store(groups[0])


@gluon.jit
def _take_operand(words, HEADS: gl.constexpr, FORMAT: gl.constexpr, GROUP: gl.constexpr):
    """Words [64, 32] of two dimensions as the left operand [64, 64] of a product."""
    pairs = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))  # [64, 32, 2]
    ordered = order_group(gl.reshape(pairs, (BLOCK_N, 64)), FORMAT, GROUP)
    ordered = ordered.to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(ordered, make_operand_layout(HEADS), assert_trivial=True)


@gluon.jit
def _add_scores(
    words, q_smem, s, GROUP: gl.constexpr, IS_FIRST: gl.constexpr, FORMAT: gl.constexpr
):
    """Issue the product of 64 dimensions [64, 32] of keys, two a word, with those of the query."""
    query = q_smem.index(GROUP // 2).slice(64 * (GROUP % 2), 64, dim=1).permute((1, 0))
    operand = _take_operand(words, query.shape[1], FORMAT, GROUP)
    return warpgroup_mma(operand, query, s, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def _locate_block(slots, pool, extra_pool, POOL: gl.constexpr, EXTRA: gl.constexpr):
    """Addresses [64] of codes and scales of a block's slots, and which of them exist."""
    ids, is_extra = slots
    return locate(ids, is_extra, pool, extra_pool, POOL, EXTRA)


@gluon.jit
def run_decode_role(
    q_smem,
    k_smem,
    stages,
    scale_stages,
    score_smem,
    q_ready,
    k_free,
    s_ready,
    s_free,
    pool,
    extra_pool,
    ends,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    WORK: gl.constexpr,
    POOL: gl.constexpr,
    EXTRA: gl.constexpr,
    END: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Decode half of every record, and multiply it by the query.

    Two blocks of records are on their way. Consumes ``q_ready``, ``k_free`` and ``s_free``, and for
    its chunk of the output ``o_ready`` and ``factor_ready``; produces ``s_ready``, with which both
    the scores and the values of a block are there. Scores of keys that do not count are -inf, and
    their values zero.
    """
    gdc_wait()
    FORMAT: gl.constexpr = POOL.record
    UNITS: gl.constexpr = list_units(FORMAT, HALF)
    WAITS: gl.constexpr = list_waits(FORMAT, HALF)
    COUNT: gl.constexpr = len(UNITS)
    PRODUCT: gl.constexpr = make_product_layout(HEADS)
    token = gl.program_id(0)
    _, _, num_blocks, length, extra_length = find_work_range(
        token, 0, pool, extra_pool, WORK, POOL, EXTRA
    )
    # Hidden: addresses of slots would be kept from before the roles part, and spill.
    lane = hide_value(gl.arange(0, BLOCK_N, ROW))  # [64]
    lists = (length, extra_length, token, pool, extra_pool)
    first = load_slots(lane, 0, *lists, EXTRA)
    second = load_slots(lane, 1, *lists, EXTRA)
    slots = load_slots(lane, 2, *lists, EXTRA)
    k_words = k_smem._reinterpret(
        gl.int32, [count_chunks(HEADS), BLOCK_N, 64], gl.NVMMASharedLayout(128, 32, 2)
    )
    places = _locate_block(first, pool, extra_pool, POOL, EXTRA)
    valid = places[2]
    for n in gl.static_range(COUNT):
        _fetch(stages[n].index(0), scale_stages.index(0), places, UNITS[n], n == 0, FORMAT)
    places = _locate_block(second, pool, extra_pool, POOL, EXTRA)
    for n in gl.static_range(COUNT):
        if UNITS[n] < PLAIN_UNIT:
            _fetch(stages[n].index(1), scale_stages.index(1), places, UNITS[n], n == 0, FORMAT)
    for block in range(num_blocks):
        at = block & 1
        next_places = _locate_block(slots, pool, extra_pool, POOL, EXTRA)
        slots = load_slots(lane, block + 3, *lists, EXTRA)
        if HEADS == 16:
            wait_for_chunk(k_free, block, 2 * HALF, HEADS)
        s = gl.zeros((BLOCK_N, HEADS), gl.float32, PRODUCT)
        for n in gl.static_range(COUNT):
            stage = stages[n].index(0 if UNITS[n] == PLAIN_UNIT else at)
            async_copy.wait_group(WAITS[n])
            if n == 0:
                scales = _read_scales(scale_stages.index(at), HALF, FORMAT)
            codes = _read_codes(stage, UNITS[n], FORMAT)
            _fetch(
                stage,
                scale_stages.index(at),
                places if UNITS[n] == PLAIN_UNIT else next_places,
                UNITS[n],
                n == 0,
                FORMAT,
            )
            target = k_words.index(find_chunk(block, find_group(UNITS[n], 0) // 2, HEADS))
            groups = _decode(codes, scales, UNITS[n], FORMAT)
            if HEADS == 16:
                _store_values(groups, target, UNITS[n])
            if n > 0:
                s = warpgroup_mma_wait(0, deps=[s])
            elif block == 0:
                mbarrier.wait(q_ready, 0)
            for g in gl.static_range(len(groups)):
                s = _add_scores(
                    groups[g],
                    q_smem,
                    s,
                    find_group(UNITS[n], g),
                    n + g == 0,
                    FORMAT,
                )
            if HEADS == 32:
                # The ring is short: its room is waited for behind the product, which needs none.
                if UNITS[n] < PLAIN_UNIT:
                    wait_for_chunk(k_free, block, UNITS[n], HEADS)
                _store_values(groups, target, UNITS[n])
        s = warpgroup_mma_wait(0, deps=[s])
        counts = gl.convert_layout(valid, gl.SliceLayout(1, PRODUCT), assert_trivial=True)
        s = gl.where(counts[:, None], s, -float("inf"))
        mbarrier.wait(s_free, (block & 1) ^ 1)
        score_smem.index(HALF).permute((1, 0)).store(s)
        mbarrier.arrive(s_ready, count=1)
        valid = places[2]
        places = next_places
    end_chunk(ends, token, (), HALF, HEADS, WORK, END, OUTPUT)
