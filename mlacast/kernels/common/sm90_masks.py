"""Bytes of 64 lanes that roles of the Hopper kernels hand on: most often 1 where a key is out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import hide_value


@gluon.jit
def has_marked(marks):
    """Whether any of 64 bytes is not zero; as one number, for a branch."""
    # Every warp reads all 64 entries: no exchange between warps.
    WARP: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[2], [4], [8], [16], [32]], [[0], [0]], [], [64]
    )
    # Opaque, so that the exchange happens here, while the scores are computed.
    return hide_value(gl.max(marks.load(WARP).to(gl.int32), 0))


@gluon.jit
def apply_mask(s, mask, COLUMN: gl.constexpr):
    """Scores [64, 64] with -inf for keys that do not count."""
    return gl.where((mask.load(COLUMN) != 0)[None, :], -float("inf"), s)
