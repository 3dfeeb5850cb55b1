"""What has to be equal bit for bit: repeats, given buffers, and rows beside other rows.

Rows of a prefill do not depend on the batch, those of a decode do not under batch_invariant=True,
and sequences of a dense prefill do not depend on each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mlacast
from tests.fuzz import dense, layer, output_checks, outputs, sparse
from tests.fuzz.calls import Call
from tests.fuzz.draw import Draw
from tests.fuzz.tensors import POISON, raw
from tests.fuzz.under import Under

PER_TOKEN = (
    "q",
    "indices",
    "topk_length",
    "extra_indices",
    "extra_topk_length",
    "latent_out",
)


def _bits(tensor: Tensor) -> Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(width)


def result_bits(result: Any) -> list[Tensor]:
    """Codes and scales of every token of an output, or its numbers, as integers."""
    if isinstance(result, Tensor):
        return [_bits(result).reshape(-1, result.shape[-2] * result.shape[-1])]
    parts = [_bits(result.data).flatten(1)]
    if isinstance(result.format, mlacast.Nvfp4):
        scales = output_checks.read_scales(result)
        assert scales is not None
        return [*parts, scales]
    return parts if result.sf is None else [*parts, _bits(result.sf).flatten(1)]


def _run(under: Under, call: Call, arguments: dict[str, Any], **place: Any) -> list[Tensor]:
    """Bits of the output and of the logarithms, all [T, ...]."""
    results = under.call(call.op, **arguments, **place)
    if not isinstance(results, tuple):
        return result_bits(results)
    out, *logarithms = results
    rows = [part.t() if call.heads_first else part.flatten(0, -2) for part in logarithms]
    return [*result_bits(out), *(_bits(part) for part in rows)]


def _assert_equal(first: list[Tensor], second: list[Tensor], what: str) -> None:
    for at, (left, right) in enumerate(zip(first, second, strict=True)):
        differ = int((left != right).sum()) if left.shape == right.shape else -1
        assert differ == 0, f"{what}: {differ} elements of part {at} differ"


def _place(draw: Draw, call: Call) -> tuple[mlacast.OutFormat, int]:
    fmt = outputs.draw_format(draw)
    total = call.shape[-1] * call.shape[-2]
    if not outputs.fitting_groups(fmt, total):
        fmt = mlacast.Mxfp8("head")
    return fmt, draw.fixed.choice(outputs.fitting_groups(fmt, total))


def _some_tokens(arguments: dict[str, Any], rows: Tensor | slice) -> dict[str, Any]:
    """The call for some of its tokens, in any order."""
    result = dict(arguments)
    for name in PER_TOKEN:
        if name in result:
            result[name] = result[name][rows]
    if "rope" in result:
        rope = result["rope"]
        result["rope"] = mlacast.Rope(rope.cos_sin_cache, rope.positions[rows], rope.pairing)
    return result


def _check(draw: Draw, under: Under, call: Call, *, rows_are_free: bool) -> None:
    """Repeats, a range of a longer buffer, and rows alone or in another order."""
    tokens = call.expected.lse.shape[0]
    fmt, groups = _place(draw, call)
    fresh: dict[str, Any] = {"out_format": fmt, "num_groups": groups}
    first = _run(under, call, call.arguments, **fresh)
    _assert_equal(_run(under, call, call.arguments, **fresh), first, "a repeat")
    before, after = draw.integer(0, 5), draw.integer(0, 5)
    features = call.shape[-1] * call.shape[-2] // groups
    buffer = mlacast.QuantizedTensor.empty(
        before + tokens + after, groups, features, fmt, under.device
    )
    for part in (buffer.data, buffer.sf):
        if part is not None:
            raw(part).fill_(POISON)
    given = _run(under, call, call.arguments, out=buffer[before : before + tokens])
    alike = [part.reshape(other.shape) for part, other in zip(given, first, strict=True)]
    _assert_equal(alike, first, "a given buffer")
    if not rows_are_free or tokens < 2:
        return
    start = draw.integer(0, tokens - 1)
    stop = draw.integer(start + 1, tokens)
    some = _some_tokens(call.arguments, slice(start, stop))
    _assert_equal(
        _run(under, call, some, **fresh), [part[start:stop] for part in first], "rows alone"
    )
    order = torch.arange(tokens - 1, -1, -1, device=under.device)
    turned = _some_tokens(call.arguments, order)
    _assert_equal(
        _run(under, call, turned, **fresh), [part[order] for part in first], "another order"
    )


def check_prefill(draw: Draw, under: Under) -> None:
    """``sparse_mla_prefill``: rows never depend on the batch."""
    call = sparse.draw_prefill(draw, under)
    _check(draw, under, call, rows_are_free=True)


def check_decode(draw: Draw, under: Under) -> None:
    """``sparse_mla_decode``: rows do not depend on the batch if so asked."""
    call = sparse.draw_decode(draw, under)
    for name in ("schedule", "workspace", "num_splits"):
        call.arguments.pop(name, None)
    invariant = draw.fixed.chance(80)
    call.arguments["batch_invariant"] = invariant
    _check(draw, under, call, rows_are_free=invariant)


def check_dense_decode(draw: Draw, under: Under) -> None:
    """``dense_mla_decode``: the same call gives the same bits."""
    _check(draw, under, dense.draw_decode(draw, under), rows_are_free=False)


def check_merge(draw: Draw, under: Under) -> None:
    """``merge_attention_states``: the same call gives the same bits."""
    _check(draw, under, layer.draw_merge(draw, under), rows_are_free=False)


def check_v_up(draw: Draw, under: Under) -> None:
    """``v_up_project``: rows do not depend on the batch."""
    _check(draw, under, layer.draw_v_up(draw, under), rows_are_free=True)


def check_dense_prefill(draw: Draw, under: Under) -> None:
    """``dense_mla_prefill``: a sequence does not depend on the others."""
    call = dense.draw_prefill(draw, under)
    _check(draw, under, call, rows_are_free=False)
    given = call.arguments
    cu_q, cu_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    if len(cu_q) < 2:
        return
    fmt, groups = _place(draw, call)
    fresh: dict[str, Any] = {"out_format": fmt, "num_groups": groups}
    together = _run(under, call, given, **fresh)
    at = draw.integer(0, len(cu_q) - 2)
    q_rows, k_rows = slice(cu_q[at], cu_q[at + 1]), slice(cu_k[at], cu_k[at + 1])
    bounds = {
        name: torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=under.device)
        for name, rows in (("cu_seqlens_q", q_rows), ("cu_seqlens_k", k_rows))
    }
    alone = given | bounds
    alone |= {"q": given["q"][q_rows], "k": given["k"][k_rows], "v": given["v"][k_rows]}
    _assert_equal(
        _run(under, call, alone, **fresh), [part[q_rows] for part in together], "a sequence alone"
    )
