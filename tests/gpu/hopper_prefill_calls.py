"""Calls of the Hopper prefill kernels with hostile inputs, and everything they are checked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.config.sparse_attention import PrefillWork, prefill_work
from tests import oracles
from tests.gpu.hopper_cases import (
    SOME_ROWS,
    Case,
    Shape,
    draw_hostile_indices,
    draw_lengths,
    draw_query,
    draw_rope,
    draw_sink,
    inside_wider_rows,
    moved,
    options_for,
    options_on,
    poisoned_rows,
    spoil_angles,
    spoil_query,
)
from tests.gpu.hopper_checks import (
    Expected,
    Written,
    assert_nothing_else_written,
    assert_right,
    assert_same,
    expect,
)
from tests.scenarios import forget_unused, used_rows

ROWS = 1000
SM_SCALE = 0.05
Launch = Callable[..., Any]


@dataclass(frozen=True)
class PrefillCall:
    """Inputs of one call, on the device where it runs.

    Attributes:
        q: Queries.
        kv: Rows; NaN where nobody selects them.
        indices: Which of them.
        options: The other arguments of the launch.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    options: dict[str, Any]

    def on(self, device: str) -> PrefillCall:
        """The same call on ``device``."""
        q, kv, indices = (moved(tensor, device) for tensor in (self.q, self.kv, self.indices))
        return PrefillCall(q, kv, indices, options_on(self.options, device))

    def run(self, launch: Launch, case: Case, ends: bool, rows: slice = slice(None)) -> Written:
        """Launch it, or some of its rows, into poison."""
        q = self.q[rows]
        out = poisoned_rows(case, q.shape[0], ends, str(q.device))
        max_logits = torch.full(q.shape[:2], float("nan"), device=q.device)
        lse = max_logits.clone()
        launch(
            q,
            self.kv,
            self.indices[rows],
            out=out,
            max_logits=max_logits,
            lse=lse,
            **options_for(self.options, rows),
        )
        return Written(out, lse, max_logits)

    def expected(self) -> Expected:
        """The reference in float64, with its bounds."""
        exact = mlacast.reference.sparse_mla_prefill(
            self.q, self.kv, self.indices, compute_dtype=torch.float64, **self.options
        )
        selected = oracles.select_rows(self.kv, self.indices, self.options["topk_length"])
        options = {name: value for name, value in self.options.items() if name != "topk_length"}
        return expect(exact, self.q, selected, options)


def draw_prefill(case: Case, shape: Shape, d_qk: int, device: str) -> PrefillCall:
    """A call with every nuisance that the contract allows."""
    indices = draw_hostile_indices(shape.tokens, shape.topk, ROWS)
    lengths = draw_lengths(case, shape.tokens, shape.topk)
    rows = torch.randn(ROWS, d_qk).bfloat16()
    # Every part of a row has to matter for the scores, the last dimensions too.
    rows[:, 400:] *= 2
    kv = inside_wider_rows(forget_unused(rows, used_rows(indices, ROWS, lengths)))
    options = {
        "sm_scale": SM_SCALE,
        "topk_length": lengths,
        "attn_sink": draw_sink(case),
        # Large enough beside squares of about 5 that a kernel without it is wrong.
        "q_norm_eps": 0.75 if case.norm else None,
        "rope": draw_rope(case, shape.tokens),
        "q_order": case.order,
    }
    q = draw_query(case, shape.tokens, d_qk)
    return PrefillCall(q, kv, indices, options).on(device)


def check_prefill(launch: Launch, case: Case, shape: Shape, d_qk: int, device: str) -> None:
    """One call: right, repeatable to the bit, and each row as if it were alone."""
    call = draw_prefill(case, shape, d_qk, device)
    written = call.run(launch, case, shape.ends)
    for _ in range(2):
        assert_same(written, call.run(launch, case, shape.ends))
    if shape.tokens >= SOME_ROWS.stop:
        alone = call.run(launch, case, shape.ends, SOME_ROWS)
        assert_same(written.rows(SOME_ROWS), alone, "a row of a smaller batch")
        assert_nothing_else_written(alone.out)
    assert_right(case, shape.ends, written, call.expected())


def check_case(launch: Launch, case: Case, d_qk: int, device: str) -> None:
    """Long lists, and more tokens than a GPU has multiprocessors to give them one each."""
    for shape in (Shape(142, 640, case.places[0]), Shape(290, 64, case.places[1])):
        check_prefill(launch, case, shape, d_qk, device)


def share_tiles(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Let ``parts`` programs share each tile of the calls that follow, 66 tiles at most."""

    def chosen(num_tokens: int, num_heads: int, multiprocessors: int) -> PrefillWork:
        return prefill_work(num_tokens, num_heads, multiprocessors)._replace(parts=parts)

    monkeypatch.setattr("mlacast.kernels.config.sparse_attention.prefill_work", chosen)


def check_shared_tiles(
    launch: Launch, case: Case, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Lists of many blocks, of one and of none: the bytes of programs with tiles of their own."""
    tokens = 61 if case.heads <= 64 else 33
    for shape in (
        Shape(tokens, 640, case.places[0]),
        Shape(tokens - 2, 100, case.places[1]),
        Shape(2, 33, case.places[0]),
        Shape(9, 0, case.places[0]),
        Shape(tokens, 2048, case.places[1]),
    ):
        call = draw_prefill(case, shape, 512, device)
        share_tiles(monkeypatch, 1)
        alone = call.run(launch, case, shape.ends)
        share_tiles(monkeypatch, 2)
        for _ in range(6):
            assert_same(alone, call.run(launch, case, shape.ends), "two programs a tile")


def draw_growing(heads: int, d_qk: int, device: str) -> PrefillCall:
    """Scores that grow or fall along a row of ten blocks, by up to 12 bits a block.

    Head by head another slope, token by token another order: ascending, descending, any.
    """
    topk = 640
    direction = torch.randint(0, 2, (d_qk,)) * 2.0 - 1
    slopes = torch.linspace(-12, 12, heads) * math.log(2)
    q = (slopes[:, None] * direction).bfloat16().expand(6, heads, d_qk).contiguous()
    height = torch.arange(topk) / 64
    kv = (height[:, None] * direction + 0.2 * torch.randn(topk, d_qk)).bfloat16()
    order = torch.arange(topk, dtype=torch.int32)
    shuffled = [torch.randperm(topk, dtype=torch.int32) for _ in range(4)]
    indices = torch.stack((order, order.flip(0), *shuffled))
    options = {
        "sm_scale": 1 / d_qk,
        "topk_length": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "q_order": "head",
    }
    return PrefillCall(q, kv, indices, options).on(device)


def check_growing(launch: Launch, case: Case, d_qk: int, device: str) -> None:
    """The base of the weights moves many times, and what came before is rescaled each time."""
    call = draw_growing(case.heads, d_qk, device)
    assert_right(case, True, call.run(launch, case, True), call.expected())


def check_empty_token(launch: Launch, case: Case, spoil: str, d_qk: int, device: str) -> None:
    """A token without keys is zero whatever its "query", or its "angles", hold."""
    call = draw_prefill(case, Shape(14, 128), d_qk, device)
    if spoil == "angles":
        call = replace(call, options=spoil_angles(call.options))
    spoilt = replace(call, q=spoil_query(call.q)) if spoil == "query" else call
    assert_right(case, True, spoilt.run(launch, case, True), call.expected())
