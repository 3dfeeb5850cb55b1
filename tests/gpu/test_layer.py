"""MLAAttention on the device: values, launches, memory, graphs of decodes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.layers import MLAAttention, MLAMetadata
from tests.gpu.cache_steps import kernels_of, replayed
from tests.gpu.steps import CUDA, same_bits
from tests.layers.steps import PAGE, Inputs, Step, assert_close, assert_rows, draw, expected

HEADS = 4
FEATURES = HEADS * 128
STEPS = (
    Step("decodes", (1, 1, 1), (5, 0, 70)),
    Step("uneven_decodes", (3, 1, 2), (5, 4, 0), threshold=3),
    Step("prefills", (5, 130, 6), (0, 0, 0)),
    Step("mixed", (1, 1, 4, 5), (7, 3, 0, 0), padding=3),
    Step("chunks", (1, 3, 4, 5), (8, 19, 0, 6), padding=1, workspace=3),
    Step("long_context", (1, 20, 9), (8, 150, 6), workspace=64),
    Step("fp8_cache", (1, 3, 4), (8, 9, 0), kv_format="FP8"),
    Step("v32_cache", (1, 3, 4), (8, 9, 0), kv_format="V32"),
    Step("nothing", (), (), padding=3),
)
FORMATS = (
    mlacast.Bf16(),
    mlacast.Fp8Tensor(0.02),
    mlacast.Fp8Group(128, "float32", "mn_major"),
    mlacast.Mxfp8(),
    mlacast.Nvfp4(448.0),
)


def on_device(inputs: Inputs) -> tuple[MLAAttention, tuple[Any, ...]]:
    """The layer and the arguments of a step, copied."""
    old, old_metadata = inputs.layer, inputs.metadata
    layer = MLAAttention(
        old.num_heads,
        scale=old.scale,
        kv_b_proj=old.kv_b_proj.to(CUDA),
        kv_format=old.kv_format,
        k_scale=old.k_scale,
        context_workspace_tokens=old.context_workspace_tokens,
    )
    metadata = MLAMetadata.build(
        old_metadata.query_lens,
        old_metadata.context_lens,
        old_metadata.block_table.to(CUDA),
        PAGE,
        max(old_metadata.query_lens[: old_metadata.num_decodes], default=1) or 1,
    )
    tensors = (inputs.q, inputs.kv_c, inputs.k_pe, inputs.kv_cache)
    return layer, (*(tensor.to(CUDA) for tensor in tensors), metadata)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_values_match_float64(step: Step) -> None:
    inputs = draw(step, HEADS)
    layer, arguments = on_device(inputs)
    output = torch.full((inputs.q.shape[0], FEATURES), float("nan"), dtype=torch.bfloat16)
    output = output.to(CUDA)
    _, lse = layer(*arguments, output, return_lse=True)
    assert_close(output.cpu(), lse.cpu(), inputs)
    assert not output[sum(step.query_lens) :].any()


@pytest.mark.parametrize("fmt", FORMATS[1:], ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_quantised_values_match_float64(step: Step, fmt: mlacast.OutFormat) -> None:
    inputs = draw(step, HEADS)
    layer, arguments = on_device(inputs)
    tokens = inputs.q.shape[0]
    buffer = mlacast.QuantizedTensor.empty(tokens, 1, FEATURES, fmt, CUDA)
    layer(*arguments, buffer)
    found = buffer.dequantize().view(tokens, FEATURES).cpu().double()
    wanted = expected(inputs)[0].view(tokens, FEATURES)
    share = 0.2 if isinstance(fmt, mlacast.Nvfp4) else 0.06
    error = (found - wanted).norm(dim=-1)
    assert bool((error <= share * wanted.norm(dim=-1)).all())
    assert not found[sum(step.query_lens) :].any()


@pytest.mark.parametrize("step", STEPS[:6], ids=lambda step: step.id)
def test_quantising_launches_no_more_kernels_than_bfloat16(step: Step) -> None:
    inputs = draw(step, HEADS)
    layer, arguments = on_device(inputs)
    counts = []
    for fmt in FORMATS:
        buffer = mlacast.QuantizedTensor.empty(inputs.q.shape[0], 1, FEATURES, fmt, CUDA)
        names = kernels_of(functools.partial(layer, *arguments, buffer))
        assert not any("quantize_output" in name for name in names)
        counts.append(len(names))
    assert counts == counts[:1] * len(FORMATS)


def peak(call: Any) -> int:
    """Bytes that a warm call allocates at its highest."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [((1,) * 256, (100,) * 256), ((1024, 512), (0, 0)), ((1, 700, 300), (50, 900, 0))],
    ids=["decodes", "prefills", "mixed_context"],
)
def test_quantising_needs_no_16_bit_output(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...]
) -> None:
    heads, page = 16, 64
    tokens, requests = sum(query_lens), len(query_lens)
    pages = max(map(sum, zip(query_lens, context_lens, strict=True))) // page + 1
    table = torch.arange(requests * pages, dtype=torch.int32, device=CUDA).view(requests, pages)

    def draw_rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA)

    layer = MLAAttention(heads, scale=0.07, kv_b_proj=draw_rows(heads * 256, 512) / 22)
    metadata = MLAMetadata.build(query_lens, context_lens, table, page)
    arguments = (
        draw_rows(tokens, heads, 192),
        draw_rows(tokens, 512),
        draw_rows(tokens, 1, 64),
        draw_rows(requests * pages, page, 576),
        metadata,
    )
    peaks = []
    for fmt in FORMATS:
        buffer = mlacast.QuantizedTensor.empty(tokens, 1, heads * 128, fmt, CUDA)
        peaks.append(peak(functools.partial(layer, *arguments, buffer)))
    assert max(peaks) - peaks[0] < tokens * heads * 128


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
def test_a_captured_step_of_decodes_is_replayed_for_other_requests(fmt: mlacast.OutFormat) -> None:
    first, second = (
        draw(Step("decodes", (1, 1, 1), lengths, padding=2), HEADS)
        for lengths in ((5, 2, 11), (11, 9, 7))
    )
    layer, arguments = on_device(second)
    _, (*_, metadata) = on_device(first)
    tensors = arguments[:4]
    fresh, buffer = (mlacast.QuantizedTensor.empty(5, 1, FEATURES, fmt, CUDA) for _ in range(2))
    graph = replayed(functools.partial(layer, *tensors, metadata, buffer))
    metadata.decode_table.copy_(arguments[4].decode_table)
    metadata.decode_seq_lens.copy_(arguments[4].decode_seq_lens)
    graph.replay()
    layer(*arguments, fresh)
    assert same_bits(buffer, fresh)
    if isinstance(fmt, mlacast.Bf16):
        assert_rows(buffer.data.cpu(), expected(second)[0].view(5, 1, FEATURES))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
def test_a_compiled_step_of_decodes_is_captured_and_replayed(fmt: mlacast.OutFormat) -> None:
    first, second = (
        draw(Step("decodes", (1, 1, 1), lengths, padding=2), HEADS)
        for lengths in ((5, 2, 11), (11, 9, 7))
    )
    layer, arguments = on_device(second)
    _, (*_, metadata) = on_device(first)

    def forward(*given: Any) -> None:
        layer(*given)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="inductor")
    fresh, buffer = (mlacast.QuantizedTensor.empty(5, 1, FEATURES, fmt, CUDA) for _ in range(2))
    graph = replayed(functools.partial(compiled, *arguments[:4], metadata, buffer))
    metadata.decode_table.copy_(arguments[4].decode_table)
    metadata.decode_seq_lens.copy_(arguments[4].decode_seq_lens)
    graph.replay()
    layer(*arguments, fresh)
    assert same_bits(buffer, fresh)
