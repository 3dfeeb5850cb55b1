"""Drawn calls of ``dense_mla_decode`` and ``dense_mla_prefill``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import calls, sparse
from tests.fuzz.attention import Expected, attend
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw
from tests.fuzz.records import LAYOUTS, Layout, draw_cache
from tests.fuzz.tensors import (
    INT32,
    INT_MAX,
    INT_MIN,
    Values,
    embed,
    embed_ints,
    forget,
    lengths_for,
    used_rows,
)
from tests.fuzz.under import Under


def draw_decode(
    draw: Draw, under: Under, *, layouts: Sequence[Layout] = LAYOUTS, plain: bool = False
) -> Call:
    """A call of ``dense_mla_decode``: pages in any order, shared, missing; any lengths.

    ``plain``: without sink, scale of values and scales on the device.
    """
    values, device = Values(draw, under.device), under.device
    batch, per_request = draw.integer(0, under.sizes.tokens), draw.fixed.choice((1, 2, 3))
    layout = draw.fixed.choice(layouts)
    fp8 = layout.name == "FP8" and draw.fixed.chance() and not under.interpreted
    page_size = draw.fixed.choice(sparse.PAGE_SIZES)
    width = draw.integer(0, max(1, under.sizes.width // page_size))
    pages = draw.integer(0, max(1, under.sizes.rows // page_size))
    table = values.integers(0, max(pages, 1), batch, width)
    if pages == 0 or draw.chance(40):
        none = torch.tensor([-1, pages, INT_MIN, INT_MAX], dtype=INT32, device=device)
        share = 1.0 if pages == 0 else draw.choice((0.2, 0.6))
        gone = values.uniform(batch, width) < share
        table = torch.where(gone, none[values.integers(0, 4, batch, width).long()], table)
    causal = draw.fixed.chance(60)
    lengths = lengths_for(draw, batch, width * page_size, device)
    stop = lengths.long().clamp(0, width * page_size)[:, None]
    if causal:
        stop = stop - torch.arange(per_request - 1, -1, -1, device=device)
    else:
        stop = stop.expand(batch, per_request)
    places = torch.arange(width * page_size, device=device)
    slots = table.long()[:, places // page_size] * page_size + places % page_size
    exists = (table >= 0) & (table < pages)
    valid = exists[:, None, places // page_size] & (places < stop[..., None])
    valid = valid.flatten(0, 1)
    slots = slots.repeat_interleave(per_request, 0)
    used = used_rows(slots, valid, pages * page_size)
    cache = draw_cache(
        draw,
        layout,
        values,
        pages=pages,
        page_size=page_size,
        used=used,
        unit=under.unit(draw),
        # The interpreter rounds to bfloat16 otherwise than a device.
        exact=under.interpreted,
    )
    keys = sparse.keys_of(cache.rows, slots, valid)
    heads = draw.fixed.choice(under.sizes.heads)
    shape = (batch, per_request, heads, layout.d_qk)
    q = sparse.draw_query(draw, values, shape, False)
    dtype = torch.float8_e4m3fn if fp8 else under.rows_dtype
    given = q.clamp(-400, 400).to(dtype)
    sink = None if plain else sparse.draw_sink(draw, values, heads)
    scale = abs(sparse.draw_scale(draw)) + 0.01
    arguments: dict[str, Any] = {
        "q": embed(draw, given, unit=under.unit(draw)),
        "k_cache": sparse.cache_argument(under, cache),
        "page_table": embed_ints(draw, table),
        "seq_lens": embed_ints(draw, lengths),
        "kv_format": layout.kv_format,
        "sm_scale": scale if plain else sparse.on_device(draw, scale, values),
        "causal": causal,
    }
    if sink is not None:
        arguments["attn_sink"] = sink
    v_scale = 1.0
    if not plain and draw.fixed.chance(25):
        v_scale = draw.choice((2.0, 0.3, -1.5))
        arguments["v_scale"] = sparse.on_device(draw, v_scale, values)
    expected = attend(
        given.double().flatten(0, 1),
        keys,
        valid,
        under.precision,
        sm_scale=sparse.as_float32(arguments["sm_scale"]),
        v_scale=sparse.as_float32(v_scale),
        attn_sink=sink,
    )
    return Call("dense_mla_decode", arguments, (batch, per_request, heads, 512), expected)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    bounds = [0, *itertools.accumulate(lengths)]
    return torch.tensor(bounds, dtype=INT32, device=device)


def draw_prefill(draw: Draw, under: Under) -> Call:
    """A call of ``dense_mla_prefill``: packed sequences, empty ones too, and rows of none."""
    values, device = Values(draw, under.device), under.device
    batch = draw.integer(0, under.sizes.tokens)
    longest = under.sizes.width
    q_lens = [draw.choice((1, 0, 2, draw.integer(0, longest))) for _ in range(batch)]
    k_lens = [draw.choice((length, draw.integer(0, longest), length + 1, 0)) for length in q_lens]
    q_tail, k_tail = draw.choice((0, 0, 3)), draw.choice((0, 0, 5))
    tokens, keys = sum(q_lens) + q_tail, sum(k_lens) + k_tail
    kv_heads = draw.fixed.choice((1, 2))
    heads = kv_heads * draw.fixed.choice((1, 2, 3))
    causal = draw.fixed.chance(70)
    cu_q, cu_k = _cumulative(q_lens, device), _cumulative(k_lens, device)
    visible = torch.zeros((tokens, keys), dtype=torch.bool, device=device)
    reached = torch.zeros(keys, dtype=torch.bool, device=device)
    first_q = first_k = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        reached[first_k : first_k + k_len] = q_len > 0
        rows = torch.arange(q_len, device=device)[:, None]
        stop = k_len - (q_len - 1 - rows) if causal else torch.full_like(rows, k_len)
        seen = torch.arange(k_len, device=device) < stop
        visible[first_q : first_q + q_len, first_k : first_k + k_len] = seen
        first_q, first_k = first_q + q_len, first_k + k_len
    q = (values.normal(tokens, heads, 192) * draw.choice((1.0, 0.1, 4.0))).bfloat16()
    k = (values.normal(keys, kv_heads, 192) * draw.choice((1.0, 0.1, 4.0))).bfloat16()
    v = (values.normal(keys, kv_heads, 128) * draw.choice((1.0, 100.0, 1e-3))).bfloat16()
    given_q = q.clone()
    given_q[tokens - q_tail :] = torch.nan
    # What no token of its sequence may attend to has to be finite all the same.
    given_k, given_v = (
        forget(part.flatten(1), reached).view(part.shape).to(under.rows_dtype) for part in (k, v)
    )
    unit = under.unit(draw)
    scale = draw.choice((None, 0.07, 0.5))
    arguments: dict[str, Any] = {
        "q": embed(draw, given_q.to(under.rows_dtype), unit=unit),
        "k": embed(draw, given_k, unit=unit),
        "v": embed(draw, given_v, unit=unit),
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(q_lens, default=0) + draw.choice((0, 0, 7)),
        "max_seqlen_k": max(k_lens, default=0) + draw.choice((0, 0, 9)),
        "causal": causal,
    }
    if scale is not None:
        arguments["softmax_scale"] = scale
    parts = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        # The oracle's values are the first columns of its keys: append a query of zeros for them.
        wide_k = torch.cat((v[:, kv_head], k[:, kv_head]), -1).double()
        wide_q = torch.cat((torch.zeros_like(q[:, head, :128]), q[:, head]), -1).double()
        parts.append(
            attend(
                wide_q[:, None],
                wide_k,
                visible,
                under.precision,
                sm_scale=192**-0.5 if scale is None else scale,
                d_v=128,
            )
        )
    expected = Expected(
        *(
            torch.cat([getattr(part, name) for part in parts], 1)
            for name in ("out", "lse", "max_logits", "out_error", "logit_error")
        )
    )
    shape = (tokens, heads, 128)
    return Call("dense_mla_prefill", arguments, shape, expected, heads_first=True)


def check_decode(draw: Draw, under: Under) -> None:
    """Draw a dense decode, run it, compare."""
    calls.check(draw, under, draw_decode(draw, under))


def check_prefill(draw: Draw, under: Under) -> None:
    """Draw a dense prefill, run it, compare."""
    calls.check(draw, under, draw_prefill(draw, under))
