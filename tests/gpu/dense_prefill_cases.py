"""Problems of the Hopper dense prefill kernel, what it must have written, and how to check that.

The yardstick is attention in float32 with weights rounded to bfloat16, stored by the reference in
the same format: the kernel's errors may be 1.5 times the yardstick's. Beside these statistics every
scale lies between those of outputs that are as much smaller and larger as all errors together, and
every byte around the rows of the call is as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.gpu.low_precision import assert_as_accurate, assert_logarithms

D_QK, D_V = 192, 128
POISON = 0x5A
SOFTMAX_SCALE = 0.1
# A weight is rounded by at most 2**-8 of itself; as much again for the scores.
WEIGHT_ERROR = 2.0**-7
# Room for the share of codes that differ, where there are few codes.
SHARE_ROOM = 0.004


@dataclass(frozen=True)
class Problem:
    """Lengths and heads of a batch.

    Attributes:
        q_lens, k_lens: Query tokens and keys of each sequence.
        heads, kv_heads: Of q, and of k and v.
        causal: Bottom-right aligned mask.
        q_tail, k_tail: Rows past the last sequence.
        before, after: Rows of the output buffer around those of the call; without rows after them
            the padding of the scales belongs to the call.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    causal: bool = True
    q_tail: int = 0
    k_tail: int = 0
    before: int = 4
    after: int = 0

    @property
    def tokens(self) -> int:
        """Rows of q."""
        return sum(self.q_lens) + self.q_tail


@dataclass(frozen=True)
class Inputs:
    """Tensors of a problem, all views into wider rows of NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


def _cumulative(lengths: tuple[int, ...], device: str) -> Tensor:
    bounds = [0, *itertools.accumulate(lengths)]
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def _inside_wider_rows(rows: int, heads: int, width: int, device: str) -> Tensor:
    """[rows, heads, width] of normal numbers; a head's row is 64 wider, a token's 64 more."""
    columns = heads * (width + 64) + 64
    wide = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=device)
    view = wide[:, 64:].view(rows, heads, width + 64)[..., :width]
    view.copy_(torch.randn((rows, heads, width), device=device))
    return view


def draw(problem: Problem, device: str) -> Inputs:
    """Random tensors, NaN in every row that no token may see."""
    keys = sum(problem.k_lens) + problem.k_tail
    q = _inside_wider_rows(problem.tokens, problem.heads, D_QK, device)
    k = _inside_wider_rows(keys, problem.kv_heads, D_QK, device)
    v = _inside_wider_rows(keys, problem.kv_heads, D_V, device)
    if problem.tokens:
        q.mul_(1 + torch.rand((problem.tokens, 1, 1), device=device) * 2)
    q[problem.tokens - problem.q_tail :] = float("nan")
    seen = torch.zeros(keys, dtype=torch.bool, device=device)
    for (start, stop), (first, last) in bounds(problem):
        # Without a query in the sequence nobody sees its keys.
        seen[first:last] = stop > start
    k[~seen], v[~seen] = float("nan"), float("nan")
    return Inputs(q, k, v, _cumulative(problem.q_lens, device), _cumulative(problem.k_lens, device))


def bounds(problem: Problem) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Tokens and keys of each sequence."""
    q_stop = k_stop = 0
    for q_len, k_len in zip(problem.q_lens, problem.k_lens, strict=True):
        yield (q_stop, q_stop + q_len), (k_stop, k_stop + k_len)
        q_stop, k_stop = q_stop + q_len, k_stop + k_len


@dataclass(frozen=True)
class Expected:
    """Float64 results, and what the yardstick makes of the same inputs.

    Attributes:
        out: [T, h, 128] float64, exact.
        lse: [h, T] float64.
        low: [T, h, 128] float32, the yardstick before any rounding of the output.
        slack: [T, h, 128] float64, how far an un-rounded element may be from the exact one.
        size: Upper bound of |scale| |q| |k|.
    """

    out: Tensor
    lse: Tensor
    low: Tensor
    slack: Tensor
    size: float


