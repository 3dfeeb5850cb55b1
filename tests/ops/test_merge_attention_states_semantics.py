"""merge_attention_states on every backend against the float64 oracle and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, assert_buffer_holds, case_id, poisoned_buffer


def _parts(dtype: torch.dtype, count: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    outs = [torch.randn(5, 4, 512).to(dtype) for _ in range(count)]
    lses = [torch.randn(5, 4) * 2 for _ in range(count)]
    return outs, lses


def _laid_out(lses: list[Tensor], layout: str) -> list[Tensor]:
    return [lse.t().contiguous() if layout == "ht" else lse for lse in lses]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["ht", "th"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_are_weighted_by_their_lse(
    count: int, layout: str, dtype: torch.dtype, backend: str
) -> None:
    outs, lses = _parts(dtype, count)
    out, lse = mlacast.merge_attention_states(
        outs, _laid_out(lses, layout), lse_layout=layout, backend=backend
    )
    expected_out, expected_lse = oracles.merge_parts(outs, lses)
    assert isinstance(out, Tensor)
    assert (out.dtype, out.shape) == (torch.bfloat16, (5, 4, 512))
    assert lse.dtype == torch.float32
    assert lse.shape == ((4, 5) if layout == "ht" else (5, 4))
    # Weights are good to about 32 u (u = 2**-24: exponents up to 8, exp, sum, division); |out| < 8;
    # then half a bf16 ulp.
    allowed = oracles.BF16_HALF_ULP * expected_out.abs() + 2 * 32 * 2.0**-24 * 8
    assert bool(((out.double() - expected_out).abs() <= allowed).all())
    natural = lse.t() if layout == "ht" else lse
    assert float((natural.double() - expected_lse).abs().max()) < 32 * 2.0**-24


def test_the_default_layout_is_heads_by_tokens(backend: str) -> None:
    outs, lses = _parts(torch.bfloat16)
    by_default = mlacast.merge_attention_states(outs, _laid_out(lses, "ht"), backend=backend)
    named = mlacast.merge_attention_states(
        outs, _laid_out(lses, "ht"), lse_layout="ht", backend=backend
    )
    for left, right in zip(by_default, named, strict=True):
        assert oracles.same_bits(left, right)


def test_natural_logarithms_by_hand(backend: str) -> None:
    outs = [torch.zeros(1, 1, 8), torch.full((1, 1, 8), 10.0)]
    lses = [torch.tensor([[math.log(2.0)]]), torch.tensor([[math.log(8.0)]])]
    out, lse = mlacast.merge_attention_states(outs, lses, backend=backend)
    # Base two would give 7.233; 8.0 is a bf16 number.
    assert oracles.plain(out).flatten().tolist() == [8.0] * 8
    assert float(lse) == pytest.approx(math.log(10.0), abs=1e-6)


def test_a_sink_is_a_part_with_output_zero(backend: str) -> None:
    outs = [torch.full((1, 1, 8), 6.0), torch.zeros(1, 1, 8)]
    lses = [torch.tensor([[math.log(2.0)]]), torch.tensor([[0.0]])]
    out, _ = mlacast.merge_attention_states(outs, lses, backend=backend)
    assert oracles.plain(out).flatten().tolist() == [4.0] * 8


def test_the_reference_backend_and_reference_module_agree(backend: str) -> None:
    outs, lses = _parts(torch.float32)
    exact, exact_lse = mlacast.reference.merge_attention_states(outs, lses, lse_layout="th")
    out, lse = mlacast.merge_attention_states(outs, lses, lse_layout="th", backend=backend)
    assert oracles.same_bits(out, exact.bfloat16())
    assert oracles.same_bits(lse, exact_lse.float())


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_merging_into_ranges_of_a_shared_buffer(case: FormatCase, backend: str) -> None:
    outs, lses = _parts(torch.bfloat16)
    exact, _ = mlacast.reference.merge_attention_states(outs, lses, lse_layout="th")
    buffer = poisoned_buffer(case, 5, 2, 1024)
    for first, last in ((2, 5), (0, 2)):
        view = buffer[first:last]
        out, _ = mlacast.merge_attention_states(
            [part[first:last] for part in outs],
            [part[first:last] for part in lses],
            lse_layout="th",
            out=view,
            backend=backend,
        )
        assert out is view
    assert_buffer_holds(buffer, case.expect(exact.view(5, 2, 1024)), case)


def test_strided_parts_are_read_through_their_strides(backend: str) -> None:
    outs, lses = _parts(torch.bfloat16)
    transposed = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in outs]
    expected = mlacast.merge_attention_states(outs, lses, lse_layout="th", backend=backend)
    turned = [lse.t().contiguous().t() for lse in lses]
    result = mlacast.merge_attention_states(transposed, turned, lse_layout="th", backend=backend)
    for left, right in zip(result, expected, strict=True):
        assert oracles.same_bits(left, right)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_merge_has_the_bytes_of_the_quantised_reference(
    case: FormatCase, backend: str
) -> None:
    outs, lses = _parts(torch.bfloat16)
    exact, _ = mlacast.reference.merge_attention_states(outs, lses, lse_layout="th")
    out, _ = mlacast.merge_attention_states(
        outs, lses, lse_layout="th", out_format=case.build(), num_groups=2, backend=backend
    )
    assert isinstance(out, mlacast.QuantizedTensor)
    assert_buffer_holds(out, case.expect(exact.view(5, 2, 1024)), case)
