"""Drawn calls of what a layer adds: merging, the products before and after, quantising."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlacast
from tests import quantizers
from tests.fuzz import calls, output_checks
from tests.fuzz.attention import Expected
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw
from tests.fuzz.numbers import FLOAT32_MAX
from tests.fuzz.outputs import draw_target
from tests.fuzz.tensors import Values, assert_unchanged, embed, raw, snapshot
from tests.fuzz.under import Under

BLOCK, GROUP = 128, 32


def draw_merge(draw: Draw, under: Under) -> Call:
    """A call of ``merge_attention_states``: parts of any type, some of them empty and NaN."""
    values = Values(draw, under.device)
    tokens, heads = draw.integer(0, under.sizes.tokens), draw.fixed.choice(under.sizes.heads)
    width = draw.fixed.choice((128, 512, 64))
    count = draw.fixed.choice((1, 2, 3, 4, 5, 7))
    layout = draw.fixed.choice(("ht", "th"))
    unit = under.unit(draw)
    outs, lses, exact, sums = [], [], [], []
    for _ in range(count):
        choices = (torch.float32, torch.float16, torch.bfloat16)[: 2 if under.interpreted else 3]
        dtype = draw.fixed.choice(choices)
        part = (values.normal(tokens, heads, width) * draw.choice((1.0, 50.0))).to(dtype)
        lse = values.normal(tokens, heads) * draw.choice((2.0, 30.0, 1e-3))
        marks = torch.tensor([-torch.inf, torch.inf], device=under.device)
        empty = values.uniform(tokens, heads) < draw.choice((0.0, 0.3, 0.7))
        mark = marks[values.integers(0, 2, tokens, heads).long()]
        lse = torch.where(empty, mark, lse)
        exact.append(torch.where(empty[..., None], 0.0, part.double()))
        sums.append(torch.where(empty, -torch.inf, lse.double()))
        given = torch.where(empty[..., None], torch.nan, part).to(dtype)
        outs.append(embed(draw, given, unit=unit))
        lses.append(lse.t().contiguous() if layout == "ht" else lse.contiguous())
    stacked = torch.stack(sums)
    peak = stacked.amax(0)
    empty = peak.isneginf()
    base = torch.where(empty, 0.0, peak)
    weights = torch.exp(stacked - base)
    total = torch.where(empty, 1.0, weights.sum(0))
    weights = weights / total
    parts = torch.stack(exact)
    out = (weights[..., None] * parts).sum(0)
    # exp of a difference that float32 rounds, in one launch for each three parts more.
    spread = (stacked - base).abs().nan_to_num(0.0, posinf=0.0, neginf=0.0)
    rounds = 1 + max(count - 2, 0) // 3
    relative = under.precision.unit * (16 + 2 * spread + 2 * base.abs()) * rounds
    error = (weights * relative)[..., None] * parts.abs()
    error = error.sum(0) + 16 * rounds * under.precision.unit * (
        weights[..., None] * parts.abs()
    ).sum(0)
    error = error + 2.0**-100 * parts.abs().amax(0)
    lse = torch.where(empty, -torch.inf, base + torch.log(total))
    bound = under.precision.unit * rounds * (24 + 4 * base.abs())
    expected = Expected(out, lse, lse, error, bound)
    arguments: dict[str, Any] = {"outs": outs, "lses": lses, "lse_layout": layout}
    shape = (tokens, heads, width)
    return Call("merge_attention_states", arguments, shape, expected, heads_first=layout == "ht")


def draw_v_up(draw: Draw, under: Under) -> Call:
    """A call of ``v_up_project``."""
    values = Values(draw, under.device)
    tokens, heads = draw.integer(0, under.sizes.tokens), draw.fixed.choice(under.sizes.heads)
    latent = (values.normal(tokens, heads, 512) * draw.choice((1.0, 20.0))).bfloat16()
    weight = (values.normal(heads, 512, 128) / 22).bfloat16()
    given = weight.to(under.rows_dtype)
    if draw.fixed.chance():
        # As a view of the weight of kv_b_proj.
        both = torch.full((heads, 256, 512), torch.nan, dtype=given.dtype, device=under.device)
        both[:, 128:] = given.transpose(1, 2)
        given = both[:, 128:].transpose(1, 2)
    out = torch.einsum("thl,hlv->thv", latent.double(), weight.double())
    sizes = torch.einsum("thl,hlv->thv", latent.double().abs(), weight.double().abs())
    error = 4 * 512**0.5 * under.precision.unit * sizes
    none = torch.zeros((tokens, heads), dtype=torch.float64, device=under.device)
    unit = under.unit(draw)
    arguments = {"latent_out": embed(draw, latent.to(under.rows_dtype), unit=unit), "w_uv": given}
    expected = Expected(out, none, none, error, none)
    return Call("v_up_project", arguments, (tokens, heads, 128), expected, ())


def check_merge(draw: Draw, under: Under) -> None:
    """Draw a merge, run it, compare."""
    calls.check(draw, under, draw_merge(draw, under))


def check_v_up(draw: Draw, under: Under) -> None:
    """Draw a product with W_UV, run it, compare."""
    calls.check(draw, under, draw_v_up(draw, under))


def _hard_rows(draw: Draw, values: Values, tokens: int, width: int) -> Tensor:
    """Rows whose groups differ in size; zeros, numbers that are none, and ties of codes."""
    x = values.normal(tokens, width)
    steps = values.integers(-20, 12, tokens, max(width // 16, 1)).float()
    spread = torch.exp2(steps).repeat_interleave(16, -1)[:, :width]
    kind = draw.choice(("sizes", "ties", "special", "plain"))
    if kind == "sizes":
        return x * spread
    if kind == "ties":
        return torch.round(x * 8) / 16 * torch.exp2(torch.round(torch.log2(spread)))
    if kind == "special":
        marks = torch.tensor(
            [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-45, -1e-40, 448.0, 1e-10, 1e-4],
            device=values.device,
        )
        where = values.uniform(tokens, width) < draw.choice((0.01, 0.3, 1.0))
        picked = marks[values.integers(0, len(marks), tokens, width).long()]
        return torch.where(where, picked, x)
    return x


def quantised_bytes(x: Tensor, fmt: mlacast.OutFormat) -> quantizers.Quantized:
    """Bytes of the codes and scales of float32 rows [T, g, f] on the CPU.

    A group with a NaN is NaN throughout; an infinity has the scale of the largest number where that
    is no power of two.
    """
    if isinstance(fmt, mlacast.Fp8Tensor):
        return quantizers.quantize_fp8_tensor(x, output_checks.format_scale(fmt))
    size = fmt.sf_vec_size
    has_nan = x.view(*x.shape[:-1], x.shape[-1] // size, size).isnan().any(-1)
    spread = has_nan.repeat_interleave(size, -1)
    if isinstance(fmt, mlacast.Nvfp4):
        found = quantizers.quantize_nvfp4(x, output_checks.format_scale(fmt))
        assert found.sf is not None
        data = found.data.masked_fill(spread[..., ::2], 0x77)
        return quantizers.Quantized(data, found.sf.masked_fill(has_nan.flatten(1), 0x7F))
    if fmt.sf_kind == "float32":
        x = x.clamp(-FLOAT32_MAX, FLOAT32_MAX)
    chunk32 = fmt.order == "chunk32"
    found = quantizers.quantize_fp8_group(
        x, size, fmt.sf_kind, chunk32=chunk32, floor=fmt.amax_floor
    )
    if chunk32:
        spread = quantizers.chunk32_order(spread, 512, 32)
    return quantizers.Quantized(found.data.masked_fill(spread, 0x7F), found.sf)


def check_quantize(draw: Draw, under: Under) -> None:
    """``quantize_output`` gives the bytes of a search for the nearest code, and nothing else."""
    values = Values(draw, under.device)
    tokens = draw.integer(0, under.sizes.tokens)
    width = draw.choice((512, 1024, 128, 1536, 384))
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    x = _hard_rows(draw, values, tokens, width).to(dtype)
    target = draw_target(draw, under, tokens, (tokens, 1, width))
    arguments = dict(target.arguments)
    if target.plain is not None:
        # There is no plain output here.
        arguments = {}
    arguments.pop("out_format", None)
    fmt = target.format
    given = embed(draw, x)
    before = snapshot([given])
    result = under.call("quantize_output", x=given, format=fmt, **arguments)
    assert_unchanged([given], before)
    rows = x.float().cpu().view(tokens, result.num_groups, result.features)
    if fmt.key == "bf16":
        bits = rows.bfloat16()
        equal = torch.equal(result.data.cpu().nan_to_num(3.0), bits.nan_to_num(3.0))
        assert equal and torch.equal(result.data.cpu().isnan(), bits.isnan())
    elif tokens:
        wanted = quantised_bytes(rows, fmt)
        codes = result.data.view(torch.uint8).cpu()
        assert torch.equal(codes, wanted.data), f"codes differ: {_first(codes, wanted.data)}"
        _compare_scales(result, wanted.sf)
    if target.buffer is not None:
        assert result is target.buffer
        output_checks.check_surroundings(result, target.whole)


def _first(actual: Tensor, wanted: Tensor) -> str:
    at = tuple((actual != wanted).nonzero()[0].tolist())
    return f"{list(at)} is {actual[at]}, not {wanted[at]}"


def _compare_scales(result: mlacast.QuantizedTensor, wanted: Tensor | None) -> None:
    if wanted is None or result.sf is None:
        return
    sf = result.sf.cpu()
    if result.format.sf_layout == "swizzled_128x4":
        rows = result.row_start + torch.arange(result.num_tokens)
        flat = sf.view(torch.uint8).reshape(-1)
        actual = flat[output_checks.swizzled_places(rows, wanted.shape[1])]
    else:
        actual = sf.contiguous().view(torch.int32)
        wanted = wanted.contiguous().view(torch.int32)
        if result.format.sf_kind == "float32":
            # NaN is NaN, whatever its bits.
            nan = 0x7FC00000
            actual = torch.where(actual.view(torch.float32).isnan(), nan, actual)
            wanted = torch.where(wanted.view(torch.float32).isnan(), nan, wanted)
    assert torch.equal(actual, wanted), f"scales differ: {_first(actual, wanted)}"


def _fill(draw: Draw, values: Values, buffer: mlacast.QuantizedTensor) -> None:
    """Codes and scales of any finite numbers, put there byte by byte."""
    fmt, data = buffer.format, buffer.data
    if fmt.key == "bf16":
        data.copy_(values.normal(*data.shape).to(data.dtype))
        return
    codes = values.integers(0, 254, *data.shape)
    if fmt.key == "nvfp4":
        codes = values.integers(0, 256, *data.shape)
    else:
        codes = codes + (codes >= 127).int()
    data.view(torch.uint8).copy_(codes.to(torch.uint8))
    sf = buffer.sf
    if sf is None:
        return
    if fmt.sf_kind == "e4m3":
        raw(sf).copy_(values.integers(20, 80, raw(sf).numel()).to(torch.uint8))
    elif fmt.sf_kind == "ue8m0_packed":
        count = buffer.features // fmt.sf_vec_size
        exponents = values.integers(112, 124, *sf.shape[:2], sf.shape[2] * 4)
        exponents[..., count:] = 0
        words = exponents.view(*sf.shape, 4)
        word = words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24
        sf.copy_(word)
    else:
        scales = torch.exp2(values.normal(*sf.shape) * 2 - 8)
        sf.copy_(torch.exp2(torch.round(torch.log2(scales))) if "pow2" in fmt.sf_kind else scales)


def draw_weights(
    draw: Draw, under: Under, values: Values, shape: tuple[int, ...], features: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights, their scales or None, and what they mean in float64."""
    kinds = ["float32", "float16", "bfloat16", "blocks"]
    if features % GROUP == 0:
        kinds += ["bytes"]
    if features % BLOCK == 0:
        kinds += ["words", "words_mn"]
    kind = draw.fixed.choice([k for k in kinds if not (under.interpreted and k == "bfloat16")])
    rows, columns = shape[-2:]
    unit = under.unit(draw)
    if kind in ("float32", "float16", "bfloat16"):
        weight = (values.normal(*shape) / columns**0.5).to(getattr(torch, kind))
        return embed(draw, weight, unit=unit), None, weight.double()
    codes = (values.normal(*shape) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
    given = embed(draw, codes, unit=unit)
    lead = shape[:-2]
    if kind == "blocks":
        size = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
        scale = values.uniform(*size) * 0.05 / columns**0.5 + 1e-5
        spread = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return given, embed(draw, scale), codes.double() * spread[..., :rows, :columns].double()
    exponents = values.integers(113, 123, *lead, rows, columns // GROUP).to(torch.uint8)
    numbers = torch.exp2(exponents.double() - 127).repeat_interleave(GROUP, -1) * codes.double()
    if kind == "bytes":
        if draw.chance(30):
            return given, exponents.view(torch.float8_e8m0fnu), numbers
        return given, exponents, numbers
    words = exponents.view(torch.int32)
    if kind == "words_mn":
        words = words.transpose(-1, -2).contiguous().transpose(-1, -2)
    return given, words, numbers


def check_project(draw: Draw, under: Under) -> None:
    """``grouped_out_project`` and ``quantized_linear`` of a buffer of any bytes."""
    values = Values(draw, under.device)
    grouped = draw.fixed.chance()
    op = "grouped_out_project" if grouped else "quantized_linear"
    tokens = draw.integer(0, under.sizes.tokens)
    features = draw.fixed.choice((512, 128, 1024, 384, 64, 96))
    groups = draw.fixed.choice((1, 2, 3))
    target = draw_target(draw, under, tokens, (tokens, 1, groups * features), groups=groups)
    buffer = target.buffer
    if buffer is None:
        # A buffer of the library, without poison.
        buffer = mlacast.QuantizedTensor.empty(
            tokens, groups, features, target.format, under.device
        )
    if under.interpreted and buffer.format.key == "bf16":
        buffer.data = torch.empty(buffer.data.shape)
    _fill(draw, values, buffer)
    columns = draw.fixed.choice((1, 8, 40, 130))
    lead = (groups, columns, features) if grouped else (columns, groups * features)
    weight, weight_sf, numbers = draw_weights(draw, under, values, lead, features)
    arguments: dict[str, Any] = {"out": buffer, "weight": weight}
    if weight_sf is not None:
        arguments["weight_sf"] = weight_sf
    inputs = [weight, weight_sf, buffer.data, buffer.sf]
    before = snapshot(inputs)
    found = under.call(op, **arguments)
    assert_unchanged(inputs, before)
    meaning = output_checks.values_of(buffer)
    if grouped:
        product = torch.einsum("tgf,gof->tgo", meaning, numbers)
        size = torch.einsum("tgf,gof->tgo", meaning.abs(), numbers.abs())
    else:
        product = meaning.flatten(1) @ numbers.t()
        size = meaning.flatten(1).abs() @ numbers.abs().t()
    assert found.shape == product.shape
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
    precision = under.precision
    unit = precision.product_unit if weight_sf is None else precision.code_unit
    unit = unit or lead[-1] * 2.0**-24
    allowed = unit * size + half_ulp[found.dtype] * product.abs() + 2.0**-24
    if found.dtype == torch.float16:
        product = product.clamp(-65504, 65504)
        found = found.clamp(-65504, 65504)
    output_checks.assert_within("product", found.double(), product - allowed, product + allowed)
