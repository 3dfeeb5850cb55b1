"""What a case costs at least: useful operations, bytes that must move, and the roofs they give.

Operations are those of the two products of attention; norm, rotations, softmax and cast count for
nothing. Bytes count every input once and every output once, whatever the caches do: the query, the
indices, the distinct cache rows that random indices are expected to name, the rotary table row and
position of a token, codes with their scales, and one or two float32 statistics per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlacast.bench.cases import PREFILL, Case
from mlacast.descriptors.kv_format import KvFormat

D_V = 512
PADDED_HEADS = 64


@dataclass(frozen=True)
class Roofs:
    """Ceilings of the device, measured in the same run.

    Attributes:
        copy_gbs: Device copy, bytes read and written, GB/s.
        matmul_tflops: bfloat16 8192^3 product on a cool chip, TFLOP/s.
        matmul_sustained_tflops: The same after two seconds of it, under the power limit.
        node_us: A one-element kernel as a node of a CUDA graph, us.
    """

    copy_gbs: float
    matmul_tflops: float
    matmul_sustained_tflops: float
    node_us: float


@dataclass(frozen=True)
class Roof:
    """The roof that applies: "memory", "matrix" or "launch", and its time in us."""

    name: str
    us: float


def flops(case: Case, heads: int | None = None) -> int:
    """Useful floating-point operations, for ``heads`` heads if given."""
    keys = case.topk + case.extra_topk
    return 2 * (heads or case.heads) * keys * (case.d_qk + D_V) * case.tokens


def expected_distinct(draws: int, pool: int) -> float:
    """Distinct rows among ``draws`` uniform draws from ``pool`` rows, on average."""
    return -pool * math.expm1(draws * math.log1p(-1.0 / pool)) if pool > 1 else float(pool)


def _row_bytes(case: Case) -> float:
    """Bytes of the distinct cache rows."""
    width = case.d_qk * 2 if case.kv_format is None else case.kv_format.bytes_per_token(case.d_qk)
    total = expected_distinct(case.tokens * case.topk, case.rows) * width
    if case.extra_kv_format is not None:
        draws = case.tokens * case.extra_topk
        total += expected_distinct(draws, case.rows) * case.extra_kv_format.bytes_per_token(
            case.d_qk
        )
    return total


def moved_bytes(case: Case) -> float:
    """Bytes that must move through device memory."""
    per_head = case.d_qk * (1 if case.kv_format is KvFormat.FP8 else 2)  # the query
    per_head += D_V + D_V // 32 if case.fused else D_V * 2  # the output
    per_head += 8 if case.op == PREFILL else 4  # lse, and the largest logit of prefill
    per_token = case.heads * per_head + 4 * (case.topk + case.extra_topk)
    per_token += 64 * 4 + 8 if case.fused else 0  # table row and position
    return case.tokens * per_token + _row_bytes(case)


def _times(case: Case, roofs: Roofs, heads: int) -> dict[str, float]:
    return {
        "memory": moved_bytes(case) / roofs.copy_gbs / 1e3,
        "matrix": flops(case, heads) / roofs.matmul_tflops / 1e6,
        "launch": roofs.node_us,
    }


def roof_of(case: Case, roofs: Roofs) -> Roof:
    """Return the roof that applies: no version can be faster than the slowest of the three."""
    times = _times(case, roofs, case.heads)
    name = max(times, key=lambda key: times[key])
    return Roof(name, times[name])


def padded_floor_us(case: Case, roofs: Roofs) -> float:
    """Return the floor with the heads padded to 64, the rows of one matrix instruction."""
    padded = -(-case.heads // PADDED_HEADS) * PADDED_HEADS
    return max(_times(case, roofs, padded).values())
