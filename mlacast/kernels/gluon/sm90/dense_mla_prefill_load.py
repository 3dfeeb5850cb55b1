"""Load role of the Hopper dense prefill kernel: finds tiles, and copies queries, keys, values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from mlacast.kernels.gluon.sm90.dense_mla_prefill_tiles import (
    BLOCK_M,
    BLOCK_N,
    CONSUMERS,
    STAGES,
    TILE_M,
    V_ARRIVALS,
    count_level,
    count_section_tiles,
    find_section_heads,
    find_sequence_of_rank,
    write_words,
)

_Q_BYTES = gl.constexpr(64 * 192 * 2)
_K_BYTES = gl.constexpr(128 * 192 * 2)
_V_BYTES = gl.constexpr(128 * 128 * 2)


@gluon.jit
def _find_tile(place, ticket, order, SEQUENCES: gl.constexpr):
    """Move on to the level of ``ticket``.

    Returns:
        the new place: section, first ticket of the level, level, how many sequences have a tile of
        it, and the tiles of all. The section is past the last one if there is no such ticket.
    """
    section, base, level, present, tiles = place
    cu_seqlens_q_ptr, batch, num_rows, num_heads, sections, parts, part_batch, part_heads = order
    _, heads = find_section_heads(section, parts, part_heads, num_heads)
    while (section < sections) & (ticket >= base + present * heads):
        base += present * heads
        level -= 1
        if level < 0:
            section += 1
            tiles = count_section_tiles(
                cu_seqlens_q_ptr, batch, num_rows, section, parts, part_batch, SEQUENCES
            )
            level = gl.max(tiles, 0) - 1
        _, heads = find_section_heads(section, parts, part_heads, num_heads)
        present = count_level(tiles, level)
    return section, base, level, present, tiles


@gluon.jit
def _load_keys(desc, smem, ready, free, count, row, column):
    """Copy a block of keys [128, 192] in three parts; consumes ``free``, produces ``ready``."""
    stage = count % STAGES
    mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), _K_BYTES)
    for part in gl.static_range(3):
        tma.async_copy_global_to_shared(
            desc, [row, column + part * 64], ready.index(stage), smem.index(stage * 3 + part)
        )


@gluon.jit
def _load_values(desc, smem, ready, free, count, row, column):
    """Copy a block of values [128, 128]; consumes ``free``, produces ``ready``."""
    stage = count % STAGES
    mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
    # In the place of a last block's copies, one of each thread.
    mbarrier.arrive(ready.index(stage), count=V_ARRIVALS - 1)
    mbarrier.expect(ready.index(stage), _V_BYTES)
    tma.async_copy_global_to_shared(desc, [row, column], ready.index(stage), smem.index(stage))


@gluon.jit
def _load_last_values(source, smem, ready, free, count, row, num_keys):
    """Copy a block that the sequence ends in; the rest, which may hold NaN, becomes zero.

    ``source`` is a head's pointer and the stride of its rows. Consumes ``free``, produces
    ``ready``.
    """
    v_ptr, stride = source
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    column = gl.arange(0, 128, gl.SliceLayout(0, COPY))  # [128]
    stage = count % STAGES
    mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
    for start in gl.static_range(0, BLOCK_N, 16):
        key = start + gl.arange(0, 16, gl.SliceLayout(1, COPY))  # [16]
        # [16, 128]
        pointers = v_ptr + ((row + key).to(gl.int64) * stride)[:, None] + column[None, :]
        async_copy.async_copy_global_to_shared(
            smem.index(stage).slice(start, 16, dim=0), pointers, mask=(key < num_keys)[:, None]
        )
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def _find_rows(sequence, order, cu_seqlens_k_ptr):
    """First row of a sequence and how many it has, first key and how many.

    The rows behind the last sequence are one without keys.
    """
    cu_seqlens_q_ptr, batch, num_rows = order[:3]
    is_real = sequence < batch
    start = gl.load(cu_seqlens_q_ptr + sequence)
    stop = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=is_real, other=0)
    stop = gl.where(is_real, stop, num_rows)
    first_key = gl.load(cu_seqlens_k_ptr + sequence, mask=is_real, other=0)
    num_keys = gl.load(cu_seqlens_k_ptr + sequence + 1, mask=is_real, other=0) - first_key
    return start, stop - start, first_key, num_keys


@gluon.jit
def _send_tile(q_desc, q_smem, q_ready, start, first_row, head, stride_q):
    """Hand the words of a tile to the consumers, and copy 64 rows [64, 192] to each of them.

    Produces ``q_ready``. Columns of the copy engine are int32: heads are less than 2**31 elements
    apart (``heads:far_apart`` in ``ops.dense_mla_prefill``).
    """
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.arrive(q_ready.index(consumer), count=1)
        mbarrier.expect(q_ready.index(consumer), _Q_BYTES)
        for part in gl.static_range(3):
            tma.async_copy_global_to_shared(
                q_desc,
                [start + first_row + consumer * BLOCK_M, head * stride_q + part * 64],
                q_ready.index(consumer),
                q_smem.index(consumer * 3 + part),
            )


@gluon.jit
def _take_ticket(counter_ptr):
    """The next ticket of all programs'."""
    counter = counter_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def _wait_for_consumers(q_free, tile):
    """Wait until both consumers have taken the query and the words of the tile before ``tile``.

    Consumes ``q_free``.
    """
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.wait(q_free.index(consumer), (tile & 1) ^ 1)


