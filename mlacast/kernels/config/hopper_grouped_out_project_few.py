"""Plan of the Hopper product of few tokens with scales per 32 features on both sides."""

from __future__ import annotations

from typing import NamedTuple

MAX_TOKENS = 64
# Registers that all roles of a program may have by the thread.
FEW_REGISTERS = 168
_FEWEST_TOKENS = 8
_BLOCK_N = 64
# Shared memory, less what barriers and alignment take.
_BYTES = 225 * 1024
# Measured on an H200: 6, 10 and 12 were slower.
_STAGES = 8
_FEWEST_STAGES = 6
# The kernel hides their number from the compiler, in eight bits.
_MOST_STEPS = 128


class FewPlan(NamedTuple):
    """What the kernel is built for.

    Attributes:
        block_m: Tokens that there is room for: 8, 16, 32 or 64.
        block_n: Columns of a program, 64.
        stages: Steps of codes in flight, an even number, so that a stage has one consumer.
        steps: Steps of 128 features.
        room: Steps of a consumer that there is room for, a power of two.
    """

    block_m: int
    block_n: int
    stages: int
    steps: int
    room: int


def plan_few(num_tokens: int, features: int, stages: int | None = None) -> FewPlan | None:
    """Plan a product; None where the kernel does not take it.

    Args:
        num_tokens: Rows of the activations.
        features: Features of a group, a multiple of 128.
        stages: Steps in flight; None for what is fastest and fits.
    """
    block_m = max(_FEWEST_TOKENS, 1 << (num_tokens - 1).bit_length())
    steps = features // 128
    # A step for each consumer.
    if block_m > MAX_TOKENS or not 2 <= steps <= _MOST_STEPS:
        return None
    room = max(4, 1 << ((steps + 1) // 2 - 1).bit_length())
    # Two words for each row and step, and the sums of one consumer.
    rest = _BYTES - 2 * room * (_BLOCK_N + block_m) * 8 - _BLOCK_N * block_m * 4
    fitting = rest // ((_BLOCK_N + block_m) * 128) // 2 * 2
    stages = min(fitting, _STAGES) if stages is None else stages
    if stages % 2 or not _FEWEST_STAGES <= stages <= fitting:
        return None
    return FewPlan(block_m, _BLOCK_N, stages, steps, room)
