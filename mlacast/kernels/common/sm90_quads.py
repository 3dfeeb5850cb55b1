"""Exchange between the four lanes of a quad, which share the rows of a Hopper accumulator.

A thread of an accumulator [64, 128] holds the column pairs ``8 * j + 2 * lane`` of two rows, where
``lane`` is its number in a quad.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from mlacast.kernels.common.sm90_rotation import hide_value

_KEEP_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def choose_larger_or_nan(a, b):
    """Maximum that keeps a NaN."""
    return gl.maximum(a, b, propagate_nan=_KEEP_NAN)


@gluon.jit
def _read_lane(x, LANE: gl.constexpr):
    """Value of lane ``LANE`` of every quad."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.idx.b32 $0, $1, {LANE}, 0x1c1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _read_partner(x, DISTANCE: gl.constexpr):
    """Value of the lane whose number differs by ``DISTANCE``, 1 or 2, in its quad."""
    return gl.inline_asm_elementwise(
        f"shfl.sync.bfly.b32 $0, $1, {DISTANCE}, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def deal_max(x):
    """Maxima over the lanes of [64, 4, lane]: [64, 4], the n-th of a row in lane n of its quad."""
    # [64, 2, 4] each.
    low, high = gl.split(gl.permute(gl.reshape(x, (64, 2, 2, 4)), (0, 2, 3, 1)))
    # [4]
    lane = hide_value(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, low.type.layout))))
    upper = gl.broadcast((lane >= 2)[None, None, :], low)[0]  # [64, 2, 4]
    other = _read_partner(gl.where(upper, low, high), 2)
    half = choose_larger_or_nan(gl.where(upper, high, low), other)  # [64, 2, 4]
    low, high = gl.split(gl.permute(half, (0, 2, 1)))  # [64, 4] each
    lane = hide_value(gl.arange(0, 4, gl.SliceLayout(0, low.type.layout)))  # [4]
    odd = gl.broadcast(((lane & 1) == 1)[None, :], low)[0]  # [64, 4]
    other = _read_partner(gl.where(odd, low, high), 1)
    return choose_larger_or_nan(gl.where(odd, high, low), other)


@gluon.jit
def join_max_of_neighbours(x):
    """Dealt maxima [64, 4] of groups, each with that of the group beside it: lanes in pairs."""
    return choose_larger_or_nan(x, _read_partner(x, 1))


@gluon.jit
def undeal(x):
    """Numbers [64, 4] as ``deal_max`` leaves them, in every lane: [64, 4, lane]."""
    even = gl.join(_read_lane(x, 0), _read_lane(x, 2))  # [64, 4, 2]
    odd = gl.join(_read_lane(x, 1), _read_lane(x, 3))  # [64, 4, 2]
    return gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 1)), (64, 4, 4))
