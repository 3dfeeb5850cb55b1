"""``rope_quantize_fp8``: rotate, scale and cast queries and keys to FP8, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from mlacast.descriptors.rope import ROPE_PAIRINGS
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.select import load, requested_backend, select
from mlacast.errors import (
    check_choice,
    check_finite,
    check_tensor,
    check_type,
    dtype_name,
    fail,
)
from mlacast.ops import value_checks
from mlacast.ops.known_calls import PUBLIC, call_operator
from mlacast.ops.overlap import check_apart, check_no_overlap
from mlacast.ops.query import check_backend

OP = "rope_quantize_fp8"
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TABLE_DTYPES = (torch.float32, torch.bfloat16)
_INDEX_DTYPES = (torch.int32, torch.int64)
_OUTPUTS = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")

# q_rope, k_rope, q_nope, k_nope.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    pairing: str = "interleaved",
    dtype: torch.dtype = torch.float8_e4m3fn,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions, then scale and cast everything to FP8.

    In float32, with c and s the cosine and sine of a pair::

        first  = first * c - second * s
        second = second * c + first * s
        code   = fp8(value * scale)        # nearest even, saturating, NaN 0x7F

    Inputs and outputs may be slices of wider rows, for example the two parts of one [n, h_q, 576]
    query.

    Args:
        q_rope: [n, h_q, r] bfloat16, float16 or float32 (the same for all inputs), r even, last
            dimension contiguous like everywhere here.
        k_rope: [n, r], one key head as in MLA, or [n, h_kv, r].
        q_nope: [n, h_q, d], not rotated, or None for d = 0.
        k_nope: [n, d_k] or [n, h_kv, d_k] like ``k_rope``, or None for d_k = 0.
        cos_sin_cache: [max_pos, r] float32 or bfloat16, r / 2 cosines then r / 2 sines a row.
        positions: [n] int32 or int64, rows of the table; clamped to it.
        pairing: "interleaved" rotates dimensions (2i, 2i+1), "half" rotates (i, i + r/2).
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, of every output.
        q_scale: Multiplies queries before the cast (the reciprocal of their dequantisation scale).
        k_scale: Multiplies keys before the cast.
        q_rope_out: Output of the shape of ``q_rope``, or None to allocate.
        k_rope_out: Output of the shape of ``k_rope``, or None.
        q_nope_out: Output of the shape of ``q_nope``, or None.
        k_nope_out: Output of the shape of ``k_nope``, or None.
        backend: "reference", "triton", "hopper", or None for the best that covers the call.

    Returns:
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out): the given objects, else new tensors with
        the memory format of their inputs. No tokens give empty ones.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype, stride, device or value breaks the contract; nothing has been
            written.
        UnsupportedError: No (or not the named) backend covers the call.

    Determinism: The same call gives the same bits, on every device.

    Source: the operations of the same name in FlashInfer and MATE.
    """
    return rotate_and_quantize(
        OP,
        (q_rope, k_rope, q_nope, k_nope),
        cos_sin_cache,
        positions,
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
        pairing=pairing,
        dtype=dtype,
        scales={"q_scale": q_scale, "k_scale": k_scale},
        backend=backend,
    )


def rotate_and_quantize(
    op: str,
    inputs: Inputs,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    outputs: tuple[torch.Tensor | None, ...],
    *,
    pairing: str,
    dtype: torch.dtype,
    scales: dict[str, float],
    backend: str | None = None,
    positions_name: str = "positions",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check, allocate, run; ``scales`` are those of queries and of keys, by the caller's names."""
    numbers = tuple(scales.values())
    values = (*inputs, cos_sin_cache, positions, *outputs, pairing, dtype, *numbers, backend)
    repeated: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    repeated = PUBLIC.repeat(op, values)
    if repeated is not None:
        return repeated
    known = PUBLIC.find(op, values)
    if known is None:
        check_inputs(op, inputs, cos_sin_cache, positions, positions_name)
        check_options(op, pairing, dtype, scales, backend)
    sources = sources_of(inputs)
    results = [
        prepare_output(op, name, out, source, dtype)
        for name, out, source in zip(_OUTPUTS, outputs, sources, strict=True)
    ]
    three_dims = [x if x.dim() == 3 else x.unsqueeze(1) for x in (*sources, *results)]
    arguments = (
        *three_dims[:4],
        None,
        cos_sin_cache,
        positions,
        *three_dims[4:],
        None,
        None,
        pairing,
        *numbers,
        backend or "",
    )
    fresh = [new for new, out in zip(results, outputs, strict=True) if out is None]
    returned = (results[0], results[1], results[2], results[3])
    operator = torch.ops.mlacast.rope_quantize_fp8
    call_operator(operator, op, known, values, arguments, fresh, returned, OP)
    return returned


def sources_of(inputs: Inputs) -> list[torch.Tensor]:
    """q_rope, k_rope, q_nope, k_nope, absent parts with a width of 0."""
    q_rope, k_rope, q_nope, k_nope = inputs
    q_plain = q_rope[..., :0] if q_nope is None else q_nope
    k_plain = k_rope[..., :0] if k_nope is None else k_nope
    return [q_rope, k_rope, q_plain, k_plain]


def check_inputs(
    op: str,
    inputs: Inputs,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    positions_name: str,
) -> list[torch.Tensor]:
    """Check the inputs; return q_rope, k_rope, q_nope, k_nope, absent parts with a width of 0."""
    q_rope, k_rope, q_nope, k_nope = inputs
    sizes: dict[str, Any] = {}
    check_tensor(op, "q_rope", q_rope, "n h_q r", sizes, dtype=_DTYPES)
    keys = ("n r", "n h_kv r")
    check_tensor(op, "k_rope", k_rope, keys, sizes)
    if sizes["r"] < 2 or sizes["r"] % 2:
        fail(op, "q_rope", "have an even last dimension of at least 2", sizes["r"])
    for name, part in (("q_rope", q_rope), ("k_rope", k_rope)):
        if part.dim() == 3 and part.shape[1] < 1:
            fail(op, name, "have at least one head", f"shape {list(part.shape)}")
    q_plain, k_plain = sources_of(inputs)[2:]
    check_tensor(op, "q_nope", q_plain, "n h_q d", sizes)
    check_tensor(op, "k_nope", k_plain, ("n d_k", "n h_kv d_k")[k_rope.dim() - 2], sizes)
    parts = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_plain, "k_nope": k_plain}
    for name, part in parts.items():
        check_row_tensor(op, name, part, q_rope.dtype, q_rope.device)
    check_tensor(
        op,
        "cos_sin_cache",
        cos_sin_cache,
        "max_pos r",
        sizes,
        dtype=_TABLE_DTYPES,
        device=q_rope.device,
        last_dim_contiguous=True,
        remedy="a row is r / 2 cosines then r / 2 sines",
    )
    if cos_sin_cache.shape[0] < 1:
        fail(op, "cos_sin_cache", "have at least one row", f"shape {list(cos_sin_cache.shape)}")
    check_tensor(
        op, positions_name, positions, "n", sizes, dtype=_INDEX_DTYPES, device=q_rope.device
    )
    return list(parts.values())


