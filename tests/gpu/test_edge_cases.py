"""The edge cases from the field on the device, through the portable kernels and the chosen ones.

The tests are those of ``tests/edge_cases``, whose tensors travel there and back. Those that say
what a float32 sum in one order gives, bit for bit, have a twin here that allows for another order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import cache_writers, oracles
from tests.edge_cases.test_cache_mismatch import (  # noqa: F401
    test_byte_views_and_three_dims_mean_the_same,
)
from tests.edge_cases.test_determinism import (  # noqa: F401
    test_200_runs_give_the_same_bits,
    test_eight_page_placements_give_the_same_bits,
    test_writing_the_same_tokens_again_gives_the_same_bytes,
)
from tests.edge_cases.test_empty_parts_of_a_merge import (  # noqa: F401
    test_an_empty_part_is_the_identity_whatever_its_output_holds,
    test_every_order_of_the_parts_matches_float64,
    test_one_live_part_comes_back_bit_for_bit,
    test_only_empty_parts_give_zero_and_the_empty_marker,
)
from tests.edge_cases.test_invalid_entries import (  # noqa: F401
    CLEAN_ROW,
    NASTY_ROW,
    test_append_outside_the_cache_writes_nothing,
    test_decode_ignores_whatever_is_past_either_length,
    test_gather_outside_the_cache_reads_nothing,
    test_holes_inside_the_length_add_nothing_to_the_denominator,
    test_position_of_invalid_tiles_does_not_matter,
    test_prefill_ignores_whatever_is_past_topk_length,
    test_prefill_rows_with_leading_invalid_entries,
)
from tests.edge_cases.test_output_canaries import (  # noqa: F401
    test_a_range_in_the_middle_of_a_buffer_changes_nothing_else,
    test_a_range_of_who_knows_what_owns_no_padding,
    test_bf16_views_are_written_through_their_strides,
)
from tests.edge_cases.test_page_layouts import (  # noqa: F401
    test_appended_bytes_lie_where_an_independent_reader_looks,
    test_results_do_not_depend_on_the_page_size,
    test_the_pad_byte_of_a_584_byte_token_has_no_effect,
)
from tests.edge_cases.test_plan_reuse import (  # noqa: F401
    test_a_plan_serves_any_lengths,
    test_a_plan_with_an_extra_cache_serves_any_lengths,
)
from tests.edge_cases.test_record_scales import (  # noqa: F401
    test_a_nan_scale_on_a_token_nobody_selects_is_harmless,
    test_scales_that_are_no_powers_of_two,
    test_very_small_and_large_scales,
)
from tests.edge_cases.test_rope_conventions import (  # noqa: F401
    HALF,
    INTERLEAVED,
    read_back_rotated_elements,
    test_a_table_with_wider_rows_is_read_through_its_stride,
    test_int32_and_int64_positions_give_identical_bits,
    test_neighbouring_positions_are_told_apart,
    test_positions_outside_are_clamped_and_never_read,
    test_prologue_and_epilogue_use_the_same_pairing,
    test_rows_of_length_zero_do_not_read_the_table,
)
from tests.edge_cases.test_scale_rounding import (  # noqa: F401
    EXPONENTS,
    test_exponent_bytes_end_to_end_from_a_656_byte_cache,
    test_zero_and_tiny_values_through_attention,
)
from tests.edge_cases.test_sink_with_splits import (  # noqa: F401
    test_infinite_sinks,
    test_two_keys_and_a_sink_share_in_three,
)
from tests.edge_cases.test_strided_inputs import (  # noqa: F401
    test_a_query_expanded_over_the_heads,
    test_a_strided_last_axis_is_supported_or_refused,
    test_a_strided_vector_is_supported_or_refused,
    test_a_transposed_query_equals_its_contiguous_copy,
    test_indices_sliced_from_a_wider_buffer,
    test_kv_rows_sliced_from_wider_rows,
    test_pages_of_one_token_with_an_odd_token_stride,
    test_the_page_stride_of_a_single_page_is_ignored,
    test_the_stride_of_a_query_axis_of_size_one_is_ignored,
    test_the_stride_of_an_axis_of_size_one_is_ignored_by_dense_prefill,
    test_the_stride_of_the_single_kv_head_is_ignored,
    test_the_strides_of_one_request_or_one_token_are_ignored_by_dense_decode,
)
from tests.edge_cases.test_swizzle_padding import (  # noqa: F401
    test_padding_is_zero_whatever_it_held,
)
from tests.edge_cases.test_zero_tokens import (  # noqa: F401
    test_an_empty_cache_makes_every_row_empty,
    test_decode_without_tokens_then_with_some,
    test_every_output_format_without_tokens,
    test_prefill_over_no_keys,
    test_prefill_without_tokens,
)
from tests.gpu.on_device import expect_low_precision, run_on_device
from tests.gpu.steps import CUDA
from tests.scenarios import indices_of

SM_SCALE = 0.02


@pytest.fixture(params=["triton", None], ids=["portable", "chosen"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """A backend for tests of ``tests/edge_cases``; plans are made for it too."""
    name: str | None = request.param
    if name is not None:
        monkeypatch.setenv("MLACAST_BACKEND", name)
    run_on_device(monkeypatch, CUDA)
    expect_low_precision(monkeypatch)
    return name


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize(("pairing", "expected"), [("interleaved", INTERLEAVED), ("half", HALF)])
def test_the_pairing_asked_for_is_the_pairing_used(
    pairing: str, expected: dict[int, float], width: int, op: str, backend: str
) -> None:
    """BC-12: logarithms to base 2 inside make the LSE inexact in its last bits."""
    found = read_back_rotated_elements(pairing, width, op, backend)
    assert found == pytest.approx(list(expected.values()), rel=2.0**-20, abs=1e-6)


@pytest.mark.parametrize("width", [512, 576])
def test_indices_outside_the_rows_count_like_deleted_ones(width: int, backend: str) -> None:
    """BC-22: eight rows in the middle of a larger buffer of NaN."""
    buffer = torch.full((40, width), float("nan"), dtype=torch.bfloat16)
    kv = buffer[16:24]
    kv.copy_(torch.randn(8, width))
    q = oracles.exact_queries(1, 2, width)
    oracle = oracles.attend(q, oracles.select_rows(kv, indices_of([CLEAN_ROW])), sm_scale=SM_SCALE)
    for row in (NASTY_ROW, CLEAN_ROW):
        out, _, lse = mlacast.sparse_mla_prefill(
            q, kv, indices_of([row]), sm_scale=SM_SCALE, backend=backend
        )
        oracles.assert_matches(out, lse, oracle)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", cache_writers.PACKED_LAYOUTS, ids=lambda layout: layout.name)
def test_slots_outside_the_cache_count_like_deleted_ones(
    layout: cache_writers.RecordLayout, num_splits: int, backend: str
) -> None:
    """BC-22: a cache of eight slots in the middle of a buffer of NaN bytes."""
    records = cache_writers.draw_records(layout, 8)
    stride = cache_writers.page_bytes(layout, 4)
    flat = torch.full((6 * stride,), 0xFF, dtype=torch.uint8)
    cache_writers.put_records(flat, layout, 4, stride, 2 * stride, range(8), records)
    cache = cache_writers.cache_view(flat, layout, 2, 4, stride, 2 * stride)
    q = oracles.exact_queries(1, 2, layout.d_qk)
    selected = oracles.select_rows(records.rows, indices_of([CLEAN_ROW]))
    oracle = oracles.attend(q, selected, sm_scale=SM_SCALE)
    for row in (NASTY_ROW, CLEAN_ROW):
        out, lse = mlacast.sparse_mla_decode(
            q,
            cache,
            indices_of([row]),
            kv_format=mlacast.KvFormat.from_name(layout.name),
            sm_scale=SM_SCALE,
            num_splits=num_splits,
            backend=backend,
        )
        oracles.assert_matches(out, lse, oracle)


@pytest.mark.parametrize(("amax", "byte"), EXPONENTS, ids=lambda value: f"{value:.9g}")
@pytest.mark.parametrize("group", [128, 64, 32])
def test_exponent_bytes_at_and_beside_powers_of_two(
    amax: float, byte: int, group: int, backend: str
) -> None:
    """BC-14: a lone float32 part with the sum zero is stored as it is."""
    x = torch.zeros(1, 1, 512)
    x[0, 0, 5] = amax
    formats: list[mlacast.OutFormat] = [
        mlacast.Fp8Group(group, "ue8m0_packed"),
        mlacast.Fp8Group(group, "float32_pow2"),
    ]
    for fmt in formats if group != 32 else [*formats, mlacast.Mxfp8()]:
        out, _ = mlacast.merge_attention_states(
            [x], [torch.zeros(1, 1)], out_format=fmt, backend=backend
        )
        assert isinstance(out, mlacast.QuantizedTensor) and out.sf is not None
        first = out.sf[0, 0, 0]
        if out.sf.dtype == torch.float32:
            assert float(first) == 2.0 ** (byte - 127)
        else:
            assert int(first) & 0xFF == byte


@pytest.mark.parametrize("value", [447.0, 448.0, 448.00003, 464.0, 465.0, 1000.0, 1e38])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["plus", "minus"])
def test_values_above_the_e4m3_maximum_saturate(sign: float, value: float, backend: str) -> None:
    """BC-18: with a forced scale of 1 the code is that of 448, never NaN."""
    x = torch.full((1, 1, 512), sign * value)
    out, _ = mlacast.merge_attention_states(
        [x], [torch.zeros(1, 1)], out_format=mlacast.Fp8Tensor(1.0), backend=backend
    )
    assert isinstance(out, mlacast.QuantizedTensor)
    codes = set(out.data.view(torch.uint8).flatten().tolist())
    assert codes == {0x7E if sign > 0 else 0xFE}


def test_nvfp4_scales_overflow_and_underflow_as_documented(backend: str) -> None:
    """BC-20: 4000 / 6 saturates at 448, 0.005 / 6 < 2**-10 rounds to 0, 6 / 6 is code 0x38."""
    x = torch.zeros(1, 1, 512)
    for block, amax in enumerate([4000.0, 0.005, 6.0]):
        x[0, 0, 16 * block : 16 * block + 8] = amax * torch.tensor(
            [1, -1, 0.6, 0.3, -0.2, 0.1, 0, 1]
        )
    out, _ = mlacast.merge_attention_states(
        [x], [torch.zeros(1, 1)], out_format=mlacast.Nvfp4(1.0), backend=backend
    )
    assert isinstance(out, mlacast.QuantizedTensor) and out.sf is not None
    scales: Tensor = out.sf.view(torch.uint8).flatten()
    assert scales[[0, 1, 2, 3]].tolist() == [0x7E, 0x00, 0x38, 0x00]
    codes = out.data.view(torch.uint8)[0, 0]
    assert int(codes[0]) == 0xF7
    assert not codes[8:16].any() and not codes[24:].any()
