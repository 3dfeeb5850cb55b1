"""Access to the modelling code of transformers, checked before anything is used from it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

MINIMUM_VERSION = "5.24"

# What the fused forward is called with; a transformers that calls its attention differently must
# not be patched.
_FORWARD_PARAMETERS = (
    "hidden_states",
    "position_embeddings",
    "position_ids",
    "attention_mask",
    "cache",
)


def load_modeling() -> Any:
    """Return ``transformers.models.deepseek_v4.modeling_deepseek_v4``.

    Raises:
        ImportError: transformers is missing, older than ``MINIMUM_VERSION``, or calls its
            DeepSeek-V4 attention with other arguments than the ones mlacast was written for. The
            message says what was found.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_needs("found none"), name="transformers") from error
    found = str(transformers.__version__)
    if _release(found) < _release(MINIMUM_VERSION):
        raise ImportError(_needs(f"found {found}"))
    modeling = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    parameters = inspect.signature(modeling.DeepseekV4Attention.forward).parameters
    missing = [name for name in _FORWARD_PARAMETERS if name not in parameters]
    if missing:
        raise ImportError(
            f"fuse: transformers {found} calls DeepseekV4Attention without {', '.join(missing)}; "
            "this mlacast does not know that version"
        )
    return modeling


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
