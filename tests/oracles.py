"""Attention oracles: float64 loops written from the contract, sharing no code with the library.

The functions here take rows that are already dequantised. They decide row by row and head by head
with Python loops, so that a mistake in an index, a length or a rounding point cannot hide in a
broadcast. Tolerances for float32 results come from the same numbers: see :func:`attend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

D_V = 512
D_ROPE = 64
FLOAT32_UNIT = 2.0**-24
BF16_HALF_ULP = 2.0**-8
"""Half a bf16 ulp of x is at most 2**-8 * |x|: eight significant bits, so ulp(x) = 2**-7 *
2**floor(log2 |x|).
"""


@dataclass(frozen=True)
class RopeSpec:
    """What a Rope holds, for the oracle: table [max_pos, 64] (cos 32 | sin 32), positions [s_q],
    pairing.
    """

    cos_sin: Tensor
    positions: Tensor
    pairing: str = "interleaved"


@dataclass(frozen=True)
class AttentionOracle:
    """Float64 results and the error a float32 evaluation may have.

    Attributes:
        out: [s_q, h, 512].
        max_logits: [s_q, h], -inf for empty rows.
        lse: [s_q, h], natural logarithm, -inf for empty rows.
        logit_error: [s_q, h], bound for a float32 logit, maximum or lse.
        out_error: [s_q, h], bound for an element of a float32 output, not rounded any further.
    """

    out: Tensor
    max_logits: Tensor
    lse: Tensor
    logit_error: Tensor
    out_error: Tensor


def round_to_bf16(values: Tensor) -> Tensor:
    """Round float64 to the nearest bfloat16, ties to even, in one step (normal numbers only);
    returns float64.
    """
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.round(mantissa * 256.0), exponent - 8)


def rotate(values: Tensor, cos_sin: Tensor, pairing: str, *, inverse: bool = False) -> Tensor:
    """Rotate the 64 values of one head, pair by pair.

    Interleaved pairs are (2i, 2i+1), half pairs are (i, i+32). With c = cos_sin[i] and s =
    cos_sin[32 + i] the forward rotation gives (a*c - b*s, b*c + a*s), the inverse (a*c + b*s, b*c -
    a*s).
    """
    result = [0.0] * D_ROPE
    source, table = values.tolist(), cos_sin.double().tolist()
    for i in range(D_ROPE // 2):
        first, second = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + D_ROPE // 2)
        cosine, sine = table[i], table[D_ROPE // 2 + i]
        if inverse:
            sine = -sine
        result[first] = source[first] * cosine - source[second] * sine
        result[second] = source[second] * cosine + source[first] * sine
    return torch.tensor(result, dtype=torch.float64)


def select_rows(rows: Tensor, indices: Tensor, topk_length: Tensor | None = None) -> list[Tensor]:
    """The rows every query token attends to, in list order, repeats kept: one [n, d] float64 tensor
    per token.
    """
    selected = []
    for token, line in enumerate(indices.tolist()):
        length = (
            len(line) if topk_length is None else min(max(int(topk_length[token]), 0), len(line))
        )
        chosen = [index for index in line[:length] if 0 <= index < rows.shape[0]]
        selected.append(rows[torch.tensor(chosen, dtype=torch.int64)].double())
    return selected


def join_selections(*selections: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate, token by token, the rows taken from several caches."""
    return [torch.cat(parts) for parts in zip(*selections, strict=True)]


def _clamped_position(rope: RopeSpec, token: int) -> int:
    return min(max(int(rope.positions[token]), 0), rope.cos_sin.shape[0] - 1)


