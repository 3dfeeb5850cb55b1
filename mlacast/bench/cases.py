"""The registry: every timed call, its shape, its formats, and the time it is meant to take.

A fused call has query norm, both rotations, a sink and an Mxfp8 output. The calls of the V3.2
geometry (d_qk 576) are attention alone with a bfloat16 output: there the norm comes before the
absorption and the output is not rotated back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mlacast.descriptors.kv_format import KvFormat

PREFILL = "sparse_mla_prefill"
DECODE = "sparse_mla_decode"
# Slots of a decode pool: random rows of it are cold in any L2 of today.
POOL_SLOTS = 1 << 20


@dataclass(frozen=True)
class Target:
    """What a case is measured against; the fields that are None do not apply.

    Attributes:
        first_us: Time to reach first.
        then_us: Time to reach after that.
        floor_factor: Multiple of the floor with heads padded to 64, instead of a time.
        peer: Name of a case of the same run that this one shall not be slower than.
    """

    first_us: float | None = None
    then_us: float | None = None
    floor_factor: float | None = None
    peer: str | None = None


@dataclass(frozen=True)
class Case:
    """One call of one operation.

    Attributes:
        name: Unique name.
        op: Public operation.
        tokens: Query tokens of the call.
        heads: Query heads.
        topk: Index columns.
        rows: Rows of ``kv``, or slots of each decode pool.
        d_qk: Query dimensions.
        kv_format: Format of the cache; None for prefill, which reads bfloat16 rows.
        extra_topk: Index columns of the second pool, 0 without one.
        extra_kv_format: Format of the second pool.
        fused: Whether norm, rotations, sink and cast are inside.
        batch_invariant: Whether a decode splits each row by that row alone.
        protocol: "burst" or "graph", see ``mlacast.bench.protocols``.
        target: What it is measured against.
    """

    name: str
    op: str
    tokens: int
    heads: int
    topk: int
    rows: int
    d_qk: int = 512
    kv_format: KvFormat | None = None
    extra_topk: int = 0
    extra_kv_format: KvFormat | None = None
    fused: bool = True
    batch_invariant: bool = False
    protocol: str = "graph"
    target: Target = Target()


def _prefill(tokens: int, heads: int, topk: int, rows: int, target: Target) -> Case:
    name = f"prefill-h{heads}-k{topk}-kv{rows}-t{tokens}"
    protocol = "burst" if tokens >= 1024 else "graph"
    return Case(name, PREFILL, tokens, heads, topk, rows, protocol=protocol, target=target)


def _decode(
    family: str,
    kv_format: KvFormat,
    extra: KvFormat,
    heads: int,
    extra_topk: int,
    tokens: int,
    target: Target,
) -> Case:
    return Case(
        f"decode-{family}-h{heads}-128+{extra_topk}-b{tokens}",
        DECODE,
        tokens,
        heads,
        128,
        POOL_SLOTS,
        kv_format=kv_format,
        extra_topk=extra_topk,
        extra_kv_format=extra,
        target=target,
    )


def _wide(
    name: str,
    op: str,
    tokens: int,
    rows: int,
    target: Target,
    kv_format: KvFormat = KvFormat.V32,
) -> Case:
    """576 query dimensions, attention alone; over per-tensor FP8 the query is FP8 too."""
    is_decode = op == DECODE
    return Case(
        name,
        op,
        tokens,
        128,
        2048,
        rows,
        d_qk=576,
        kv_format=kv_format if is_decode else None,
        fused=False,
        protocol="graph" if is_decode else "burst",
        target=target,
    )


_FLOOR = Target(floor_factor=1.5)
# Tokens, time to reach first, time to reach then.
_DECODE_H64 = ((1, 13, 11), (16, 19, 15), (64, 31, 22), (128, 36, 28), (256, 64, 48))
_DECODE_H128 = ((64, 46, 38), (128, 90, 70), (256, 172, 135))

PREFILL_CASES = (
    _prefill(4096, 64, 640, 32768, Target(590, 530)),
    _prefill(4096, 128, 1152, 32768, Target(1870, 1770)),
    _prefill(4096, 64, 2048, 8192, Target(1600, 1530)),
    _prefill(4096, 128, 2048, 8192, Target(3130, 3000)),
    _wide("prefill-v32-h128-k2048-kv8192-t4096", PREFILL, 4096, 8192, Target(3300)),
    *(_prefill(tokens, 64, 640, 32768, Target(16)) for tokens in (1, 16, 64)),
    *(_prefill(4096, heads, 640, 32768, _FLOOR) for heads in (8, 16, 32)),
)

DECODE_CASES = (
    *(
        _decode(family, kv_format, kv_format, heads, extra_topk, tokens, Target(first, then))
        for family, kv_format in (("v4", KvFormat.V4), ("v41", KvFormat.V41))
        for heads, extra_topk, rows in ((64, 512, _DECODE_H64), (128, 1024, _DECODE_H128))
        for tokens, first, then in rows
    ),
    *(
        _wide(f"decode-v32-h128-2048-b{tokens}", DECODE, tokens, POOL_SLOTS, Target(first, then))
        for tokens, first, then in ((64, 85, 68), (128, 165, 130))
    ),
    *(
        _wide(
            f"decode-fp8-h128-2048-b{tokens}",
            DECODE,
            tokens,
            POOL_SLOTS,
            Target(first),
            KvFormat.FP8,
        )
        for tokens, first in ((64, 72), (128, 141))
    ),
    *(
        _decode(
            "v41+fp4",
            KvFormat.V41,
            KvFormat.V41_FP4,
            heads,
            extra_topk,
            tokens,
            Target(peer=f"decode-v41-h{heads}-128+{extra_topk}-b{tokens}"),
        )
        for heads, extra_topk, tokens in ((64, 512, 1), (64, 512, 64), (64, 512, 256))
        + ((128, 1024, 128),)
    ),
    *(_decode("v4", KvFormat.V4, KvFormat.V4, heads, 512, 128, _FLOOR) for heads in (8, 16, 32)),
)

# What it costs, beside the same calls without it.
INVARIANT_CASES = tuple(
    dataclasses.replace(case, name=f"{case.name}-invariant", batch_invariant=True, target=Target())
    for case in DECODE_CASES
    if case.name in {f"decode-v41-h64-128+512-b{tokens}" for tokens in (1, 16, 64, 256)}
)

CASES = PREFILL_CASES + DECODE_CASES + INVARIANT_CASES


def select_cases(substring: str) -> tuple[Case, ...]:
    """Return the cases whose name contains ``substring``, and the peers they are measured against.

    Raises:
        ValueError: No case has such a name.
    """
    wanted = {case.name for case in CASES if substring in case.name}
    if not wanted:
        raise ValueError(f"no case contains {substring!r}; mlacast bench --list names them")
    wanted |= {case.target.peer for case in CASES if case.name in wanted and case.target.peer}
    return tuple(case for case in CASES if case.name in wanted)
