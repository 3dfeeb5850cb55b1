"""Steps of an MLA layer whose cache is spread over ranks, cut out of a step that has everything."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import mlacast
from mlacast.distributed import KvShard, local_indices
from mlacast.layers import MLAAttention, MLAMetadata
from tests.layers.steps import K_SCALE, PAGE, SCALE, Inputs, Step, draw, picking_weight, slots_of


@dataclass(frozen=True)
class ShardedStep:
    """A step of all ranks.

    Attributes:
        step: What one rank with every head and every cached token would do.
        interleave: Neighbouring positions on one rank.
        sparse: Which rows attend to a selection: "", "decodes" or "all".
        picking: Whether the weight is one that leaves nothing to round.
    """

    step: Step
    interleave: int = 1
    sparse: str = ""
    picking: bool = False

    @property
    def heads(self) -> int:
        """Heads of a rank; some formats have blocks of four."""
        return 4 if self.picking else 2

    @property
    def id(self) -> str:
        parts = [self.step.id, f"interleave{self.interleave}"]
        parts += [f"sparse_{self.sparse}_{self.step.kv_format}"] if self.sparse else []
        return "-".join(parts + ["picking"] * self.picking)

    def whole(self, world: int) -> Inputs:
        """The step of one rank that has the heads and the cache of all, the same in any process."""
        torch.manual_seed(zlib.crc32(f"{self.id}-{world}".encode()))
        heads = self.heads * world
        return draw(self.step, heads, picking_weight(heads) if self.picking else None)

    def selection(self) -> list[list[int]]:
        """Positions that each token selects: the first, and every third one back from itself."""
        lengths = zip(self.step.query_lens, self.step.context_lens, strict=True)
        return [
            [0, *range(cached + own, -1, -3)][: 3 + own]
            for new, cached in lengths
            for own in range(new)
        ]


@dataclass(frozen=True)
class Share:
    """What one rank has of a step; ``options`` are the keyword arguments of a sparse one."""

    layer: MLAAttention
    metadata: MLAMetadata
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Tensor] = field(default_factory=dict)

    def run(self, buffer: mlacast.QuantizedTensor) -> Tensor:
        """Make the step into a buffer; return the lse."""
        result = self.layer(*self.tensors, self.metadata, buffer, return_lse=True, **self.options)
        assert isinstance(result, tuple)
        lse = result[1]
        assert isinstance(lse, Tensor)
        return lse

    def rows(self) -> tuple[Tensor, Tensor]:
        """Make the step as bfloat16: rows [T, N, 128], lse [T, N]."""
        q = self.tensors[0]
        shape = (q.shape[0], self.layer.num_heads, 128)
        buffer = mlacast.QuantizedTensor.empty(*shape, mlacast.Bf16(), q.device)
        buffer.data.fill_(float("nan"))
        lse = self.run(buffer)
        return buffer.data, lse


def heads_of_all(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put the heads of all ranks side by side: rows [T, N, 128], lse [T, N]."""
    return torch.cat([out for out, _ in states], 1), torch.cat([lse for _, lse in states], 1)


def positions_of(shard: KvShard, length: int) -> list[int]:
    """Positions that a rank keeps, counted one by one."""
    return [
        position
        for position in range(length)
        if (position // shard.interleave) % shard.world_size == shard.rank
    ]


def cut(
    case: ShardedStep,
    group: dist.ProcessGroup | None,
    rank: int,
    world: int,
    device: str = "cpu",
) -> Share:
    """Cut the share of a rank out of a step: its heads, and its tokens in pages of its own."""
    whole = case.whole(world)
    shard = KvShard(rank, world, case.interleave)
    old = whole.metadata
    table, cache = _local_cache(whole, shard)
    heads = slice(rank * case.heads, (rank + 1) * case.heads)
    layer = MLAAttention(
        case.heads,
        scale=SCALE,
        kv_b_proj=whole.layer.kv_b_proj.view(-1, 256, 512)[heads].reshape(-1, 512).to(device),
        kv_format=whole.layer.kv_format,
        k_scale=K_SCALE if whole.layer.kv_format == mlacast.KvFormat.FP8 else 1.0,
        context_workspace_tokens=case.step.workspace,
        dcp_group=group,
    )
    metadata = MLAMetadata.build(
        old.query_lens,
        old.context_lens,
        table.to(device),
        PAGE,
        case.step.threshold,
        rank,
        world,
        case.interleave,
    )
    q, kv_c, k_pe, kv_cache = (
        tensor.to(device) for tensor in (whole.q[:, heads], whole.kv_c, whole.k_pe, cache)
    )
    options = {}
    if case.sparse:
        tokens = old.num_tokens if case.sparse == "all" else metadata.num_decode_tokens
        options = _selected(case, tokens, metadata)
    return Share(layer, metadata, (q, kv_c, k_pe, kv_cache), options)


def _selected(case: ShardedStep, tokens: int, metadata: MLAMetadata) -> dict[str, Tensor]:
    """What the first tokens select, as slots of a rank."""
    device = metadata.device
    picked = case.selection()
    positions = torch.full((tokens, max(map(len, picked))), -1, dtype=torch.int32)
    for token, selected in enumerate(picked[:tokens]):
        positions[token, : len(selected)] = torch.tensor(selected)
    new = torch.tensor(metadata.query_lens)
    requests = torch.arange(len(new)).repeat_interleave(new)[:tokens]
    indices, lengths = local_indices(
        positions.to(device), requests.to(device), metadata.block_table, PAGE, metadata.shard
    )
    return {"indices": indices, "topk_length": lengths}


def _local_cache(whole: Inputs, shard: KvShard) -> tuple[Tensor, Tensor]:
    """Pages of one rank, in an order of their own, with NaN where it keeps nothing."""
    old, kv_format = whole.metadata, whole.layer.kv_format
    totals = [sum(pair) for pair in zip(old.query_lens, old.context_lens, strict=True)]
    kept = [positions_of(shard, total) for total in totals]
    pages = max((math.ceil(len(positions) / PAGE) for positions in kept), default=0)
    table = torch.randperm(len(totals) * pages + 1)[: len(totals) * pages]
    table = table.view(len(totals), pages).to(torch.int32)
    width = None if kv_format.d_qk else 576
    cache = kv_format.allocate(len(totals) * pages + 1, PAGE, d_qk=width)
    cache.view(torch.uint8).fill_(0xFF)
    records, own = (x.view(torch.uint8).flatten(0, 1) for x in (whole.kv_cache, cache))
    for request, positions in enumerate(kept):
        if positions:
            source = slots_of(old.block_table, request, torch.tensor(positions))
            own[slots_of(table, request, torch.arange(len(positions)))] = records[source]
    return table, cache
