"""E4m3 codes and bfloat16 values of an accumulator [64, 128] on Hopper, neighbours in a thread.

By shuffles in the quads of lanes that ``sm90_quads`` describes, without shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_rotation import hide_value

# $2..$9: the thread's pairs j = 0..3; $10 and $12: how this lane picks and sorts; $14: its lane.
# Pairs become codes and change places in the quad, so that lane j leaves with the 8 codes of j.
_PACK_E4M3 = gl.constexpr("""{
.reg .b16 pair0, pair1, pair2, pair3;
.reg .b32 low, high, keep, send, got, own, other, rest, flipped;
.reg .pred upper;
cvt.rn.satfinite.e4m3x2.f32 pair0, $3, $2;
cvt.rn.satfinite.e4m3x2.f32 pair1, $5, $4;
cvt.rn.satfinite.e4m3x2.f32 pair2, $7, $6;
cvt.rn.satfinite.e4m3x2.f32 pair3, $9, $8;
mov.b32 low, {pair0, pair1};
mov.b32 high, {pair2, pair3};
setp.gt.s32 upper, $14, 1;
selp.b32 keep, high, low, upper;
selp.b32 send, low, high, upper;
shfl.sync.bfly.b32 got, send, 2, 0x1f, 0xffffffff;
xor.b32 flipped, $10, 0x2222;
prmt.b32 own, keep, got, $10;
prmt.b32 other, keep, got, flipped;
shfl.sync.bfly.b32 rest, other, 1, 0x1f, 0xffffffff;
xor.b32 flipped, $12, 0x2222;
prmt.b32 $0, own, rest, $12;
prmt.b32 $1, own, rest, flipped;
}""")


@gluon.jit
def _move_to_rows(x):
    """Give every thread 8 neighbouring columns of [64, 128] registers, its quad 32.

    Two lane bits trade places with two register bits, one at a time: shuffles, no shared memory.
    """
    HALFWAY: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    ROWS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    return gl.convert_layout(gl.convert_layout(x, HALFWAY), ROWS)


@gluon.jit
def pack_e4m3(x, alive, MASKED: gl.constexpr):
    """Codes of [64, 128] as words of 4 [64, 32], 8 neighbouring codes in a thread.

    ``alive`` (int32 [64]) is all ones, or zero in rows whose codes are zero whatever ``x`` holds.
    """
    steps = gl.permute(gl.reshape(x, (64, 4, 2, 2, 4, 2)), (0, 1, 4, 5, 3, 2))
    first, second = gl.split(steps)  # [64, 4, 4, 2, 2] each
    step0, step1 = gl.split(first)  # [64, 4, 4, 2] each, like the words
    step2, step3 = gl.split(second)
    LAYOUT: gl.constexpr = step0.type.layout
    lane = hide_value(
        gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    )
    pick = gl.where((lane & 1) == 1, 0x7632, 0x5410)  # [4]
    sort = gl.where((lane & 1) == 1, 0x1054, 0x5410) ^ gl.where(lane >= 2, 0x2222, 0)
    words = gl.inline_asm_elementwise(
        _PACK_E4M3,
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            step0,
            step1,
            step2,
            step3,
            pick[None, None, :, None],
            sort[None, None, :, None],
            lane[None, None, :, None],
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    if MASKED:
        mask = gl.convert_layout(
            alive,
            gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, words.type.layout))),
            assert_trivial=True,
        )  # [64]
        words = words & mask[:, None, None, None]
    return gl.reshape(words, (64, 32))


@gluon.jit
def pack_bf16(x, alive, MASKED: gl.constexpr):
    """Values of [64, 128], 8 neighbouring ones in a thread; ``alive`` as in ``pack_e4m3``."""
    if MASKED:
        # [64]
        mask = gl.convert_layout(alive, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        values = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1; and.b32 $0, $0, $3;",
            "=r,r,r,r,r",
            [x, mask[:, None]],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        values = x.to(gl.bfloat16)
    return _move_to_rows(values)
