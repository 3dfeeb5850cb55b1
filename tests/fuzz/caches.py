"""Drawn calls of the cache operations: gather, append, RoPE with FP8, and the scheduler.

Their results are bytes or integers with one right answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.ops.decode_metadata import decode_metadata
from tests import quantizers, rope_quantize_cases, schedules
from tests.fuzz import attention
from tests.fuzz.draw import Draw
from tests.fuzz.records import LAYOUTS, Layout, decode, draw_cache
from tests.fuzz.tensors import (
    INT_MAX,
    INT_MIN,
    POISON,
    Values,
    assert_unchanged,
    embed,
    embed_ints,
    raw,
    snapshot,
)
from tests.fuzz.under import Under

MIN_RATIO = 1e-4


def _draw_slots(draw: Draw, values: Values, count: int, slots: int) -> Tensor:
    """int32 or int64 slots: any, none, repeats."""
    drawn = values.integers(-2, slots + 2, count, dtype=torch.int64)
    if count and draw.chance(30):
        drawn[draw.integer(0, count - 1)] = draw.choice((INT_MAX, INT_MIN, -1, slots))
    if count and draw.chance(20):
        drawn.fill_(int(drawn[0]))
    return embed_ints(draw, drawn.int() if draw.fixed.chance() else drawn)


def _draw_paging(draw: Draw, under: Under) -> tuple[int, int]:
    page_size = draw.fixed.choice((1, 3, 16, 64))
    return draw.integer(0, max(1, under.sizes.rows // page_size)), page_size


def _bits_of_bf16(rows: Tensor) -> Tensor:
    """Bits of float64 bfloat16 numbers; every NaN alike."""
    bits = rows.float().view(torch.int32) >> 16
    return torch.where(rows.isnan(), 0x7FC0, bits & 0xFFFF)


def check_gather(draw: Draw, under: Under) -> None:
    """``kv_cache_gather`` of records of any bytes: bit for bit, zeros where there is no slot."""
    values = Values(draw, under.device)
    layout = draw.fixed.choice(LAYOUTS)
    pages, page_size = _draw_paging(draw, under)
    cache = draw_cache(draw, layout, values, pages=pages, page_size=page_size)
    rows = cache.rows
    # The interpreter's bfloat16 is wrong where rounding or NaN is.
    if draw.chance(40) and not under.interpreted:
        storage = raw(cache.tensor)
        storage.copy_(values.integers(0, 256, storage.numel()).to(torch.uint8))
        records = storage[cache.records]
        rows = decode(layout, records[:, : layout.data], records[:, layout.data :])
    count = draw.integer(0, under.sizes.tokens * 4)
    slots = _draw_slots(draw, values, count, cache.slots)
    before = snapshot([cache.tensor, slots])
    found = under.call(
        "kv_cache_gather", cache=cache.tensor, slots=slots, kv_format=layout.kv_format
    )
    assert_unchanged([cache.tensor, slots], before)
    inside = (slots >= 0) & (slots < cache.slots)
    expected = torch.zeros((count, layout.d_qk), dtype=torch.float64, device=under.device)
    expected[inside] = rows[slots[inside].long()]
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    bits = found.view(torch.int16).int() & 0xFFFF
    bits = torch.where(found.isnan(), 0x7FC0, bits)
    wrong = bits != _bits_of_bf16(expected)
    assert not bool(wrong.any()), f"rows differ at {wrong.nonzero()[0].tolist()}"


def _tiles(x: Tensor, size: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1] // size, size)


def _pow2_records(layout: Layout, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponent bytes and broken tiles of V3.2, V4 and V4.1."""
    tiles = _tiles(x, layout.tile)
    amax = tiles.abs().amax(-1)
    ratio = (amax / torch.tensor(448.0)).clamp(min=torch.tensor(MIN_RATIO))
    flat = [quantizers.power_of_two_byte(value) for value in ratio.reshape(-1).tolist()]
    exponents = torch.tensor(flat, dtype=torch.int64).view(ratio.shape)
    scale = torch.ldexp(torch.ones_like(ratio), (exponents - 127).int())
    codes = quantizers.e4m3_codes(tiles / scale[..., None])
    return codes, exponents.to(torch.uint8), ~tiles.isfinite().all(-1)


