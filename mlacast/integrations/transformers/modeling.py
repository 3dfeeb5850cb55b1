"""Access to the modelling code of transformers, checked before anything is used from it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

MINIMUM_VERSION = "5.24"

# Models by the name of their folder: how the names of their classes begin, and what the fused
# forward is called with. A transformers that calls its attention differently must not be patched.
_MODELS = {
    "deepseek_v3": (
        "DeepseekV3",
        ("hidden_states", "position_embeddings", "attention_mask", "cache"),
    ),
    "deepseek_v32": (
        "DeepseekV32",
        ("hidden_states", "position_embeddings", "attention_mask", "cache", "position_ids"),
    ),
    "deepseek_v4": (
        "DeepseekV4",
        ("hidden_states", "position_embeddings", "position_ids", "attention_mask", "cache"),
    ),
}


def load_modeling(model: str = "deepseek_v4") -> Any:
    """Return the module ``transformers.models.{model}.modeling_{model}``.

    Args:
        model: "deepseek_v3", "deepseek_v32" or "deepseek_v4".

    Raises:
        ImportError: transformers is missing, older than ``MINIMUM_VERSION``, or calls the attention
            of this model with other arguments than the ones mlacast was written for. The message
            says what was found.
    """
    found = check_transformers()
    prefix, expected = _MODELS[model]
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    attention = getattr(modeling, f"{prefix}Attention")
    parameters = inspect.signature(attention.forward).parameters
    missing = [name for name in expected if name not in parameters]
    if missing:
        raise ImportError(
            f"fuse: transformers {found} calls {prefix}Attention without {', '.join(missing)}; "
            "this mlacast does not know that version"
        )
    return modeling


def check_transformers() -> str:
    """Return the version of transformers.

    Raises:
        ImportError: It is missing or older than ``MINIMUM_VERSION``.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_needs("found none"), name="transformers") from error
    found = str(transformers.__version__)
    if _release(found) < _release(MINIMUM_VERSION):
        raise ImportError(_needs(f"found {found}"))
    return found


def _needs(found: str) -> str:
    return (
        f"fuse: mlacast.integrations.transformers needs transformers>={MINIMUM_VERSION} "
        f'(pip install "transformers>={MINIMUM_VERSION}"), {found}'
    )


def _release(version: str) -> tuple[int, int]:
    """``"5.24.0.dev0"`` -> ``(5, 24)``. A part that is no number counts as 0."""
    parts = (version.split(".") + ["0"])[:2]
    major, minor = (int(part) if part.isdigit() else 0 for part in parts)
    return major, minor