def attend(
    q: Tensor,
    selected: Sequence[Tensor],
    *,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    q_norm_eps: float | None = None,
    rope: RopeSpec | None = None,
) -> AttentionOracle:
    """Attend every (token, head) of ``q`` [s_q, h, d_qk] to the token's own rows, in float64.

    Error bounds for float32. A dot product of length d has, by the probabilistic bound of Higham
    and Mary (2019), an error below lambda * sqrt(d) * u * sum|q_j k_j| with u = 2**-24; lambda = 4
    makes a violation improbable at the sizes used here, and sum|q_j k_j| <= |q| |k|. Scale and norm
    factor add a few u. So

        logit_error = 4 * (sqrt(d) + 4) * u * |scale| * |q| * max|k| + (4 |max logit| + n + 8) u,

    the second part for the rounding of the logits themselves, of n exponentials, their sum and the
    logarithm.

    A softmax weight then moves by at most a relative 2 * logit_error (numerator and denominator),
    and n weighted sums plus the division add (n + 8) u, each times max|v|. The inverse rotation
    adds two such values with factors of at most one: twice the bound.
    """
    s_q, heads, width = q.shape
    out = torch.zeros(s_q, heads, D_V, dtype=torch.float64)
    max_logits = torch.full((s_q, heads), -math.inf, dtype=torch.float64)
    lse = torch.full((s_q, heads), -math.inf, dtype=torch.float64)
    logit_error = torch.zeros(s_q, heads, dtype=torch.float64)
    out_error = torch.zeros(s_q, heads, dtype=torch.float64)
    for token in range(s_q):
        keys = selected[token]
        if keys.shape[0] == 0:
            continue
        largest_key = max(math.sqrt(float(torch.dot(key, key))) for key in keys)
        largest_value = float(keys[:, :D_V].abs().max())
        for head in range(heads):
            query = q[token, head].double().clone()
            scale = sm_scale
            if q_norm_eps is not None:
                scale *= 1.0 / math.sqrt(float(torch.dot(query, query)) / 512.0 + q_norm_eps)
            if rope is not None:
                line = rope.cos_sin[_clamped_position(rope, token)]
                query[-D_ROPE:] = round_to_bf16(rotate(query[-D_ROPE:], line, rope.pairing))
            logits = [scale * float(torch.dot(query, key)) for key in keys]
            peak = max(logits)
            weights = [math.exp(logit - peak) for logit in logits]
            total = math.fsum(weights)
            max_logits[token, head] = peak
            lse[token, head] = peak + math.log(total)
            query_norm = math.sqrt(float(torch.dot(query, query)))
            error = (
                4 * (math.sqrt(width) + 4) * FLOAT32_UNIT * abs(scale) * query_norm * largest_key
            )
            # Rounding of the logits, of the n exponentials and their sum, and of the logarithm.
            error += FLOAT32_UNIT * (4 * abs(peak) + keys.shape[0] + 8)
            logit_error[token, head] = error
            spread = 2 * error + (keys.shape[0] + 8) * FLOAT32_UNIT
            out_error[token, head] = spread * largest_value * (1 if rope is None else 2)
            share = _share_beside_sink(float(lse[token, head]), attn_sink, head)
            row = torch.zeros(D_V, dtype=torch.float64)
            for weight, key in zip(weights, keys, strict=True):
                row += (weight / total * share) * key[:D_V]
            if rope is not None and width == D_V:
                line = rope.cos_sin[_clamped_position(rope, token)]
                row[-D_ROPE:] = rotate(row[-D_ROPE:], line, rope.pairing, inverse=True)
            out[token, head] = row
    return AttentionOracle(out, max_logits, lse, logit_error, out_error)


def _share_beside_sink(lse: float, attn_sink: Tensor | None, head: int) -> float:
    """exp(lse) / (exp(lse) + exp(sink)): what the keys keep of the denominator."""
    if attn_sink is None:
        return 1.0
    gap = float(attn_sink[head]) - lse
    if gap == math.inf or gap > 700:
        return 0.0
    return 1.0 / (1.0 + math.exp(gap))


