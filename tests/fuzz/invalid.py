"""Calls with one argument that is wrong, or that may be: an error of ours, or a call that works.

A call raises TypeError, ValueError or UnsupportedError, in a sentence that begins with the name of
the operation or descriptor, and has written nothing; or it goes through and has changed nothing but
its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.errors import UnsupportedError
from tests.fuzz import calls, dense, layer, sparse
from tests.fuzz.draw import Draw
from tests.fuzz.outputs import draw_target
from tests.fuzz.tensors import Values, assert_unchanged, raw
from tests.fuzz.under import Under, all_tensors

Arguments = dict[str, Any]
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip
STRANGERS: tuple[object, ...] = (
    None, "x", "", 0, -1, 1.5, True, math.nan, math.inf, -math.inf, 10**30, 10**400, 2**63,
    1e300, b"q", [], (), {},
    object(), 0.0, -0.0, "reference", "hopper", 2**31, torch.bfloat16,
)  # fmt: skip
OURS = ("QuantizedTensor", "Rope", "KvFormat", "Fp8Tensor", "Nvfp4", "Fp8Group", "Mxfp8")


def _gathers(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
    values = Values(draw, under.device)
    cache = mlacast.KvFormat.V4.allocate(2, 4)
    slots = values.integers(0, 8, 3)
    arguments = {"cache": cache, "slots": slots, "kv_format": mlacast.KvFormat.V4}
    return "kv_cache_gather", arguments, None


def _appends(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
    _, arguments, _ = _gathers(draw, under)
    values = Values(draw, under.device)
    rope = mlacast.Rope(values.normal(5, 64), values.integers(0, 5, 3))
    more = {"latent": values.normal(3, 512), "norm_eps": 1e-6, "norm_weight": values.normal(512)}
    return "kv_cache_append", arguments | more | {"rope": rope}, None


def _rotates(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
    values = Values(draw, under.device)
    arguments = {
        "q_rope": values.normal(3, 2, 64), "k_rope": values.normal(3, 64),
        "q_nope": values.normal(3, 2, 24), "k_nope": values.normal(3, 24),
        "cos_sin_cache": values.normal(5, 64), "positions": values.integers(0, 5, 3),
        "pairing": "half", "dtype": torch.float8_e4m3fn, "q_scale": 1.0, "k_scale": 2.0,
        "q_rope_out": torch.zeros(3, 2, 64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "k_nope_out": torch.zeros(3, 24, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }  # fmt: skip
    return "rope_quantize_fp8", arguments, None


def _quantises(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
    values = Values(draw, under.device)
    buffer = mlacast.QuantizedTensor.empty(5, 2, 512, mlacast.Mxfp8())
    arguments = {"x": values.normal(3, 1024), "format": buffer.format, "out": buffer[1:4]}
    if draw.chance():
        arguments["num_groups"] = 2
    return "quantize_output", arguments, None


def _multiplies(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
    values = Values(draw, under.device)
    fmt = draw.choice((mlacast.Mxfp8("chunk32"), mlacast.Fp8Group(), mlacast.Nvfp4(3.0)))
    buffer = mlacast.quantize_output(values.normal(3, 1024), fmt, num_groups=2)
    grouped = draw.chance()
    shape = (2, 40, 512) if grouped else (40, 1024)
    weight, scales, _ = layer.draw_weights(draw, under, values, shape, 512)
    arguments = {"out": buffer, "weight": weight, "weight_sf": scales, "weight_order": "buffer"}
    return "grouped_out_project" if grouped else "quantized_linear", arguments, None


def _attends(make: Callable[[Draw, Under], Any]) -> Callable[..., Any]:
    def build(draw: Draw, under: Under) -> tuple[str, Arguments, tuple[int, ...] | None]:
        call = make(draw, under)
        return call.op, call.arguments, call.shape

    return build


BUILDERS = (
    _attends(sparse.draw_prefill),
    _attends(sparse.draw_decode),
    _attends(dense.draw_decode),
    _attends(dense.draw_prefill),
    _attends(layer.draw_merge),
    _attends(layer.draw_v_up),
    _gathers,
    _appends,
    _rotates,
    _quantises,
    _multiplies,
)


def _spoil_tensor(draw: Draw, tensor: Tensor) -> object:
    """A tensor with another dtype, shape, stride or device, or no tensor."""
    kind = draw.choice(
        ("dtype", "narrow", "wide", "deeper", "flat", "strided", "meta", "stranger", "view",
         "expanded", "empty", "transposed", "sparse", "scalar")
    )  # fmt: skip
    if kind == "dtype":
        return tensor.to(draw.choice(DTYPES))
    if kind == "narrow" and tensor.dim():
        dim = draw.integer(0, tensor.dim() - 1)
        return tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))
    if kind == "wide" and tensor.dim():
        dim = draw.integer(0, tensor.dim() - 1)
        return torch.cat((raw_like(tensor), raw_like(tensor)), dim).view(tensor.dtype)
    if kind == "deeper":
        return tensor.unsqueeze(draw.integer(0, tensor.dim()))
    if kind == "flat":
        return tensor.reshape(-1)
    if kind == "strided" and tensor.dim():
        return torch.stack((raw_like(tensor), raw_like(tensor)), -1).view(tensor.dtype)[..., 0]
    if kind == "meta":
        return tensor.to("meta")
    if kind == "view":
        return tensor.view(torch.uint8) if tensor.dim() and tensor.stride(-1) == 1 else tensor
    if kind == "expanded" and tensor.dim() and 0 not in tensor.shape:
        return tensor.narrow(0, 0, 1).expand(tensor.shape)
    if kind == "empty":
        return tensor.new_empty((0, *tensor.shape[1:]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2)
    if kind == "scalar":
        return torch.zeros((), dtype=tensor.dtype)
    return draw.choice(STRANGERS)


def raw_like(tensor: Tensor) -> Tensor:
    """A contiguous copy with integers of the same size: not every operation has FP8."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(width)


