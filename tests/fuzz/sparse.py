"""Drawn calls of ``sparse_mla_prefill`` and ``sparse_mla_decode``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import mlacast
from tests.fuzz import calls
from tests.fuzz.attention import Rotation, attend
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw
from tests.fuzz.records import LAYOUTS, Cache, Layout, draw_cache
from tests.fuzz.tensors import (
    POISON,
    Values,
    draw_indices,
    embed,
    embed_ints,
    forget,
    lengths_for,
    used_rows,
    valid_entries,
)
from tests.fuzz.under import Under

PAIRINGS = ("interleaved", "half")
PAGE_SIZES = (1, 3, 16, 64, 53)


def draw_query(draw: Draw, values: Values, shape: tuple[int, ...], exact: bool) -> Tensor:
    """Queries [..., d_qk] float32 with bfloat16 values; ``exact`` ones are multiples of 1/32.

    Rotated by a table of multiples of 1/64, those have one right rounding.
    """
    if exact:
        return values.integers(-128, 128, *shape).float() / 32
    size = draw.choice((1.0, 0.01, 30.0))
    return (values.normal(*shape) * size).bfloat16().float()


def draw_rope(
    draw: Draw, values: Values, tokens: int, live: Tensor, kinds: tuple[str | None, ...]
) -> tuple[Any, Rotation | None]:
    """A rotation or None; rows of the table that no live token names are NaN."""
    kind = draw.fixed.choice(kinds)
    if kind is None:
        return None, None
    rows = draw.integer(1, 9)
    table = values.integers(-64, 65, rows, 64).float() / 64
    positions = values.integers(-3, rows + 3, tokens, dtype=torch.int64)
    if draw.fixed.chance(30):
        positions = positions.int()
    read = torch.zeros(rows, dtype=torch.bool, device=values.device)
    read[positions.long().clamp(0, rows - 1)[live]] = True
    table = embed(draw, forget(table, read), unit=4, permute=False)
    rotation = Rotation(table, positions, kind)
    return mlacast.Rope(table, embed_ints(draw, positions), kind), rotation


def draw_sink(draw: Draw, values: Values, heads: int) -> Tensor | None:
    """Sinks of any size, both infinities among them, or None."""
    if not draw.fixed.chance():
        return None
    sink = values.normal(heads)
    for head in range(min(heads, 3)):
        sink[head] = draw.choice((0.5, -torch.inf, torch.inf, 90.0, -90.0, 1e4))
    return sink


def draw_scale(draw: Draw) -> float:
    """A score scale; ones that are not positive do not keep the order of scores."""
    return draw.fixed.choice((1, 1, 1, 1, 1, 1, 0, -1)) * draw.choice((0.05, 0.0442, 0.5, 1e-4))


def into_chunk16(q: Tensor) -> Tensor:
    """[T, h, 512] in head order to the permuted order of the fused step."""
    tokens, heads, width = q.shape
    return q.view(tokens, heads, width // 16, 16).transpose(1, 2).reshape(tokens, heads, width)


class Prologue:
    """Query, norm, rotation and sink, drawn for tokens of which some attend to nothing."""

    def __init__(
        self,
        draw: Draw,
        under: Under,
        values: Values,
        width: int,
        live: Tensor,
        *,
        style: str = "free",
        fp8: bool = False,
    ) -> None:
        tokens, heads = live.shape[0], draw.fixed.choice(under.sizes.heads)
        kinds = PAIRINGS if style == "fused" else (None, *PAIRINGS)
        has_prologue = style != "plain" and not fp8
        rope = None
        self.rotation: Rotation | None = None
        if has_prologue:
            rope, self.rotation = draw_rope(draw, values, tokens, live, kinds)
        norm = None
        if width == 512 and has_prologue and draw.fixed.chance():
            norm = draw.choice((1e-6, 1e-5, 0.5))
        order = "head"
        if width == 512 and has_prologue and (style == "fused" or draw.fixed.chance(40)):
            order = "chunk16"
        q = draw_query(draw, values, (tokens, heads, width), rope is not None)
        if fp8:
            q = q.clamp(-400, 400).to(torch.float8_e4m3fn).float()
        self.q, self.heads = q, heads
        given = q.clone()
        if not fp8:
            # Nothing is read of a token that attends to nothing, or it does not matter.
            given[~live] = torch.nan
        if order == "chunk16":
            given = into_chunk16(given)
        dtype = torch.float8_e4m3fn if fp8 else under.rows_dtype
        unit = under.unit(draw)
        self.arguments: dict[str, Any] = {}
        given = given.to(dtype)
        if order == "chunk16":
            # Heads of a token leave no gaps.
            flat = embed(draw, given.flatten(1), unit=unit)
            self.arguments["q"] = flat.view(tokens, heads, width)
        else:
            self.arguments["q"] = embed(draw, given, unit=unit)
        self.sink = draw_sink(draw, values, heads)
        self.norm = norm
        optional = {"attn_sink": self.sink, "q_norm_eps": norm, "rope": rope}
        self.arguments |= {name: value for name, value in optional.items() if value is not None}
        if order == "chunk16":
            self.arguments["q_order"] = order

    @property
    def options(self) -> dict[str, Any]:
        """What the oracle takes."""
        return {"attn_sink": self.sink, "q_norm_eps": self.norm, "rotation": self.rotation}


def draw_tokens(draw: Draw, under: Under) -> int:
    """Tokens of a call, none among them."""
    return draw.integer(0, under.sizes.tokens)


def draw_list(
    draw: Draw, under: Under, values: Values, tokens: int, rows: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Indices, lengths or None, and which entries count."""
    width = draw.integer(0, under.sizes.width)
    if draw.chance(15):
        width = draw.choice((0, 1, 64, 65, 128)) if under.sizes.width >= 64 else width
    indices = draw_indices(draw, values, tokens, width, rows)
    lengths = None
    if draw.fixed.chance(60):
        lengths = embed_ints(draw, lengths_for(draw, tokens, width, values.device))
    return indices, lengths, valid_entries(indices, lengths, rows)


