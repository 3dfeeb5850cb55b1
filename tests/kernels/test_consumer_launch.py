"""Repeated calls of the consumers of quantised outputs launch what Triton would have launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mlacast
from mlacast.kernels.common.launch import Launches
from tests import projections
from tests.kernels.fake_gpu import FakeGpu, fake_gpu

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from tests.kernels import repeated  # noqa: E402
from tests.kernels import test_launch as launches  # noqa: E402
from tests.kernels.test_launch import Shape  # noqa: E402

SHAPES = tuple(
    Shape(tokens=tokens, heads=heads, out=out, first_row=first_row)
    for tokens, heads, out, first_row in (
        (3, 4, "mxfp8", 0),
        (1, 4, "bf16", 1),
        (16, 2, "nvfp4", 0),
        (65, 4, "fp8_tensor", 2),
        (3, 1, "nvfp4", 5),
    )
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _buffer(shape: Shape, features: int = 256) -> mlacast.QuantizedTensor:
    """``heads`` counts groups."""
    rows = shape.tokens + shape.first_row + 2
    fmt = launches._format(shape.out)
    whole = mlacast.QuantizedTensor.empty(rows, shape.heads, features, fmt)
    return whole[shape.first_row : shape.first_row + shape.tokens]


def _project(kind: str) -> Callable[[Shape], dict[str, Any]]:
    def make(shape: Shape) -> dict[str, Any]:
        weights = projections.draw_weights(kind, (shape.heads, 40, 256))
        return {
            "out": _buffer(shape),
            "weight": weights.weight,
            "weight_sf": weights.weight_sf,
            "backend": "triton",
        }

    return make


def _linear(kind: str) -> Callable[[Shape], dict[str, Any]]:
    def make(shape: Shape) -> dict[str, Any]:
        weights = projections.draw_weights(kind, (40, shape.heads * 256))
        return {
            "out": _buffer(shape),
            "weight": weights.weight,
            "weight_sf": weights.weight_sf,
            "backend": "triton",
        }

    return make


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Shape], dict[str, Any]]]] = {
    "plain weights": (mlacast.grouped_out_project, _project("bfloat16")),
    "blocks": (mlacast.grouped_out_project, _project("blocks_128")),
    "words": (mlacast.grouped_out_project, _project("words_32")),
    "bytes": (mlacast.grouped_out_project, _project("bytes_32")),
    "linear, plain": (mlacast.quantized_linear, _linear("bfloat16")),
    "linear, bytes": (mlacast.quantized_linear, _linear("bytes_32")),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.tokens}-{shape.out}")
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_launches_what_triton_launches(
    name: str, shape: Shape, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, make = CALLS[name]

    def results(**arguments: Any) -> tuple[Any, ...]:
        return (call(**arguments),)

    launches.test_a_repeated_call_launches_what_triton_launches(
        results, make, shape, gpu, monkeypatch
    )
    assert len(gpu.runs) == 1


@pytest.mark.parametrize("name", CALLS)
def test_sizes_and_places_compile_nothing_new(name: str, gpu: FakeGpu) -> None:
    """Numbers of tokens and rows of a buffer pick variants that two calls have compiled."""
    call, make = CALLS[name]
    for tokens in (1, 16, 100):
        call(**make(Shape(tokens=tokens, heads=3, out="mxfp8")))
    variants = len(gpu.compiled)
    for tokens in (2, 15, 17, 64, 101):
        for first_row in (0, 1, 5, 16):
            call(**make(Shape(tokens=tokens, heads=3, out="mxfp8", first_row=first_row)))
    assert len(gpu.compiled) == variants


@pytest.mark.parametrize("kind", ["blocks_128", "bytes_32", "words_32"])
@pytest.mark.parametrize(
    ("call", "make"),
    [(mlacast.grouped_out_project, _project), (mlacast.quantized_linear, _linear)],
    ids=["project", "linear"],
)
def test_launches_of_the_hopper_kernel_are_bound(
    call: Callable[..., Any], make: Callable[..., Any], kind: str, gpu: FakeGpu
) -> None:
    for first_row in (0, 5):
        shape = Shape(tokens=3, heads=4, out="mxfp8", first_row=first_row)
        arguments = {**make(kind)(shape), "backend": "hopper"}
        call(**arguments)
        variants = len(gpu.compiled)
        gpu.runs.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launches, "launch", repeated.refuse)
            call(**arguments)
        assert len(gpu.runs) == 1
        assert len(gpu.compiled) == variants
