"""Caller-owned or fresh output buffers, flattened for the registered operations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlacast.descriptors.out_format import Bf16, OutFormat, out_format_from_key
from mlacast.descriptors.quantized_checks import check_row_strides
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import check_tensor, check_type, dtype_name, fail
from mlacast.ops.known_call import KnownCall

D_V = 512
_RESULT_DIMS = {3: "T h d", 4: "B Q h d"}
Output = torch.Tensor | QuantizedTensor


class OutputArguments(NamedTuple):
    """An output buffer as a registered operation takes it; see ``mlacast.ops._schemas``.

    ``is_fresh`` says that it was allocated for the call, so nothing else can share its memory.
    """

    data: torch.Tensor
    sf: torch.Tensor | None
    out_format: str
    scale: torch.Tensor | None
    row_start: int
    total_tokens: int
    is_fresh: bool = False

    @property
    def fresh(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors of a fresh buffer, nothing of the caller's."""
        return (self.data, self.sf) if self.is_fresh else ()


def to_arguments(buffer: QuantizedTensor, is_fresh: bool = False) -> OutputArguments:
    """Flatten a buffer; scales come with the padding rows that its writer has to zero."""
    total_tokens = buffer.total_tokens
    if total_tokens is None:
        # Unknown: any total past the range says that its writer owns no padding.
        stop = buffer.row_start + buffer.num_tokens
        sf = buffer.sf
        swizzled = sf is not None and buffer.format.sf_layout == "swizzled_128x4"
        total_tokens = sf.shape[0] if sf is not None and swizzled else stop + 1
    return OutputArguments(
        buffer.data,
        buffer.sf_rows_with_padding(),
        buffer.format.key,
        buffer.format.scale_tensor(buffer.data.device),
        buffer.row_start,
        total_tokens,
        is_fresh,
    )


def from_arguments(
    data: torch.Tensor,
    sf: torch.Tensor | None,
    out_format: str,
    scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
) -> QuantizedTensor:
    """Rebuild the buffer that ``to_arguments`` flattened."""
    fmt = out_format_from_key(out_format, scale)
    rows = sf
    if sf is not None and out_format != "nvfp4":
        rows = sf[: data.shape[0]]
    buffer = QuantizedTensor(data, rows, fmt, row_start, data.shape[0], total_tokens)
    return buffer if sf is None else buffer.with_sf_rows(sf)


def features_of(out_format: str) -> frozenset[str]:
    """Features that a backend needs to write a format."""
    return frozenset({f"out:{out_format}"})


def _check_format(op: str, out_format: OutFormat | None) -> OutFormat:
    if out_format is None:
        return Bf16()
    check_type(op, "out_format", out_format, OutFormat, "an OutFormat such as mlacast.Mxfp8()")
    return out_format


def _features_per_group(op: str, fmt: OutFormat, num_groups: int, total_features: int) -> int:
    """Split the features of a token into groups that the format can hold."""
    check_type(op, "num_groups", num_groups, int, "an int")
    if num_groups < 1 or total_features % num_groups:
        fail(op, "num_groups", f"divide the {total_features} features of a token", num_groups)
    features = total_features // num_groups
    fmt.check_features(op, features)
    return features


