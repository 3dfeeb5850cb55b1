"""What the public functions ``grouped_out_project`` and ``quantized_linear`` share: the call."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.project_weights import (
    as_bytes,
    check_project_arguments,
    empty_product,
    source_arguments,
)


def call_project(
    op: str,
    operator: Any,
    out: QuantizedTensor,
    weight: torch.Tensor,
    weight_sf: torch.Tensor | None,
    weight_order: str,
    backend: str | None,
    *,
    is_grouped: bool,
) -> torch.Tensor:
    """Check the arguments unless the call is known, allocate the product, call the operator."""
    values = (out, weight, weight_sf, weight_order, backend)
    repeated: torch.Tensor | None = PUBLIC.repeat(op, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(op, values)
    if known is None:
        check_project_arguments(
            op, out, weight, weight_sf, weight_order, backend, is_grouped=is_grouped
        )
    projected = empty_product(out, weight)
    source = source_arguments(out, weight_order)
    arguments = (
        source.data,
        source.sf,
        weight,
        as_bytes(weight_sf),
        projected,
        source.out_format,
        source.scale,
        source.row_start,
        source.total_tokens,
        backend or "",
    )
    call_operator(operator, op, known, values, arguments, (projected,), projected)
    return projected
