"""``torch.ops.mlacast.mla_attention``: a whole step of an MLA layer as one operator.

Like the operators of the core it returns nothing, and its outputs are mutated arguments; its fake
kernel has nothing to compute. A compiled layer calls it once, whatever requests are in the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Bf16
from mlacast.layers.layer_step import LayerSettings, LayerStep
from mlacast.layers.live_metadata import with_number
from mlacast.layers.metadata import MLAMetadata
from mlacast.ops.output import Output, OutputArguments, from_arguments, to_arguments
from mlacast.ops.signature import nobody_listens

OP = "MLAAttention.forward"
SCHEMA = (
    "mla_attention(Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor kv_cache, Tensor kv_b_proj, "
    "Tensor metadata, Tensor(a!) out_data, Tensor(b!)? out_sf, Tensor(c!)? lse, Tensor? indices, "
    "Tensor? topk_length, float scale, str kv_format, float q_scale, Tensor? q_scale_tensor, "
    "float k_scale, Tensor? k_scale_tensor, SymInt context_workspace_tokens, str dcp_group, "
    "str out_format, Tensor? out_scale, SymInt row_start, SymInt total_tokens) -> ()"
)


def run_step(settings: LayerSettings, step: LayerStep, metadata: MLAMetadata) -> None:
    """Write a step, through the operator wherever somebody could see it.

    To flatten a step and put it together again takes the host as long as some of its launches, so
    eager mode goes without. Metadata that is made in a compiled function has no number; its steps
    are traced through.

    Args:
        settings: Of the layer.
        step: Tensors of the step; its output and lse are written.
        metadata: Requests of the step. Nothing but the number may be read of it here: a compiler
            would take it for a constant.
    """
    number = metadata.number
    # Subclasses of Tensor watch as well: fake ones have no memory to read.
    if number is None or (nobody_listens() and type(step.q) in (Tensor, Parameter)):
        step.write(settings, metadata)
        return
    out = _flatten(step.out)
    q_scale, q_scale_tensor = _split(settings.q_scale)
    k_scale, k_scale_tensor = _split(settings.k_scale)
    torch.ops.mlacast.mla_attention(
        step.q,
        step.kv_c_normed,
        step.k_pe,
        step.kv_cache,
        settings.kv_b_proj,
        number,
        out.data,
        out.sf,
        step.lse,
        step.indices,
        step.topk_length,
        settings.scale,
        settings.kv_format.name,
        q_scale,
        q_scale_tensor,
        k_scale,
        k_scale_tensor,
        settings.context_workspace_tokens,
        settings.group_name,
        out.out_format,
        out.scale,
        out.row_start,
        out.total_tokens,
    )


def _flatten(out: Output) -> OutputArguments:
    if isinstance(out, Tensor):
        return OutputArguments(out, None, Bf16().key, None, 0, out.shape[0])
    return to_arguments(out)


def _split(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (float(scale), None)


def _body(
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    kv_b_proj: Tensor,
    metadata: Tensor,
    out_data: Tensor,
    out_sf: Tensor | None,
    lse: Tensor | None,
    indices: Tensor | None,
    topk_length: Tensor | None,
    scale: float,
    kv_format: str,
    q_scale: float,
    q_scale_tensor: Tensor | None,
    k_scale: float,
    k_scale_tensor: Tensor | None,
    context_workspace_tokens: int,
    dcp_group: str,
    out_format: str,
    out_scale: Tensor | None,
    row_start: int,
    total_tokens: int,
) -> None:
    """Eager kernel of the operator."""
    settings = LayerSettings(
        scale,
        kv_b_proj,
        KvFormat.from_name(kv_format),
        q_scale if q_scale_tensor is None else q_scale_tensor,
        k_scale if k_scale_tensor is None else k_scale_tensor,
        context_workspace_tokens,
        dcp_group,
    )
    out = from_arguments(out_data, out_sf, out_format, out_scale, row_start, total_tokens)
    step = LayerStep(q, kv_c_normed, k_pe, kv_cache, out, lse, indices, topk_length)
    # Forward only, whoever calls the operator.
    with torch.no_grad():
        step.write(settings, with_number(OP, metadata))


def _fake(*args: Any, **kwargs: Any) -> None:
    """Fake kernel: all outputs are mutated arguments."""


# The library object owns the registration: it lives as long as the module does.
_LIBRARY: Any = torch.library.Library("mlacast", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(SCHEMA, tags=(torch.Tag.needs_exact_strides,))
_LIBRARY.impl("mla_attention", _body, "CompositeExplicitAutograd")
_LIBRARY.impl("mla_attention", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("mlacast::mla_attention", _fake, lib=_LIBRARY)