def prepare_output(
    op: str,
    out: Output | None,
    out_format: OutFormat | None,
    num_groups: int,
    *,
    shape: tuple[int, ...],
    device: torch.device,
    known: KnownCall | None = None,
) -> tuple[Output, OutputArguments]:
    """Check the caller's buffer, or allocate one, for a result of ``shape`` [..., h, d].

    The leading dimensions are tokens; a QuantizedTensor holds them flattened.

    Args:
        op: Name for messages.
        out: None, a bfloat16 tensor of ``shape`` (tokens at one free stride), or a QuantizedTensor
            of any format.
        out_format: Format to allocate; with ``out`` given it has to agree with it. None: Bf16, or
            that of ``out``.
        num_groups: Groups of the allocated QuantizedTensor; with ``out`` given it is 1 or agrees
            with it.
        shape: Shape of the result.
        device: Device of the inputs.
        known: The call, if these arguments passed the checks before; they are not repeated.

    Returns:
        The object to hand to the caller (``out`` itself if given) and the arguments for the
        registered operation.
    """
    tokens = 1
    for size in shape[:-2]:
        tokens = tokens * size
    total_features = shape[-2] * shape[-1]
    if isinstance(out, QuantizedTensor):
        if known is not None:
            return out, to_arguments(out)
        if out_format is not None and _check_format(op, out_format) != out.format:
            fail(op, "out_format", f"agree with out.format {out.format!r}", repr(out_format))
        if num_groups not in (1, out.num_groups):
            fail(op, "num_groups", f"be 1 or out.num_groups={out.num_groups}", num_groups)
        if out.num_tokens != tokens:
            fail(
                op,
                "out",
                f"have num_tokens={tokens}",
                out.num_tokens,
                "slice the buffer: buffer[a:b]",
            )
        if out.num_groups * out.features != total_features:
            actual = f"{out.num_groups} * {out.features} = {out.num_groups * out.features}"
            fail(op, "out", f"have num_groups * features = {total_features}", actual)
        if out.data.device != device:
            fail(op, "out", f"be on {device} like the other arguments", out.data.device)
        return out, to_arguments(out)
    fmt = _check_format(op, out_format)
    if isinstance(out, torch.Tensor):
        if known is not None:
            flat = _flatten_tokens(op, out)
            return out, OutputArguments(flat, None, fmt.key, None, 0, tokens)
        if not isinstance(fmt, Bf16):
            fail(
                op,
                "out",
                f"be a QuantizedTensor for out_format={fmt!r}",
                f"a Tensor of {dtype_name(out.dtype)}",
            )
        if num_groups != 1:
            fail(op, "num_groups", "be 1 for a plain Tensor out", num_groups)
        # Sizes are bound by name: a size may be symbolic, which has no text while tracing.
        names = _RESULT_DIMS[len(shape)]
        check_tensor(
            op,
            "out",
            out,
            names,
            dict(zip(names.split(), shape, strict=True)),
            dtype=torch.bfloat16,
            device=device,
            last_dim_contiguous=True,
        )
        flat = _flatten_tokens(op, out)
        if tokens > 0:
            check_row_strides(op, "out", flat)
        return out, OutputArguments(flat, None, fmt.key, None, 0, tokens)
    if out is not None:
        raise TypeError(
            f"{op}: out must be None, a Tensor or a QuantizedTensor, got {type(out).__name__}"
        )
    if isinstance(fmt, Bf16) and num_groups == 1:
        fresh = torch.empty(shape, dtype=torch.bfloat16, device=device)
        flat = fresh if fresh.dim() == 3 else fresh.flatten(0, -3)
        return fresh, OutputArguments(flat, None, fmt.key, None, 0, tokens, True)
    features = _features_per_group(op, fmt, num_groups, total_features)
    buffer = QuantizedTensor.empty(tokens, num_groups, features, fmt, device)
    return buffer, to_arguments(buffer, True)


def _flatten_tokens(op: str, out: torch.Tensor) -> torch.Tensor:
    """View [B, Q, h, d] as [B * Q, h, d]; a [T, h, d] tensor is returned as it is."""
    if out.dim() == 3:
        return out
    batch, per_request = out.shape[0], out.shape[1]
    if batch > 1 and per_request > 1 and out.stride(0) != per_request * out.stride(1):
        fail(
            op,
            "out",
            "have tokens at one step (stride(0) = Q * stride(1))",
            f"strides {list(out.stride())}",
        )
    step = out.stride(1) if per_request > 1 else out.stride(0)
    return out.as_strided((batch * per_request, *out.shape[2:]), (step, *out.stride()[2:]))