def keys_of(rows: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    """Rows [T, K, d] of valid entries, zeros elsewhere."""
    if rows.shape[0] == 0:
        shape = (*indices.shape, rows.shape[1])
        return torch.zeros(shape, dtype=torch.float64, device=rows.device)
    chosen = rows[torch.where(valid, indices, 0).long()]
    return torch.where(valid[..., None], chosen, 0.0)


def draw_prefill(draw: Draw, under: Under, *, style: str = "free") -> Call:
    """A call of ``sparse_mla_prefill``.

    ``style``: "free", "plain" without norm, rotation and other orders, or "fused" with a rotation
    of queries in chunk16 order.
    """
    values = Values(draw, under.device)
    widths = (512,) if style == "fused" else (512, 576)
    tokens, width = draw_tokens(draw, under), draw.fixed.choice(widths)
    rows = draw.integer(0, under.sizes.rows)
    indices, lengths, valid = draw_list(draw, under, values, tokens, rows)
    prologue = Prologue(draw, under, values, width, valid.any(1), style=style)
    kv = (values.normal(rows, width) * draw.choice((1.0, 0.1, 5.0))).bfloat16().double()
    keys = keys_of(kv, indices, valid)
    given = forget(kv, used_rows(indices, valid, rows)).to(under.rows_dtype)
    given = embed(draw, given, unit=under.unit(draw), permute=False)
    scale = draw_scale(draw)
    arguments: dict[str, Any] = {
        **prologue.arguments,
        "kv": given.unsqueeze(1) if draw.chance(30) else given,
        "indices": indices.unsqueeze(1) if draw.chance(30) else indices,
        "sm_scale": scale,
    }
    if lengths is not None:
        arguments["topk_length"] = lengths
    expected = attend(prologue.q, keys, valid, under.precision, sm_scale=scale, **prologue.options)
    shape = (tokens, prologue.heads, 512)
    return Call("sparse_mla_prefill", arguments, shape, expected, ("max_logits", "lse"))


def _draw_pool(
    draw: Draw, under: Under, values: Values, tokens: int, layout: Layout
) -> tuple[Cache, Tensor, Tensor | None, Tensor]:
    """A cache, its list, and which entries count."""
    page_size = draw.fixed.choice(PAGE_SIZES)
    pages = draw.integer(0, max(1, under.sizes.rows // page_size))
    indices, lengths, valid = draw_list(draw, under, values, tokens, pages * page_size)
    used = used_rows(indices, valid, pages * page_size)
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
    return cache, indices, lengths, valid


def cache_argument(under: Under, cache: Cache) -> Tensor:
    """The cache as the call takes it: bfloat16 rows are float32 for the interpreter."""
    if not under.interpreted or cache.tensor.dtype != torch.bfloat16:
        return cache.tensor
    tensor = cache.tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).float()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def partners_of(layout: Layout, fp8: bool) -> list[Layout]:
    """Formats of a second pool, for queries in FP8 or not."""
    return [layout] if fp8 else [other for other in LAYOUTS if other.d_qk == layout.d_qk]


def draw_decode(
    draw: Draw,
    under: Under,
    *,
    style: str = "free",
    layouts: Sequence[Layout] = LAYOUTS,
    partners: Callable[[Layout, bool], Sequence[Layout]] = partners_of,
    fp8_query: bool | None = None,
) -> Call:
    """A call of ``sparse_mla_decode``: one pool or two, any splits.

    Args:
        draw: Choices.
        under: What is tested.
        style: As in ``draw_prefill``; splits and scales are drawn for "free" only.
        layouts: Formats of the pool.
        partners: Formats of a second one, of the first and of whether queries are FP8.
        fp8_query: Whether they are; None for either.
    """
    values = Values(draw, under.device)
    tokens, layout = draw_tokens(draw, under), draw.fixed.choice(layouts)
    fp8 = layout.name == "FP8" and draw.fixed.chance() and not under.interpreted
    if fp8_query is not None:
        fp8 = fp8_query
    seconds = partners(layout, fp8)
    second = draw.fixed.choice(seconds) if seconds and draw.fixed.chance(40) else None
    cache, indices, lengths, valid = _draw_pool(draw, under, values, tokens, layout)
    keys = keys_of(cache.rows, indices, valid)
    arguments: dict[str, Any] = {
        "k_cache": cache_argument(under, cache),
        "indices": indices,
        "kv_format": layout.kv_format,
    }
    if lengths is not None:
        arguments["topk_length"] = lengths
    topk, extra_topk = indices.shape[1], 0
    if second is not None:
        extra, extra_indices, extra_lengths, extra_valid = _draw_pool(
            draw, under, values, tokens, second
        )
        keys = torch.cat((keys, keys_of(extra.rows, extra_indices, extra_valid)), 1)
        valid = torch.cat((valid, extra_valid), 1)
        extra_topk = extra_indices.shape[1]
        arguments |= {
            "extra_k_cache": cache_argument(under, extra),
            "extra_indices": extra_indices,
            "extra_kv_format": second.kv_format,
        }
        if extra_lengths is not None:
            arguments["extra_topk_length"] = extra_lengths
    prologue = Prologue(draw, under, values, layout.d_qk, valid.any(1), style=style, fp8=fp8)
    arguments |= prologue.arguments
    scale, v_scale = draw_scale(draw), 1.0
    is_free = style == "free"
    if is_free and draw.fixed.chance(25):
        v_scale = draw.choice((2.0, 0.3, -1.5))
        arguments["v_scale"] = on_device(draw, v_scale, values)
    arguments["sm_scale"] = on_device(draw, scale, values) if is_free and scale > 0 else scale
    if is_free:
        _draw_splits(draw, under, arguments, tokens, prologue.heads, topk, extra_topk)
    expected = attend(
        prologue.q,
        keys,
        valid,
        under.precision,
        sm_scale=as_float32(arguments["sm_scale"]),
        v_scale=as_float32(v_scale),
        moved_keys=under.precision.moved_keys if layout.name == "V32" else 0,
        is_codes=fp8,
        **prologue.options,
    )
    return Call("sparse_mla_decode", arguments, (tokens, prologue.heads, 512), expected)


def as_float32(number: float | Tensor) -> float:
    """What float32 makes of a number or of a tensor."""
    return float(torch.as_tensor(number, dtype=torch.float32))


def on_device(draw: Draw, number: float, values: Values) -> float | Tensor:
    """The number, or a tensor of it."""
    kind = draw.fixed.choice((0, 0, 1, 2))
    if kind == 0:
        return number
    tensor = torch.tensor(number, dtype=torch.float32, device=values.device)
    return tensor if kind == 1 else tensor.view(1)


def _draw_splits(
    draw: Draw,
    under: Under,
    arguments: dict[str, Any],
    tokens: int,
    heads: int,
    topk: int,
    extra_topk: int,
) -> None:
    """Splits by number or by schedule, with or without scratch of exactly the planned size."""
    splits = draw.fixed.choice((None, 1, 2, 3, 8))
    if splits == 8:
        splits = draw.choice((8, 1000))
    invariant = draw.fixed.chance(30)
    if invariant:
        arguments["batch_invariant"] = True
    planned = draw.fixed.chance(30)
    if not planned:
        if splits is not None:
            arguments["num_splits"] = splits
        return
    extra_format = arguments.get("extra_kv_format")
    schedule = mlacast.plan_sparse_decode(
        tokens,
        heads,
        topk,
        kv_format=arguments["kv_format"],
        extra_topk=extra_topk,
        extra_kv_format=extra_format,
        num_splits=splits,
        batch_invariant=invariant,
        device=under.device,
    )
    arguments["schedule"] = schedule
    if draw.fixed.chance() and schedule.num_splits < 100:
        needed = mlacast.workspace_size(schedule)
        scratch = torch.full((needed + 256,), POISON, dtype=torch.uint8, device=under.device)
        arguments["workspace"] = scratch[:needed]


def check_prefill(draw: Draw, under: Under) -> None:
    """Draw a prefill, run it, compare."""
    calls.check(draw, under, draw_prefill(draw, under))


def check_decode(draw: Draw, under: Under) -> None:
    """Draw a decode, run it, compare; what lies behind the given scratch stays."""
    call = draw_decode(draw, under)
    calls.check(draw, under, call)
    scratch = call.arguments.get("workspace")
    if scratch is not None:
        behind = torch.as_strided(scratch, (256,), (1,), scratch.numel())
        assert bool((behind == POISON).all()), "bytes behind the workspace changed"
