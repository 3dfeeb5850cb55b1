"""Which rows of ``kv_cache_append`` name a slot that a lower row names too.

Of rows with the same slot the lowest wins, whatever order programs run in, so each row has to know
whether a lower one names its slot. No table of owners is kept, which somebody would have to clear:
a program looks through the slots before its own, and compares them with the ranges of its own only.
Slots of a chunk of prefill are runs of neighbours whose ranges do not meet, and a few rows seldom
lie in more than two runs. A program whose ranges do meet an earlier slot looks again, row by row.
At 8192 rows the longest look is 64 KB, read while the latents are on their way. The look grows with
the square of the rows: by estimate it costs less than the latents up to some 30 000 rows in runs.
"""

import triton
import triton.language as tl


@triton.jit
def load_slots(slots_ptr, stride_slots, row, exists):
    """Slots of rows as int64, -1 where there is none."""
    slot = tl.load(slots_ptr + row.to(tl.int64) * stride_slots, mask=exists, other=-1)
    return slot.to(tl.int64)


@triton.jit
def _load_own(slots_ptr, stride_slots, row, exists, num_slots):
    """Slots of rows as int32, -1 where there is none in the cache."""
    slot = load_slots(slots_ptr, stride_slots, row, exists)
    return tl.where((slot >= 0) & (slot < num_slots), slot, -1).to(tl.int32)


@triton.jit
def _distance(slot, low):
    """How far the low half of ``slot`` is above ``low``, unsigned: large if below."""
    return (slot.to(tl.int32) - low).to(tl.uint32, bitcast=True)


@triton.jit
def _of_thread(x, TILE: tl.constexpr, THREADS: tl.constexpr):
    """The least of what each thread has of ``x`` [TILE], without asking other threads."""
    MANY: tl.constexpr = TILE // THREADS if TILE > THREADS else 1
    return tl.min(tl.reshape(x, (MANY, TILE // MANY)), 0)


@triton.jit
def _may_have_twins(
    slots_ptr,
    stride_slots,
    first,
    slot,
    valid,
    near,
    num_slots,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Not 0 unless the valid slots of rows ``first``.. differ from each other and earlier ones.

    ``near`` are the last of the slots before ``first``, those that fill no tile, and -1: a tile is
    on its way while the one before it is looked at.
    """
    row = tl.arange(0, ROWS)
    # Rows that cross into the next page are two runs of neighbours, those from the first slot on
    # and the rest: no slot is in both. No cache has a slot 2**31 - 1.
    base = _load_own(slots_ptr, stride_slots, first, True, num_slots)
    base = tl.where(base < 0, 0x7FFFFFFF, base)
    own = tl.where(valid, slot, -1).to(tl.int32)
    before = _load_own(slots_ptr, stride_slots, first + row - 1, row > 0, num_slots)
    in_first = _distance(own, base) < ROWS
    before_in_first = _distance(before, base) < ROWS
    # All differ if both runs rise, one after the other.
    rises = (before >= 0) & (own > before) & (in_first == before_in_first)
    follows = (row == 0) | rises | (before_in_first & (own >= 0) & (in_first == 0))
    span = tl.max(tl.where(in_first, own - base, 0)).to(tl.uint32)
    rest = tl.where(in_first, -1, own)
    next_low = tl.min(tl.where(rest < 0, 0x7FFFFFFF, rest))
    next_span = _distance(tl.maximum(tl.max(rest), next_low), next_low)
    nearest = tl.full((TILE,), 0xFFFFFFFF, tl.uint32)
    next_nearest = nearest
    for start in range(0, first // TILE):
        ahead = tl.load(slots_ptr + (start * TILE + tl.arange(0, TILE)).to(tl.int64) * stride_slots)
        nearest = tl.minimum(nearest, _distance(near, base))
        next_nearest = tl.minimum(next_nearest, _distance(near, next_low))
        near = ahead.to(tl.int64)
    nearest = _of_thread(tl.minimum(nearest, _distance(near, base)), TILE, THREADS)
    next_nearest = _of_thread(tl.minimum(next_nearest, _distance(near, next_low)), TILE, THREADS)
    meets = (nearest <= span) | (next_nearest <= next_span)
    doubtful = tl.max(tl.where(follows, 0, valid.to(tl.int32)))
    return tl.max(meets.to(tl.int32)) | doubtful


@triton.jit
def _twins(slots_ptr, stride_slots, first, num_rows, ROWS: tl.constexpr, STEP: tl.constexpr):
    """A bit for each of rows ``first``.. [ROWS] whose slot a lower row names too."""
    row = tl.arange(0, ROWS)
    slot = load_slots(slots_ptr, stride_slots, first + row, first + row < num_rows)
    other = load_slots(slots_ptr, stride_slots, first + row, first + row < num_rows)
    same = (slot[:, None] == other[None, :]) & (row[None, :] < row[:, None])
    found = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(0, first, STEP):
        at = start + tl.arange(0, STEP)
        near = load_slots(slots_ptr, stride_slots, at, at < first)
        found |= (slot[:, None] == near[None, :]).to(tl.int32)
    twin = (tl.max(found, 1) | tl.max(same.to(tl.int32), 1)).to(tl.int64)
    return tl.sum(twin << row)


@triton.jit
def has_lower_twin(
    slots_ptr,
    stride_slots,
    first,
    slot,
    valid,
    num_rows,
    near,
    num_slots,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    THREADS: tl.constexpr,
):
    """1 where a lower row names the same slot, else 0, for rows ``first``.. [ROWS]."""
    if TILE == 0:
        bits = _twins(slots_ptr, stride_slots, first, num_rows, ROWS, STEP)
    else:
        bits = first.to(tl.int64) * 0
        doubtful = _may_have_twins(
            slots_ptr, stride_slots, first, slot, valid, near, num_slots, ROWS, TILE, THREADS
        )
        if doubtful != 0:
            bits = _twins(slots_ptr, stride_slots, first, num_rows, ROWS, STEP)
    return (bits >> tl.arange(0, ROWS)) & 1