def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial results [T, h, d] with lses [T, h] in float64; either infinity marks an empty
    part.
    """
    tokens, heads, width = outs[0].shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for token in range(tokens):
        for head in range(heads):
            live = [
                part for part in range(len(outs)) if math.isfinite(float(lses[part][token, head]))
            ]
            if not live:
                continue
            peak = max(float(lses[part][token, head]) for part in live)
            weights = [math.exp(float(lses[part][token, head]) - peak) for part in live]
            total = math.fsum(weights)
            for weight, part in zip(weights, live, strict=True):
                out[token, head] += weight / total * outs[part][token, head].double()
            lse[token, head] = peak + math.log(total)
    return out, lse


def chunk16_from_head_order(q: Tensor) -> Tensor:
    """[s_q, h, 512] in head order -> same shape whose flat token reads in the permuted order of the
    fused step.
    """
    s_q, heads, width = q.shape
    flat = torch.empty(s_q, heads * width, dtype=q.dtype)
    for head in range(heads):
        for element in range(width):
            flat[:, (element // 16) * (heads * 16) + head * 16 + element % 16] = q[:, head, element]
    return flat.view(s_q, heads, width)


def exact_rope_table(max_pos: int) -> Tensor:
    """A [max_pos, 64] float32 table of multiples of 1/64 in [-1, 1], row 0 the identity.

    Products with the queries of ``exact_queries`` and their sums are exact in float32, so the
    rounding of the rotated query to bf16 has one right answer whatever precision the rotation ran
    in. (The rows are no unit vectors: the contract is a formula in cos and sin and does not need
    them to be.)
    """
    table = torch.randint(-64, 65, (max_pos, D_ROPE)).float() / 64.0
    table[0, :32], table[0, 32:] = 1.0, 0.0
    return table


def exact_queries(*shape: int) -> Tensor:
    """bf16 queries that are multiples of 1/32 in [-4, 4): eight significant bits at most."""
    return (torch.randint(-128, 128, shape).float() / 32.0).bfloat16()


def assert_matches(
    result: object,
    actual_lse: Tensor,
    oracle: AttentionOracle,
    *,
    actual_max_logits: Tensor | None = None,
) -> None:
    """Compare with the oracle: float64 to 1e-10, float32 within its bounds, bf16 with half an ulp
    on top.

    Float64: the bounds of :func:`attend` shrink by 2**29 and stay below 1e-10 for the sizes used
    here.
    """
    _assert_logarithms(actual_lse, oracle.lse, oracle.logit_error)
    if actual_max_logits is not None:
        _assert_logarithms(actual_max_logits, oracle.max_logits, oracle.logit_error)
    actual_out = plain(result)
    assert actual_out.shape == oracle.out.shape
    error = (actual_out.double() - oracle.out).abs()
    if actual_out.dtype == torch.float64:
        allowed = torch.full_like(error, 1e-10)
    else:
        allowed = oracle.out_error.unsqueeze(-1).expand_as(error)
        if actual_out.dtype == torch.bfloat16:
            allowed = allowed + BF16_HALF_ULP * (oracle.out.abs() + allowed)
    assert not actual_out.isnan().any()
    worst = float((error - allowed).max()) if error.numel() else -1.0
    assert worst <= 0, f"output is off by {float(error.max()):.3e}, {worst:.3e} more than allowed"
    empty = oracle.lse == -math.inf
    assert (actual_out[empty] == 0).all(), "an empty row must be exactly zero"


def _assert_logarithms(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(actual[~finite].double(), expected[~finite]), "empty rows must say -inf"
    error = (actual[finite].double() - expected[finite]).abs()
    allowed = bound[finite]
    if actual.dtype == torch.float64:
        allowed = torch.full_like(error, 1e-10)
    worst = float((error - allowed).max()) if error.numel() else -1.0
    assert worst <= 0, (
        f"lse or max_logits off by {float(error.max()):.3e}, {worst:.3e} more than allowed"
    )


def bf16_ulp(values: Tensor) -> Tensor:
    """One bf16 unit in the last place of every value (normal numbers), float64."""
    _, exponent = torch.frexp(values.double().abs().clamp_min(2.0**-126))
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 8)


def assert_within_bf16_ulps(actual: Tensor, expected: Tensor, ulps: int, floor: float) -> None:
    """Each element within ``ulps`` bf16 steps of the expected one, or within ``floor`` (for
    cancelled sums).
    """
    assert not actual.isnan().any()
    error = (actual.double() - expected.double()).abs()
    allowed = (ulps * bf16_ulp(expected)).clamp_min(floor)
    assert bool((error <= allowed).all()), (
        f"off by up to {float((error / allowed).max()):.2f} of the allowance"
    )


def plain(value: object) -> Tensor:
    """The value itself, which has to be a tensor: an unquantised call returns no buffer object."""
    assert isinstance(value, Tensor)
    return value


def same_bits(first: object, second: object) -> bool:
    """Equality of shape, dtype and every bit of two tensors; NaN payloads and the sign of zero
    count.
    """
    left, right = plain(first), plain(second)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype in (torch.float64, torch.int64):
        return torch.equal(
            left.contiguous().view(torch.int64), right.contiguous().view(torch.int64)
        )
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.contiguous().view(width), right.contiguous().view(width))