def expect(problem: Problem, inputs: Inputs) -> Expected:
    """Attend in float64, and with rounded weights in float32."""
    shape = (problem.tokens, problem.heads, D_V)
    device = inputs.q.device
    out = torch.zeros(shape, dtype=torch.float64, device=device)
    low = torch.zeros(shape, device=device)
    slack = torch.zeros_like(out)
    lse = torch.full((problem.heads, shape[0]), -math.inf, dtype=torch.float64, device=device)
    size = 0.0
    shared = problem.heads // problem.kv_heads
    for (start, stop), (first, last) in bounds(problem):
        if start == stop or first == last:
            continue
        q = inputs.q[start:stop].double()
        k, v = (
            rows[first:last].double().repeat_interleave(shared, 1) for rows in (inputs.k, inputs.v)
        )
        size = max(size, SOFTMAX_SCALE * float(q.norm(dim=2).max() * k.norm(dim=2).max()))
        logits = torch.einsum("thd,khd->htk", q, k) * SOFTMAX_SCALE
        if problem.causal:
            count = last - first
            token = torch.arange(stop - start, device=device)[:, None] + count - (stop - start)
            logits.masked_fill_(torch.arange(count, device=device) > token, -math.inf)
        lse[:, start:stop] = logits.logsumexp(2)
        weights = (logits - logits.amax(2, keepdim=True)).exp().nan_to_num(0.0)
        total = weights.sum(2, keepdim=True).clamp_min(1e-30)
        out[start:stop] = torch.einsum("htk,khd->thd", weights / total, v)
        magnitude = torch.einsum("htk,khd->thd", weights / total, v.abs())
        slack[start:stop] = WEIGHT_ERROR * magnitude
        rounded = weights.float().bfloat16().float()
        low[start:stop] = torch.einsum("htk,khd->thd", rounded, v.float())
        low[start:stop] /= total[..., 0].T[..., None].float()
    slack += 2.0**-100 * (out != 0)
    return Expected(out, lse, low, slack, 2 * size)


