"""What each row of a step is in float32 before it is cast: the operations' references, one request
at a time.

With a weight that picks entries of the latent, no product before them is rounded, so the values do
not depend on the rows that are up-projected together, and the bytes of a cast are defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mlacast
from tests.layers.steps import K_SCALE, SCALE, Inputs, slots_of

State = tuple[Tensor, Tensor]


def float32_rows(inputs: Inputs) -> Tensor:
    """[T, N, 128] float32; zeros for padding."""
    metadata, heads = inputs.metadata, inputs.layer.num_heads
    out = torch.zeros(inputs.q.shape[0], heads, 128)
    first = 0
    for request, new in enumerate(metadata.query_lens):
        rows = slice(first, first + new)
        if request < metadata.num_decodes:
            out[rows] = decoded(inputs, request, rows)
        else:
            out[rows] = prefilled(inputs, request, rows)
        first += new
    return out


def cut(cached: int, workspace: int) -> list[int]:
    """Lengths of the pieces that a context is attended in."""
    whole, rest = divmod(cached, workspace)
    return [workspace] * whole + [rest] * (rest > 0)


def decoded(inputs: Inputs, request: int, rows: slice) -> Tensor:
    layer, metadata = inputs.layer, inputs.metadata
    weight = layer.kv_b_proj.view(layer.num_heads, 256, 512)
    q = inputs.q[rows]
    nope = torch.einsum("thd,hdl->thl", q[..., :128].float(), weight[:, :128].float())
    absorbed = torch.cat((nope.bfloat16(), q[..., 128:]), -1)
    seq_len = metadata.context_lens[request] + metadata.query_lens[request]
    is_fp8 = layer.kv_format == mlacast.KvFormat.FP8
    latent, _ = mlacast.dense_mla_decode(
        absorbed[None],
        inputs.kv_cache,
        metadata.block_table[request : request + 1],
        torch.tensor([seq_len], dtype=torch.int32),
        kv_format=layer.kv_format,
        sm_scale=SCALE * K_SCALE if is_fp8 else SCALE,
        v_scale=K_SCALE if is_fp8 else 1.0,
        backend="reference",
    )
    assert isinstance(latent, Tensor)
    out: Tensor = mlacast.reference.v_up_project(latent[0], weight[:, 128:].transpose(1, 2))
    return out


def prefilled(inputs: Inputs, request: int, rows: slice) -> Tensor:
    out, lse = attend(inputs, rows, inputs.kv_c[rows], inputs.k_pe[rows, 0], causal=True)
    cached_tokens = inputs.metadata.context_lens[request]
    pieces = cut(cached_tokens, inputs.layer.context_workspace_tokens)
    if not pieces:
        return out
    parts = [(out.bfloat16(), lse)]
    first = 0
    for number, length in enumerate(pieces):
        positions = torch.arange(first, first + length)
        slots = slots_of(inputs.metadata.block_table, request, positions)
        kv_format = inputs.layer.kv_format
        cached = kv_format.gather(inputs.kv_cache, slots)
        if kv_format == mlacast.KvFormat.FP8:
            cached = (cached.float() * K_SCALE).bfloat16()
        out, lse = attend(inputs, rows, cached[:, :512], cached[:, 512:], causal=False)
        parts.append((out.bfloat16(), lse))
        first += length
        # At most four parts are kept, and those still to be merged become one in bfloat16.
        if len(parts) == 4 and number < len(pieces) - 1:
            out, lse = merged(parts)
            parts = [(out.bfloat16(), lse)]
    return merged(parts)[0]


def merged(parts: list[State]) -> State:
    state: State = mlacast.reference.merge_attention_states(
        [out for out, _ in parts], [lse for _, lse in parts]
    )
    return state


def attend(inputs: Inputs, rows: slice, latent: Tensor, k_pe: Tensor, causal: bool) -> State:
    heads = inputs.layer.num_heads
    up = latent.float() @ inputs.layer.kv_b_proj.float().T
    up = up.bfloat16().view(-1, heads, 256)
    k = torch.cat((up[..., :128], k_pe[:, None].expand(-1, heads, -1)), -1)
    state: State = mlacast.reference.dense_mla_prefill(
        inputs.q[rows],
        k,
        up[..., 128:],
        cu_seqlens_q=torch.tensor([0, rows.stop - rows.start]),
        cu_seqlens_k=torch.tensor([0, latent.shape[0]]),
        softmax_scale=SCALE,
        causal=causal,
    )
    return state
