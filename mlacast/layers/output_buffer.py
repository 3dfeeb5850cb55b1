"""The output of an MLA layer as something that ranges of rows can be taken of.

A QuantizedTensor is one already. The plain tensors of an engine become one, according to their
scheme and to what the engine says about the layout of their scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlacast.descriptors.out_format import Fp8Group, Fp8Tensor, Nvfp4, OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import check_tensor, fail
from mlacast.layers.output_scheme import FP8_STATIC, NVFP4, QuantKey, detect_output_quant_key
from mlacast.layouts.sf_mn_major import ceil4
from mlacast.layouts.sf_swizzled_128x4 import swizzled_shape
from mlacast.ops.output import Output

OP = "MLAAttention.forward"
D_V = 128


@dataclass(frozen=True)
class GroupLayout:
    """What an engine says about FP8 scales of groups; None leaves it to the tensor.

    Attributes:
        group_size: Columns of a group.
        pow2: Scales are powers of two, kept as float32. None: they are not.
        col_major: Stride 1 along tokens.
        tma_aligned: Columns start 16 bytes apart or a multiple of it.
    """

    group_size: int | None = None
    pow2: bool | None = None
    col_major: bool | None = None
    tma_aligned: bool | None = None

    @property
    def said(self) -> tuple[int | bool | None, ...]:
        """What was given."""
        return self.group_size, self.pow2, self.col_major, self.tma_aligned


def output_buffer(
    output: Output,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
    layout: GroupLayout,
    num_tokens: int,
    heads: int,
    device: torch.device,
) -> Output:
    """Check an output of ``num_tokens`` rows of ``heads`` * 128 values, and return its buffer.

    Raises:
        TypeError: Not tensors.
        ValueError: Shapes, dtypes, strides, devices or scales do not fit each other or the step.
        UnsupportedError: A scheme that no operation writes.
    """
    features = heads * D_V
    if isinstance(output, QuantizedTensor):
        if any(value is not None for value in (output_scale, output_block_scale, *layout.said)):
            requirement = "be None, like all that describes scales, for a QuantizedTensor"
            fail(OP, "output_scale", requirement, "a value")
        buffer = output
    else:
        key = detect_output_quant_key(output, output_scale, output_block_scale, features)
        if key is None:
            return _plain(output, layout, num_tokens, heads, device)
        buffer = _quantised(key, output, output_scale, output_block_scale, layout)
    if buffer.num_tokens != num_tokens:
        fail(OP, "output", f"have T={num_tokens} tokens like q", buffer.num_tokens)
    if buffer.num_groups * buffer.features != features:
        actual = buffer.num_groups * buffer.features
        fail(OP, "output", f"have N * 128 = {features} features", actual)
    if buffer.device != device:
        fail(OP, "output", f"be on {device} like the other arguments", buffer.device)
    return buffer


def _plain(
    output: Tensor, layout: GroupLayout, num_tokens: int, heads: int, device: torch.device
) -> Tensor:
    """Return a bfloat16 output as [T, N, 128]."""
    if any(value is not None for value in layout.said):
        fail(OP, "output_block_scale", "be given with quant_* arguments", None)
    remedy = "codes come with output_scale or output_block_scale, or as a QuantizedTensor"
    check_tensor(
        OP,
        "output",
        output,
        (f"T {heads * D_V}", f"T {heads} {D_V}"),
        {"T": num_tokens},
        dtype=torch.bfloat16,
        device=device,
        last_dim_contiguous=True,
        remedy="" if output.dtype == torch.bfloat16 else remedy,
    )
    return output.view(num_tokens, heads, D_V) if output.dim() == 2 else output


def _quantised(
    key: QuantKey,
    output: Tensor,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
    layout: GroupLayout,
) -> QuantizedTensor:
    """Return the buffer over an engine's tensors, which are those of a whole step.

    Args:
        key: What `detect_output_quant_key` said of them.
        output: [T, K] codes.
        output_scale: As there.
        output_block_scale: FP8: [T, G] float32, row-major or with stride 1 along tokens. NVFP4:
            the swizzled [ceil128(T), ceil4(K / 16)] e4m3.
        layout: What else is known of FP8 scales of groups.
    """
    codes = output.view(torch.uint8) if output.dtype == torch.float4_e2m1fn_x2 else output
    if codes.dim() != 2:
        fail(OP, "output", "have shape [T, columns]", list(codes.shape))
    if key.scheme != "fp8_group" and any(layout.said):
        fail(OP, "quant_*", f"be None or False for {key.scheme}", layout.said)
    data = codes.unsqueeze(1)
    if key == FP8_STATIC:
        assert output_scale is not None, "the key says so"
        return QuantizedTensor(data, None, Fp8Tensor(output_scale))
    assert output_block_scale is not None, "the key says so"
    if key == NVFP4:
        assert output_scale is not None, "the key says so"
        # The scales are those of the whole step, so their padding is ours to zero.
        total = output.shape[0]
        _check_swizzled(codes, output_block_scale)
        return QuantizedTensor(data, output_block_scale, Nvfp4(output_scale), total_tokens=total)
    fmt = _group_format(key, codes, output_block_scale, layout)
    return QuantizedTensor(data, output_block_scale.unsqueeze(1), fmt)


def _check_swizzled(codes: Tensor, scales: Tensor) -> None:
    """Check the scales of packed NVFP4 codes, eight bytes of which share one."""
    rows, columns = swizzled_shape(codes.shape[0], codes.shape[1] // 8)
    check_tensor(
        OP,
        "output_block_scale",
        scales,
        f"{rows} {columns}",
        {},
        dtype=torch.float8_e4m3fn,
        device=codes.device,
        contiguous=True,
        remedy="[ceil128(T), ceil4(K / 16)]; view bytes or words as float8_e4m3fn",
    )


def _group_format(key: QuantKey, codes: Tensor, scales: Tensor, layout: GroupLayout) -> OutFormat:
    """Return the format of FP8 groups, after checking what is said of it against the tensor."""
    if layout.group_size not in (None, key.group_size):
        requirement = f"be {key.group_size}, which the columns of output_block_scale say"
        fail(OP, "quant_group_size", requirement, layout.group_size)
    sizes, device = {"T": codes.shape[0]}, codes.device
    name = "output_block_scale"
    check_tensor(OP, name, scales, "T G", sizes, dtype=torch.float32, device=device)
    tokens, groups = scales.shape
    strides = f"strides {list(scales.stride())}"
    # With one token or one group both layouts may describe the same strides.
    col_major = layout.col_major
    if col_major is None:
        col_major = groups > 1 and tokens > 1 and scales.stride(0) < scales.stride(1)
    if col_major and tokens > 1 and scales.stride(0) != 1:
        fail(OP, name, "have stride 1 along tokens for quant_col_major", strides)
    if not col_major and groups > 1 and tokens > 0 and scales.stride(1) != 1:
        fail(OP, name, "have stride 1 along groups unless quant_col_major is true", strides)
    if layout.tma_aligned:
        if not col_major:
            fail(OP, "quant_tma_aligned", "be false unless quant_col_major is true", True)
        if groups > 1 and scales.stride(1) != ceil4(tokens):
            requirement = f"have stride(1) = {ceil4(tokens)} for quant_tma_aligned"
            fail(OP, name, requirement, strides)
    sf = "float32_pow2" if layout.pow2 else "float32"
    return Fp8Group(key.group_size, sf, "mn_major" if col_major else "row_major")
