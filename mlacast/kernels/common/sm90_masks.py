"""Masks of keys in the score roles of the Hopper kernels: one byte a key, 1 where it is out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import opaque


@gluon.jit
def any_masked(mask):
    """Whether a block has keys that do not count; as one number, for a branch."""
    # Every warp reads all 64 entries: no exchange between warps.
    WARP: gl.constexpr = gl.DistributedLinearLayout(
        [[1]], [[2], [4], [8], [16], [32]], [[0], [0]], [], [64]
    )
    # Opaque, so that the exchange happens here, while the scores are computed.
    return opaque(gl.max(mask.load(WARP).to(gl.int32), 0))


@gluon.jit
def apply_mask(s, mask, COLUMN: gl.constexpr):
    """Scores [64, 64] with -inf for keys that do not count."""
    return gl.where((mask.load(COLUMN) != 0)[None, :], -float("inf"), s)
