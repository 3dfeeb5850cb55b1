"""The 128x4 swizzled scales: every real byte in its place, every padding byte zero.

BC-32, vllm-project/vllm#38148 (also NVIDIA/TransformerEngine#3070): stale 0x7F in the padding
reached real rows as NaN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import quantizers
from tests.format_cases import fill_storage

GLOBAL_SCALE = 672.0


def _poisoned(tokens: int, heads: int) -> mlacast.QuantizedTensor:
    buffer = mlacast.QuantizedTensor.empty(tokens, 1, heads * 512, mlacast.Nvfp4(GLOBAL_SCALE))
    assert buffer.sf is not None
    fill_storage(buffer.sf, 0x7F)
    return buffer


def _flat_bytes(buffer: mlacast.QuantizedTensor) -> Tensor:
    assert buffer.sf is not None
    return buffer.sf.view(torch.uint8).flatten()


def test_listed_offsets_of_five_rows(backend: str) -> None:
    """n = 5, one head: 32 columns in 8 tiles of columns, 4096 bytes of which 160 are real."""
    x = torch.zeros(5, 512)
    listed = {(0, 0): 0, (1, 0): 16, (0, 1): 1, (0, 4): 512, (4, 31): 3651}
    for rank, (row, column) in enumerate(listed):
        # gs * amax / 6 = 112 * amax: amax = 2**e / 112 gives the scale 2**e.
        x[row, 16 * column] = 2.0**rank * (6 / GLOBAL_SCALE)
    buffer = _poisoned(5, 1)
    mlacast.quantize_output(x, buffer.format, out=buffer, backend=backend)
    flat = _flat_bytes(buffer)
    assert flat.numel() == 4096
    assert {int(offset) for offset in torch.nonzero(flat).flatten()} == set(listed.values())
    for rank, offset in enumerate(listed.values()):
        assert int(flat[offset]) == (rank + 7) << 3


@pytest.mark.parametrize(
    ("row", "column", "offset"), [(32, 0, 4), (127, 0, 508), (128, 0, 4096), (128, 5, 4609)]
)
def test_listed_offsets_of_129_rows(row: int, column: int, offset: int, backend: str) -> None:
    """Row 32 goes to byte 4, row 127 to 508; row 128 opens the second tile of rows, 8 * 512 bytes
    on.
    """
    x = torch.zeros(129, 512)
    x[row, 16 * column] = 6 / GLOBAL_SCALE
    buffer = _poisoned(129, 1)
    mlacast.quantize_output(x, buffer.format, out=buffer, backend=backend)
    flat = _flat_bytes(buffer)
    assert flat.numel() == 2 * 4096
    assert torch.nonzero(flat).flatten().tolist() == [offset]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [0, 5, 128, 129])
def test_padding_is_zero_whatever_it_held(tokens: int, heads: int, backend: str) -> None:
    """Every real scale is non-zero here, so counting the non-zero bytes counts the real ones."""
    q, kv = torch.zeros(tokens, heads, 512).bfloat16(), torch.ones(1, 512).bfloat16()
    indices = torch.zeros(tokens, 1, dtype=torch.int32)
    buffer = _poisoned(tokens, heads)
    mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=1.0, out=buffer, backend=backend)
    assert buffer.sf is not None
    assert buffer.sf.shape == ((tokens + 127) // 128 * 128, heads * 32)
    flat = _flat_bytes(buffer)
    assert int((flat != 0).sum()) == tokens * heads * 32
    assert not bool((flat == 0x7F).any())
    assert (
        bool((buffer.dequantize() == buffer.dequantize().flatten()[:1]).all()) if tokens else True
    )


def test_a_column_count_that_is_no_multiple_of_four(backend: str) -> None:
    """K = 480 has 30 columns in 8 tiles of columns, two of them padding."""
    x = torch.randn(131, 480)
    fmt = mlacast.Nvfp4(GLOBAL_SCALE)
    expected = quantizers.quantize_nvfp4(x.view(131, 1, 480), GLOBAL_SCALE)
    assert expected.sf is not None and expected.sf.shape == (131, 30)
    for bounds in ((0, 131), (0, 5, 130, 131)):
        buffer = mlacast.QuantizedTensor.empty(131, 1, 480, fmt)
        assert buffer.sf is not None
        fill_storage(buffer.sf, 0x7F)
        for first, last in zip(bounds, bounds[1:], strict=False):
            mlacast.quantize_output(x[first:last], fmt, out=buffer[first:last], backend=backend)
        assert torch.equal(buffer.data, expected.data)
        assert torch.equal(buffer.sf.view(torch.uint8), quantizers.swizzled_buffer(expected.sf))


@pytest.mark.parametrize(
    "sf",
    [
        torch.zeros(128, 28, dtype=torch.float8_e4m3fn),
        torch.zeros(5, 32, dtype=torch.float8_e4m3fn),
        torch.zeros(128 * 32, dtype=torch.float8_e4m3fn),
        torch.zeros(128, 32, dtype=torch.float32),
        torch.zeros(128, 64, dtype=torch.float8_e4m3fn)[:, ::2],
    ],
    ids=["too_few_columns", "unpadded_rows", "flat", "float32", "strided"],
)
def test_buffers_that_are_too_small_or_of_another_dtype_are_refused(sf: Tensor) -> None:
    data = torch.zeros(5, 1, 256, dtype=torch.uint8)
    with pytest.raises(ValueError, match="QuantizedTensor: sf must .*got"):
        mlacast.QuantizedTensor(data, sf, mlacast.Nvfp4(GLOBAL_SCALE))
