"""Attention in float64, all tokens at once, and how far a float32 evaluation may be from it.

The bounds are those of ``tests.oracles.attend``, with the magnitudes that are added up in place of
the largest one. ``Precision`` says what the unit of an evaluation is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests import fp8_unit
from tests.fuzz import numbers

D_V = 512
ROPE = 64
# Weights that are no normal numbers of float32 may vanish.
TINY = 2.0**-100


@dataclass(frozen=True)
class Precision:
    """How a backend calculates.

    Attributes:
        unit: Relative rounding of a sum of products.
        weight_error: Relative error of a softmax weight beyond that, for weights in 16 bits.
        rounds_query: The rotated query is rounded to bfloat16.
        product_unit: Unit of a product with weights, None for a float32 sum of its terms.
        code_unit: The same where weights are codes.
        least_value: Keys and values of this size may vanish.
        moved_keys: Elements of a key with float32 scales that may be the neighbour of the bfloat16
            number that the product rounds to.
        code_scores: Scores of e4m3 queries are sums of Hopper's FP8 matrix unit.
        code_weight_step: Beside e4m3 queries a weight may be off by this share of the largest one
            of its row.
    """

    unit: float = 2.0**-24
    weight_error: float = 0.0
    rounds_query: bool = True
    product_unit: float | None = None
    code_unit: float | None = None
    least_value: float = 0.0
    moved_keys: int = 0
    code_scores: bool = False
    code_weight_step: float = 0.0


@dataclass(frozen=True)
class Rotation:
    """Table [max_pos, 64] (32 cosines, 32 sines), positions [T], pairing, and what is rotated."""

    table: Tensor
    positions: Tensor
    pairing: str
    rotate_query: bool = True

    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, 32] of the clamped positions."""
        rows = self.table.double()[self.positions.long().clamp(0, self.table.shape[0] - 1)]
        return rows[:, None, :32], rows[:, None, 32:]


