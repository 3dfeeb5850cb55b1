"""A token range of a quantised buffer: codes, scale factors, format and place in the whole.

Slices share storage. Codes and most scale factors of a range are strided views of its rows; rows of
swizzled scale factors cannot be views, so every Nvfp4 range carries the whole scale buffer and its
absolute first row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlacast.descriptors.out_format import Nvfp4, OutFormat
from mlacast.descriptors.quantized_checks import check_data, check_sf
from mlacast.errors import check_type, fail
from mlacast.formats import (
    decode_e4m3,
    dequantize_fp8_group,
    dequantize_nvfp4,
    unpack_e2m1,
    unpack_ue8m0_words,
)
from mlacast.layouts.element_order import from_chunk32
from mlacast.layouts.sf_mn_major import allocate_mn_major_padded, ceil4
from mlacast.layouts.sf_row_major import allocate_row_major
from mlacast.layouts.sf_swizzled_128x4 import gather_swizzled, swizzled_shape

OP = "QuantizedTensor"
# Sizes are symbols while a graph is traced with dynamic shapes.
INTS = (int, torch.SymInt)
# More rows than memory holds, and few enough for offsets in 64 bits.
MAX_TOKENS = 2**40


class QuantizedTensor:
    """Codes and scale factors of ``num_tokens`` consecutive tokens of a buffer of ``total_tokens``.

    Args:
        data: [num_tokens, num_groups, features], halved last dimension for Nvfp4, in
            ``format.data_dtype``; last dimension contiguous. Only the rows of the range.
        sf: None for formats without scale factors. Else [num_tokens, num_groups, words] in
            ``format.sf_dtype``, only the rows of the range: row-major, or MN-major with stride 1
            along tokens and columns that do not overlap. For Nvfp4 the whole buffer
            [ceil128(total_tokens), ceil4(num_groups * features / 16)] e4m3, contiguous.
        format: Output format of both.
        row_start: Absolute row of the first token in the whole buffer.
        num_tokens: Tokens of the range; None takes them from ``data``.
        total_tokens: Tokens of the whole buffer. Whoever writes the range that ends the buffer also
            zeroes the padding of the scale factors. None: data that starts at row 0 and fills its
            storage, with scale factors laid out for its rows, is the whole buffer. Of any other
            range, and of every one made inside a compiled function, the total stays unknown, and
            padding, which may be rows of somebody else, is left alone.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A shape, dtype, stride, device or row that breaks the contract above.
    """

    def __init__(
        self,
        data: Tensor,
        sf: Tensor | None,
        format: OutFormat,
        row_start: int = 0,
        num_tokens: int | None = None,
        total_tokens: int | None = None,
    ) -> None:
        check_type(OP, "format", format, OutFormat, "an OutFormat")
        check_type(OP, "row_start", row_start, INTS, "an int")
        for name, tokens in (("num_tokens", num_tokens), ("total_tokens", total_tokens)):
            if tokens is not None:
                check_type(OP, name, tokens, INTS, "an int or None")
        check_data(OP, data, format)
        rows = data.shape[0]
        if num_tokens is not None and num_tokens != rows:
            fail(OP, "num_tokens", f"be the {rows} rows of data", num_tokens)
        if row_start < 0:
            fail(OP, "row_start", "be at least 0", row_start)
        last = row_start if total_tokens is None else total_tokens
        if last > MAX_TOKENS:
            name = "row_start" if total_tokens is None else "total_tokens"
            fail(OP, name, f"be at most {MAX_TOKENS}", last)
        if total_tokens is not None and total_tokens < row_start + rows:
            requirement = f"be at least row_start + num_tokens = {row_start + rows}"
            fail(OP, "total_tokens", requirement, total_tokens)
        self.data = data
        self.format = format
        self.row_start = row_start
        self.num_tokens = rows
        self.total_tokens = total_tokens
        check_sf(OP, sf, data, self.features, row_start + rows, total_tokens, format)
        if total_tokens is None and row_start == 0 and _is_whole_buffer(data, sf, format):
            self.total_tokens = rows
        self._sf_rows = sf
        if sf is not None and self._may_own_padding:
            self._sf_rows = _with_mn_major_padding(sf, row_start + rows)

    @staticmethod
    def empty(
        num_tokens: int,
        num_groups: int,
        features: int,
        format: OutFormat,
        device: torch.device | str = "cpu",
    ) -> QuantizedTensor:
        """Allocate a whole buffer: uninitialised codes, zeroed scale factors with zeroed padding.

        Args:
            num_tokens: Tokens, 0 allowed.
            num_groups: Groups of a token; ``num_groups * features`` is ``h_q * d_v``.
            features: Values of a group, a multiple of the format's scale block (512 for chunk32).
            format: Output format.
            device: Where to allocate.
        """
        op = "QuantizedTensor.empty"
        check_type(op, "num_tokens", num_tokens, INTS, "an int")
        check_type(op, "num_groups", num_groups, INTS, "an int")
        check_type(op, "features", features, INTS, "an int")
        check_type(op, "format", format, OutFormat, "an OutFormat")
        if num_tokens < 0:
            fail(op, "num_tokens", "be at least 0", num_tokens)
        if num_groups < 1:
            fail(op, "num_groups", "be at least 1", num_groups)
        format.check_features(op, features)
        shape = (num_tokens, num_groups, format.data_features(features))
        data = torch.empty(shape, dtype=format.data_dtype, device=device)
        sf = _allocate_sf(num_tokens, num_groups, features, format, device)
        rows = sf[:num_tokens] if sf is not None and format.sf_layout == "mn_major" else sf
        buffer = QuantizedTensor(data, rows, format, total_tokens=num_tokens)
        buffer._sf_rows = sf
        return buffer

    @property
    def sf(self) -> Tensor | None:
        """Scale factors: the rows of the range, the whole buffer for Nvfp4, None without any."""
        rows = self._sf_rows
        if rows is None or not self._may_own_padding:
            return rows
        return rows[: self.num_tokens]

    @property
    def num_groups(self) -> int:
        """Groups of a token."""
        return self.data.shape[1]

    @property
    def features(self) -> int:
        """Values of a group (twice the bytes of ``data`` for Nvfp4)."""
        width = self.data.shape[2]
        return width * 2 if isinstance(self.format, Nvfp4) else width

    @property
    def device(self) -> torch.device:
        """Where the buffer lives."""
        return self.data.device

    @property
    def ends_buffer(self) -> bool:
        """Whether the range is known to hold the last token; its writer zeroes the padding."""
        return self.row_start + self.num_tokens == self.total_tokens

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, index: slice) -> QuantizedTensor:
        """Return the token range ``index`` of the same storage; bounds as in Python, step 1."""
        check_type(OP, "index", index, slice, "a slice of tokens")
        if index.step is not None and index.step != 1:
            fail(OP, "index", "have step 1", index.step)
        start = _bound(index.start, 0, self.num_tokens)
        stop = _bound(index.stop, self.num_tokens, self.num_tokens)
        stop = max(start, stop)
        rows, swizzled = self._sf_rows, self.format.sf_layout == "swizzled_128x4"
        part = QuantizedTensor(
            self.data[start:stop],
            rows if rows is None or swizzled else rows[start:stop],
            self.format,
            self.row_start + start,
            total_tokens=self.total_tokens,
        )
        if rows is not None and part._may_own_padding:
            part._sf_rows = rows[start:]
        return part

    def __repr__(self) -> str:
        stop = self.row_start + self.num_tokens
        total = "an unknown total" if self.total_tokens is None else self.total_tokens
        return (
            f"QuantizedTensor(tokens {self.row_start}:{stop} of {total}, "
            f"num_groups={self.num_groups}, features={self.features}, "
            f"format={self.format!r}, device={self.device})"
        )

    @property
    def _may_own_padding(self) -> bool:
        """Whether the rows that pad MN-major columns are part of what this range writes.

        An empty range owns nothing: the range before it ends the buffer as well.
        """
        return self.format.sf_layout == "mn_major" and self.ends_buffer and self.num_tokens > 0

    def sf_rows_with_padding(self) -> Tensor | None:
        """Return the scale factors that the writer of this range owns, None if there are none.

        The rows of the range; and, when the range ends an MN-major buffer, also the rows that pad
        each column to ``ceil4(total_tokens)``, provided the columns are that far apart and the
        storage reaches so far. For Nvfp4 the whole buffer. A buffer that a compiled function makes
        from tensors of the caller (not by `empty`) counts as having no such rows.
        """
        return self._sf_rows

    def with_sf_rows(self, sf: Tensor) -> QuantizedTensor:
        """Take ``sf`` in place of an equal view of the same memory, and return this buffer.

        Launches find the tensors of a call by identity. A view of other rows than those of
        `sf_rows_with_padding` is left alone.
        """
        rows = self._sf_rows
        if rows is not None and rows.shape == sf.shape and rows.stride() == sf.stride():
            self._sf_rows = sf
        return self

    def dequantize(self) -> Tensor:
        """Return the values, float32 [num_tokens, num_groups, features], in natural head order.

        The buffer's own scale is multiplied in, or divided out for Nvfp4. Padding is not read.
        """
        format, data, sf = self.format, self.data, self.sf
        if sf is None:
            if data.dtype == torch.bfloat16:
                return data.float()
            values, scale = decode_e4m3(data), format.scale_tensor(self.device)
            return values if scale is None else values * scale
        if isinstance(format, Nvfp4):
            codes, words = unpack_e2m1(data), format.sf_words(self.features)
            rows = gather_swizzled(sf, self.row_start, self.num_tokens, self.num_groups * words)
            factors = rows.view(self.num_tokens, self.num_groups, words)
            return dequantize_nvfp4(codes, factors, format.scale_tensor(self.device))
        factors = sf.contiguous()
        if format.sf_kind == "ue8m0_packed":
            factors = unpack_ue8m0_words(factors, self.features // format.sf_vec_size)
        values = dequantize_fp8_group(data, factors, format.sf_vec_size)
        return from_chunk32(values) if format.order == "chunk32" else values


def _allocate_sf(
    num_tokens: int, num_groups: int, features: int, format: OutFormat, device: torch.device | str
) -> Tensor | None:
    """Return zeroed scale factors of a whole buffer, with the rows that pad MN-major columns."""
    dtype, words = format.sf_dtype, format.sf_words(features)
    if dtype is None:
        return None
    if format.sf_layout == "swizzled_128x4":
        shape = swizzled_shape(num_tokens, num_groups * words)
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
    if format.sf_layout == "mn_major":
        return allocate_mn_major_padded(num_tokens, num_groups, words, dtype, device)
    return allocate_row_major(num_tokens, num_groups, words, dtype, device)


def _is_whole_buffer(data: Tensor, sf: Tensor | None, format: OutFormat) -> bool:
    """Whether checked tensors of rows from 0 on are a buffer of their own, not a range of one."""
    rows = data.shape[0]
    if sf is None or format.sf_layout == "row_major":
        return True
    if torch.compiler.is_compiling():
        return False
    # Scale columns are padded, so theirs look alike for a range and a whole; codes are not.
    if data.numel() * data.element_size() != data.untyped_storage().nbytes():
        return False
    if format.sf_layout == "swizzled_128x4":
        return sf.shape[0] == swizzled_shape(rows, sf.shape[1])[0]
    return sf.shape[2] == 1 or sf.stride(2) == ceil4(rows)


def _with_mn_major_padding(sf: Tensor, total_tokens: int) -> Tensor:
    """Extend the last rows of an MN-major buffer by the rows that pad its columns, if it has them.

    It has them when every column reaches ``ceil4(total_tokens)`` before the next one starts and
    before the storage ends.
    """
    num_tokens, groups, words = sf.shape
    padding = ceil4(total_tokens) - total_tokens
    # Storage cannot be asked while a compiler traces, and padding outside of what it sees as the
    # tensor would be lost when it makes mutation explicit.
    if torch.compiler.is_compiling() or padding == 0 or num_tokens == 0:
        return sf
    column = total_tokens + padding
    if words > 1 and sf.stride(2) < column:
        return sf
    if groups > 1 and sf.stride(1) < (words - 1) * sf.stride(2) + column:
        return sf
    last = sf.storage_offset() + (groups - 1) * sf.stride(1) + (words - 1) * sf.stride(2)
    if (last + num_tokens + padding) * sf.element_size() > sf.untyped_storage().nbytes():
        return sf
    return sf.as_strided((num_tokens + padding, groups, words), (1, sf.stride(1), sf.stride(2)))


def _bound(value: int | None, default: int, length: int) -> int:
    """Read one bound of a slice as Python does: negative from the end, clamped to 0..length."""
    if value is None:
        return default
    check_type(OP, "index", value, INTS, "a slice of ints")
    if value < 0:
        value = value + length
    return min(max(value, 0), length)
