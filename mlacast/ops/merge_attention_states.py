"""``merge_attention_states``: combine attention over disjoint keys, then quantise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlacast.descriptors.out_format import OutFormat
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import check_choice, check_tensor, fail
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.output import Output, features_of, from_arguments, prepare_output
from mlacast.ops.overlap import check_no_overlap
from mlacast.ops.query import check_backend

OP = "merge_attention_states"
LSE_LAYOUTS = ("ht", "th")
_PART_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def merge_attention_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    lse_layout: str = "ht",
    out: Output | None = None,
    out_format: OutFormat | None = None,
    num_groups: int = 1,
    backend: str | None = None,
) -> tuple[Output, torch.Tensor]:
    """Merge partial attention results over disjoint keys; optionally quantise the merged value.

    In float32, in the order of the lists: ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i
        - lse) * out_i``.

    A part is empty for a (token, head) whose lse is -inf or +inf, both markers being in use
    elsewhere; what its output holds there, NaN included, is not read. One live part among empties
    comes back unchanged. There is no sink argument: a finite sink joins as a part with output 0 and
    lse = sink (a sink of +inf cannot: +inf marks an empty part).

    Args:
        outs: One or more parts [T, h, d], bfloat16, float16 or float32, last dimension contiguous.
        lses: As many natural-log sums, float32, [h, T] for "ht" or [T, h] for "th".
        lse_layout: Layout of ``lses`` and of the returned lse.
        out: Buffer to fill: a bfloat16 tensor [T, h, d], or a QuantizedTensor with T tokens.
        out_format: Format of the output; None means bfloat16, or that of ``out``.
        num_groups: Groups of the QuantizedTensor allocated when ``out`` is None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        out: ``out`` itself if given, else a bfloat16 tensor [T, h, d] or a QuantizedTensor
            (any other format, or num_groups > 1).
        lse: float32 in ``lse_layout``. Where every part is empty: zeros and -inf. Zero tokens give
            empty results.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits.

    Source: the merge of vLLM's ``merge_attn_states`` (natural log, +inf read as -inf).
    """
    values = (outs, lses, lse_layout, out, out_format, num_groups, backend)
    repeated: tuple[Output, torch.Tensor] | None = PUBLIC.repeat(OP, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(OP, values)
    if known is None:
        _check(outs, lses, lse_layout, backend)
    device, shape = outs[0].device, tuple(outs[0].shape)
    result, target = prepare_output(
        OP, out, out_format, num_groups, shape=shape, device=device, known=known
    )
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=device)
    arguments = (
        list(outs),
        list(lses),
        target.data,
        target.sf,
        lse,
        lse_layout,
        target.out_format,
        target.scale,
        target.row_start,
        target.total_tokens,
        backend or "",
    )
    fresh = (lse, *target.fresh)
    returned = (result, lse)
    call_operator(
        torch.ops.mlacast.merge_attention_states, OP, known, values, arguments, fresh, returned
    )
    return returned


def _check(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    lse_layout: str,
    backend: str | None,
) -> None:
    """Check the arguments of ``merge_attention_states``, those about its output apart."""
    check_choice(OP, "lse_layout", lse_layout, LSE_LAYOUTS)
    check_backend(OP, backend)
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(f"{OP}: {name} must be a list of tensors, got {type(parts).__name__}")
    if len(outs) == 0 or len(outs) != len(lses):
        fail(OP, "lses", "have as many parts as outs, at least one", f"{len(lses)} for {len(outs)}")
    sizes: dict[str, Any] = {}
    device = outs[0].device if isinstance(outs[0], torch.Tensor) else None
    for part, tensor in enumerate(outs):
        check_tensor(
            OP,
            f"outs[{part}]",
            tensor,
            "T h d",
            sizes,
            dtype=_PART_DTYPES,
            device=device,
            last_dim_contiguous=True,
        )
    dims = "h T" if lse_layout == "ht" else "T h"
    for part, tensor in enumerate(lses):
        check_tensor(OP, f"lses[{part}]", tensor, dims, sizes, dtype=torch.float32, device=device)


def required_features(out_format: str) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return features_of(out_format)


def run(
    outs: list[torch.Tensor],
    lses: list[torch.Tensor],
    out_data: torch.Tensor,
    out_sf: torch.Tensor | None,
    lse: torch.Tensor,
    lse_layout: str,
    out_format: str,
    out_scale: torch.Tensor | None,
    row_start: int,
    total_tokens: int,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.merge_attention_states``."""
    device = outs[0].device
    impl = select(
        OP, required_features(out_format), arch_of(device), requested_backend(OP, backend)
    )
    if outs[0].shape[0] == 0:
        return None
    inputs = [(f"outs[{part}]", tensor) for part, tensor in enumerate(outs)]
    inputs += [(f"lses[{part}]", tensor) for part, tensor in enumerate(lses)]
    check_no_overlap(OP, [("out", out_data), ("out.sf", out_sf), ("lse", lse)], inputs)
    return load(impl.target)(
        outs,
        lses,
        lse_layout=lse_layout,
        out=from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens),
        lse=lse,
    )
