"""grouped_out_project: einsum bhr,hdr->bhd over the dequantised buffer."""

from __future__ import annotations

import pytest
import torch

import mlacast
from tests.format_cases import FAMILIES, FormatCase, case_id


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_matches_a_float64_einsum(case: FormatCase, dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(5, 2048)
    out = mlacast.quantize_output(x, case.build(), num_groups=2)
    weight = torch.randn(2, 24, 1024).to(dtype)
    result = mlacast.grouped_out_project(out, weight, backend=backend)
    assert (result.dtype, result.shape) == (dtype, (5, 2, 24))
    values = out.dequantize().double()
    exact = torch.einsum("bhr,hdr->bhd", values, weight.double())
    # Float32 accumulation of r = 1024 products: 4 * sqrt(r) * u * |a| |w|; then half a bf16 ulp
    # where the result is bf16.
    norms = values.norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1).unsqueeze(0)
    allowed = 4 * 32 * 2.0**-24 * norms
    if dtype == torch.bfloat16:
        allowed = allowed + 2.0**-8 * exact.abs()
    assert bool(((result.double() - exact).abs() <= allowed).all())


def test_selects_by_group(backend: str) -> None:
    """One-hot weights read single elements back, in natural head order, from their own group."""
    out = mlacast.quantize_output(
        torch.arange(1, 2049).float().view(1, 2048), mlacast.Mxfp8(order="chunk32"), num_groups=2
    )
    weight = torch.zeros(2, 2, 1024)
    weight[0, 0, 0], weight[0, 1, 600], weight[1, 0, 1], weight[1, 1, 1023] = 1.0, 1.0, 1.0, 1.0
    values = out.dequantize()
    result = mlacast.grouped_out_project(out, weight, backend=backend)
    assert result[0].tolist() == [
        [float(values[0, 0, 0]), float(values[0, 0, 600])],
        [float(values[0, 1, 1]), float(values[0, 1, 1023])],
    ]


def test_a_row_is_the_same_alone_and_together(backend: str) -> None:
    buffer = mlacast.quantize_output(torch.randn(7, 1024), mlacast.Mxfp8())
    weight = torch.randn(1, 16, 1024)
    whole = mlacast.grouped_out_project(buffer, weight, backend=backend)
    part = mlacast.grouped_out_project(buffer[3:6], weight, backend=backend)
    # Different batch sizes may sum in another order: both lie within the bound of the float32
    # accumulation.
    norms = buffer.dequantize()[3:6].norm(dim=-1, keepdim=True) * weight.norm(dim=-1).unsqueeze(0)
    assert bool(((whole[3:6] - part).abs() <= 8 * 32 * 2.0**-24 * norms).all())


def test_no_tokens(backend: str) -> None:
    buffer = mlacast.QuantizedTensor.empty(0, 2, 512, mlacast.Mxfp8())
    result = mlacast.grouped_out_project(buffer, torch.randn(2, 8, 512), backend=backend)
    assert result.shape == (0, 2, 8)
