"""``fuse`` and ``unfuse``: switch a model's attention to mlacast and back."""

from __future__ import annotations

from typing import Any, TypeVar

from mlacast.descriptors.out_format import OutFormat
from mlacast.errors import check_type
from mlacast.integrations.transformers.families import family_of
from mlacast.integrations.transformers.module_forward import ModuleForward
from mlacast.integrations.transformers.selection import SelectionMemo
from mlacast.integrations.transformers.support import check_config
from mlacast.ops.query import check_backend

Model = TypeVar("Model")


def fuse(model: Model, *, out_format: OutFormat | None = None, backend: str | None = None) -> Model:
    """Run every attention layer of a DeepSeek-V3, V3.2 or V4 model through mlacast, in place.

    V4: Q norm, RoPE, attention with sinks, inverse RoPE and the cast of the attention output become
    one core op per layer and forward: ``sparse_mla_prefill`` for several query tokens,
    ``sparse_mla_decode`` on the model's own cache for one. The quantised output feeds
    ``grouped_out_project`` with the weight of ``o_a_proj``.

    V3 and V3.2: prompts take ``dense_mla_prefill``, which quantises; one new token attends in
    absorbed form to the latents of the model's cache with ``dense_mla_decode``, and
    ``v_up_project`` quantises. Where V3.2's indexer leaves keys out, prompts and tokens take
    ``sparse_mla_prefill`` and ``sparse_mla_decode``, then ``v_up_project``. ``quantized_linear``
    with the weight of ``o_proj`` reads the output.

    Projections, compressors, indexer, masks, rotary tables and the cache stay the model's own; only
    the core between them is replaced. ``model.generate`` works with and without cache, with
    padding, sampling and beams.

    Queries and latents (V3 prompts: keys and values) are rounded to bfloat16 for the ops, sinks are
    read as float32. Fused attention computes forward only: a backward pass through it raises.
    ``output_attentions=True`` raises as well.

    Args:
        model: ``DeepseekV3ForCausalLM``, ``DeepseekV32ForCausalLM``, ``DeepseekV4ForCausalLM`` or
            the ``...Model`` of one, of transformers >= 5.24. At most 128 heads. V4: head_dim 512
            (64 of it rotary), eager attention (the only one it ships). V3 and V3.2: heads of 128 +
            64 and values of 128, latents of 512, attention "eager" or "sdpa". Any float dtype.
        out_format: Format in which the attention output reaches the out-projection. None:
            ``Mxfp8()`` for V4, ``Fp8Group(128)`` for V3 and V3.2.
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
    family = family_of("fuse", model)
    modules = family.attention_modules(model)
    config = modules[0].config if modules else getattr(model, "config", None)
    check_config("fuse", config, family.geometry, family.forward.implementations)
    fmt = family.default_format if out_format is None else out_format
    check_type("fuse", "out_format", fmt, OutFormat, "an OutFormat or None")
    check_backend("fuse", backend)
    memo = SelectionMemo()
    for module in modules:
        _install(module, family.forward, fmt, backend, memo)
    return model


def unfuse(model: Model) -> Model:
    """Give every attention layer its own forward back, in place: the inverse of ``fuse``.

    Args:
        model: A model that ``fuse`` takes; one that is not fused stays as it is.

    Returns:
        ``model`` itself; its logits are bit-identical to those before ``fuse``.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: ``model`` is of another class.
    """
    for module in family_of("unfuse", model).attention_modules(model):
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


def _installed(module: Any) -> ModuleForward | None:
    found = (vars(module).get(slot) for slot in ("forward", "_old_forward"))
    return next((forward for forward in found if isinstance(forward, ModuleForward)), None)


def _install(
    module: Any,
    forward: type[ModuleForward],
    fmt: OutFormat,
    backend: str | None,
    memo: SelectionMemo,
) -> None:
    fused = _installed(module)
    if fused is not None:
        fused.out_format, fused.backend, fused.memo = fmt, backend, memo
        return
    slot = _slot(module)
    original = vars(module).get(slot)
    setattr(module, slot, forward(module, original, slot, fmt, backend, memo))
