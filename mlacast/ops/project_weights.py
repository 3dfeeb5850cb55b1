"""Weights of ``grouped_out_project`` and ``quantized_linear``: checks, and features of a call."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.out_format import Mxfp8
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import check_choice, check_tensor, check_type, dtype_name, fail
from mlacast.ops.output import OutputArguments, features_of, to_arguments
from mlacast.ops.query import check_backend

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODES = torch.float8_e4m3fn
BLOCK = 128
GROUP = 32
WEIGHT_ORDERS = ("head", "buffer")
# Copies of 16 bytes, places as int32.
_ALIGNMENT = 16
_FARTHEST = 2**31
# Tokens, columns and features of a group from which on a vendor's product is the faster one, though
# it is a launch for each group; smaller ones have not been compared, but for few tokens.
_LARGE = (4096, 1024, 4096)


def check_project_arguments(
    op: str,
    out: object,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    weight_order: str,
    backend: str | None,
    *,
    is_grouped: bool,
) -> None:
    """Check the arguments of either operation.

    Args:
        op: Name for messages.
        out: What has to be a QuantizedTensor [T, g, f].
        weight: [g, d_out, f] if grouped, else [d_out, g * f].
        weight_sf: Its scales, or None.
        weight_order: "head" or "buffer".
        backend: Name asked for.
        is_grouped: Which of the operations.
    """
    check_type(op, "out", out, QuantizedTensor, "a QuantizedTensor")
    assert isinstance(out, QuantizedTensor), "checked above"
    groups, features = out.num_groups, out.features
    sizes: dict[str, Any] = {"g": groups, "f": features}
    dims = "g d_out f"
    if not is_grouped:
        sizes, dims = {"K": groups * features}, "d_out K"
    device = out.data.device
    check_tensor(
        op,
        "weight",
        weight,
        dims,
        sizes,
        dtype=(*PLAIN_DTYPES, CODES),
        device=device,
        last_dim_contiguous=True,
    )
    check_choice(op, "weight_order", weight_order, WEIGHT_ORDERS)
    check_backend(op, backend)
    if weight_sf is None:
        if weight.dtype == CODES:
            remedy = "ones where codes are the weights"
            fail(op, "weight_sf", "be given for weights in float8_e4m3fn", None, remedy)
        return
    check_type(op, "weight_sf", weight_sf, torch.Tensor, "a torch.Tensor or None")
    if weight.dtype != CODES:
        fail(op, "weight_sf", f"be None for weights in {dtype_name(weight.dtype)}", "a tensor")
    _check_scales(op, weight, weight_sf, features, device)


def _check_scales(
    op: str,
    weight: torch.Tensor,
    weight_sf: torch.Tensor,
    features: int,
    device: torch.device,
) -> None:
    """Check the scales of e4m3 weights."""
    *lead, rows, columns = weight.shape
    dtypes = (torch.float32, torch.uint8, torch.float8_e8m0fnu, torch.int32)
    if weight_sf.dtype not in dtypes:
        wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
        fail(op, "weight_sf", f"have dtype {wanted}", dtype_name(weight_sf.dtype))
    if weight_sf.dtype == torch.float32:
        shape = [*lead, -(-rows // BLOCK), -(-columns // BLOCK)]
        meaning = "a scale for each 128x128 block"
    else:
        step = BLOCK if weight_sf.dtype == torch.int32 else GROUP
        if features % step:
            requirement = f"be float32 unless groups have a multiple of {step} features"
            fail(op, "weight_sf", requirement, f"{features} features")
        shape = [*lead, rows, columns // step]
        meaning = "four packed scales a word" if step == BLOCK else "a scale for each 32 features"
    if list(weight_sf.shape) != shape:
        fail(op, "weight_sf", f"have shape {shape}", list(weight_sf.shape), meaning)
    if weight_sf.device != device:
        fail(op, "weight_sf", f"be on {device} like the other arguments", weight_sf.device)
    if weight_sf.element_size() == 1 and not weight_sf.is_contiguous():
        actual = f"strides {list(weight_sf.stride())}"
        fail(op, "weight_sf", "be contiguous if it is bytes", actual)


def as_bytes(weight_sf: torch.Tensor | None) -> torch.Tensor | None:
    """Scales as the operators take them: float8_e8m0fnu as uint8."""
    if weight_sf is not None and weight_sf.dtype == torch.float8_e8m0fnu:
        return weight_sf.view(torch.uint8)
    return weight_sf


def empty_product(out: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
    """Where the product goes: [T, ...] with the dimensions of ``weight`` but the last."""
    dtype = torch.bfloat16 if weight.dtype == CODES else weight.dtype
    shape = (out.num_tokens, *weight.shape[:-1])
    return torch.empty(shape, dtype=dtype, device=weight.device)


def source_arguments(out: QuantizedTensor, weight_order: str) -> OutputArguments:
    """Flatten what is multiplied.

    Weights in the order of the buffer fit its features as they stand, which is what reading it as
    one in head order gives.
    """
    source = to_arguments(out)
    if weight_order == "buffer" and out.format.order == "chunk32":
        return source._replace(out_format=Mxfp8("head").key)
    return source


def project_features(
    out: QuantizedTensor, weight: torch.Tensor, weight_sf: torch.Tensor | None, weight_order: str
) -> frozenset[str]:
    """Features that a backend needs for a call."""
    needed = set(features_of(source_arguments(out, weight_order).out_format))
    data, sf = out.data, out.sf
    if out.features % BLOCK:
        needed.add("features:partial_blocks")
    if weight_sf is None:
        needed.add("weights:plain")
    elif weight_sf.dtype == torch.float32:
        needed.add("weights:blocks_128")
        if not weight_sf.is_contiguous():
            needed.add("weights:strided_scales")
    else:
        needed.add("weights:groups_32")
        if out.features % BLOCK:
            needed.add("weights:partial_words")
        if weight_sf.element_size() == 1 and weight_sf.data_ptr() % 4:
            needed.add("weights:unaligned_scales")
    strides = (*data.stride()[:2], *weight.stride()[:-1])
    places = (data.data_ptr(), weight.data_ptr())
    if any(number % _ALIGNMENT for number in (*strides, *places)):
        needed.add("rows:unaligned")
    farthest = sum((n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True))
    last_group = (data.shape[1] - 1) * data.stride(1)
    if max(farthest, last_group) >= _FARTHEST:
        needed.add("operands:far_apart")
    if sf is not None and out.format.sf_layout == "swizzled_128x4" and sf.data_ptr() % 4:
        needed.add("scales:unaligned")
    if sf is not None and out.format.sf_layout == "mn_major":
        column = -(-out.num_tokens // 4) * 4
        words = sf.shape[2]
        if sf.stride() != (1, words * column, column):
            needed.add("scales:of_a_range")
    if out.num_tokens % 4:
        needed.add("tokens:not_of_4")
    if out.features % (4 * BLOCK):
        needed.add("features:not_of_512")
    for step in (8, 16):
        if weight.shape[-2] % step:
            needed.add(f"columns:not_of_{step}")
    sizes = (out.num_tokens, weight.shape[-2], out.features)
    if any(size < large for size, large in zip(sizes, _LARGE, strict=True)):
        needed.add("product:small")
    return frozenset(needed)
