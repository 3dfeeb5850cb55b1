"""Nvfp4 codes and scale bytes of an accumulator [64, 128] on Hopper.

Same bits as ``mlacast.kernels.common.store``, places as in ``sm90_scaled_store``. Hopper has no
conversion to e2m1, so codes are made by one float32 addition, whose rounding is that of e2m1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_scaled_store import _deal_max, _from_lane
from mlacast.kernels.common.sm90_store import _max_or_nan

# Code of $1 * $2. Numbers of 1.5 * 2**23 steps round what is added to them to a whole step, nearest
# even: steps are 0.5 below 2, 1 below 4, then 2. The few steps more count the codes below, two at a
# time.
_TO_E2M1 = gl.constexpr("""{
.reg .f32 scaled, size, steps;
.reg .b32 sign;
.reg .pred small, middle;
mul.rn.f32 scaled, $1, $2;
abs.f32 size, scaled;
min.f32 size, size, 0f40C00000;
setp.lt.f32 small, size, 0f40000000;
setp.lt.f32 middle, size, 0f40800000;
selp.f32 steps, 0f4B400002, 0f4BC00004, middle;
selp.f32 steps, 0f4AC00000, steps, small;
add.rn.f32 steps, steps, size;
mov.b32 $0, steps;
and.b32 $0, $0, 7;
mov.b32 sign, scaled;
shr.u32 sign, sign, 28;
lop3.b32 $0, sign, 8, $0, 0xEA;
}""")

# Bytes n of words $4..$7, which are those of lanes 0..3, become word n.
_TRANSPOSE_BYTES = gl.constexpr("""{
.reg .b32 left, right;
prmt.b32 left, $4, $5, 0x5140;
prmt.b32 right, $6, $7, 0x5140;
prmt.b32 $0, left, right, 0x5410;
prmt.b32 $1, left, right, 0x7632;
prmt.b32 left, $4, $5, 0x7362;
prmt.b32 right, $6, $7, 0x7362;
prmt.b32 $2, left, right, 0x5410;
prmt.b32 $3, left, right, 0x7632;
}""")


@gluon.jit
def _lanes_to_registers(words):
    """Exchange the lanes of a quad with the second dimension of [64, 4, lane]."""
    WORDS_IN_REGISTERS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    HALFWAY: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 2, 0], [8, 0, 0]],
        [[0, 1, 0], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    LANES_IN_REGISTERS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
    words = gl.convert_layout(words, WORDS_IN_REGISTERS, assert_trivial=True)
    # One bit at a time: shuffles, no shared memory.
    return gl.convert_layout(gl.convert_layout(words, HALFWAY), LANES_IN_REGISTERS)


@gluon.jit
def _of_lanes(x):
    """Split the last dimension of [64, 4, lane] into its elements [64, 4]."""
    even, odd = gl.split(gl.reshape(x, (64, 4, 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _pack_words(pairs):
    """Pairs of codes [64, 16, lane] as words of 8 codes [64, 16], four neighbours in a thread."""
    first, second, third, fourth = _steps(gl.reshape(pairs, (64, 4, 4, 4)))
    words = (first | (second << 8)) | ((third << 16) | (fourth << 24))
    zero, one, two, three = _of_lanes(_lanes_to_registers(words))
    a, b, c, d = gl.inline_asm_elementwise(
        _TRANSPOSE_BYTES,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [zero, one, two, three],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (64, 16))


@gluon.jit
def _steps(x):
    """Split dimension 2 of [64, 4, 4, lane] into its elements [64, 4, lane]."""
    first_two, last_two = gl.split(gl.permute(gl.reshape(x, (64, 4, 2, 2, 4)), (0, 1, 3, 4, 2)))
    first, second = gl.split(gl.permute(first_two, (0, 1, 3, 2)))
    third, fourth = gl.split(gl.permute(last_two, (0, 1, 3, 2)))
    return first, second, third, fourth


@gluon.jit
def _scale_bytes(amax, global_scale):
    """Scale bytes (int32) and multipliers of groups with these largest magnitudes.

    A multiplier is NaN for a group that has a NaN, and zero under the scale zero.
    """
    has_nan = amax != amax
    wanted = gl.minimum(global_scale * gl.div_rn(amax, 6.0), 448.0)
    byte = wanted.to(gl.float8e4nv).to(gl.uint8, bitcast=True).to(gl.int32)
    byte = gl.where(has_nan, 0x7F, byte)
    # The codes match the stored scale. Moved up by seven bits it is the float16 of 2**-8 times its
    # value.
    decoded = (byte << 7).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32) * 256.0
    multiplier = gl.div_rn(global_scale, gl.where(byte == 0, 1.0, decoded))
    multiplier = gl.where(byte == 0, 0.0, multiplier)
    return byte, gl.where(has_nan, float("nan"), multiplier)


@gluon.jit
def _spread(multiplier):
    """Numbers of 4 groups, dealt to the lanes of quads, in every lane: [64, 4, lane]."""
    even = gl.join(_from_lane(multiplier, 0), _from_lane(multiplier, 2))
    odd = gl.join(_from_lane(multiplier, 1), _from_lane(multiplier, 3))
    return gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 1)), (64, 4, 4))


@gluon.jit
def to_nvfp4(x, alive, global_scale, MASKED: gl.constexpr):
    """Quantise an accumulator [64, 128] in groups of 16.

    With ``MASKED``, rows where ``alive`` (int32 [64]) is zero count as zeros whatever they hold.

    Returns:
        codes as words of 8 [64, 16], and the scale bytes of the first and the last four groups,
        each [64, 4]; int32.
    """
    groups = gl.reshape(x, (64, 8, 2, 4, 2))
    by_lane = gl.reduce(gl.reduce(gl.abs(groups), 4, _max_or_nan), 2, _max_or_nan)
    left, right = gl.split(gl.permute(gl.reshape(by_lane, (64, 2, 4, 4)), (0, 2, 3, 1)))
    left = _deal_max(left)
    right = _deal_max(right)
    if MASKED:
        ROW: gl.constexpr = gl.SliceLayout(1, left.type.layout)
        is_alive = gl.convert_layout(alive, ROW, assert_trivial=True)[:, None] != 0
        is_alive = gl.broadcast(is_alive, left)[0]
        left = gl.where(is_alive, left, 0.0)
        right = gl.where(is_alive, right, 0.0)
    left_byte, left = _scale_bytes(left, global_scale)
    right_byte, right = _scale_bytes(right, global_scale)
    multiplier = gl.permute(gl.join(_spread(left), _spread(right)), (0, 3, 1, 2))
    multiplier = gl.reshape(multiplier, (64, 8, 4))
    BY_LANE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, groups.type.layout))
    multiplier = gl.convert_layout(multiplier, BY_LANE, assert_trivial=True)
    wide = gl.broadcast(gl.expand_dims(gl.expand_dims(multiplier, 2), 4), groups)[0]
    codes = gl.inline_asm_elementwise(
        _TO_E2M1, "=r,f,f", [groups, wide], dtype=gl.int32, is_pure=True, pack=1
    )
    low, high = gl.split(codes)
    pairs = low | (high << 4)
    wide = gl.broadcast(gl.expand_dims(multiplier, 2), pairs)[0]
    # A group under the scale zero has codes 0, one with a NaN has codes 7.
    pairs = gl.where(wide == 0.0, 0, gl.where(wide != wide, 0x77, pairs))
    return _pack_words(gl.reshape(pairs, (64, 16, 4))), left_byte, right_byte
