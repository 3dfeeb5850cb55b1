"""Which models ``fuse`` accepts. Every check runs before the first module is changed."""

from __future__ import annotations

from typing import Any

from mlacast.errors import UnsupportedError, fail

D_HEAD = 512
D_ROPE = 64
MAX_HEADS = 128


def attention_modules(op: str, model: object, modeling: Any) -> list[Any]:
    """Return the attention modules of a supported model, in order.

    Raises:
        TypeError: ``model`` is neither a DeepseekV4ForCausalLM nor a DeepseekV4Model.
    """
    if not isinstance(model, (modeling.DeepseekV4ForCausalLM, modeling.DeepseekV4Model)):
        raise TypeError(
            f"{op}: model must be a DeepseekV4ForCausalLM or DeepseekV4Model of transformers, "
            f"got {type(model).__name__}"
        )
    return [m for m in model.modules() if isinstance(m, modeling.DeepseekV4Attention)]


def check_config(op: str, config: Any) -> None:
    """Raise unless the fused path reproduces this geometry and attention implementation.

    Raises:
        UnsupportedError: head_dim other than 512, a rotary part other than 64, more than one KV
            head or more than 128 query heads.
        ValueError: The model was loaded for another attention than "eager", whose mask the fused
            path reads.
    """
    wanted = (
        ("head_dim", config.head_dim, config.head_dim == D_HEAD, str(D_HEAD)),
        (
            "qk_rope_head_dim",
            config.qk_rope_head_dim,
            config.qk_rope_head_dim == D_ROPE,
            str(D_ROPE),
        ),
        ("num_key_value_heads", config.num_key_value_heads, config.num_key_value_heads == 1, "1"),
        (
            "num_attention_heads",
            config.num_attention_heads,
            config.num_attention_heads <= MAX_HEADS,
            f"at most {MAX_HEADS}",
        ),
    )
    for name, value, holds, requirement in wanted:
        if not holds:
            raise UnsupportedError(
                f"{op}: config.{name} must be {requirement}, got {value}; the model is unchanged",
                op=op,
                missing=(name,),
            )
    check_attention_implementation(op, config)


def check_attention_implementation(op: str, config: Any) -> None:
    """Raise ValueError unless the model builds its masks for eager attention, all V4 ships."""
    found = getattr(config, "_attn_implementation", None)
    if found not in (None, "eager"):
        fail(
            op,
            "config._attn_implementation",
            "be 'eager'",
            repr(found),
            "call model.set_attn_implementation('eager'): the fused attention reads that mask",
        )
