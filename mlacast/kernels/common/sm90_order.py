"""Values as they are, at a point of the program: ptxas moves instructions across waits otherwise.

What it delays stays in registers longer, what it starts early takes registers sooner; both spill
where an accumulator leaves few.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What the branch does matters: with trap behind it registers spill. $2, $3: the values again.
_AWAIT = gl.constexpr("""{
.reg .f32 smaller;
.reg .pred never;
min.f32 smaller, $2, $3;
setp.lt.f32 never, smaller, 0f00000000;
vote.sync.any.pred never, never, 0xffffffff;
@!never bra DONE;
nanosleep.u32 32;
DONE:
}""")


@gluon.jit
def wait_until_there(x):
    """``x``, two float32 numbers a thread that are not negative, once they are there.

    A branch on them, never taken: waits for products stay behind it.
    """
    return gl.inline_asm_elementwise(
        _AWAIT, "=f,=f,0,1", [x], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def hold_back(x):
    """``x``, but what is computed with it stays behind the wait that precedes.

    By a shuffle, which returns a lane's own value, and which is not moved before a wait.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )
