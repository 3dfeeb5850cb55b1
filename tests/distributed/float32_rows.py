"""What each row is in float32 before it is cast, where a cache is spread over ranks.

Each rank's part of a decode is rounded to bfloat16, and so is their merge; W_UV and the cast
follow. Prefills are those of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mlacast
from mlacast.distributed import KvShard
from tests.distributed.sharded_steps import positions_of
from tests.layers.float32_rows import prefilled
from tests.layers.steps import K_SCALE, SCALE, Inputs, slots_of


def float32_rows(whole: Inputs, world: int, interleave: int) -> Tensor:
    """[T, N of all ranks, 128] float32; zeros for padding."""
    metadata = whole.metadata
    out = torch.zeros(whole.q.shape[0], whole.layer.num_heads, 128)
    shards = [KvShard(rank, world, interleave) for rank in range(world)]
    first = 0
    for request, new in enumerate(metadata.query_lens):
        if request >= metadata.num_decodes:
            rows = slice(first, first + new)
            out[rows] = prefilled(whole, request, rows)
        else:
            for own in range(new):
                seen = metadata.context_lens[request] + own + 1
                out[first + own] = _decoded(whole, shards, request, whole.q[first + own], seen)
        first += new
    return out


def _decoded(whole: Inputs, shards: list[KvShard], request: int, q: Tensor, seen: int) -> Tensor:
    layer = whole.layer
    weight = layer.kv_b_proj.view(layer.num_heads, 256, 512)
    nope = torch.einsum("hd,hdl->hl", q[..., :128].float(), weight[:, :128].float())
    absorbed = torch.cat((nope.bfloat16(), q[..., 128:]), -1)
    is_fp8 = layer.kv_format == mlacast.KvFormat.FP8
    outs, lses = [], []
    for shard in shards:
        positions = torch.tensor(positions_of(shard, seen), dtype=torch.int64)
        slots = slots_of(whole.metadata.block_table, request, positions)
        part, lse = mlacast.sparse_mla_decode(
            absorbed[None],
            whole.kv_cache,
            slots.to(torch.int32)[None],
            kv_format=layer.kv_format,
            sm_scale=SCALE * K_SCALE if is_fp8 else SCALE,
            v_scale=K_SCALE if is_fp8 else 1.0,
            backend="reference",
        )
        assert isinstance(part, Tensor)
        outs.append(part)
        lses.append(lse)
    merged, _ = mlacast.reference.merge_attention_states(outs, lses, lse_layout="th")
    w_uv = weight[:, 128:].transpose(1, 2)
    out: Tensor = mlacast.reference.v_up_project(merged.bfloat16(), w_uv)
    return out[0]