def check_row_tensor(
    op: str, name: str, part: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Check dtype, device and last stride of a tensor whose shape has been checked."""
    dims = " ".join(f"size_{dim}" for dim in range(part.dim()))
    check_tensor(op, name, part, dims, {}, dtype=dtype, device=device, last_dim_contiguous=True)


def check_options(
    op: str,
    pairing: str,
    dtype: torch.dtype,
    scales: dict[str, float],
    backend: str | None,
) -> None:
    """Check what is no tensor."""
    check_choice(op, "pairing", pairing, ROPE_PAIRINGS)
    check_type(op, "dtype", dtype, torch.dtype, "a torch.dtype")
    if dtype not in FP8_DTYPES:
        fail(op, "dtype", "be float8_e4m3fn or float8_e5m2", dtype_name(dtype))
    for name, scale in scales.items():
        check_type(op, name, scale, (int, float), "a number")
        check_finite(op, name, scale)
    check_backend(op, backend)


def prepare_output(
    op: str, name: str, out: torch.Tensor | None, source: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Check a given output, or allocate one with the memory format of its input."""
    if out is None:
        return _empty_like(source, dtype)
    # Numbers as names of dimensions: the shape has to be that of the input.
    shape = " ".join(str(size) for size in source.shape)
    check_tensor(
        op, name, out, shape, {}, dtype=dtype, device=source.device, last_dim_contiguous=True
    )
    check_apart(op, name, out)
    return out


def _empty_like(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dense, with the dimensions in the order that those of ``source`` have in memory.

    ``torch.empty_like`` keeps the strides of a slice of one row, but not on fake tensors.
    """
    shape, device = source.shape, source.device
    if source.dim() == 3 and source.stride(0) < source.stride(1):
        heads_first = (shape[1], shape[0], shape[2])
        return torch.empty(heads_first, dtype=dtype, device=device).transpose(0, 1)
    return torch.empty(shape, dtype=dtype, device=device)


def required_features(pairing: str, dtype: torch.dtype) -> frozenset[str]:
    """Features that a backend needs for this call."""
    return frozenset({f"rope:{pairing}", f"out:{dtype_name(dtype)}"})


def run(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    q_rope_out: torch.Tensor,
    k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_nope_out: torch.Tensor,
    v_out: torch.Tensor | None,
    page_table: list[torch.Tensor] | None,
    pairing: str,
    q_scale: float,
    kv_scale: float,
    backend: str,
) -> Any:
    """Eager body of ``torch.ops.mlacast.rope_quantize_fp8``."""
    features = required_features(pairing, q_rope_out.dtype)
    impl = select(OP, features, arch_of(q_rope.device), requested_backend(OP, backend))
    if q_rope.shape[0] == 0:
        return None
    if value_checks.validation_requested(OP, q_rope.device):
        _check_positions(positions, cos_sin_cache.shape[0])
    inputs = {"q_rope": q_rope, "k_rope": k_rope, "q_nope": q_nope, "k_nope": k_nope, "v": v}
    inputs |= {"cos_sin_cache": cos_sin_cache, "positions": positions}
    outputs = dict(zip(_OUTPUTS, (q_rope_out, k_rope_out, q_nope_out, k_nope_out), strict=True))
    check_no_overlap(OP, [*outputs.items(), ("v_out", v_out)], list(inputs.items()))
    return load(impl.target)(
        q_rope,
        k_rope,
        q_nope,
        k_nope,
        v,
        cos_sin_cache,
        positions,
        **outputs,
        v_out=v_out,
        page_table=None if page_table is None else tuple(page_table),
        pairing=pairing,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )


def _check_positions(positions: torch.Tensor, rows: int) -> None:
    bad = (positions < 0) | (positions >= rows)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        actual = f"{int(positions[where])} at [{where}]"
        fail(OP, "positions", f"have values in [0, {rows})", actual)
