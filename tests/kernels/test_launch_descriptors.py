"""A repeated launch with tensor descriptors describes the tensors of its own call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mlacast
from tests.kernels import fake_gpu as fakes
from tests.kernels.fake_gpu import FakeGpu, fake_gpu

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    modules = (*fakes._MODULES, "gluon.sm90.dense_mla_prefill")
    monkeypatch.setattr(fakes, "_MODULES", modules)
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _tensors(tokens: int, out_format: mlacast.OutFormat) -> dict[str, Any]:
    """Arguments of a dense prefill; ``v`` lies in wider rows, ``out`` in a longer buffer."""
    v = torch.zeros(tokens, 4, 256, dtype=torch.bfloat16)[..., 128:]
    bounds = torch.tensor([0, 3, tokens], dtype=torch.int32)
    return {
        "q": torch.zeros(tokens, 4, 192, dtype=torch.bfloat16),
        "k": torch.zeros(tokens, 4, 192, dtype=torch.bfloat16),
        "v": v,
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds.clone(),
        "out": mlacast.QuantizedTensor.empty(tokens + 8, 1, 512, out_format)[4 : 4 + tokens],
        "lse": torch.zeros(4, tokens),
    }


def _launch(arguments: dict[str, Any]) -> Any:
    from mlacast.kernels.gluon.sm90.dense_mla_prefill import launch_dense_mla_prefill

    return launch_dense_mla_prefill(
        **arguments, max_seqlen_q=9, max_seqlen_k=9, softmax_scale=0.1, causal=True
    )


def _of_call(arguments: dict[str, Any]) -> list[torch.Tensor]:
    out = arguments["out"]
    parts = [out.data, out.sf_rows_with_padding(), out.format.scale_tensor("cpu")]
    given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return [*given, *(part for part in parts if part is not None)]


def _comparable(value: Any) -> Any:
    """Addresses of tensors and descriptors, and what else says where a copy reads."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "strides"):
        address = value.base.data_ptr()
        return address, list(value.shape), list(value.strides), value.padding
    return value


@pytest.mark.parametrize(
    "out_format", [mlacast.Bf16(), mlacast.Mxfp8(), mlacast.Nvfp4(torch.ones(1))]
)
def test_a_plan_takes_the_addresses_of_its_call(
    gpu: FakeGpu, out_format: mlacast.OutFormat
) -> None:
    first, second = (_tensors(37, out_format) for _ in range(2))
    plan = _launch(first).bind(_of_call(first))
    assert plan is not None
    start = len(gpu.runs)
    plan([tensor.data_ptr() for tensor in _of_call(second)])
    planned = gpu.runs[start:]
    start = len(gpu.runs)
    _launch(second)
    launched = gpu.runs[start:]
    assert len(planned) == len(launched) == 2, "the counter, and the kernel"
    # Grid, stream, function; metadata and two hooks; then the arguments.
    for (_, actual), (_, wanted) in zip(planned, launched, strict=True):
        assert actual[:6] == wanted[:6]
        pairs = list(zip(actual[9:], wanted[9:], strict=True))
        different = [pair for pair in pairs if _comparable(pair[0]) != _comparable(pair[1])]
        # Scratch is allocated anew by every call.
        assert len(different) == 1, different


def test_a_plan_keeps_no_tensor_alive(gpu: FakeGpu) -> None:
    import weakref

    arguments = _tensors(37, mlacast.Bf16())
    plan = _launch(arguments).bind(_of_call(arguments))
    gpu.runs.clear()
    watched = weakref.ref(arguments["q"])
    del arguments
    assert plan is not None
    assert watched() is None


def test_one_variant_for_every_size(gpu: FakeGpu) -> None:
    for tokens in (37, 48, 64, 16, 5):
        _launch(_tensors(tokens, mlacast.Mxfp8()))
    assert len(gpu.compiled) == 2
