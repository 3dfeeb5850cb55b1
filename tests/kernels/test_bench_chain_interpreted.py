"""The benchmark's separate kernels, interpreted: the chain they make has to be a right one."""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast.bench.chain_kernels import norm_rope, rope_cast
from mlacast.reference.epilogue import epilogue
from mlacast.reference.prologue import prologue
from mlacast.reference.quantize_output import quantize_output
from tests.kernels.launches import unit_table


def _rope(tokens: int) -> mlacast.Rope:
    return mlacast.Rope(unit_table(9), torch.randint(0, 9, (tokens,)))


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (3, 5), (2, 64)])
def test_norm_and_rope(tokens: int, heads: int) -> None:
    q = torch.randn(tokens, heads, 512) * 3
    rope, out = _rope(tokens), torch.full((tokens, heads, 512), float("nan"))
    norm_rope(q, 1e-6, rope, out)
    values, norm = prologue(q.double(), q_norm_eps=1e-6, rope=rope, compute_dtype=torch.float64)
    # A sum of 512 squares, a root and a rotation in float32 are good to about 1e-6.
    torch.testing.assert_close(out.double(), values * norm[..., None], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("tokens", "heads", "groups"), [(1, 8, 1), (9, 16, 2), (19, 5, 1)])
def test_inverse_rope_and_cast(tokens: int, heads: int, groups: int) -> None:
    x = torch.randn(tokens, heads, 512)
    # Groups at, around and far below the borders of a power of two.
    edge = torch.tensor([448.0, 448.00003, 447.99997, 3.5, 7.0, 1e-6, 0.0])
    x[0, :7, :32] = 0.0
    x[0, : min(heads, 7), 3] = edge[: min(heads, 7)]
    rope = _rope(tokens)
    features = heads * 512 // groups
    found = mlacast.QuantizedTensor.empty(tokens, groups, features, mlacast.Mxfp8())
    found.data.view(torch.uint8).fill_(0x7F)
    rope_cast(x, rope, found)
    wanted = mlacast.QuantizedTensor.empty(tokens, groups, features, mlacast.Mxfp8())
    turned = epilogue(x, torch.zeros(tokens, heads), rope=rope)
    quantize_output(turned.reshape(tokens, groups, features), wanted)
    assert found.sf is not None and wanted.sf is not None
    assert torch.equal(found.sf, wanted.sf)
    codes, expected = found.data.view(torch.uint8), wanted.data.view(torch.uint8)
    # The interpreter's own conversion to e4m3 truncates subnormals and loses the carry of a value
    # that rounds up to a power of two, whose mantissa is then 0. The GPU's instruction is checked
    # by the benchmark's gate.
    sure = (expected & 7 != 0) & (expected & 0x78 != 0)
    assert torch.equal(codes[sure], expected[sure])
    assert (codes == expected).float().mean() > 0.95
