"""plan_sparse_decode and workspace_size: static in shapes, independent of values."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

import mlacast
from mlacast.ops.sparse_decode_checks import check_workspace
from tests.scenarios import CacheCase, draw_indices, transposed_queries

V4 = mlacast.KvFormat.V4
PLANNER = "mlacast.kernels.config.sparse_attention:plan_hopper_decode"


def test_the_same_shapes_give_an_equal_workspace() -> None:
    sizes = {
        mlacast.workspace_size(mlacast.plan_sparse_decode(4, 8, 640, kv_format=V4, num_splits=4))
        for _ in range(3)
    }
    assert len(sizes) == 1
    size = sizes.pop()
    assert isinstance(size, int) and size >= 0


def test_partials_of_every_split_fit_in_the_workspace() -> None:
    """Split partials are float32: an output of 512, a maximum and a sum for each token and head,
    unless the plan keeps a single split. Kernels take a workspace of that size, and none smaller.
    """
    scratch = pytest.importorskip("mlacast.kernels.common.combine_splits")
    launches = importlib.import_module("mlacast.kernels.common.launch").Launches
    q = torch.empty(4, 2, 512)
    for num_splits in (2, 3, 8):
        plan = mlacast.plan_sparse_decode(4, 2, 640, kv_format=V4, num_splits=num_splits)
        size, rows = mlacast.workspace_size(plan), num_splits * 4 * 2
        assert size == rows * (512 + 2) * 4
        workspace = torch.empty(size + 16, dtype=torch.uint8)
        check_workspace(workspace[:size], PLANNER, q, 640, num_splits, False)
        scratch.split_scratch(rows, workspace[:size], launches(workspace.device))
        for wrong in (workspace[: size - 1], workspace[8:]):
            with pytest.raises(ValueError, match=f"sparse_mla_decode: workspace must hold {size} "):
                check_workspace(wrong, PLANNER, q, 640, num_splits, False)
    check_workspace(workspace[8:8], PLANNER, q, 640, 1, False)
    check_workspace(workspace[8:8], None, q, 640, 8, False)


def test_a_workspace_without_a_schedule_is_held_against_the_splits_of_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten blocks of 64 keys on 132 multiprocessors: ten splits of one token and 64 heads."""
    config = pytest.importorskip("mlacast.kernels.config.sparse_attention")
    monkeypatch.setattr(config, "num_multiprocessors", lambda device: 132)
    workspace, q = torch.empty(10 * 64 * 514 * 4, dtype=torch.uint8), torch.empty(1, 64, 512)
    check_workspace(workspace, PLANNER, q, 640, None, False)
    with pytest.raises(ValueError, match="workspace must hold 1447424 bytes"):
        check_workspace(workspace, PLANNER, q, 641, None, False)


@pytest.mark.parametrize("backend", ["reference", "triton", "hopper"])
def test_a_workspace_of_a_call_is_checked_before_the_launch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has no splits, and leaves a workspace alone whatever its size."""
    if backend != "reference":
        pytest.importorskip("mlacast.kernels.config.sparse_attention")
        monkeypatch.setattr("mlacast.ops.sparse_mla_decode.arch_of", lambda device: "sm90")
        monkeypatch.setattr("mlacast.dispatch.select.is_installed", lambda module: True)
        launched: list[str] = []
        monkeypatch.setattr(
            "mlacast.ops.sparse_mla_decode.load",
            lambda target: lambda *args, **kwargs: launched.append(target),
        )
    filled = CacheCase("V4", 512).fill(num_pages=1, page_size=4, slots=range(4))
    q, indices = transposed_queries(2, 64, 512), draw_indices(2, 70, 4)
    needed = 3 * 2 * 64 * 514 * 4
    for size in (needed, needed - 1):
        is_refused = size < needed and backend != "reference"
        outcome = pytest.raises(ValueError, match=f"workspace must hold {needed} bytes")
        with outcome if is_refused else contextlib.nullcontext():
            mlacast.sparse_mla_decode(
                q,
                filled.cache,
                indices,
                kv_format=V4,
                sm_scale=1.0,
                num_splits=3,
                workspace=torch.empty(size, dtype=torch.uint8),
                backend=backend,
            )
    if backend != "reference":
        assert len(launched) == 1, "one call is refused, the other is not"


def test_a_plan_for_a_gpu_has_the_splits_of_a_call_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten blocks of 64 keys, one tile: an unplanned call would not leave 131 processors idle."""
    config = pytest.importorskip("mlacast.kernels.config.sparse_attention")
    monkeypatch.setattr("mlacast.ops.schedule.arch_of", lambda device: "sm90")
    monkeypatch.setattr("mlacast.dispatch.select.is_installed", lambda module: True)
    monkeypatch.setattr(config, "num_multiprocessors", lambda device: 132)
    few = mlacast.plan_sparse_decode(1, 64, 640, kv_format=V4, device="cuda:0")
    many = mlacast.plan_sparse_decode(1000, 64, 640, kv_format=V4, device="cuda:0")
    assert few.num_splits > 1
    assert many.num_splits == 1
    fixed = [
        mlacast.plan_sparse_decode(
            s_q, 64, 640, kv_format=V4, device="cuda:0", batch_invariant=True
        ).num_splits
        for s_q in (1, 7, 1000)
    ]
    assert len(set(fixed)) == 1


