"""The split-KV schedule of MATE's sparse decode, made once and passed to every layer.

The schedule has MATE's values, for programs that look into it. The decode here reads lengths on the
device and plans from shapes, so it needs none: with metadata and without it gives the same bits,
and metadata that went stale cannot make it wrong. What is kept is MATE's rule that metadata belong
to one set of shapes, and, for ``MLACAST_VALIDATE=1``, the lengths that they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from mlacast.compat.mate._checks import (
    HEADS_PER_REPEAT,
    check_query_shape,
    check_seq_lens,
    check_top_k,
    check_top_k_blocks,
)
from mlacast.errors import check_type, fail
from mlacast.ops.decode_metadata import decode_metadata, num_multiprocessors
from mlacast.ops.signature import described_by_type

OP = "get_batch_decode_metadata_mla"
# What more splits than these would win, the merge loses.
MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeConfig:
    """Shapes that metadata belong to.

    Attributes:
        batch: Requests.
        q_len: Query tokens of a request.
        heads: Query heads.
        topk: Width of the index lists.
    """

    batch: int
    q_len: int
    heads: int
    topk: int


@described_by_type("config", "num_splits.device")
@dataclass(frozen=True, eq=False)
class DecodeMetadata:
    """Schedule of ``sparse_mla_fp8_decode``; treat it as opaque.

    Attributes:
        config: Shapes that it belongs to.
        max_num_splits: Most splits that a request can have.
        num_scheduler_ctas: C, programs that the work is cut for.
        scheduler_metadata: [C, 8] int32: first request, first block of it, last request, block
            after the last one of it, split index, three zeros.
        num_splits: [B + 1] int32, splits of all requests before each one.
        seq_lens: [B] int32, a copy of the lengths.
    """

    config: DecodeConfig
    max_num_splits: int
    num_scheduler_ctas: int
    scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor
    seq_lens: torch.Tensor

    def check(self, op: str, config: DecodeConfig, device: torch.device) -> None:
        """Raise ValueError unless the metadata were made for these shapes on this device."""
        remedy = f"prepare it again with {OP}"
        for field in fields(config):
            planned, actual = getattr(self.config, field.name), getattr(config, field.name)
            if planned != actual:
                requirement = f"be prepared for {field.name}={actual}"
                fail(op, "metadata", requirement, planned, remedy)
        if self.num_splits.device != device:
            fail(op, "metadata", f"be on {device}", self.num_splits.device, remedy)

    def check_seq_lens(self, op: str, seq_lens: torch.Tensor) -> None:
        """Raise ValueError if the lengths are not those of the metadata; synchronises."""
        changed = (self.seq_lens != seq_lens).nonzero()
        if changed.numel():
            request = int(changed[0])
            requirement = f"be prepared for the current seq_lens ({int(seq_lens[request])} at "
            fail(
                op,
                "metadata",
                f"{requirement}[{request}])",
                int(self.seq_lens[request]),
                f"prepare it again with {OP}",
            )


def get_batch_decode_metadata_mla(
    query: torch.Tensor, seq_lens: torch.Tensor, sparse_mla_top_k: int
) -> DecodeMetadata:
    """Plan ``sparse_mla_fp8_decode`` for these shapes and lengths.

    The plan is made on the device: nothing is read on the host, a CUDA graph can capture it, and
    every layer can use it while shapes and lengths stay.

    Args:
        query: [B, Q, H, 576]; only its shape and device matter. H up to 64, or a multiple of 64.
        seq_lens: [B] or [B, 1] int32, contiguous: valid columns of each request.
        sparse_mla_top_k: Width of the index lists, a positive multiple of 64.

    Returns:
        The metadata. ``num_scheduler_ctas`` is 1 on a device without multiprocessors.

    Raises:
        TypeError: An argument is of another Python type, or ``seq_lens`` is not int32.
        ValueError: A shape, stride or device breaks the contract.
    """
    check_type(OP, "query", query, torch.Tensor, "a torch.Tensor")
    sizes: dict[str, Any] = {}
    check_query_shape(OP, query, sizes)
    check_top_k(OP, sparse_mla_top_k)
    check_top_k_blocks(OP, sparse_mla_top_k)
    check_seq_lens(OP, seq_lens, sizes, query.device)
    config = DecodeConfig(sizes["B"], sizes["Q"], sizes["H"], sparse_mla_top_k)
    repeats = max(config.heads // HEADS_PER_REPEAT, 1)
    parts = max(num_multiprocessors(query.device) // (config.q_len * repeats), 1)
    blocks = sparse_mla_top_k // 64
    lengths = seq_lens.view(config.batch)
    rows, num_splits = decode_metadata(lengths, num_parts=parts, topk=sparse_mla_top_k)
    return DecodeMetadata(
        config,
        1 if parts == 1 or blocks == 1 else min(blocks, parts, MAX_SPLITS),
        parts,
        rows,
        num_splits,
        lengths.clone(),
    )
