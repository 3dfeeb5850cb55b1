"""The checks of the Hopper kernels, on the CPU: a sound kernel passes, and planted faults do not.

In place of the kernels runs their arithmetic in float32, block by block with weights rounded to
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.reference import epilogue, prologue
from tests import oracles
from tests.format_cases import FormatCase
from tests.gpu.hopper_cases import (
    EMPTY_TOKEN,
    ENDS,
    MIDDLE,
    MX,
    MX32,
    NVFP4,
    Case,
    Shape,
    case_id,
    storage_of,
)
from tests.gpu.hopper_checks import assert_right
from tests.gpu.hopper_decode_calls import check_decode
from tests.gpu.hopper_prefill_calls import (
    check_empty_token,
    check_growing,
    check_prefill,
    draw_prefill,
)
from tests.gpu.hopper_stores import (
    FAMILIES,
    boundary_rows,
    check_store,
    draw_factors,
    family_id,
    special_rows,
)

Results = tuple[Tensor, Tensor, Tensor]
CASES = (
    Case("bf16", 8, lengths=True, sink=True),
    Case("mx-chunk", 8, MX32, 2, "half", True, True, True, "chunk16", places=ENDS),
    Case("mx-head", 8, MX, 2, "interleaved", True, places=MIDDLE),
    Case("group32", 8, mlacast.Fp8Group(32, "float32", "row_major"), 4, lengths=True),
    Case("group128", 8, mlacast.Fp8Group(128, "ue8m0_packed", "mn_major"), 4, sink=True),
    Case("group64", 8, mlacast.Fp8Group(64, "float32_pow2", "mn_major"), 2),
    Case("tensor", 8, mlacast.Fp8Tensor(0.002), 4),
    Case("nvfp4", 8, NVFP4, 2, "interleaved", True, True, True, places=ENDS),
    Case("nvfp4-inside", 8, NVFP4, 1, "half", places=MIDDLE),
)
SHAPES = (Shape(14, 192), Shape(10, 64, ends=False))


def attend(
    q: Tensor,
    selected: Sequence[Tensor],
    sm_scale: float,
    round_weights: Callable[[Tensor], Tensor],
    **options: Any,
) -> Results:
    """Output before rounding, max_logits and lse; blocks of keys as in a kernel."""
    names = ("q_norm_eps", "rope", "q_order")
    values, norm = prologue(q, **{name: options[name] for name in names})
    out = torch.zeros(*q.shape[:2], 512)
    peaks = torch.full(q.shape[:2], -torch.inf)
    lse = peaks.clone()
    laziness = 8 * math.log(2) if q.shape[2] == 512 else 0.0
    for token, rows in enumerate(selected):
        base, total, acc = peaks[token].clone(), lse[token].exp(), out[token].clone()
        for first in range(0, len(rows), 64):
            keys = rows[first : first + 64].float()
            logits = (values[token] @ keys.T) * (norm[token] * sm_scale)[:, None]
            peaks[token] = torch.maximum(peaks[token], logits.amax(1))
            new_base = torch.where(peaks[token] > base + laziness, peaks[token], base)
            alpha, weights = torch.exp(base - new_base), torch.exp(logits - new_base[:, None])
            total = total * alpha + weights.sum(1)
            acc = acc * alpha[:, None] + round_weights(weights) @ keys[:, :512]
            base = new_base
        if len(rows):
            out[token], lse[token] = acc / total[:, None], base + torch.log(total)
    rope = options["rope"] if q.shape[2] == 512 else None
    return epilogue(out, lse, attn_sink=options["attn_sink"], rope=rope), peaks, lse


@dataclass
class Kernel:
    """A kernel, or one with a fault.

    Attributes:
        round_weights: How weights lose precision.
        before: Changes arguments.
        after: Changes results before they are stored.
        stored: Changes the buffer afterwards.
    """

    round_weights: Callable[[Tensor], Tensor] = lambda weights: weights.bfloat16().float()
    before: Callable[[dict[str, Any]], None] = lambda arguments: None
    after: Callable[[Results], None] = lambda results: None
    stored: Callable[[mlacast.QuantizedTensor], None] = lambda out: None

    def _finish(
        self,
        q: Tensor,
        selected: Sequence[Tensor],
        out: mlacast.QuantizedTensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        results = attend(q, selected, round_weights=self.round_weights, **options)
        self.after(results)
        rows = results[0].reshape(out.num_tokens, out.num_groups, out.features)
        mlacast.reference.quantize_output(rows, out)
        self.stored(out)
        return results[1:]

    def prefill(self, q: Tensor, kv: Tensor, indices: Tensor, **arguments: Any) -> None:
        """In place of a prefill launcher."""
        self.before(arguments)
        selected = oracles.select_rows(kv, indices, arguments.pop("topk_length"))
        out, max_logits, lse = (arguments.pop(name) for name in ("out", "max_logits", "lse"))
        for target, result in zip(
            (max_logits, lse), self._finish(q, selected, out, arguments), strict=True
        ):
            target.copy_(result)

    def decode(self, q: Tensor, cache: Tensor, indices: Tensor, **arguments: Any) -> None:
        """In place of the decode launcher."""
        self.before(arguments)
        selected = _gather(arguments["kv_format"], cache, indices, arguments["topk_length"])
        if arguments["extra_kv_format"] is not None:
            more = (arguments[f"extra_{name}"] for name in ("k_cache", "indices", "topk_length"))
            extra = _gather(arguments["extra_kv_format"], *more)
            selected = oracles.join_selections(selected, extra)
        names = ("sm_scale", "attn_sink", "q_norm_eps", "rope", "q_order")
        options = {name: arguments[name] for name in names}
        arguments["lse"].copy_(self._finish(q, selected, arguments["out"], options)[1])


def _gather(
    kv_format: mlacast.KvFormat, cache: Tensor, indices: Tensor, lengths: Tensor | None
) -> list[Tensor]:
    slots = torch.arange(cache.shape[0] * cache.shape[1], dtype=torch.int32)
    return oracles.select_rows(kv_format.gather(cache, slots), indices, lengths)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_sound_prefill_passes(case: Case) -> None:
    for shape in SHAPES:
        check_prefill(Kernel().prefill, case, shape, 512, "cpu")
        # A query of 576 dimensions has neither norm nor another order.
        check_prefill(Kernel().prefill, replace(case, norm=False, order="head"), shape, 576, "cpu")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_sound_decode_passes(case: Case) -> None:
    one, two = replace(case, pools=("V4",)), replace(case, pools=("V41", "V41_FP4"))
    check_decode(Kernel().decode, one, Shape(14, 128), "cpu")
    check_decode(Kernel().decode, two, Shape(10, 0, False, 64, num_splits=2), "cpu")
    wide = replace(case, pools=("V32",), norm=False, order="head")
    check_decode(Kernel().decode, wide, Shape(10, 128), "cpu")


def test_a_sound_kernel_passes_the_special_rows() -> None:
    check_growing(Kernel().prefill, CASES[0], 512, "cpu")
    for spoil in ("query", "angles"):
        check_empty_token(Kernel().prefill, CASES[1], spoil, 512, "cpu")


def _a_live_head(results: Results) -> tuple[int, int]:
    """A token and a head with keys whose output is not closed by a sink."""
    token, head = (results[0].abs().amax(2) > 0).nonzero()[-1].tolist()
    return int(token), int(head)


def _add_to(number: int, amount: float) -> Callable[[Results], None]:
    def change(results: Results) -> None:
        results[number][_a_live_head(results)] += amount

    return change


def _swap_heads(results: Results) -> None:
    token, head = _a_live_head(results)
    results[0][token, [head, head - 3]] = results[0][token, [head - 3, head]]


def _lose_dimensions(results: Results) -> None:
    token, head = _a_live_head(results)
    results[0][token, head, 480:] = 0


def _fill_empty_token(results: Results) -> None:
    results[0][EMPTY_TOKEN] = 1e-3


def _change_the_row_before(out: mlacast.QuantizedTensor) -> None:
    storage_of(out.data)[0] ^= 1


def _change_a_scale_before(out: mlacast.QuantizedTensor) -> None:
    assert out.sf is not None
    storage_of(out.sf)[0] ^= 1


def _leave_padding(out: mlacast.QuantizedTensor) -> None:
    rows = out.sf_rows_with_padding()
    assert rows is not None
    rows[-1] = 5


def _double_a_scale(out: mlacast.QuantizedTensor) -> None:
    """One exponent, with the codes of the right one."""
    assert out.sf is not None
    out.sf[out.num_tokens // 2 + 1, 0, 3] += 1 << 8


def _move_a_code(out: mlacast.QuantizedTensor) -> None:
    """One larger code by three."""
    codes = out.data.view(torch.uint8)
    token, group, at = ((codes > 100) & (codes < 115)).nonzero()[-1].tolist()
    codes[token, group, at] += 3


def _scales_of_neighbours(out: mlacast.QuantizedTensor) -> None:
    """Scales of neighbouring heads change places."""
    assert out.sf is not None
    raw = out.sf.contiguous().view(torch.uint8).reshape(-1, 4)[:, [1, 0, 2, 3]]
    out.sf.copy_(raw.contiguous().view(torch.int32).view(out.sf.shape))


def _skip_the_last_column(arguments: dict[str, Any]) -> None:
    arguments["topk_length"] = arguments["topk_length"] - 1


def _forget_the_sink(arguments: dict[str, Any]) -> None:
    arguments["attn_sink"] = None


def _pair_neighbours(arguments: dict[str, Any]) -> None:
    rope = arguments["rope"]
    arguments["rope"] = mlacast.Rope(rope.cos_sin_cache, rope.positions, "interleaved")


def _wrap_positions(arguments: dict[str, Any]) -> None:
    rope = arguments["rope"]
    rows = rope.positions % rope.cos_sin_cache.shape[0]
    arguments["rope"] = mlacast.Rope(rope.cos_sin_cache, rows, rope.pairing)


def _round_to_fp8(weights: Tensor) -> Tensor:
    return weights.to(torch.float8_e4m3fn).float()


WRONG_NUMBERS = {
    "lse off": Kernel(after=_add_to(2, 0.02)),
    "maximum off": Kernel(after=_add_to(1, 0.02)),
    "lse NaN": Kernel(after=_add_to(2, float("nan"))),
    "heads swapped": Kernel(after=_swap_heads),
    "dimensions lost": Kernel(after=_lose_dimensions),
    "empty token written": Kernel(after=_fill_empty_token),
    "row before": Kernel(stored=_change_the_row_before),
    "scale before": Kernel(stored=_change_a_scale_before),
    "padding": Kernel(stored=_leave_padding),
    "scale doubled": Kernel(stored=_double_a_scale),
    "code moved": Kernel(stored=_move_a_code),
    "scales of neighbours": Kernel(stored=_scales_of_neighbours),
    "last column": Kernel(before=_skip_the_last_column),
    "sink": Kernel(before=_forget_the_sink),
    "pairing": Kernel(before=_pair_neighbours),
    "positions": Kernel(before=_wrap_positions),
    "weights in fp8": Kernel(round_weights=_round_to_fp8),
}


@pytest.mark.parametrize("fault", WRONG_NUMBERS)
def test_wrong_numbers_are_seen(fault: str) -> None:
    """All options in use, MXFP8 in chunks: padding, exponents, codes in another order."""
    case = CASES[1]
    call = draw_prefill(case, Shape(14, 192), 512, "cpu")
    assert_right(case, True, call.run(Kernel().prefill, case, True), call.expected())
    written = call.run(WRONG_NUMBERS[fault].prefill, case, True)
    with pytest.raises(AssertionError):
        assert_right(case, True, written, call.expected())


def _noise(results: Results) -> None:
    results[0].mul_(1 + 2.0**-9 * torch.rand(results[0].shape))


def _depend_on_the_batch(results: Results) -> None:
    results[0].mul_(1 + len(results[0]) * 2.0**-9)


@pytest.mark.parametrize(
    ("change", "message"), [(_noise, "a repeat"), (_depend_on_the_batch, "a smaller batch")]
)
def test_results_that_vary_are_seen(change: Callable[[Results], None], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_prefill(Kernel(after=change).prefill, CASES[0], Shape(14, 192), 512, "cpu")


def _reference_store(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    rows = torch.where((factors == 0)[..., None], 0.0, x * factors[..., None])
    mlacast.reference.quantize_output(rows.reshape(len(x), out.num_groups, -1), out)


def _without_minus_zero(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    _reference_store(x + 0.0, factors, out)


def _without_factors(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    _reference_store(x, torch.ones_like(factors), out)


def _into_the_row_before(x: Tensor, factors: Tensor, out: mlacast.QuantizedTensor) -> None:
    _reference_store(x, factors, out)
    storage_of(out.data)[0] ^= 1


@pytest.mark.parametrize("family", FAMILIES, ids=family_id)
def test_bytes_are_compared(family: tuple[FormatCase, ...]) -> None:
    for case in family:
        x = torch.cat((boundary_rows(case, 8), special_rows(8)))
        scaled, factors = draw_factors(x)
        factors[::5] = 0.0
        check_store(_reference_store, case, scaled, factors, 2, "cpu")
        for faulty in (_without_minus_zero, _without_factors):
            with pytest.raises(AssertionError, match="bytes differ"):
                check_store(faulty, case, scaled, factors, 2, "cpu")
        with pytest.raises(AssertionError, match="data: 1 of"):
            check_store(
                _into_the_row_before, case, scaled, factors, 2, "cpu", (len(x),), len(x) + 1
            )
