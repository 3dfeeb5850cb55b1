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
def load_slots(slots_ptr, stride_slots, row, num_slots):
    """Slots of rows as int32, -1 where there is none in the cache."""
    slot = tl.load(slots_ptr + row.to(tl.int64) * stride_slots)
    # Negative ones are large without a sign.
    if slot.dtype == tl.int64:
        inside = slot.to(tl.uint64, bitcast=True) < num_slots.to(tl.uint64)
    else:
        inside = slot.to(tl.uint32, bitcast=True) < num_slots.to(tl.uint32)
    return tl.where(inside, slot.to(tl.int32), -1)


@triton.jit
def load_rest(slots_ptr, stride_slots, first, TILE: tl.constexpr):
    """Low halves of the slots before ``first`` that fill no tile [TILE], then -1."""
    row = first // TILE * TILE + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + row.to(tl.int64) * stride_slots, mask=row < first, other=-1)
    return slot.to(tl.int32)


@triton.jit
def _distance(slot, low):
    """How far ``slot`` is above ``low``, unsigned: large if below."""
    return (slot - low).to(tl.uint32, bitcast=True)


@triton.jit
def _find_nearest(slot, low, TILE: tl.constexpr, THREADS: tl.constexpr):
    """The least distance of what each thread has of ``slot`` [TILE], without asking others."""
    MANY: tl.constexpr = TILE // THREADS if TILE > THREADS else 1
    return tl.min(tl.reshape(_distance(slot, low), (MANY, TILE // MANY)), 0)


@triton.jit
def _may_have_twins(
    slots_ptr,
    stride_slots,
    first,
    own,
    near,
    last_row,
    num_slots,
    PROGRAM: tl.constexpr,
):
    """Not 0 unless the slots ``own`` of rows ``first``.. differ from each other and earlier ones.

    ``near`` is what ``load_rest`` gives: a tile is on its way while the one before it is looked at.
    """
    ROWS: tl.constexpr = PROGRAM.rows
    TILE: tl.constexpr = PROGRAM.tile
    THREADS: tl.constexpr = 32 * PROGRAM.num_warps
    row = tl.arange(0, ROWS)
    # Rows that cross into the next page are two runs of neighbours, those from the first slot on
    # and the rest: no slot is in both. No cache has a slot 2**31 - 1.
    base = load_slots(slots_ptr, stride_slots, first, num_slots)
    base = tl.where(base < 0, 0x7FFFFFFF, base)
    behind = tl.minimum(tl.maximum(first + row - 1, 0), last_row)
    before = load_slots(slots_ptr, stride_slots, behind, num_slots)
    in_first = _distance(own, base) < ROWS
    before_in_first = _distance(before, base) < ROWS
    # All differ if both runs rise, one after the other.
    rises = (before >= 0) & (own > before) & (in_first == before_in_first)
    follows = (row == 0) | rises | (before_in_first & (in_first == 0))
    span = tl.max(tl.where(in_first, own - base, 0)).to(tl.uint32)
    rest = tl.where(in_first, -1, own)
    next_low = tl.min(tl.where(rest < 0, 0x7FFFFFFF, rest))
    next_span = _distance(tl.maximum(tl.max(rest), next_low), next_low)
    nearest = tl.full((min(TILE, THREADS),), 0xFFFFFFFF, tl.uint32)
    next_nearest = nearest
    for start in range(0, first // TILE):
        at = start * TILE + tl.arange(0, TILE)
        ahead = tl.load(slots_ptr + at.to(tl.int64) * stride_slots).to(tl.int32)
        nearest = tl.minimum(nearest, _find_nearest(near, base, TILE, THREADS))
        next_nearest = tl.minimum(next_nearest, _find_nearest(near, next_low, TILE, THREADS))
        near = ahead
    nearest = tl.minimum(nearest, _find_nearest(near, base, TILE, THREADS))
    next_nearest = tl.minimum(next_nearest, _find_nearest(near, next_low, TILE, THREADS))
    meets = (nearest <= span) | (next_nearest <= next_span)
    doubtful = tl.max(tl.where((own < 0) | follows, 0, 1))
    return tl.max(meets.to(tl.int32)) | doubtful


@triton.jit
def _find_twins(slots_ptr, stride_slots, first, last_row, PROGRAM: tl.constexpr):
    """A bit for each of rows ``first``.. [ROWS] whose slot a lower row names too.

    Slots are compared as they are given: what is outside of the cache has no equal inside, and
    rows without a slot in it write nothing whatever their bit.
    """
    ROWS: tl.constexpr = PROGRAM.rows
    STEP: tl.constexpr = PROGRAM.step
    row = tl.arange(0, ROWS)
    at = tl.minimum(first + row, last_row)
    own = tl.load(slots_ptr + at.to(tl.int64) * stride_slots)
    other = tl.load(slots_ptr + at.to(tl.int64) * stride_slots)
    same = (own[:, None] == other[None, :]) & (row[None, :] < row[:, None])
    found = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(0, first, STEP):
        earlier = start + tl.arange(0, STEP)
        place = slots_ptr + earlier.to(tl.int64) * stride_slots
        near = tl.load(place, mask=earlier < first, other=-1)
        found |= (own[:, None] == near[None, :]).to(tl.int32)
    twin = tl.max(found, 1) | tl.max(same.to(tl.int32), 1)
    return tl.sum(twin << row)


@triton.jit
def has_lower_twin(
    slots_ptr,
    stride_slots,
    first,
    own,
    near,
    last_row,
    num_slots,
    PROGRAM: tl.constexpr,
):
    """1 where a lower row names the same slot, else 0, for rows ``first``.. [ROWS], 32 at most.

    PROGRAM is an `AppendConfig`.
    """
    if PROGRAM.tile == 0:
        bits = _find_twins(slots_ptr, stride_slots, first, last_row, PROGRAM)
    else:
        bits = first * 0
        doubtful = _may_have_twins(
            slots_ptr, stride_slots, first, own, near, last_row, num_slots, PROGRAM
        )
        if doubtful != 0:
            bits = _find_twins(slots_ptr, stride_slots, first, last_row, PROGRAM)
    return (bits >> tl.arange(0, PROGRAM.rows)) & 1
