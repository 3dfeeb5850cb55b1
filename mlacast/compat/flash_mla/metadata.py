"""The lazily filled scheduling object of ``flash_mla_with_kvcache``.

FlashMLA computes a schedule in the first call and reuses it. The core ops here read lengths on the
device and plan from shapes alone, so nothing in the object can go stale with the values of a call;
what is kept is FlashMLA's rule that one object serves one set of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from mlacast.errors import fail
from mlacast.ops.signature import described_by_type


@described_by_type("have_initialized", "config", "tile_scheduler_metadata")
@dataclass
class FlashMLASchedMeta:
    """What the first call of ``flash_mla_with_kvcache`` remembers for the later ones.

    Attributes:
        have_initialized: Whether a call has filled the object.
        config: The shapes that it was filled for.
        tile_scheduler_metadata: Plan of the core op, opaque: a ``SparseDecodeSchedule``, or in
            dense mode, where the shapes are all there is to plan, the config again.
        num_splits: [b + 1] int32, number of KV splits of all requests before each one.
    """

    @dataclass(frozen=True)
    class Config:
        """The shapes and switches that later calls have to repeat."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Any = None
    num_splits: torch.Tensor | None = None

    def check(self, op: str, config: Config) -> None:
        """Raise ValueError if the object was filled by a call of other shapes.

        Args:
            op: Name that opens the message.
            config: Shapes of this call.
        """
        if not self.have_initialized or self.config is None:
            return
        for field in fields(config):
            planned, actual = getattr(self.config, field.name), getattr(config, field.name)
            if planned != actual:
                fail(
                    op,
                    "tile_scheduler_metadata",
                    f"be used with {field.name}={planned} as in its first call",
                    actual,
                    "take a new object from get_mla_metadata()",
                )

    def fill(
        self, config: Config, plan: object, splits_per_request: int, device: torch.device
    ) -> None:
        """Remember the first call; later calls change nothing.

        Args:
            config: Shapes of the call.
            plan: What the core op planned.
            splits_per_request: KV splits of each request.
            device: Where ``num_splits`` lives.
        """
        if self.have_initialized:
            return
        counts = torch.arange(config.b + 1, dtype=torch.int32, device=device)
        self.num_splits = counts * splits_per_request
        self.config = config
        self.tile_scheduler_metadata = plan
        self.have_initialized = True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Make an empty scheduling object.

    Args:
        *args: Ignored: older FlashMLA planned here from lengths and head counts.
        **kwargs: Ignored likewise.

    Returns:
        The object, which the first ``flash_mla_with_kvcache`` call fills, and None.
    """
    del args, kwargs
    return FlashMLASchedMeta(), None
