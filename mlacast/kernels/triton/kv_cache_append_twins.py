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

# How far $1 is above $2 without a sign, or $3 if that is less: one instruction.
_NEARER = tl.constexpr(
    """{
    .reg .u32 above;
    sub.u32 above, $1, $2;
    min.u32 $0, above, $3;
    }"""
)


@triton.jit
def load_slots(slots_ptr, stride_slots, row):
    """Slots of rows as they are given, of the shape of ``row``."""
    return tl.load(slots_ptr + row.to(tl.int64) * stride_slots)


@triton.jit
def keep_if_cached(slot, num_slots):
    """Slots as int32, of any shape, and -1 in the place of those that are not in the cache."""
    # Negative ones are large without a sign.
    if slot.dtype == tl.int64:
        inside = slot.to(tl.uint64, bitcast=True) < num_slots.to(tl.uint64)
    else:
        inside = slot.to(tl.uint32, bitcast=True) < num_slots.to(tl.uint32)
    return tl.where(inside, slot.to(tl.int32), -1)


@triton.jit
def load_before(slots_ptr, stride_slots, first, last_row, ROWS: tl.constexpr):
    """The slots of the rows one before each of ``first``.. [ROWS]."""
    # [ROWS]
    before = tl.minimum(tl.maximum(first + tl.arange(0, ROWS) - 1, 0), last_row)
    return load_slots(slots_ptr, stride_slots, before)