def test_a_plan_for_the_cpu_has_one_split() -> None:
    assert mlacast.plan_sparse_decode(1, 64, 640, kv_format=V4, device="cpu").num_splits == 1


def test_a_plan_needs_a_device() -> None:
    with pytest.raises(TypeError, match="plan_sparse_decode: device must be .*got int"):
        mlacast.plan_sparse_decode(1, 64, 640, kv_format=V4, device=0)  # type: ignore[arg-type]


def test_zero_tokens_can_be_planned() -> None:
    plan = mlacast.plan_sparse_decode(0, 8, 64, kv_format=V4)
    assert mlacast.workspace_size(plan) >= 0


@pytest.mark.parametrize(
    ("override", "argument", "given"),
    [
        ({"s_q": -1}, "s_q", "-1"),
        ({"h_q": 0}, "h_q", "0"),
        ({"h_q": 129}, "h_q", "129"),
        ({"topk": -1}, "topk", "-1"),
        ({"extra_topk": -2}, "extra_topk", "-2"),
        ({"num_splits": 0}, "num_splits", "0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_sizes_are_checked(override: dict[str, int], argument: str, given: str) -> None:
    sizes = {"s_q": 4, "h_q": 8, "topk": 64, "num_splits": 2, "extra_topk": 0} | override
    s_q, h_q, topk = sizes.pop("s_q"), sizes.pop("h_q"), sizes.pop("topk")
    with pytest.raises(ValueError, match=rf"plan_sparse_decode: {argument} must .*got {given}\b"):
        mlacast.plan_sparse_decode(
            s_q,
            h_q,
            topk,
            kv_format=V4,
            num_splits=sizes["num_splits"],
            extra_topk=sizes["extra_topk"],
        )


def test_the_format_must_be_a_format() -> None:
    with pytest.raises(TypeError, match="plan_sparse_decode: kv_format must be .*got str"):
        mlacast.plan_sparse_decode(4, 8, 64, kv_format="V4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "planned", [(3, 2, 16), (4, 3, 16), (4, 2, 17)], ids=["s_q", "h_q", "topk"]
)
def test_a_schedule_for_other_shapes_is_refused(planned: tuple[int, int, int]) -> None:
    filled = CacheCase("V4", 512).fill(num_pages=1, page_size=4, slots=range(4))
    schedule = mlacast.plan_sparse_decode(*planned, kv_format=V4, num_splits=2)
    with pytest.raises(ValueError, match="sparse_mla_decode: schedule must"):
        mlacast.sparse_mla_decode(
            transposed_queries(4, 2, 512),
            filled.cache,
            draw_indices(4, 16, 4),
            kv_format=V4,
            sm_scale=1.0,
            schedule=schedule,
        )


def test_a_small_workspace_is_refused() -> None:
    filled = CacheCase("V4", 512).fill(num_pages=1, page_size=4, slots=range(4))
    schedule = mlacast.plan_sparse_decode(4, 2, 16, kv_format=V4, num_splits=2)
    with pytest.raises(ValueError, match="sparse_mla_decode: workspace must .*got"):
        mlacast.sparse_mla_decode(
            transposed_queries(4, 2, 512),
            filled.cache,
            draw_indices(4, 16, 4),
            kv_format=V4,
            sm_scale=1.0,
            schedule=schedule,
            workspace=torch.empty(mlacast.workspace_size(schedule) - 1, dtype=torch.uint8),
        )
