"""What ``QuantizedTensor`` asks of its tensors: shapes, dtypes, devices and strides."""

from __future__ import annotations

from torch import Tensor

from mlacast.descriptors.out_format import Nvfp4, OutFormat
from mlacast.errors import check_tensor, fail
from mlacast.layouts.sf_swizzled_128x4 import swizzled_shape


def check_data(op: str, data: object, format: OutFormat) -> None:
    """Check codes [num_tokens, num_groups, features] (half the features for Nvfp4)."""
    dims = "num_tokens num_groups features"
    if isinstance(format, Nvfp4):
        dims = "num_tokens num_groups features/2"
    remedy = f"the format is {format.key}"
    check_tensor(op, "data", data, dims, {}, dtype=format.data_dtype, remedy=remedy)
    assert isinstance(data, Tensor), "check_tensor let something else than a tensor pass"
    if data.shape[1] < 1 or data.shape[2] < 1:
        fail(op, "data", "have at least one group of one feature", f"shape {list(data.shape)}")
    if data.shape[0] > 0:
        check_row_strides(op, "data", data)


def check_sf(
    op: str,
    sf: Tensor | None,
    data: Tensor,
    features: int,
    stop: int,
    total_tokens: int | None,
    format: OutFormat,
) -> None:
    """Check the scale factors that belong to checked codes of ``features`` values per group.

    ``stop`` is the absolute row after the range.
    """
    if not format.has_sf:
        if sf is not None:
            fail(op, "sf", f"be None for {format.key}", type(sf).__name__)
        return
    if sf is None:
        fail(op, "sf", f"be given for {format.key}", None)
    format.check_features(op, features)
    num_tokens, num_groups = data.shape[0], data.shape[1]
    words = format.sf_words(features)
    device, dtype = data.device, format.sf_dtype
    if format.sf_layout == "swizzled_128x4":
        rows = stop if total_tokens is None else total_tokens
        sf_rows, sf_columns = swizzled_shape(rows, num_groups * words)
        sizes = {"sf_rows": sf_rows, "sf_columns": sf_columns}
        if total_tokens is None and isinstance(sf, Tensor) and sf.dim() == 2:
            # The total is unknown: any whole number of tiles that holds the range will do.
            sizes["sf_rows"] = max(sf_rows, sf.shape[0] // 128 * 128)
        remedy = "the whole buffer is wanted, [ceil128(total_tokens), ceil4(blocks per token)]"
        dims = "sf_rows sf_columns"
        check_tensor(op, "sf", sf, dims, sizes, dtype=dtype, device=device, remedy=remedy)
        if not sf.is_contiguous():
            fail(op, "sf", "be contiguous", f"strides {list(sf.stride())}")
        return
    sizes = {"num_tokens": num_tokens, "num_groups": num_groups, "words": words}
    check_tensor(op, "sf", sf, "num_tokens num_groups words", sizes, dtype=dtype, device=device)
    if num_tokens == 0:
        return
    if format.sf_layout == "mn_major":
        _check_mn_major(op, sf)
    else:
        check_row_strides(op, "sf", sf)


def check_row_strides(op: str, argument: str, x: Tensor) -> None:
    """Require a contiguous last dimension and rows of tokens and groups that do not overlap."""
    tokens, groups, width = x.shape
    # A dimension of size 1 has no meaningful stride.
    token_stride = x.stride(0) if tokens > 1 else groups * width
    group_stride = x.stride(1) if groups > 1 else width
    contiguous = width == 1 or x.stride(2) == 1
    token_major = group_stride >= width and token_stride >= (groups - 1) * group_stride + width
    if contiguous and token_major:
        return
    group_major = token_stride >= width and group_stride >= (tokens - 1) * token_stride + width
    if not (contiguous and groups > 1 and group_major):
        requirement = "have a contiguous last dimension and rows that do not overlap"
        fail(op, argument, requirement, f"strides {list(x.stride())} for shape {list(x.shape)}")


def _check_mn_major(op: str, sf: Tensor) -> None:
    """Require stride 1 along tokens and columns that do not overlap."""
    tokens, groups, words = sf.shape
    word_stride = sf.stride(2) if words > 1 else tokens
    group_stride = sf.stride(1) if groups > 1 else words * word_stride
    unit = tokens == 1 or sf.stride(0) == 1
    if not (unit and word_stride >= tokens and group_stride >= words * word_stride):
        requirement = "be MN-major: strides (1, >= words * stride(2), >= num_tokens)"
        fail(op, "sf", requirement, f"strides {list(sf.stride())} for shape {list(sf.shape)}")
