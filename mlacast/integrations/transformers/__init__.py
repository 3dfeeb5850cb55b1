"""Run the attention of a Hugging Face DeepSeek-V3, V3.2 or V4 model through mlacast.

``fuse(model)`` replaces the forward of every attention module of one model object;
``unfuse(model)`` puts the originals back. Nothing is patched on classes or modules of transformers,
so other models in the process are not touched. transformers itself is imported at the first call,
not here.
"""

from __future__ import annotations

from mlacast.integrations.transformers.fuse import fuse, unfuse

__all__ = ["fuse", "unfuse"]
