"""Calls of the Hopper decode kernel with hostile inputs, and everything they are checked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.gpu.hopper_cases import (
    Case,
    Shape,
    draw_hostile_indices,
    draw_lengths,
    draw_query,
    draw_rope,
    draw_sink,
    moved,
    options_for,
    options_on,
    poisoned_rows,
)
from tests.gpu.hopper_checks import Expected, Written, assert_right, assert_same, expect
from tests.gpu.hopper_pools import EXTRA, MAIN, Geometry, Pool, build_pool
from tests.scenarios import used_rows

SM_SCALE = 0.02
# Smallest subnormal bfloat16, in units of 2**64.
KEY_RESOLUTION = 2.0**-69
ALL = range(MAIN.slots)
Launch = Callable[..., Any]


@dataclass(frozen=True)
class DecodeCall:
    """Inputs of one call, on the device where it runs.

    Attributes:
        q: Queries.
        indices: Slots of the main pool.
        pools: The caches, one or two.
        options: The other arguments of the launch, but for those of `run`.
    """

    q: Tensor
    indices: Tensor
    pools: tuple[Pool, ...]
    options: dict[str, Any]

    def on(self, device: str) -> DecodeCall:
        """The same call on ``device``."""
        pools = tuple(pool.on(device) for pool in self.pools)
        tensors = (moved(self.q, device), moved(self.indices, device))
        return DecodeCall(*tensors, pools, options_on(self.options, device))

    @property
    def arguments(self) -> dict[str, Any]:
        """Options and caches."""
        formats = [mlacast.KvFormat.from_name(pool.name) for pool in self.pools]
        extra = len(self.pools) > 1
        return {
            **self.options,
            "kv_format": formats[0],
            "extra_k_cache": self.pools[1].cache if extra else None,
            "extra_kv_format": formats[1] if extra else None,
        }

    def run(
        self,
        launch: Launch,
        case: Case,
        *,
        ends: bool = True,
        rows: slice = slice(None),
        num_splits: int | None = 1,
        batch_invariant: bool = False,
        workspace: Tensor | None = None,
    ) -> Written:
        """Launch it, or some of its rows, into poison."""
        q = self.q[rows]
        out = poisoned_rows(case, q.shape[0], ends, str(q.device))
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        launch(
            q,
            self.pools[0].cache,
            self.indices[rows],
            out=out,
            lse=lse,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            workspace=workspace,
            **options_for(self.arguments, rows),
        )
        return Written(out, lse)

    def expected(self) -> Expected:
        """The reference in float64, with its bounds."""
        exact = mlacast.reference.sparse_mla_decode(
            self.q,
            self.pools[0].cache,
            self.indices,
            compute_dtype=torch.float64,
            **self.arguments,
        )
        lists = [
            (self.indices, self.options["topk_length"]),
            (self.options["extra_indices"], self.options["extra_topk_length"]),
        ]
        selected = oracles.join_selections(
            *(
                oracles.select_rows(pool.rows, indices, lengths)
                for pool, (indices, lengths) in zip(self.pools, lists, strict=False)
            )
        )
        names = ("sm_scale", "attn_sink", "q_norm_eps", "rope", "q_order")
        expected = expect(exact, self.q, selected, {name: self.options[name] for name in names})
        # Keys stand in shared memory as 2**-64 of their value: smaller ones than 2**-62 lose bits.
        slack = expected.slack + KEY_RESOLUTION * (expected.out != 0)
        return replace(expected, slack=slack)


def draw_decode(
    case: Case,
    shape: Shape,
    device: str,
    geometries: Sequence[Geometry] = (MAIN, EXTRA),
    pools: Sequence[Pool] | None = None,
) -> DecodeCall:
    """A call with every nuisance that the contract allows.

    Records are only where a token selects one, unless ``pools`` are given.
    """
    widths = (shape.topk, shape.extra_topk)[: len(case.pools)]
    lists, lengths, drawn = [], [], []
    for name, width, geometry in zip(case.pools, widths, geometries, strict=False):
        lists.append(draw_hostile_indices(shape.tokens, width, geometry.slots))
        lengths.append(draw_lengths(case, shape.tokens, width))
        if pools is None:
            used = sorted(used_rows(lists[-1], geometry.slots, lengths[-1]))
            drawn.append(build_pool(name, geometry, used))
    chosen = tuple(drawn if pools is None else pools)
    two = len(chosen) > 1
    options = {
        "sm_scale": SM_SCALE,
        "topk_length": lengths[0],
        "extra_indices": lists[1] if two else None,
        "extra_topk_length": lengths[1] if two else None,
        "attn_sink": draw_sink(case),
        # Large enough beside squares of about 5 that a kernel without it is wrong.
        "q_norm_eps": 0.75 if case.norm else None,
        "rope": draw_rope(case, shape.tokens),
        "q_order": case.order,
    }
    q = draw_query(case, shape.tokens, chosen[0].rows.shape[1])
    return DecodeCall(q, lists[0], chosen, options).on(device)


def poisoned_workspace(call: DecodeCall, num_splits: int | None) -> Tensor | None:
    """Exactly the scratch of a split call, full of NaN; None where there is none."""
    if num_splits is None or num_splits == 1:
        return None
    floats = num_splits * call.q.shape[0] * call.q.shape[1] * 514
    return torch.full((floats * 4,), 0xFF, dtype=torch.uint8, device=call.q.device)


def check_call(launch: Launch, case: Case, shape: Shape, call: DecodeCall) -> None:
    """One call: right, and repeatable to the bit, with and without a workspace."""
    where: dict[str, Any] = {"ends": shape.ends, "num_splits": shape.num_splits}
    written = call.run(launch, case, **where)
    for workspace in (None, poisoned_workspace(call, shape.num_splits)):
        assert_same(written, call.run(launch, case, workspace=workspace, **where))
    assert_right(case, shape.ends, written, call.expected())


def check_decode(launch: Launch, case: Case, shape: Shape, device: str) -> None:
    """`check_call` of a random call."""
    check_call(launch, case, shape, draw_decode(case, shape, device))


def draw_growing(case: Case, device: str) -> DecodeCall:
    """Scores that grow or fall along a row of eight blocks, by 100 bits in the extreme heads.

    Head by head another slope; even tokens ascend, odd ones descend. One pool, full.
    """
    call = draw_decode(case, Shape(6, 512), "cpu", pools=[build_pool(case.pools[0], MAIN, ALL)])
    rows, width = call.pools[0].rows, call.q.shape[2]
    queries = torch.randn(6, width)
    scores = queries.double() @ rows.T
    order = scores.sort(1).indices[:, -512:]
    order[1::2] = order[1::2].flip(1)
    slopes = torch.linspace(-1, 1, case.heads)
    q = (queries[:, None] * slopes[:, None]).bfloat16()
    spread = float((scores.amax(1) - scores.amin(1)).amax())
    options = call.options | {"sm_scale": 100 * math.log(2) / spread}
    return DecodeCall(q, order.to(torch.int32), call.pools, options).on(device)
