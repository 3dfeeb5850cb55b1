"""Seeded runs: which configurations there are, one call of one of them, and what went wrong.

Nothing here needs hypothesis. A call is named by subject, backend, configuration and number; with
the seed of the run, that repeats it.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlacast.errors import UnsupportedError
from tests.fuzz.attention import Precision
from tests.fuzz.draw import SeededDraw
from tests.fuzz.subjects import DROP_INS, OPERATIONS, STEADY
from tests.fuzz.under import Sizes, Under

# Tensor cores keep two bits less than float32 of aligned summands; weights are in 16 bits: rounded
# by 2**-8 of themselves, and as much again for what moves them; sums of products of codes keep 13
# bits below the largest term. Decision 013: keys below 2**-62 lose bits, and of keys with float32
# scales one element in 500 is a neighbour in bfloat16: about one of a key, hardly ever more than 8.
PRECISION = Precision(
    unit=2.0**-22,
    weight_error=2.0**-7,
    product_unit=2.0**-18,
    code_unit=2.0**-11,
    least_value=2.0**-60,
    moved_keys=8,
)
GPU_SIZES = Sizes(tokens=9, heads=(64, 128, 8, 5, 1), width=300, rows=700)
# A seed names another configuration when a backend does not cover the first one.
ATTEMPTS = 120
STEP = 1000


@dataclass(frozen=True)
class Task:
    """One configuration: calls that kernels are compiled for once.

    ``backend`` is None for whatever dispatch chooses.
    """

    subject: str
    backend: str | None
    configuration: int

    def __str__(self) -> str:
        return f"{self.subject}/{self.backend or 'chosen'}/{self.configuration}"


@dataclass(frozen=True)
class Failure:
    """A call that went wrong."""

    case: str
    error: str
    where: str


# Configurations on a GPU: backends and how many of each. Each costs seconds of compilation.
PLAN: tuple[tuple[str, str | None, int], ...] = (
    ("sparse_mla_prefill", "hopper", 30),
    ("sparse_mla_prefill", "triton", 20),
    ("sparse_mla_decode", "hopper", 40),
    ("sparse_mla_decode", "triton", 30),
    ("dense_mla_decode", "triton", 20),
    ("dense_mla_prefill", "hopper", 20),
    ("dense_mla_prefill", "triton", 15),
    ("merge_attention_states", "triton", 15),
    ("v_up_project", "triton", 15),
    ("quantize_output", "reference", 10),
    ("products", "hopper", 15),
    ("products", "triton", 15),
    ("rope_quantize_fp8", "triton", 12),
    ("kv_cache_append", "triton", 15),
    ("kv_cache_gather", "triton", 11),
    ("decode_metadata", "triton", 2),
    *((name, None, 4) for name in DROP_INS),
)

# The same for what must not change a bit.
STEADY_PLAN: tuple[tuple[str, str | None, int], ...] = (
    ("steady_sparse_mla_prefill", "hopper", 15),
    ("steady_sparse_mla_prefill", "triton", 15),
    ("steady_sparse_mla_decode", "hopper", 15),
    ("steady_sparse_mla_decode", "triton", 15),
    ("steady_dense_mla_decode", "triton", 15),
    ("steady_dense_mla_prefill", "hopper", 15),
    ("steady_dense_mla_prefill", "triton", 15),
    ("steady_merge_attention_states", "triton", 15),
    ("steady_v_up_project", "triton", 15),
)

SUBJECTS = {**OPERATIONS, **DROP_INS, **STEADY}


def tasks_for(device: torch.device, only: str = "", *, steady: bool = False) -> list[Task]:
    """Configurations of a device, one of each subject in turn.

    ``only`` is part of a name; ``steady`` asks for what must not change a bit.
    """
    plan = STEADY_PLAN if steady else PLAN
    if device.type == "cpu":
        plan = tuple((name, "reference", 4) for name in (STEADY if steady else OPERATIONS))
        if not steady:
            plan += tuple((name, None, 4) for name in DROP_INS)
    named = []
    for at in range(max(count for *_, count in plan)):
        named += [Task(subject, name, at) for subject, name, count in plan if at < count]
    return [task for task in named if only in str(task)]


def under_for(task: Task, device: torch.device) -> Under:
    """The implementation that a task tests."""
    if device.type == "cpu":
        return Under(device=device, backend=task.backend)
    # The portable kernels multiply codes as 16-bit numbers.
    is_portable = task.backend == "triton"
    # Beside e4m3 queries weights are float16, whose steps end at 2**-24: one is off by 2**-25 where
    # the largest is 2**7 or more (decision 013), or, in the portable kernels, 2**15.
    precision = dataclasses.replace(
        PRECISION,
        code_scores=not is_portable,
        code_weight_step=2.0 ** (-40 if is_portable else -32),
    )
    return Under(device, task.backend, precision=precision, sizes=GPU_SIZES, exact_share=15)


def draw_for(task: Task, seed: int, case: int, attempt: int = 0) -> SeededDraw:
    """Choices of one call."""
    configuration = f"{task.subject}:{task.backend}:{task.configuration + STEP * attempt}"
    return SeededDraw(f"{seed}:{task}:{case}", configuration)


def run_case(
    task: Task, seed: int, case: int, device: torch.device, attempt: int = 0
) -> Failure | None:
    """Run one call; what went wrong, or None. A call that is not covered raises."""
    subject: Callable[..., None] = SUBJECTS[task.subject]
    name = f"{task}/{attempt}/{case}"
    try:
        subject(draw_for(task, seed, case, attempt), under_for(task, device))
    except UnsupportedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames[:-5:-1])
        text = f"{type(error).__name__}: {error}"
        return Failure(name, text[:600], where)
    return None


def covered_attempt(task: Task, seed: int, device: torch.device) -> int | None:
    """The first attempt whose calls the backend covers, None if there is none."""
    for attempt in range(ATTEMPTS):
        try:
            run_case(task, seed, 0, device, attempt)
        except UnsupportedError:
            continue
        return attempt
    return None