def encode(layout: Layout, latent: Tensor) -> Tensor:
    """Bytes [n, data + scale] of latent rows on the CPU, by the table of docs/formats.md."""
    if layout.name == "BF16":
        bits = latent.bfloat16().view(torch.int16)
        if latent.dtype != torch.bfloat16:
            bits = torch.where(latent.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), bits)
        return bits.contiguous().view(torch.uint8)
    x = latent.float()
    if layout.name == "FP8":
        return quantizers.e4m3_codes(x)
    kept = latent[:, layout.quantised :]
    rope = encode(LAYOUTS[0], kept) if kept.shape[1] else kept.new_empty((len(x), 0)).byte()
    x = x[:, : layout.quantised]
    tiles = _tiles(x, layout.tile)
    if layout.tile != 16:
        codes, exponents, broken = _pow2_records(layout, x)
        if layout.name == "V32":
            numbers32 = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
            numbers32 = numbers32.masked_fill(broken, torch.nan)
            codes = codes.masked_fill(broken[..., None], 0x7F).flatten(1)
            return torch.cat((codes, numbers32.view(torch.uint8), rope), 1)
        zeros = tiles.signbit().to(torch.uint8) * 0x80
        marked = torch.where(tiles.isinf(), torch.tensor(0x7F, dtype=torch.uint8), zeros)
        marked = marked.masked_fill(tiles.isnan().any(-1, keepdim=True), 0x7F)
        codes = torch.where(broken[..., None], marked, codes).flatten(1)
        scales = exponents.masked_fill(broken, 0xFF)
    else:
        broken = ~tiles.isfinite().all(-1)
        ratio = tiles.abs().amax(-1) / torch.tensor(6.0)
        if layout.name != "NVFP4_384":
            ratio = ratio.clamp(2.0**-9, 448.0)
        scales = quantizers.e4m3_codes(ratio.nan_to_num(0.0, posinf=0.0)).masked_fill(broken, 0x7F)
        factor = quantizers.e4m3_values(scales).float()[..., None]
        # One divides, the other multiplies with the reciprocal.
        quotient = tiles * (1 / factor) if layout.name == "NVFP4_384" else tiles / factor
        nibbles = quantizers.e2m1_codes(quotient)
        nibbles = nibbles.masked_fill((scales == 0)[..., None], 0)
        nibbles = nibbles.masked_fill(broken[..., None], 7).flatten(1)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    rest = torch.zeros((len(x), layout.scale - scales.shape[1]), dtype=torch.uint8)
    return torch.cat((codes, rope, scales, rest), 1)