def _spoil(draw: Draw, value: object) -> object:
    if isinstance(value, Tensor):
        return _spoil_tensor(draw, value)
    if isinstance(value, mlacast.Rope):
        return _spoil_rope(draw, value)
    if isinstance(value, mlacast.KvFormat):
        name = draw.choice(("BF16", "V32", "V4", "V41", "FP8", "NVFP4_384", ""))
        return mlacast.KvFormat.from_name(name) if name else draw.choice(STRANGERS)
    if isinstance(value, mlacast.QuantizedTensor) and draw.chance(70):
        return draw.choice((value[:1], value[1:1], value.data, value.sf, [value]))
    if isinstance(value, list) and draw.chance(70):
        spoilt = list(value)
        at = draw.integer(0, len(spoilt) - 1)
        spoilt[at] = _spoil_tensor(draw, spoilt[at])
        return draw.choice((spoilt, spoilt[:-1], tuple(value), [*value, value[0]]))
    return draw.choice(STRANGERS)


def _spoil_rope(draw: Draw, rope: mlacast.Rope) -> object:
    table, positions = rope.cos_sin_cache, rope.positions
    if draw.chance():
        table = _spoil_tensor(draw, table)  # type: ignore[assignment]
    else:
        positions = _spoil_tensor(draw, positions)  # type: ignore[assignment]
    return (table, positions, rope.pairing)


def _rope_or_not(value: object) -> object:
    """Build a spoilt rotation, or leave what it refuses as it is."""
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], str):
        try:
            return mlacast.Rope(*value)
        except (TypeError, ValueError):
            return value
    return value


def check_invalid(draw: Draw, under: Under) -> None:
    """Draw a call of any operation, spoil an argument, and see what it does."""
    op, arguments, shape = draw.choice(BUILDERS)(draw, under)
    parts = []
    if shape is not None:
        tokens = math.prod(shape[:-2])
        target = draw_target(draw, under, tokens, shape)
        arguments = arguments | target.arguments
        parts = target.parts
    kept = dict(arguments)
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(sorted(arguments))
        arguments[name] = _spoil(draw, kept[name])
    outs = {name: kept[name] for name in kept if name.endswith("out") or name == "cache"}
    parts += [part for part in outs.values() if isinstance(part, Tensor)]
    for out in outs.values():
        if isinstance(out, mlacast.QuantizedTensor):
            parts += [out.data] if out.sf is None else [out.data, out.sf]
    places = {part.untyped_storage().data_ptr() for part in parts}
    read = [
        tensor for tensor in all_tensors(kept) if tensor.untyped_storage().data_ptr() not in places
    ]
    arguments = {name: _rope_or_not(value) for name, value in arguments.items()}
    raised = _attempt(under, op, arguments, read, parts)
    if draw.chance(30):
        # A call that is known by now must not let the wrong one through.
        for _ in range(calls.REPEATS):
            under.call(op, **kept)
        assert _attempt(under, op, arguments, read, parts) == raised, "known calls change errors"


def _attempt(
    under: Under, op: str, arguments: Arguments, read: list[Tensor], parts: list[Tensor]
) -> bool:
    """Whether the call raises one of our errors; any other, and any stray write, is a failure."""
    before, written_before = ([raw(tensor).clone() for tensor in group] for group in (read, parts))
    raised = False
    try:
        under.call(op, **arguments)
    except (TypeError, ValueError, UnsupportedError) as error:
        raised = True
        if not str(error).startswith((f"{op}:", *OURS)):
            raise AssertionError(f"{op}: not one of our sentences: {error!r}") from error
    assert_unchanged(read, before)
    if raised:
        assert_unchanged(parts, written_before)
    return raised
