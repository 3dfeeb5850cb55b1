"""Reference of the storing epilogue: float32 rows into a buffer of any output format."""

from __future__ import annotations

import torch

from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.formats.block_scaled import quantize_fp8_group, quantize_fp8_tensor, quantize_nvfp4
from mlacast.formats.e2m1 import pack_e2m1
from mlacast.formats.ue8m0 import pack_ue8m0_words
from mlacast.layouts.element_order import to_chunk32
from mlacast.layouts.sf_swizzled_128x4 import scatter_swizzled

MXFP8_AMAX_FLOOR = 1e-4


def _store_scales(scales: torch.Tensor, out: QuantizedTensor) -> None:
    """Write [T, g, n] scales (or words) through the buffer's strides; zero its padding rows."""
    target = out.sf_rows_with_padding()
    assert target is not None, "block-scaled buffers carry scales"
    target[: scales.shape[0]].copy_(scales)
    target[scales.shape[0] :].zero_()


def _store_swizzled(scales: torch.Tensor, out: QuantizedTensor) -> None:
    """Scatter [T, n] e4m3 bytes at the absolute rows, with the padding this range owns."""
    assert out.sf is not None, "Nvfp4 buffers carry scales"
    buffer = out.sf.view(torch.uint8)
    scatter_swizzled(buffer, scales, out.row_start)
    if out.ends_buffer and out.total_tokens is not None:
        padding_rows = buffer.shape[0] - out.total_tokens
        zeros = torch.zeros(
            (padding_rows, buffer.shape[1]), dtype=torch.uint8, device=buffer.device
        )
        scatter_swizzled(buffer, zeros, out.total_tokens)
    padding_columns = buffer.shape[1] - scales.shape[1]
    if padding_columns:
        widened = torch.nn.functional.pad(scales, (0, padding_columns))
        scatter_swizzled(buffer, widened, out.row_start)


def quantize_output(x: torch.Tensor, out: QuantizedTensor) -> None:
    """Quantise rows and write them, with their scales, into ``out``.

    Args:
        x: [T, g, f], any float dtype, natural head order; rounded to float32 first.
        out: Buffer (or token range of one) with ``num_tokens`` T, ``num_groups`` g and ``features``
            f. Only its rows are written; when the range ends the buffer, the padding of the scales
            is zeroed as well.
    """
    x = x.float()
    fmt = out.format
    if isinstance(fmt, Bf16):
        out.data.copy_(x)
        return
    if fmt.order == "chunk32":
        x = to_chunk32(x)
    if isinstance(fmt, Fp8Tensor):
        scale = fmt.scale_tensor(x.device)
        assert scale is not None, "Fp8Tensor carries a scale"
        out.data.copy_(quantize_fp8_tensor(x, scale).view(torch.float8_e4m3fn))
    elif isinstance(fmt, Nvfp4):
        scale = fmt.scale_tensor(x.device)
        assert scale is not None, "Nvfp4 carries a scale"
        codes, scales = quantize_nvfp4(x, scale)
        out.data.copy_(pack_e2m1(codes))
        _store_swizzled(scales.flatten(1), out)
    elif isinstance(fmt, (Fp8Group, Mxfp8)):
        if isinstance(fmt, Mxfp8):
            codes, scales = quantize_fp8_group(x, fmt.group, "ue8m0", amax_floor=MXFP8_AMAX_FLOOR)
        else:
            sf = "ue8m0" if fmt.sf == "ue8m0_packed" else fmt.sf
            codes, scales = quantize_fp8_group(x, fmt.group_size, sf)
        out.data.copy_(codes.view(torch.float8_e4m3fn))
        _store_scales(pack_ue8m0_words(scales) if scales.dtype == torch.uint8 else scales, out)
    else:
        raise TypeError(f"quantize_output: format must be an OutFormat, got {type(fmt).__name__}")