@dataclass(frozen=True)
class Expected:
    """Float64 results [T, h, d_v] and [T, h] with bounds of their errors, element by element."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor
    out_error: Tensor
    logit_error: Tensor


def _pairs(values: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    half = values.shape[-1] // 2
    if pairing == "interleaved":
        return values[..., 0::2], values[..., 1::2]
    return values[..., :half], values[..., half:]


def _join(first: Tensor, second: Tensor, pairing: str) -> Tensor:
    if pairing == "interleaved":
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def rotate(values: Tensor, cosine: Tensor, sine: Tensor, pairing: str) -> Tensor:
    """(a c - b s, b c + a s) of each pair of the last dimension."""
    a, b = _pairs(values, pairing)
    return _join(a * cosine - b * sine, b * cosine + a * sine, pairing)


def rotated_sizes(sizes: Tensor, cosine: Tensor, sine: Tensor, pairing: str) -> Tensor:
    """(a |c| + b |s|, b |c| + a |s|): bounds of what a rotation makes of magnitudes."""
    a, b = _pairs(sizes, pairing)
    c, s = cosine.abs(), sine.abs()
    return _join(a * c + b * s, b * c + a * s, pairing)


def attend(
    q: Tensor,
    keys: Tensor,
    valid: Tensor,
    precision: Precision,
    *,
    sm_scale: float,
    v_scale: float = 1.0,
    attn_sink: Tensor | None = None,
    q_norm_eps: float | None = None,
    rotation: Rotation | None = None,
    d_v: int = D_V,
    moved_keys: int = 0,
    is_codes: bool = False,
) -> Expected:
    """Attend every token of q [T, h, d_qk] to its own keys [T, K, d_qk] where ``valid`` [T, K].

    Keys [K, d_qk] are those of every token, and finite; of each, ``moved_keys`` elements may be a
    neighbour in bfloat16. Values of queries and keys may be those of e4m3 codes, ``is_codes``.
    """
    query, unit = q.double(), precision.unit
    width = query.shape[-1]
    scale = torch.full(query.shape[:2], sm_scale, dtype=torch.float64, device=q.device)
    if q_norm_eps is not None:
        scale = scale / torch.sqrt(query.square().sum(-1) / 512 + q_norm_eps)
    if rotation is not None and rotation.rotate_query:
        turned = rotate(query[..., -ROPE:], *rotation.rows(), rotation.pairing)
        if precision.rounds_query:
            turned = numbers.round_bf16(turned)
        query = torch.cat((query[..., :-ROPE], turned), -1)
    # Letters of the sums below.
    own = "k" if keys.dim() == 2 else "tk"
    keys = keys.double()
    if keys.dim() == 3:
        keys = torch.where(valid[..., None], keys, 0.0)
    logits = torch.einsum(f"thd,{own}d->thk", query, keys) * scale[..., None]
    logits = torch.where(valid[:, None], logits, -torch.inf)
    count = valid.sum(-1)
    empty = (count == 0)[:, None].expand(query.shape[:2])
    if valid.shape[1] == 0:
        peak = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    else:
        peak = logits.amax(-1)
    base = torch.where(empty, 0.0, peak)
    weights = torch.exp(logits - base[..., None])
    total = weights.sum(-1)
    lse = torch.where(empty, -torch.inf, base + torch.log(total))
    weights = weights / torch.where(empty, 1.0, total)[..., None]
    values = keys[..., :d_v]
    largest_key = keys.norm(dim=-1).amax(-1, keepdim=True) if valid.shape[1] else scale * 0
    sizes = scale.abs() * query.norm(dim=-1) * largest_key
    rounding = 4 * base.abs() + count[:, None] + 24
    # A rotation in float32 is off by a few units before its result is rounded, or not at all.
    logit_error = unit * (4 * (width**0.5 + 8) * sizes + rounding)
    if moved_keys and valid.shape[1]:
        # Neighbours are up to 2**-7 of a number apart.
        most = query.abs().amax(-1) * keys.abs().amax(-1).amax(-1, keepdim=True)
        logit_error = logit_error + moved_keys * 2.0**-7 * scale.abs() * most
    if is_codes and precision.code_scores and valid.shape[1]:
        errors = fp8_unit.score_errors(query, keys) * scale.abs()[..., None]
        logit_error = logit_error + torch.where(valid[:, None], errors, 0.0).amax(-1)
    # Beyond this, weights may be anything; an infinite bound times a zero would be NaN.
    bounded = logit_error.clamp_max(100.0)
    relative = torch.expm1(2 * bounded) + precision.weight_error
    share = torch.ones_like(lse)
    if attn_sink is not None:
        gap = attn_sink.double()[None] - torch.where(empty, 0.0, lse)
        share = 1 / (1 + torch.exp(gap))
        relative = relative + torch.expm1(bounded) + unit * (8 + 2 * gap.abs().clamp_max(200))
    out = torch.einsum(f"thk,{own}d->thd", weights, values) * (share * v_scale)[..., None]
    summed = torch.einsum(f"thk,{own}d->thd", weights, values.abs())
    summed = summed * (share * abs(v_scale))[..., None]
    error = (relative + (count[:, None] + 24) * unit)[..., None] * summed
    if is_codes and valid.shape[1]:
        # Of the largest weight, 1 / total, whatever the weight of a key.
        step = precision.code_weight_step / torch.where(empty, 1.0, total)
        each = torch.einsum(f"tk,{own}d->td", valid.double(), values.abs())[:, None]
        error = error + (step * share * abs(v_scale))[..., None] * each
    if valid.shape[1]:
        largest = values.abs().amax((-2, -1))[..., None, None]
        error = error + abs(v_scale) * (TINY * largest + precision.least_value)
    if rotation is not None and width == d_v:
        cosine, sine = rotation.rows()
        back = rotate(out[..., -ROPE:], cosine, -sine, rotation.pairing)
        moved = error[..., -ROPE:] + 4 * unit * out[..., -ROPE:].abs()
        spread = rotated_sizes(moved, cosine, sine, rotation.pairing)
        out = torch.cat((out[..., :-ROPE], back), -1)
        error = torch.cat((error[..., :-ROPE], spread), -1)
    out = torch.where(empty[..., None], 0.0, out)
    error = torch.where(empty[..., None], 0.0, error)
    return Expected(out, lse, torch.where(empty, -torch.inf, peak), error, logit_error)


def assert_logarithms(name: str, actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """lse or max_logits: -inf exactly where expected, else within the bound."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}"
    assert actual.dtype in (torch.float32, torch.float64), f"{name}: {actual.dtype}"
    infinite = expected.isinf()
    found = actual.double()
    wrong = torch.where(infinite, found != expected, ~((found - expected).abs() <= bound))
    if bool(wrong.any()):
        at = tuple(int(place) for place in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}{list(at)} is {float(found[at])}, not {float(expected[at])} "
            f"to within {float(bound[at]):.3g}"
        )
