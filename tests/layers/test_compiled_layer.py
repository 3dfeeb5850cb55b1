"""The layer under torch.compile: one operator for a step, the bits of eager mode, compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mlacast
from mlacast.compat import vllm
from mlacast.layers import MLAAttention, MLAMetadata
from tests.format_cases import (
    FAMILIES,
    FormatCase,
    buffer_bytes,
    bytes_of,
    case_id,
    poisoned_buffer,
)
from tests.layers.steps import HEADS, PAGE, Inputs, Step, assert_close, draw
from tests.oracles import same_bits

FEATURES = HEADS * 128
# All of 11 rows, and so of the same shapes.
STEPS = (
    Step("mixed", (1, 1, 4, 3), (7, 3, 0, 0), padding=2),
    Step("chunks", (1, 3, 5), (8, 19, 6), padding=2, workspace=3),
    Step("decodes", (1,) * 9, (5, 0, 7, 1, 2, 3, 9, 4, 6), padding=2),
    Step("uneven_decodes", (3, 1, 2, 3), (5, 4, 0, 1), threshold=3, padding=2),
    Step("prefill", (11,), (0,)),
    Step("nothing", (), (), padding=11),
)
CACHES = (
    Step("fp8_cache", (1, 3, 4), (8, 9, 0), kv_format="FP8", workspace=4),
    Step("v32_cache", (1, 3, 4), (8, 9, 0), kv_format="V32", workspace=4),
    Step("no_rows", (), ()),
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Inductor compiles C++ for the CPU.
inductor = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
)


class Counter:
    """Backend that counts graphs, and the operators of this package in each."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets = (str(node.target) for node in module.graph.nodes)
        self.operators.append([target for target in targets if target.startswith("mlacast")])
        return module


def forward_of(layer: MLAAttention, **options: Any) -> Callable[..., Any]:
    def forward(*arguments: Any) -> Any:
        return layer(*arguments, return_lse=True, **options)

    return forward


def plain_output(inputs: Inputs) -> Tensor:
    shape = (inputs.q.shape[0], FEATURES)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def assert_bits_of_eager_mode(inputs: Inputs, **options: Any) -> None:
    """Compile a step, and make it in both ways."""
    forward = forward_of(inputs.layer, **options)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    ours, theirs = plain_output(inputs), plain_output(inputs)
    returned, lse = compiled(*inputs.tensors, ours)
    _, wanted_lse = forward(*inputs.tensors, theirs)
    assert same_bits(ours, theirs)
    assert same_bits(lse, wanted_lse)
    assert returned.data_ptr() == ours.data_ptr()


@pytest.mark.parametrize("step", [*STEPS[1:], *CACHES], ids=lambda step: step.id)
def test_bits_of_eager_mode(step: Step) -> None:
    assert_bits_of_eager_mode(draw(step))


def test_values() -> None:
    inputs = draw(STEPS[0])
    output = plain_output(inputs)
    compiled = torch.compile(forward_of(inputs.layer), fullgraph=True, backend="aot_eager")
    _, lse = compiled(*inputs.tensors, output)
    assert_close(output, lse, inputs)
    assert not output[9:].any()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "range"])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_bytes_of_eager_mode(case: FormatCase, is_whole: bool) -> None:
    """Rows around the range and padding of scales included."""
    inputs = draw(STEPS[0], heads=4)
    range_of, total = (slice(0, 11), 11) if is_whole else (slice(2, 13), 14)
    buffers = []
    for backend in ("aot_eager", None):
        buffer = poisoned_buffer(case, total, 1, 4 * 128)
        run: Any = inputs.layer.forward
        if backend is not None:
            run = torch.compile(run, fullgraph=True, backend=backend)
        returned = run(*inputs.tensors, buffer[range_of])
        assert returned.data.data_ptr() == buffer[range_of].data.data_ptr()
        buffers.append(buffer_bytes(buffer))
    for compiled, eager in zip(*buffers, strict=True):
        assert compiled is None or torch.equal(compiled, eager)


