"""Rescaling of accumulators by factors that are nearly always one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _write_program(COUNT):
    """Per warp: multiply a thread's accumulators, or do nothing when every factor is one.

    ``$COUNT``.. are the accumulators again, the thread's two rows have the factors
    ``$2*COUNT`` and ``$2*COUNT + 2``.
    """
    first, second = 2 * COUNT, 2 * COUNT + 2
    products = "".join(f"mul.f32 ${i}, ${i}, ${first + (i & 2)}; " for i in range(COUNT))
    return (
        f"{{ .reg .pred first, some; setp.neu.f32 first, ${first}, 0f3F800000; "
        f"setp.neu.or.f32 some, ${second}, 0f3F800000, first; "
        f"vote.sync.any.pred some, some, 0xffffffff; @!some bra DONE; {products}DONE: }}"
    )


@gluon.constexpr_function
def _write_column_program(COUNT):
    """``_write_program`` of COUNT accumulators: of COUNT columns a thread has two of each eight."""
    columns = [i for i in range(COUNT // 2) if not i & 2]
    # Bits of an accumulator's number that say in which column it is.
    of_column = COUNT // 2 - 3
    tests = "".join(
        f"setp.neu.{'or.' if column else ''}f32 some, ${2 * COUNT + column}, 0f3F800000"
        f"{', some' if column else ''}; "
        for column in columns
    )
    factors = [2 * COUNT + (i & of_column) for i in range(COUNT)]
    products = "".join(f"mul.f32 ${i}, ${i}, ${factors[i]}; " for i in range(COUNT))
    return (
        f"{{ .reg .pred some; {tests}vote.sync.any.pred some, some, 0xffffffff; "
        f"@!some bra DONE; {products}DONE: }}"
    )


@gluon.constexpr_function
def _list_operands(COUNT):
    """Accumulators in place, then the factor of each."""
    return ",".join(["=f"] * COUNT + [str(i) for i in range(COUNT)] + ["f"] * COUNT)


@gluon.jit
def rescale(o, alpha, COUNT: gl.constexpr):
    """``o * alpha[:, None]``, [64, n] and [64], for ``o`` of COUNT registers a thread.

    Nearly always every factor is one, and skipping the products saves energy.
    """
    return gl.inline_asm_elementwise(
        _write_program(COUNT),
        _list_operands(COUNT),
        [o, alpha[:, None]],
        dtype=gl.float32,
        is_pure=False,
        pack=COUNT,
    )


@gluon.jit
def rescale_columns(o, alpha):
    """``o * alpha[None, :]``, [128, n] and [n], n 16 or 32; as ``rescale``."""
    COUNT: gl.constexpr = o.shape[1]
    return gl.inline_asm_elementwise(
        _write_column_program(COUNT),
        _list_operands(COUNT),
        [o, alpha[None, :]],
        dtype=gl.float32,
        is_pure=False,
        pack=COUNT,
    )