def storage_of(tensor: Tensor) -> Tensor:
    """Every byte behind a tensor, shared with it."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


def poisoned_rows(
    problem: Problem, out_format: mlacast.OutFormat, groups: int, device: str
) -> mlacast.QuantizedTensor:
    """Rows of a longer buffer all of whose bytes, padding and scales too, are poison."""
    buffer = mlacast.QuantizedTensor.empty(
        problem.before + problem.tokens + problem.after,
        groups,
        problem.heads * D_V // groups,
        out_format,
        device,
    )
    storage_of(buffer.data).fill_(POISON)
    if buffer.sf is not None:
        storage_of(buffer.sf).fill_(POISON)
    return buffer[problem.before : problem.before + problem.tokens]


Launch = Callable[..., object]


@dataclass(frozen=True)
class Written:
    """What a launch filled."""

    out: mlacast.QuantizedTensor
    lse: Tensor


def launch(
    run: Launch,
    problem: Problem,
    inputs: Inputs,
    out_format: mlacast.OutFormat,
    groups: int,
) -> Written:
    """Launch into poisoned memory."""
    device = str(inputs.q.device)
    out = poisoned_rows(problem, out_format, groups, device)
    lse = torch.full((problem.heads, problem.tokens), float("nan"), device=device)
    run(
        inputs.q,
        inputs.k,
        inputs.v,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
        max_seqlen_q=max(problem.q_lens, default=0),
        max_seqlen_k=max(problem.k_lens, default=0),
        softmax_scale=SOFTMAX_SCALE,
        causal=problem.causal,
        out=out,
        lse=lse,
    )
    return Written(out, lse)


def assert_right(problem: Problem, groups: int, written: Written, expected: Expected) -> None:
    """Every row that was written, and everything around it."""
    fmt = written.out.format
    assert_logarithms(written.lse, expected.lse.cpu(), D_QK, expected.size)
    values = written.out.dequantize().reshape(expected.out.shape).double()
    empty = expected.lse.isneginf().T
    assert not bool(values[empty].any()), "a row without keys is not zero"

    def stored(rows: Tensor) -> mlacast.QuantizedTensor:
        out = poisoned_rows(problem, fmt, groups, str(rows.device))
        mlacast.reference.quantize_output(rows.float().reshape(len(rows), groups, -1), out)
        return out

    exact, low = stored(expected.out), stored(expected.low)
    assert_as_accurate(values, low.dequantize().reshape(values.shape), expected.out)
    data = [storage_of(part.data) for part in (written.out, low, exact)]
    row_bytes = exact.data[0].numel() * exact.data.element_size() if problem.tokens else 0
    inside = slice(problem.before * row_bytes, (problem.before + problem.tokens) * row_bytes)
    outside = torch.ones(data[0].numel(), dtype=torch.bool, device=values.device)
    outside[inside] = False
    assert bool((data[0][outside] == POISON).all()), "codes of others changed"
    if fmt.key == "bf16":
        allowed = expected.slack + oracles.BF16_HALF_ULP * (expected.out.abs() + expected.slack)
        worst = float(((values - expected.out).abs() - allowed).max()) if values.numel() else 0.0
        assert worst <= 0, f"an element is {worst:.3e} further off than all errors together"
        return
    if values.numel():
        share, normal = (float((part != data[2]).float().mean()) for part in data[:2])
        assert share <= 1.5 * normal + SHARE_ROOM, f"{share:.4f} of the codes, {normal:.4f}"
    if written.out.sf is None:
        return
    size = expected.out.abs()
    smaller = stored(torch.copysign((size - expected.slack).clamp_min(0), expected.out))
    larger = stored(torch.copysign(size + expected.slack, expected.out))
    kind = torch.float32 if fmt.sf_dtype == torch.float32 else torch.uint8
    parts = []
    for part in (smaller, written.out, larger):
        assert part.sf is not None
        parts.append(storage_of(part.sf).view(kind))
    assert bool((parts[0] <= parts[1]).all()), "a scale is too small, or moved"
    assert bool((parts[1] <= parts[2]).all()), "a scale is too large, or moved"


def assert_same(first: Written, second: Written) -> None:
    """Two launches gave the same bits."""
    assert oracles.same_bits(first.lse, second.lse)
    assert torch.equal(first.out.data.view(torch.uint8), second.out.data.view(torch.uint8))
    if first.out.sf is not None and second.out.sf is not None:
        assert torch.equal(first.out.dequantize(), second.out.dequantize())


# Sequences of one token and of none, more and fewer keys than tokens, lengths around those of
# blocks and tiles.
RAGGED = Problem((300, 1, 0, 77), (300, 1, 5, 200), heads=2, kv_heads=2)
PADDED = Problem((5, 300, 64), (2, 300, 0), heads=2, kv_heads=1, q_tail=70, k_tail=3)
ALIGNED = Problem((256, 128), (256, 384), heads=2, kv_heads=2)
CROSS = Problem((130, 3), (600, 0), heads=4, kv_heads=2, causal=False)
NO_SEQUENCES = Problem((), (), heads=2, kv_heads=2, q_tail=3, k_tail=2)
NO_KEYS = Problem((4, 0), (0, 0), heads=2, kv_heads=2)
MANY = Problem((3,) * 40 + (200,), (5,) * 40 + (200,), heads=1, kv_heads=1)
LONG = Problem((1000, 2100), (1000, 2500), heads=8, kv_heads=8)
# Two for a quantised format: with padding of the scales, and without.
ENDING = Problem((65, 0, 140), (65, 3, 150), heads=8, kv_heads=2, q_tail=3, before=5)
INSIDE = Problem((5, 9), (2, 9), heads=8, kv_heads=8, before=4, after=7)


@dataclass(frozen=True)
class Output:
    """An output format and the groups of its features."""

    format: mlacast.OutFormat
    groups: int = 1

    @property
    def id(self) -> str:
        """Readable parametrisation id."""
        return f"{self.format.key}:{self.groups}"


OUTPUTS = (
    Output(mlacast.Fp8Tensor(0.02)),
    Output(mlacast.Fp8Group(128, "float32", "mn_major")),
    Output(mlacast.Fp8Group(128, "float32", "row_major"), 8),
    Output(mlacast.Fp8Group(64, "float32_pow2", "row_major"), 2),
    Output(mlacast.Fp8Group(32, "float32", "mn_major"), 2),
    Output(mlacast.Fp8Group(128, "ue8m0_packed", "mn_major")),
    # One scale to a group: the rest of its word is padding.
    Output(mlacast.Fp8Group(128, "ue8m0_packed", "row_major"), 8),
    Output(mlacast.Fp8Group(64, "ue8m0_packed", "mn_major"), 8),
    Output(mlacast.Mxfp8("head"), 2),
    Output(mlacast.Mxfp8("chunk32"), 1),
    Output(mlacast.Nvfp4(50.0)),
    Output(mlacast.Nvfp4(50.0), 8),
)