def _hard_latent(draw: Draw, values: Values, count: int, width: int) -> Tensor:
    """Rows of every size, with zeros, numbers that are none, and ties."""
    x = values.normal(count, width)
    kind = draw.choice(("plain", "sizes", "ties", "special"))
    if kind == "sizes":
        x = x * torch.exp2(values.integers(-30, 14, count, width // 16).float()).repeat_interleave(
            16, 1
        )
    elif kind == "ties":
        x = torch.round(x * 8) / 16
    elif kind == "special":
        marks = torch.tensor(
            [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-45, 6.0, 448.0, -5.0, 2.5],
            device=values.device,
        )
        where = values.uniform(count, width) < draw.choice((0.002, 0.1, 1.0))
        x = torch.where(where, marks[values.integers(0, 11, count, width).long()], x)
    return x


def check_append(draw: Draw, under: Under) -> None:
    """``kv_cache_append``: the bytes of each record, and no other byte."""
    values = Values(draw, under.device)
    layout = draw.fixed.choice(LAYOUTS)
    pages, page_size = _draw_paging(draw, under)
    cache = draw_cache(
        draw,
        layout,
        values,
        pages=pages,
        page_size=page_size,
        used=torch.zeros(pages * page_size, dtype=torch.bool, device=under.device),
        fill=POISON,
    )
    count = draw.integer(0, under.sizes.tokens * 3)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    dtype = draw.fixed.choice(dtypes[: 2 if under.interpreted else 3])
    latent = _hard_latent(draw, values, count, layout.d_qk).to(dtype)
    slots = _draw_slots(draw, values, count, cache.slots)
    arguments: dict[str, Any] = {}
    if draw.fixed.chance(40) and not under.interpreted:
        latent = values.integers(-128, 128, count, layout.d_qk).float().div(32).to(dtype)
        arguments, rows = _normed(draw, under, values, latent)
    else:
        rows = latent
    given = embed(draw, latent, unit=under.unit(draw), permute=False)
    inputs = [given, slots]
    before = snapshot(inputs)
    under.call(
        "kv_cache_append",
        latent=given,
        slots=slots,
        cache=cache.tensor,
        kv_format=layout.kv_format,
        **arguments,
    )
    assert_unchanged(inputs, before)
    expected = torch.full((raw(cache.tensor).numel(),), POISON, dtype=torch.uint8)
    records, places = encode(layout, rows.cpu()), cache.records.cpu()
    for row in reversed(range(count)):
        slot = int(slots[row])
        if 0 <= slot < cache.slots:
            expected[places[slot]] = records[row]
    found = raw(cache.tensor).cpu()
    wrong = (found != expected).nonzero().flatten()
    assert wrong.numel() == 0, (
        f"{wrong.numel()} bytes differ, byte {int(wrong[0])} is {int(found[wrong[0]])}, "
        f"not {int(expected[wrong[0]])}"
    )


def _normed(
    draw: Draw, under: Under, values: Values, latent: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """Options of a fused norm or rotation, and the rows that then are encoded.

    They are taken from a bfloat16 cache, after a comparison with float64 to one bfloat16 step: the
    contract has each step rounded to bfloat16, so any other format encodes exactly these.
    """
    count, width = latent.shape
    arguments: dict[str, Any] = {}
    exact = latent.double()
    touched = torch.zeros(width, dtype=torch.bool, device=latent.device)
    if draw.fixed.chance(60):
        eps = draw.choice((1e-6, 0.1))
        arguments["norm_eps"] = eps
        root = torch.sqrt(exact[:, :512].square().mean(1, keepdim=True) + eps)
        normed = exact[:, :512] / root
        if draw.fixed.chance():
            weight = values.normal(512).to(draw.fixed.choice((torch.bfloat16, torch.float32)))
            arguments["norm_weight"] = weight
            normed = normed * weight.double()
        exact = torch.cat((normed, exact[:, 512:]), 1)
        touched[:512] = True
    size = exact.abs()
    if not arguments or draw.fixed.chance():
        table_rows = draw.integer(1, 9)
        table = values.normal(table_rows, 64)
        positions = values.integers(-3, table_rows + 3, count, dtype=torch.int64)
        pairing = draw.fixed.choice(("interleaved", "half"))
        arguments["rope"] = mlacast.Rope(table, positions, pairing)
        cosine, sine = attention.Rotation(table, positions, pairing).rows()
        tail = exact[:, -64:]
        if touched[-1]:
            tail = tail.bfloat16().double()
        turned = attention.rotate(tail, cosine[:, 0], sine[:, 0], pairing)
        sizes = attention.rotated_sizes(tail.abs(), cosine[:, 0], sine[:, 0], pairing)
        exact = torch.cat((exact[:, :-64], turned), 1)
        size = torch.cat((size[:, :-64], sizes), 1)
        touched[-64:] = True
    plain = mlacast.KvFormat.BF16.allocate(max(count, 1), 1, d_qk=width, device=under.device)
    under.call(
        "kv_cache_append",
        latent=latent,
        slots=torch.arange(count, device=under.device),
        cache=plain,
        kv_format=mlacast.KvFormat.BF16,
        **arguments,
    )
    rows = plain[:count, 0, 0]
    # A bfloat16 step of the element, one of each of a rotated pair whose norm was rounded, and what
    # float32 leaves where a pair nearly cancels.
    allowed = 2.0**-7 * exact.abs() + 2.0**-7 * (size if touched[0] else exact.abs()) + 1e-30
    allowed = allowed + 2.0**-22 * size
    off = (rows.double() - exact).abs() - allowed
    assert not bool((off[:, touched] > 0).any()), "norm or rotation is off"
    return arguments, torch.where(touched, rows.to(latent.dtype), latent)


def check_rope_quantize(draw: Draw, under: Under) -> None:
    """``rope_quantize_fp8``: slices of wider rows in and out, bytes of steps in float64."""
    values = Values(draw, under.device)
    tokens = draw.integer(0, under.sizes.tokens)
    r = draw.fixed.choice((64, 2, 12, 32))
    d, d_k = draw.fixed.choice((512, 0, 20)), draw.fixed.choice((512, 0, 7))
    heads, kv_heads = draw.fixed.choice(under.sizes.heads), draw.fixed.choice((0, 1, 2))
    dtype = draw.fixed.choice((torch.bfloat16, torch.float16, torch.float32))
    code = draw.fixed.choice((torch.float8_e4m3fn, torch.float8_e5m2))
    pairing = draw.fixed.choice(("interleaved", "half"))
    lead_k = (tokens, kv_heads) if kv_heads else (tokens,)
    shapes = {
        "q_rope": (tokens, heads, r),
        "k_rope": (*lead_k, r),
        "q_nope": (tokens, heads, d),
        "k_nope": (*lead_k, d_k),
    }
    parts: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        part = (values.normal(*shape) * draw.choice((1.0, 300.0, 1e-3))).to(dtype)
        if part.numel() and draw.chance(30):
            flat = part.view(-1)
            flat[draw.integer(0, flat.numel() - 1)] = draw.choice(
                (torch.nan, torch.inf, -torch.inf, -0.0)
            )
        parts[name] = part
    rows = draw.integer(1, 9)
    table = values.normal(rows, r).to(draw.fixed.choice((torch.float32, torch.bfloat16)))
    positions = values.integers(-3, rows + 3, tokens, dtype=torch.int64)
    if draw.fixed.chance():
        positions = positions.int()
    scales = draw.choice((1.0, 1.7, 0.03)), draw.choice((1.0, 0.3, 20.0))
    given: dict[str, Any] = {name: embed(draw, part) for name, part in parts.items()}
    given |= {
        name: None for name in ("q_nope", "k_nope") if parts[name].shape[-1] == 0 and draw.chance()
    }
    outs: dict[str, Any] = {}
    for name, part in parts.items():
        if draw.fixed.chance():
            codes = torch.zeros(part.shape, dtype=torch.uint8, device=under.device)
            wide = embed(draw, codes)
            raw(wide).fill_(POISON)
            outs[f"{name}_out"] = wide.view(code)
    inputs = [part for part in (*given.values(), table, positions) if part is not None]
    before = snapshot(inputs)
    results = under.call(
        "rope_quantize_fp8",
        **given,
        cos_sin_cache=table,
        positions=embed_ints(draw, positions),
        pairing=pairing,
        dtype=code,
        q_scale=scales[0],
        k_scale=scales[1],
        **outs,
    )
    assert_unchanged(inputs, before)
    for name, result in zip(shapes, results, strict=True):
        out = outs.get(f"{name}_out")
        assert out is None or result is out, f"{name}: a given tensor is not what came back"
        source = parts[name].cpu()
        heads3 = source if source.dim() == 3 else source[:, None]
        exact = heads3.double()
        if name.endswith("rope"):
            exact = rope_quantize_cases.rotated(heads3, table.cpu(), positions.cpu(), pairing)
        wanted = rope_quantize_cases.codes(exact, scales[name[0] == "k"], code)
        found = result.view(torch.uint8)
        same = torch.equal(found.cpu().reshape(wanted.shape), wanted)
        assert same, f"codes of {name} differ"
        if out is not None:
            found.fill_(POISON)
            assert bool((raw(out) == POISON).all()), f"bytes around {name}_out changed"


def check_metadata(draw: Draw, under: Under) -> None:
    """The scheduler of split decodes against its greedy walk over Python numbers."""
    batch = draw.integer(0, 12)
    special = (0, 1, 63, 64, 65, -3, 4096, 100_000)
    lengths = [
        draw.choice(special) if draw.chance() else draw.integer(0, 3000) for _ in range(batch)
    ]
    parts = draw.choice((1, 2, 7, 132, draw.integer(1, 20)))
    topk = draw.choice((None, 0, 64, 2048))
    overhead = draw.choice((5, 0, 1, 9))
    tensor = torch.tensor(lengths, dtype=torch.int32, device=under.device)
    rows, splits = decode_metadata(
        embed_ints(draw, tensor),
        num_parts=parts,
        topk=topk,
        overhead=overhead,
        backend=under.backend,
    )
    wanted_rows, wanted_splits = schedules.walk(lengths, parts, topk, overhead)
    assert [tuple(row) for row in rows[:, :5].tolist()] == wanted_rows
    assert splits.tolist() == wanted_splits
    assert not bool(rows[:, 5:].any())
