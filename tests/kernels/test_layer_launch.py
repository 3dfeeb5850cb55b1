"""Repeated calls of the operations of a dense layer launch what Triton would have launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mlacast
from tests.kernels.fake_gpu import FakeGpu, fake_gpu

pytest.importorskip("triton", reason="the portable kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from tests.kernels import test_launch as launches  # noqa: E402
from tests.kernels.test_launch import Shape  # noqa: E402

BF16 = torch.bfloat16
SHAPES = tuple(
    Shape(tokens=tokens, heads=heads, out=out, first_row=first_row)
    for tokens, heads, out, first_row in (
        (3, 4, "mxfp8", 0),
        (1, 4, "bf16", 1),
        (16, 16, "nvfp4", 0),
        (65, 4, "fp8_tensor", 2),
        (3, 1, "nvfp4", 5),
    )
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _buffer(shape: Shape, features: int) -> mlacast.QuantizedTensor:
    rows = shape.tokens + shape.first_row + 2
    whole = mlacast.QuantizedTensor.empty(rows, 1, features, launches._format(shape.out))
    return whole[shape.first_row : shape.first_row + shape.tokens]


def _dense_prefill(shape: Shape) -> dict[str, Any]:
    up = torch.zeros(shape.tokens, shape.heads, 256, dtype=BF16)
    bounds = torch.tensor([0, shape.tokens], dtype=torch.int32)
    return {
        "q": torch.zeros(shape.tokens, shape.heads, 192, dtype=BF16),
        "k": torch.zeros(shape.tokens, shape.heads, 192, dtype=BF16),
        "v": up[..., 128:],
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds.clone(),
        "max_seqlen_q": shape.tokens,
        "max_seqlen_k": shape.tokens,
        "out": _buffer(shape, shape.heads * 128),
        "backend": "triton",
    }


def _v_up(shape: Shape) -> dict[str, Any]:
    up = torch.zeros(shape.heads, 256, 512, dtype=BF16)
    return {
        "latent_out": torch.zeros(shape.tokens, shape.heads, 512, dtype=BF16),
        "w_uv": up[:, 128:].transpose(1, 2),
        "out": _buffer(shape, shape.heads * 128),
        "backend": "triton",
    }


def _merge(count: int) -> Callable[[Shape], dict[str, Any]]:
    def make(shape: Shape) -> dict[str, Any]:
        sizes = shape.tokens, shape.heads, 128
        return {
            "outs": [torch.zeros(sizes, dtype=BF16) for _ in range(count)],
            "lses": [torch.zeros(sizes[:2]).t() for _ in range(count)],
            "out": _buffer(shape, shape.heads * 128),
            "backend": "triton",
        }

    return make


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Shape], dict[str, Any]], int]] = {
    "dense_mla_prefill": (mlacast.dense_mla_prefill, _dense_prefill, 1),
    "v_up_project": (mlacast.v_up_project, _v_up, 1),
    "merge of 2": (mlacast.merge_attention_states, _merge(2), 1),
    "merge of 4": (mlacast.merge_attention_states, _merge(4), 1),
    # Four, their result and three more, that and the last two.
    "merge of 9": (mlacast.merge_attention_states, _merge(9), 3),
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.tokens}-{shape.out}")
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_launches_what_triton_launches(
    name: str, shape: Shape, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, make, count = CALLS[name]

    def results(**arguments: Any) -> tuple[Any, ...]:
        returned = call(**arguments)
        return returned if isinstance(returned, tuple) else (returned,)

    launches.test_a_repeated_call_launches_what_triton_launches(
        results, make, shape, gpu, monkeypatch
    )
    assert len(gpu.runs) == count


@pytest.mark.parametrize("name", CALLS)
def test_sizes_and_places_compile_nothing_new(
    name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of tokens and rows of a buffer pick variants that three calls have compiled."""
    call, make, _ = CALLS[name]
    for tokens in (1, 16, 100):
        call(**make(Shape(tokens=tokens, heads=5, out="nvfp4")))
    variants = len(gpu.compiled)
    for tokens in (2, 15, 17, 64, 101):
        for first_row in (0, 1, 5, 16):
            call(**make(Shape(tokens=tokens, heads=5, out="nvfp4", first_row=first_row)))
    assert len(gpu.compiled) == variants