@gluon.jit
def run_load_role(load, SEQUENCES: gl.constexpr, CAUSAL: gl.constexpr):
    """Take tickets until there are none, and keep the rings of keys and values full.

    Produces ``q_ready`` (a consumer's 64 rows, and the words of the tile), ``k_ready`` and
    ``v_ready``; consumes ``q_free``, ``k_free`` and ``v_free``. Blocks of keys go from the last to
    the first, so that the masked ones come first.
    """
    buffers, barriers, sources, order, counter_ptr = load
    q_smem, k_smem, v_smem, words_smem = buffers
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    q_desc, k_desc, v_desc, v_ptr, cu_seqlens_k_ptr, strides = sources
    stride_q, stride_k, stride_v, stride_v_key, heads_per_key_head = strides
    cu_seqlens_q_ptr, batch, num_rows, num_heads, sections, parts, part_batch, part_heads = order

    ticket = gl.program_id(0)
    tiles = count_section_tiles(cu_seqlens_q_ptr, batch, num_rows, 0, parts, part_batch, SEQUENCES)
    level = gl.max(tiles, 0) - 1
    place = (0, 0, level, count_level(tiles, level), tiles)
    section, base, level, present, tiles = _find_tile(place, ticket, order, SEQUENCES)
    count = 0
    tile = 0
    while section < sections:
        first_head, heads = find_section_heads(section, parts, part_heads, num_heads)
        head = first_head + (ticket - base) % heads
        sequence = (section // parts) * part_batch
        sequence += find_sequence_of_rank(tiles, level, (ticket - base) // heads)
        start, length, first_key, num_keys = _find_rows(sequence, order, cu_seqlens_k_ptr)
        tile_stop = length - ((length + TILE_M - 1) // TILE_M - 1 - level) * TILE_M
        visible = num_keys
        if CAUSAL:
            visible = gl.minimum(num_keys, tile_stop + num_keys - length)
        # Rows without keys take one block with every key masked.
        num_blocks = gl.maximum((visible + BLOCK_N - 1) // BLOCK_N, 1)

        # The first block does not wait for the query's place, which is taken until the last
        # scores of the tile before are done.
        last = (num_blocks - 1) * BLOCK_N
        row = first_key + last
        key_head = head // heads_per_key_head
        # Int32, as in ``_send_tile``.
        k_column = key_head * stride_k
        v_column = key_head * stride_v
        _load_keys(k_desc, k_smem, k_ready, k_free, count, row, k_column)
        if last + BLOCK_N > num_keys:
            # Rows and heads are apart by multiples of 8; copies of 16 bytes need to know.
            source = (v_ptr + key_head.to(gl.int64) * (stride_v // 8 * 8), stride_v_key // 8 * 8)
            keys_left = num_keys - last
            _load_last_values(source, v_smem, v_ready, v_free, count, row, keys_left)
        else:
            _load_values(v_desc, v_smem, v_ready, v_free, count, row, v_column)
        count += 1

        _wait_for_consumers(q_free, tile)
        first_row = tile_stop - TILE_M
        offset = num_keys - length if CAUSAL else num_keys
        write_words(
            words_smem.index(tile & 1), num_blocks, first_row, start, num_keys, offset, head
        )
        _send_tile(q_desc, q_smem, q_ready, start, first_row, head, stride_q)
        if num_blocks > 1:
            row -= BLOCK_N
            _load_keys(k_desc, k_smem, k_ready, k_free, count, row, k_column)
            _load_values(v_desc, v_smem, v_ready, v_free, count, row, v_column)
            count += 1

        # The next tile is found while the consumers are busy with the blocks above.
        ticket = _take_ticket(counter_ptr)
        place = (section, base, level, present, tiles)
        section, base, level, present, tiles = _find_tile(place, ticket, order, SEQUENCES)

        for _ in range(num_blocks - 2):
            row -= BLOCK_N
            _load_keys(k_desc, k_smem, k_ready, k_free, count, row, k_column)
            _load_values(v_desc, v_smem, v_ready, v_free, count, row, v_column)
            count += 1
        tile += 1

    _wait_for_consumers(q_free, tile)
    write_words(words_smem.index(tile & 1), -1, 0, 0, 0, 0, 0)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.arrive(q_ready.index(consumer), count=2)
