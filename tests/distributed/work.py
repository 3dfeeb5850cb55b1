"""What every rank does for test_layer.py: one start of the processes serves all of its tests."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mlacast
from mlacast.compat.vllm import forward_impl
from mlacast.distributed import gather_heads, gather_rows, merge_over_ranks
from mlacast.layers import MLAAttention, MLAMetadata
from tests.distributed.sharded_steps import ShardedStep, Share, cut
from tests.format_cases import (
    FAMILIES,
    MXFP8_CHUNK32,
    NVFP4,
    FormatCase,
    buffer_bytes,
    poisoned_buffer,
)
from tests.layers.steps import PAGE, Step

SPEC = Step("two_tokens_each", (2, 2), (5, 3), threshold=2)
UNEVEN = Step("uneven_decodes", (3, 1, 2), (5, 4, 0), threshold=3)
MIXED = Step("mixed", (1, 1, 4, 5), (7, 3, 0, 0), padding=2)
# With 1, 2, 6 and 10 tokens there are ranks without any.
SHORT = Step("short_decodes", (1, 1, 1, 1), (0, 1, 5, 9))
CONTEXT = Step("mixed_context", (1, 3, 4, 5), (8, 9, 0, 6))
CHUNKS = Step("chunks", (1, 3, 4, 5), (8, 9, 0, 6), padding=1, workspace=4)
SPARSE = Step("selected", (1, 2, 4, 3), (7, 9, 6, 0), threshold=2, padding=1)
FP8 = Step("fp8_cache", (2, 2, 4, 5), (7, 3, 9, 0), threshold=2, kv_format="FP8")
V32 = Step("v32_cache", (1, 3, 4), (8, 9, 0), kv_format="V32")

MIXED_ON_RANKS = ShardedStep(MIXED, 2)
SHORT_IN_PAIRS = ShardedStep(SHORT, 2)
CONTEXT_ON_RANKS = ShardedStep(CONTEXT)
STEPS = (
    ShardedStep(Step("one_decode", (1,), (9,))),
    ShardedStep(SHORT),
    SHORT_IN_PAIRS,
    ShardedStep(SPEC),
    ShardedStep(SPEC, 3),
    ShardedStep(UNEVEN),
    ShardedStep(UNEVEN, PAGE),
    MIXED_ON_RANKS,
    CONTEXT_ON_RANKS,
    ShardedStep(CONTEXT, 2 * PAGE),
    ShardedStep(CHUNKS, 3),
    ShardedStep(Step("a_token_a_chunk", (3, 4), (9, 2), workspace=1)),
    ShardedStep(Step("shared_chunk", (3, 4, 5), (9, 3, 2), workspace=8)),
    ShardedStep(Step("requests_without_tokens", (0, 1, 3, 0), (4, 5, 3, 2))),
    ShardedStep(Step("padded_context", (3,), (6,), padding=3)),
    ShardedStep(Step("nothing", (), (), padding=3)),
    ShardedStep(FP8, 2),
    ShardedStep(V32),
)
SELECTED = tuple(
    ShardedStep(replace(SPARSE, kv_format=kv_format), interleave, sparse)
    for kv_format, interleave, sparse in (
        ("BF16", 1, "decodes"),
        ("BF16", 3, "all"),
        ("FP8", 2, "all"),
        ("V32", 1, "all"),
    )
)
# To the byte.
CAST = (
    *((ShardedStep(CHUNKS, 3, picking=True), fmt) for fmt in FAMILIES),
    (ShardedStep(FP8, picking=True), NVFP4),
    (ShardedStep(UNEVEN, 2, picking=True), MXFP8_CHUNK32),
)
FP8_QUERIES = ShardedStep(FP8)
Q_SCALE = 2**-4


def everything() -> dict[str, Any]:
    """What a rank finds, by subject."""
    group = dist.group.WORLD
    assert group is not None, "the process has joined a group"
    rank, world = dist.get_rank(), dist.get_world_size()
    out, lse = parts(world)
    share = functools.partial(cut, group=group, rank=rank, world=world)
    found: dict[str, Any] = {
        "rows": {case.id: share(case).rows() for case in (*STEPS, *SELECTED)},
        "bytes": {(case.id, fmt.id): _bytes(share(case), fmt) for case, fmt in CAST},
        "again": share(CONTEXT_ON_RANKS).rows(),
        "fp8 queries": _with_fp8_queries(share(FP8_QUERIES)),
        "replayed": _replayed(share(SHORT_IN_PAIRS)),
        "profiling": _profiled(share(MIXED_ON_RANKS)),
        "operators": [_operators(share(ShardedStep(CHUNKS)), fmt) for fmt in (FAMILIES[0], None)],
        "merged": merge_over_ranks(out[rank], lse[rank], group),
        "heads": _gathered(rank, group),
        "refused": _refused(share(MIXED_ON_RANKS), rank, world),
    }
    if world == 2:
        found["compiled"] = _compiled(share(CONTEXT_ON_RANKS))
    # Every process takes part in making every group.
    pairs = [dist.new_group([at, at + world // 2]) for at in range(world // 2)]
    mine = pairs[rank % (world // 2)]
    found["pair"] = cut(CONTEXT_ON_RANKS, mine, dist.get_rank(mine), 2).rows()
    alone = [dist.new_group([at]) for at in range(world)]
    found["alone"] = cut(CONTEXT_ON_RANKS, alone[rank], 0, 1).rows()
    found["stranger"] = _said(lambda: _layer(dcp_group=alone[rank - 1]))
    return found


def parts(world: int) -> tuple[Tensor, Tensor]:
    """Outputs [world, 6, 2 * world, 512] and sums of every rank, with every kind of empty part."""
    generator = torch.Generator().manual_seed(5)
    out = torch.randn(world, 6, 2 * world, 512, generator=generator).bfloat16()
    lse = 3 * torch.randn(world, 6, 2 * world, generator=generator)
    # Row 0 is all live, 1 has one empty part, 2 one live part, 3 none.
    lse[world - 1, 1] = -math.inf
    lse[1:, 2] = math.inf
    lse[:, 3] = -math.inf
    lse[0, 3] = math.inf
    lse[0, 4] = -math.inf
    lse[0, 5], lse[1:, 5] = -60000.0, 80.0
    # What stands in an empty part is never read.
    out[lse.isinf()] = float("nan")
    return out, lse


def _shape(share: Share) -> tuple[int, int, int]:
    tokens, heads, _ = share.tensors[0].shape
    return tokens, 1, heads * 128


def _bytes(share: Share, fmt: FormatCase) -> tuple[Tensor, Tensor | None]:
    buffer = poisoned_buffer(fmt, *_shape(share))
    share.run(buffer)
    return buffer_bytes(buffer)


def _with_fp8_queries(share: Share) -> tuple[Tensor, Tensor]:
    share.layer.q_scale = Q_SCALE
    return share.rows()


def _replayed(share: Share) -> tuple[Tensor, Tensor]:
    """Give the metadata of other requests what a captured step reads of these."""
    own = share.metadata
    others = MLAMetadata.build(
        own.query_lens,
        [0] * len(own.query_lens),
        torch.zeros_like(own.block_table),
        PAGE,
        dcp_rank=own.shard.rank,
        dcp_world_size=own.shard.world_size,
        dcp_interleave=own.shard.interleave,
    )
    others.decode_table.copy_(own.decode_table)
    others.decode_seq_lens.copy_(own.decode_seq_lens)
    return replace(share, metadata=others).rows()


def _profiled(share: Share) -> Tensor:
    """Make the run of an engine that has no requests yet."""
    tokens, _, features = _shape(share)
    output = torch.full((tokens, features), float("nan"), dtype=torch.bfloat16)
    forward_impl(share.layer, *share.tensors, None, output)
    return output


def _compiled(share: Share) -> tuple[Tensor, Tensor]:
    """Make the step through the operator, which finds the group by its name."""
    layer: Any = torch.compile(share.layer, fullgraph=True, backend="aot_eager")
    return Share(layer, share.metadata, share.tensors).rows()


def _operators(share: Share, fmt: FormatCase | None) -> list[str]:
    kind = mlacast.Bf16() if fmt is None else fmt.build()
    buffer = mlacast.QuantizedTensor.empty(*_shape(share), kind)
    with torch.autograd.profiler.profile() as profile:
        share.run(buffer)
    names = [event.name for event in profile.function_events or []]
    return [name for name in names if name.startswith(("mlacast::", "c10d::"))]


def _gathered(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    own = (torch.arange(3 * 2 * 4).view(3, 2, 4) + 100 * rank).bfloat16()
    turned = own.transpose(0, 1).contiguous().transpose(0, 1)
    return [
        gather_heads(own, group),
        gather_heads(turned, group),
        gather_heads(own.to(torch.float8_e4m3fn), group),
        gather_heads(own[:0], group),
        gather_rows(own[:, 0], group),
    ]


def _layer(**options: Any) -> MLAAttention:
    heads = options.pop("num_heads", 2)
    weight = torch.zeros(heads * 256, 512, dtype=torch.bfloat16)
    return MLAAttention(heads, scale=1.0, kv_b_proj=weight, **options)


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _refused(share: Share, rank: int, world: int) -> dict[str, str]:
    """What is said to calls that do not fit the group, or the other ranks."""
    own = share.metadata

    def step(**changes: Any) -> str:
        numbers = {
            "query_lens": own.query_lens,
            "context_lens": own.context_lens,
            "dcp_rank": rank,
            "dcp_world_size": world,
            "dcp_interleave": own.shard.interleave,
            **changes,
        }
        table = torch.zeros(len(own.query_lens), 16, dtype=torch.int32)
        metadata = MLAMetadata.build(block_table=table, page_size=PAGE, **numbers)
        tokens, _, features = _shape(share)
        output = torch.full((tokens, features), 7.0).bfloat16()
        said = _said(lambda: share.layer(*share.tensors, metadata, output))
        return said if bool((output == 7.0).all()) else f"{said} after writing"

    refused = {
        "rank": step(dcp_rank=(rank + 1) % world),
        "world": step(dcp_rank=0, dcp_world_size=1),
        "heads": _said(lambda: _layer(num_heads=128 // world + 1, dcp_group=dist.group.WORLD)),
    }
    os.environ["MLACAST_VALIDATE"] = "1"
    is_last = rank == world - 1
    refused |= {
        "lengths": step(context_lens=[8, 3, 0, 0]) if is_last else step(),
        "interleave": step(dcp_interleave=1) if is_last else step(),
        "agreed": _said(share.rows),
    }
    del os.environ["MLACAST_VALIDATE"]
    return refused
