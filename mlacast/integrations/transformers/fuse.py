"""``fuse`` and ``unfuse``: switch a model's attention to mlacast and back."""

from __future__ import annotations

from typing import Any, TypeVar

from mlacast.descriptors.out_format import Mxfp8, OutFormat
from mlacast.errors import check_type
from mlacast.integrations.transformers.forward import FusedForward
from mlacast.integrations.transformers.modeling import load_modeling
from mlacast.integrations.transformers.selection import SelectionMemo
from mlacast.integrations.transformers.support import attention_modules, check_config
from mlacast.ops.query import check_backend

Model = TypeVar("Model")


def fuse(model: Model, *, out_format: OutFormat | None = None, backend: str | None = None) -> Model:
    """Run every attention layer of a DeepSeek-V4 model through mlacast, in place.

    Q norm, RoPE, attention with sinks, inverse RoPE and the cast of the attention output become one
    core op per layer and forward: ``sparse_mla_prefill`` for several query tokens,
    ``sparse_mla_decode`` on the model's own cache for one. The quantised output feeds
    ``grouped_out_project`` with the weight of ``o_a_proj``. Projections, compressors, indexer,
    masks, rotary tables and the cache stay the model's own; only the core between them is replaced.
    ``model.generate`` works with and without cache, with padding, sampling and beams.

    Queries and latents are rounded to bfloat16 for the op (no change for a bfloat16 model), sinks
    are read as float32. Fused attention computes forward only: a backward pass through it raises.
    ``output_attentions=True`` raises as well.

    Args:
        model: ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model`` of transformers >= 5.24 with
            head_dim 512 (64 of it rotary), at most 128 heads and eager attention (the only one it
            ships). Any float dtype.
        out_format: Format in which the attention output reaches the out-projection. None:
            ``Mxfp8()``.
        backend: None (chosen per call), "reference", "triton" or "hopper"; a named backend never
            falls back.

    Returns:
        ``model`` itself. Fusing a fused model only updates ``out_format`` and ``backend``.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: ``model`` is of another class, or ``out_format`` is no OutFormat.
        ValueError: ``backend`` is unknown, or the model was set to another attention
            implementation.
        UnsupportedError: The geometry differs from the one above. The model is unchanged after
            every error.
    """
    modeling = load_modeling()
    modules = attention_modules("fuse", model, modeling)
    check_config("fuse", modules[0].config if modules else getattr(model, "config", None))
    fmt = Mxfp8() if out_format is None else out_format
    check_type("fuse", "out_format", fmt, OutFormat, "an OutFormat or None")
    check_backend("fuse", backend)
    memo = SelectionMemo()
    for module in modules:
        _install(module, fmt, backend, memo)
    return model


def unfuse(model: Model) -> Model:
    """Give every attention layer its own forward back, in place: the inverse of ``fuse``.

    Args:
        model: ``DeepseekV4ForCausalLM`` or ``DeepseekV4Model``; one that is not fused stays as it
            is.

    Returns:
        ``model`` itself; its logits are bit-identical to those before ``fuse``.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: ``model`` is of another class.
    """
    for module in attention_modules("unfuse", model, load_modeling()):
        fused = _installed(module)
        if fused is None:
            continue
        if fused.original is None:
            delattr(module, fused.slot)
        else:
            setattr(module, fused.slot, fused.original)
    return model


def _slot(module: Any) -> str:
    """Name of the attribute that holds the attention's own forward.

    Weight-offloading hooks (accelerate) keep it in ``_old_forward`` and call it after bringing the
    weights; taking their place instead would run the layer on absent weights.
    """
    offloaded = hasattr(module, "_hf_hook") and "_old_forward" in vars(module)
    return "_old_forward" if offloaded else "forward"


def _installed(module: Any) -> FusedForward | None:
    found = (vars(module).get(slot) for slot in ("forward", "_old_forward"))
    return next((forward for forward in found if isinstance(forward, FusedForward)), None)


def _install(module: Any, fmt: OutFormat, backend: str | None, memo: SelectionMemo) -> None:
    fused = _installed(module)
    if fused is not None:
        fused.out_format, fused.backend, fused.memo = fmt, backend, memo
        return
    slot = _slot(module)
    original = vars(module).get(slot)
    setattr(module, slot, FusedForward(module, original, slot, fmt, backend, memo))
