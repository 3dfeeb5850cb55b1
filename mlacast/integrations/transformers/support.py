"""Which models ``fuse`` accepts. Every check runs before the first module is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlacast.errors import UnsupportedError, fail

MAX_HEADS = 128


def check_config(
    op: str, config: Any, geometry: Mapping[str, int], implementations: tuple[str, ...]
) -> None:
    """Raise unless the fused path reproduces this geometry and attention implementation.

    Args:
        op: Name for messages.
        config: Config of the model.
        geometry: Fields of it and the only value each may have.
        implementations: As for ``check_attention_implementation``.

    Raises:
        UnsupportedError: Another geometry, or more than 128 query heads.
        ValueError: Another attention implementation.
    """
    heads = config.num_attention_heads
    wanted = [
        (name, getattr(config, name), getattr(config, name) == value, str(value))
        for name, value in geometry.items()
    ]
    wanted.append(("num_attention_heads", heads, heads <= MAX_HEADS, f"at most {MAX_HEADS}"))
    for name, value, holds, requirement in wanted:
        if not holds:
            raise UnsupportedError(
                f"{op}: config.{name} must be {requirement}, got {value}; the model is unchanged",
                op=op,
                missing=(name,),
            )
    check_attention_implementation(op, config, implementations)


def check_attention_implementation(op: str, config: Any, implementations: tuple[str, ...]) -> None:
    """Raise ValueError unless the model builds its masks for one of these implementations.

    Args:
        op: Name for messages.
        config: Config of the model.
        implementations: Those whose masks the fused path reads, the plainest first.
    """
    found = getattr(config, "_attn_implementation", None)
    if found not in (None, *implementations):
        fail(
            op,
            "config._attn_implementation",
            "be " + " or ".join(repr(name) for name in implementations),
            repr(found),
            f"call model.set_attn_implementation({implementations[-1]!r}): "
            "the fused attention reads that mask",
        )