def test_selections_and_scales_on_the_device() -> None:
    inputs = draw(CACHES[0])
    inputs.layer.q_scale = torch.tensor([0.125])
    inputs.layer.k_scale = torch.tensor(0.05)
    slots = inputs.metadata.block_table[:, 0].repeat_interleave(torch.tensor([1, 3, 4])) * PAGE
    indices = torch.stack((slots, slots + 1, slots), 1)
    lengths = torch.tensor([2, 1, 3, 2, 1, 0, 3, 2], dtype=torch.int32)
    assert_bits_of_eager_mode(inputs, indices=indices, topk_length=lengths)


def engine_tensors(scheme: str) -> tuple[Tensor, dict[str, Any]]:
    """An output of 11 rows of 4 heads, and what is said of it."""
    codes = torch.full((11, 256 if scheme == "nvfp4" else 512), 0x5A, dtype=torch.uint8)
    if scheme == "static":
        return codes.view(torch.float8_e4m3fn), {"output_scale": torch.tensor([0.03])}
    if scheme == "nvfp4":
        sf = torch.full((128, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return codes, {"output_scale": torch.tensor([600.0]), "output_block_scale": sf}
    # Columns 12 apart.
    scales = torch.full((4, 12), float("nan")).T[:11]
    words = {"quant_group_size": 128, "quant_col_major": True, "quant_tma_aligned": True}
    return codes.view(torch.float8_e4m3fn), {"output_block_scale": scales, **words}


@pytest.mark.parametrize("scheme", ["static", "nvfp4", "group"])
def test_tensors_of_an_engine(scheme: str) -> None:
    inputs = draw(STEPS[1], heads=4)

    def step(output: Tensor, options: dict[str, Any]) -> None:
        vllm.forward_impl(inputs.layer, *inputs.tensors, output, **options)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        output, options = engine_tensors(scheme)
        untouched = bytes_of(output).clone()
        run(output, options)
        assert not torch.equal(bytes_of(output), untouched)
        results.append([output, *(v for v in options.values() if isinstance(v, Tensor))])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(bytes_of(eager), bytes_of(compiled))


def test_a_profiling_run() -> None:
    inputs = draw(STEPS[0])
    output = plain_output(inputs)
    compiled = torch.compile(vllm.forward_impl, fullgraph=True, backend="aot_eager")
    compiled(inputs.layer, *inputs.tensors[:4], None, output)
    assert not output.any()
    # What it compiled does not stand in the way of a step.
    compiled(inputs.layer, *inputs.tensors, output)
    wanted = plain_output(inputs)
    inputs.layer(*inputs.tensors, wanted)
    assert same_bits(output, wanted)


def test_metadata_made_in_the_compiled_function() -> None:
    inputs = draw(STEPS[0])
    table = inputs.metadata.block_table

    def step(output: Tensor) -> None:
        metadata = MLAMetadata.build(STEPS[0].query_lens, STEPS[0].context_lens, table, PAGE)
        inputs.layer(*inputs.tensors[:4], metadata, output)

    ours, theirs = plain_output(inputs), plain_output(inputs)
    torch.compile(step, fullgraph=True, backend="aot_eager")(ours)
    step(theirs)
    assert same_bits(ours, theirs)


def test_metadata_that_only_the_call_holds() -> None:
    inputs = draw(STEPS[0])
    ours, theirs = plain_output(inputs), plain_output(inputs)
    inputs.layer(*inputs.tensors, theirs)
    metadata = [inputs.metadata]
    tensors = inputs.tensors[:4]
    object.__setattr__(inputs, "metadata", None)
    compiled = torch.compile(inputs.layer.forward, fullgraph=True, backend="aot_eager")
    compiled(*tensors, metadata.pop(), ours)
    assert same_bits(ours, theirs)


def test_one_operator_and_one_compilation_for_all_batches_of_a_size() -> None:
    counter = Counter()
    layer = draw(STEPS[1]).layer
    compiled = torch.compile(forward_of(layer), fullgraph=True, backend=counter)
    # Pools of one size, as an engine has.
    drawn = [draw(step) for step in STEPS]
    pages = max(inputs.kv_cache.shape[0] for inputs in drawn)
    for inputs in drawn:
        shape = (pages, *inputs.kv_cache.shape[1:])
        cache = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        cache[: inputs.kv_cache.shape[0]] = inputs.kv_cache
        arguments = (inputs.q, inputs.kv_c, inputs.k_pe, cache, inputs.metadata)
        ours, theirs = plain_output(inputs), plain_output(inputs)
        compiled(*arguments, ours)
        layer(*arguments, theirs)
        assert torch.equal(ours, theirs)
    assert counter.operators == [["mlacast.mla_attention"]]


def test_one_compilation_for_many_numbers_of_tokens() -> None:
    counter = Counter()
    layer = draw(STEPS[0]).layer
    compiled = torch.compile(forward_of(layer), fullgraph=True, dynamic=True, backend=counter)
    for step in (
        STEPS[0],
        Step("more", (1, 6, 9), (2, 0, 5), padding=1),
        Step("few", (1, 2), (1, 0)),
    ):
        inputs = draw(step)
        ours, theirs = plain_output(inputs), plain_output(inputs)
        compiled(*inputs.tensors, ours)
        layer(*inputs.tensors, theirs)
        assert torch.equal(ours, theirs)
    assert len(counter.operators) == 1


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_what_is_written_is_seen_before_and_behind(backend: str) -> None:
    inputs = draw(Step("decodes", (1, 1, 1), (5, 2, 7)))
    metadata = inputs.metadata
    last = torch.tensor([5, 2, 7])
    pages = metadata.block_table.long()[torch.arange(3), last // PAGE]
    slots = pages * PAGE + last % PAGE
    latent = torch.cat((inputs.kv_c, inputs.k_pe[:, 0]), dim=1)

    def step(cache: Tensor, output: Tensor) -> Tensor:
        mlacast.kv_cache_append(latent, slots, cache, mlacast.KvFormat.BF16)
        output.fill_(3.0)
        before = output + 0
        inputs.layer(inputs.q, inputs.kv_c, inputs.k_pe, cache, metadata, output)
        return torch.stack((before, output + 1))

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        cache = inputs.kv_cache.clone()
        cache.view(-1, 576)[slots] = 0.0
        output = torch.empty(3, FEATURES, dtype=torch.bfloat16)
        results.append((run(cache, output), output, cache))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(bytes_of(eager), bytes_of(compiled))
    stacked, output, _ = results[1]
    assert bool((stacked[0] == 3.0).all())
    assert torch.equal(stacked[1], output + 1)
    # The appended tokens counted.
    untouched = torch.empty_like(output)
    inputs.layer(*inputs.tensors, untouched)
    assert torch.equal(output, untouched)


@pytest.mark.parametrize("backend", [inductor])
def test_no_output_is_copied(backend: str) -> None:
    """The operator gets rows of the caller's buffer: the code around it allocates nothing."""
    inputs = draw(STEPS[0])
    case = FormatCase("Fp8Group", 128, "float32", "mn_major")
    ours, theirs = (poisoned_buffer(case, 14, 1, FEATURES) for _ in range(2))

    def step(buffer: mlacast.QuantizedTensor) -> None:
        inputs.layer(*inputs.tensors, buffer[2:13])

    _, code = run_and_get_code(torch.compile(step, fullgraph=True, backend=backend), ours)
    step(theirs)
    for one, other in zip(buffer_bytes(ours), buffer_bytes(theirs), strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other)
    call = code[0][code[0].index("def call") :]
    assert call.count("mlacast.mla_attention.default(") == 1
    assert "empty_strided_cpu(" not in call


def test_errors_keep_their_sentence_and_come_before_anything_is_written() -> None:
    inputs = draw(STEPS[0])
    compiled = torch.compile(forward_of(inputs.layer), fullgraph=True, backend="aot_eager")
    output = torch.full((8, FEATURES), 7.0, dtype=torch.bfloat16)
    cut = [tensor[:8] for tensor in inputs.tensors[:3]]
    with pytest.raises(ValueError, match="q must have the 9 tokens of metadata, or more, got 8"):
        compiled(*cut, inputs.kv_cache, inputs.metadata, output)
    assert bool((output == 7.0).all())