@triton.jit
def _load_tile(slots_ptr, stride_slots, start, PROGRAM: tl.constexpr):
    """Low halves of the slots of a tile of rows from ``start`` on: tensors [WIDTH]."""
    WIDTH: tl.constexpr = min(PROGRAM.tile, 32 * PROGRAM.num_warps)
    # Added one after the other: steps of a thread are constants of its loads.
    one = slots_ptr + start.to(tl.int64) * stride_slots
    place = one + tl.arange(0, WIDTH).to(tl.int64) * stride_slots  # [WIDTH]
    step = tl.cast(stride_slots, tl.int64) * WIDTH
    slots = ()
    for i in tl.static_range(PROGRAM.tile // WIDTH):
        slots = slots + (tl.load(place + i * step).to(tl.int32),)
    return slots


@triton.jit
def load_rest(slots_ptr, stride_slots, first, PROGRAM: tl.constexpr):
    """Low halves of the slots before ``first`` that fill no tile: tensors [WIDTH], else -1."""
    WIDTH: tl.constexpr = min(PROGRAM.tile, 32 * PROGRAM.num_warps)
    left = first % PROGRAM.tile
    one = slots_ptr + (first - left).to(tl.int64) * stride_slots
    place = one + tl.arange(0, WIDTH).to(tl.int64) * stride_slots  # [WIDTH]
    # Compared with a constant for each load.
    behind = tl.arange(0, WIDTH) - left  # [WIDTH]
    step = tl.cast(stride_slots, tl.int64) * WIDTH
    slots = ()
    for i in tl.static_range(PROGRAM.tile // WIDTH):
        # [WIDTH]
        slot = tl.load(place + i * step, mask=behind < -i * WIDTH, other=-1)
        slots = slots + (slot.to(tl.int32),)
    return slots


@triton.jit
def _measure_distance(slot, low):
    """How far ``slot``, of any shape, is above the number ``low``, unsigned: large if below."""
    return (slot - low).to(tl.uint32, bitcast=True)


@triton.jit
def _find_nearest(nearest, slots, low, NATIVE: tl.constexpr):
    """The least of ``nearest`` and how far ``slots``, a tuple, are above ``low``; all [WIDTH]."""
    for i in tl.static_range(len(slots)):
        if NATIVE:
            # The compiler would make a tree of minima, half as many instructions more.
            nearest = tl.inline_asm_elementwise(
                _NEARER, "=r,r,r,r", [slots[i], low, nearest], tl.uint32, is_pure=True, pack=1
            )
        else:
            nearest = tl.minimum(nearest, _measure_distance(slots[i], low))
    return nearest


@triton.jit
def may_have_twins(
    slots_ptr,
    stride_slots,
    first,
    own,
    before,
    near,
    num_slots,
    PROGRAM: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Not 0 unless the slots ``own`` of rows ``first``.. differ from each other and earlier ones.

    ``own`` [ROWS] are what ``keep_if_cached`` gives, ``before`` [ROWS] what ``load_before`` and
    ``near``, a tuple of [WIDTH], what ``load_rest`` gives.
    """
    ROWS: tl.constexpr = PROGRAM.rows
    TILE: tl.constexpr = PROGRAM.tile
    WIDTH: tl.constexpr = min(TILE, 32 * PROGRAM.num_warps)
    row = tl.arange(0, ROWS)  # [ROWS]
    # Rows that cross into the next page are two runs of neighbours, those from the first slot on
    # and the rest: no slot is in both. No cache has a slot 2**31 - 1.
    before = keep_if_cached(before, num_slots)
    # Not loaded: one number for all threads would be waited for at once.
    base = tl.max(tl.where(row == 0, own, -1))
    base = tl.where(base < 0, 0x7FFFFFFF, base)
    in_first = _measure_distance(own, base) < ROWS  # [ROWS]
    before_in_first = _measure_distance(before, base) < ROWS  # [ROWS]
    # All differ if both runs rise, one after the other.
    rises = (before >= 0) & (own > before) & (in_first == before_in_first)  # [ROWS]
    follows = (row == 0) | rises | (before_in_first & (in_first == 0))  # [ROWS]
    span = tl.max(tl.where(in_first, own - base, 0)).to(tl.uint32)
    rest = tl.where(in_first, -1, own)  # [ROWS]
    next_low = tl.min(tl.where(rest < 0, 0x7FFFFFFF, rest))
    next_span = _measure_distance(tl.maximum(tl.max(rest), next_low), next_low)
    # What each thread has of the slots before, without asking others. First those that are asked
    # for already: no branch stands before this.
    nearest = tl.full((WIDTH,), 0xFFFFFFFF, tl.uint32)
    next_nearest = nearest
    nearest = _find_nearest(nearest, near, base, NATIVE)
    next_nearest = _find_nearest(next_nearest, near, next_low, NATIVE)
    for start in range(0, first // TILE):
        at = start * TILE
        ahead = _load_tile(slots_ptr, stride_slots, at, PROGRAM)  # many of [WIDTH]
        nearest = _find_nearest(nearest, ahead, base, NATIVE)
        next_nearest = _find_nearest(next_nearest, ahead, next_low, NATIVE)
    meets = (nearest <= span) | (next_nearest <= next_span)  # [WIDTH]
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
    row = tl.arange(0, ROWS)  # [ROWS]
    at = tl.minimum(first + row, last_row)  # [ROWS]
    own = tl.load(slots_ptr + at.to(tl.int64) * stride_slots)  # [ROWS]
    # The same, of its own layout: [ROWS].
    other = tl.load(slots_ptr + at.to(tl.int64) * stride_slots)
    same = (own[:, None] == other[None, :]) & (row[None, :] < row[:, None])  # [ROWS, ROWS]
    found = tl.zeros((ROWS, STEP), tl.int32)
    for start in range(0, first, STEP):
        earlier = start + tl.arange(0, STEP)  # [STEP]
        place = slots_ptr + earlier.to(tl.int64) * stride_slots
        near = tl.load(place, mask=earlier < first, other=-1)  # [STEP]
        found |= (own[:, None] == near[None, :]).to(tl.int32)
    twin = tl.max(found, 1) | tl.max(same.to(tl.int32), 1)  # [ROWS]
    return tl.sum(twin << row)


@triton.jit
def has_lower_twin(slots_ptr, stride_slots, first, doubtful, last_row, PROGRAM: tl.constexpr):
    """1 where a lower row names the same slot, else 0, for rows ``first``.. [ROWS], 32 at most.

    ``doubtful`` is what ``may_have_twins`` gives, None for a program without ranges. PROGRAM is an
    `AppendConfig`.
    """
    if PROGRAM.tile == 0:
        bits = _find_twins(slots_ptr, stride_slots, first, last_row, PROGRAM)
    else:
        bits = first * 0
        if doubtful != 0:
            bits = _find_twins(slots_ptr, stride_slots, first, last_row, PROGRAM)
    return (bits >> tl.arange(0, PROGRAM.rows)) & 1
