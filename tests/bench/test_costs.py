"""Operations, bytes and roofs against values worked out by hand."""

from __future__ import annotations

import pytest

from mlacast.bench.cases import CASES, DECODE, PREFILL, Case
from mlacast.bench.costs import (
    Roofs,
    expected_distinct,
    flops,
    moved_bytes,
    padded_floor_us,
    roof_of,
)
from mlacast.descriptors.kv_format import KvFormat

ONE = Case("one", PREFILL, 1, 1, 1, 1)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_operations_of_the_headline_cases() -> None:
    # 2 * 64 heads * 640 keys * 1024 * 4096 tokens.
    assert flops(named("prefill-h64-k640-kv32768-t4096")) == 343_597_383_680
    # 2 * 64 * (128 + 512) * 1024 * 256.
    assert flops(named("decode-v4-h64-128+512-b256")) == 21_474_836_480
    # 2 * 128 * 2048 * (576 + 512) * 64.
    assert flops(named("decode-v32-h128-2048-b64")) == 36_507_222_016


def test_bytes_of_a_fused_prefill_token() -> None:
    # Query 1024, codes 512, scales 16, two statistics 8, index 4, table row 256, position 8, row
    # 1024.
    assert moved_bytes(ONE) == 2852


def test_bytes_of_a_fused_decode_token_with_two_pools() -> None:
    case = Case(
        "two", DECODE, 1, 2, 1, 1, 512, KvFormat.V4, extra_topk=1, extra_kv_format=KvFormat.V41_FP4
    )
    # Two heads of 1024 + 512 + 16 + 4, two indices, table row and position, one row of each pool.
    assert moved_bytes(case) == 2 * 1556 + 8 + 264 + 584 + 288


def test_bytes_of_plain_attention() -> None:
    case = Case("v32", DECODE, 1, 1, 1, 1, 576, KvFormat.V32, fused=False)
    # Query 1152, bfloat16 output 1024, lse 4, index 4, record 656.
    assert moved_bytes(case) == 2840


def test_rows_read_twice_count_once() -> None:
    assert expected_distinct(1, 1000) == pytest.approx(1.0)
    assert expected_distinct(5, 1) == 1.0
    # The second of two draws from two rows is new half of the time.
    assert expected_distinct(2, 2) == pytest.approx(1.5)
    assert expected_distinct(10**7, 1000) == pytest.approx(1000.0)


def test_the_roof_is_the_slowest_of_three() -> None:
    # 2852 bytes at 1 GB/s take 2.852 us; 2048 operations at 0.001 TFLOP/s take 2.048 us.
    roof = roof_of(ONE, Roofs(1.0, 0.001, 0.001, 0.5))
    assert roof.name == "memory" and roof.us == pytest.approx(2.852)
    roof = roof_of(ONE, Roofs(1.0, 0.0005, 0.0005, 0.5))
    assert roof.name == "matrix" and roof.us == pytest.approx(4.096)
    assert roof_of(ONE, Roofs(1.0, 0.001, 0.001, 9.0)).name == "launch"


def test_the_padded_floor_counts_64_heads() -> None:
    roofs = Roofs(1.0, 0.001, 0.001, 0.5)
    assert padded_floor_us(ONE, roofs) == pytest.approx(64 * 2.048)
