"""The layer under torch.compile: one operator for a step, the bits of eager mode, compiled once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mlacast
from mlacast.layers import MLAAttention, MLAMetadata
from tests.format_cases import bytes_of
from tests.layers.steps import HEADS, PAGE, Inputs, Step, assert_close, draw

FEATURES = HEADS * 128
# All of 9 tokens and 2 rows of padding or none, and so of the same shapes.
STEPS = (
    Step("mixed", (1, 1, 4, 3), (7, 3, 0, 0), padding=2),
    Step("chunks", (1, 3, 5), (8, 19, 6), padding=2, workspace=3),
    Step("decodes", (1,) * 9, (5, 0, 7, 1, 2, 3, 9, 4, 6), padding=2),
    Step("uneven_decodes", (3, 1, 2, 3), (5, 4, 0, 1), threshold=3, padding=2),
    Step("prefill", (11,), (0,)),
    Step("nothing", (), (), padding=11),
)
FORMATS = (
    mlacast.Bf16(),
    mlacast.Fp8Tensor(0.02),
    mlacast.Fp8Group(128, "float32", "mn_major"),
    mlacast.Nvfp4(448.0),
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """Backend that counts graphs, and the operators of this package in each."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets = (str(node.target) for node in module.graph.nodes)
        self.operators.append([target for target in targets if target.startswith("mlacast")])
        return module


def forward_of(layer: MLAAttention) -> Callable[..., Any]:
    def forward(*arguments: Any) -> Any:
        return layer(*arguments, return_lse=True)

    return forward


def buffer_of(fmt: mlacast.OutFormat, tokens: int) -> mlacast.QuantizedTensor:
    """Rows 2 to 2 + tokens of a longer buffer, which hold NaN."""
    buffer = mlacast.QuantizedTensor.empty(tokens + 3, 1, FEATURES, fmt)
    for tensor in (buffer.data, buffer.sf):
        if tensor is not None:
            bytes_of(tensor).fill_(0xFF)
    return buffer


def assert_same(left: mlacast.QuantizedTensor, right: mlacast.QuantizedTensor) -> None:
    assert torch.equal(bytes_of(left.data), bytes_of(right.data))
    if left.sf is not None:
        assert right.sf is not None
        assert torch.equal(bytes_of(left.sf), bytes_of(right.sf))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.key)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.id)
def test_bits_of_eager_mode(step: Step, fmt: mlacast.OutFormat) -> None:
    inputs = draw(step)
    tokens = inputs.q.shape[0]
    forward = forward_of(inputs.layer)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    whole, other = buffer_of(fmt, tokens), buffer_of(fmt, tokens)
    part = whole[2 : 2 + tokens]
    returned, lse = compiled(*inputs.tensors, part)
    _, wanted_lse = forward(*inputs.tensors, other[2 : 2 + tokens])
    assert_same(whole, other)
    assert torch.equal(lse, wanted_lse)
    assert returned.data.data_ptr() == part.data.data_ptr()


def test_values_of_a_plain_output() -> None:
    inputs = draw(STEPS[0])
    output = torch.full((11, FEATURES), float("nan"), dtype=torch.bfloat16)
    compiled = torch.compile(forward_of(inputs.layer), fullgraph=True, backend="aot_eager")
    _, lse = compiled(*inputs.tensors, output)
    assert_close(output, lse, inputs)
    assert not output[9:].any()


def test_one_operator_and_one_compilation_for_all_batches_of_a_size() -> None:
    counter = Counter()
    layer = draw(STEPS[1]).layer
    compiled = torch.compile(forward_of(layer), fullgraph=True, backend=counter)
    # Pools of one size, as an engine has.
    drawn = [(step, draw(step)) for step in STEPS]
    pages = max(inputs.kv_cache.shape[0] for _, inputs in drawn)
    for _, inputs in drawn:
        shape = (pages, *inputs.kv_cache.shape[1:])
        cache = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        cache[: inputs.kv_cache.shape[0]] = inputs.kv_cache
        arguments = (inputs.q, inputs.kv_c, inputs.k_pe, cache, inputs.metadata)
        ours, theirs = (torch.empty(11, FEATURES, dtype=torch.bfloat16) for _ in range(2))
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
        ours, theirs = (
            torch.empty(inputs.q.shape[0], FEATURES, dtype=torch.bfloat16) for _ in range(2)
        )
        compiled(*inputs.tensors, ours)
        layer(*inputs.tensors, theirs)
        assert torch.equal(ours, theirs)
    assert len(counter.operators) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of the operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.mlacast.mla_attention.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def recorded_call(inputs: Inputs, output: Any) -> tuple[Any, ...]:
    with Recorder() as recorder:
        inputs.layer(*inputs.tensors, output, return_lse=True)
    assert len(recorder.calls) == 1
    call: tuple[Any, ...] = recorder.calls[0]
    return call


@pytest.mark.parametrize("step", STEPS[:2], ids=lambda step: step.id)
def test_opcheck(step: Step) -> None:
    inputs = draw(step)
    # opcheck compares inputs with allclose, to which NaN is never close.
    tensors = [torch.nan_to_num(tensor) for tensor in inputs.tensors[:4]]
    output = torch.zeros(inputs.q.shape[0], FEATURES, dtype=torch.bfloat16)
    with Recorder() as recorder:
        inputs.layer(*tensors, inputs.metadata, output, return_lse=True)
    torch.library.opcheck(torch.ops.mlacast.mla_attention.default, recorder.calls[0])


def test_the_schema_names_what_is_written() -> None:
    arguments = torch.ops.mlacast.mla_attention.default._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out_data", "out_sf", "lse"]


def test_fake_tensors() -> None:
    inputs = draw(STEPS[0])
    output = torch.empty(11, FEATURES, dtype=torch.bfloat16)
    layer = copy.deepcopy(inputs.layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs.tensors[:4]]
        layer.kv_b_proj = mode.from_tensor(inputs.layer.kv_b_proj)
        returned, lse = layer(*fakes, inputs.metadata, mode.from_tensor(output), return_lse=True)
    assert returned.shape == output.shape
    assert (lse.shape, lse.dtype) == ((11, HEADS), torch.float32)


def test_metadata_that_is_gone_is_named() -> None:
    inputs = draw(STEPS[0])
    output = torch.zeros(11, FEATURES, dtype=torch.bfloat16)
    call = list(recorded_call(inputs, output.clone()))
    names = [a.name for a in torch.ops.mlacast.mla_attention.default._schema.arguments]
    call[names.index("metadata")] = MLAMetadata.build(
        [1], [0], torch.zeros(1, 1, dtype=torch.int32), PAGE
    ).number
    call[names.index("out_data")] = output.view(11, HEADS, 128)
    with pytest.raises(ValueError, match="metadata must be kept until the step is done"):
        torch.ops.mlacast.mla_attention(*call)
    assert not output.any()


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda metadata: pickle.loads(pickle.dumps(metadata))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_metadata_are_metadata_of_their_own(duplicate: Callable[[Any], Any]) -> None:
    inputs = draw(STEPS[0])
    ours, theirs = (torch.empty(11, FEATURES, dtype=torch.bfloat16) for _ in range(2))
    inputs.layer(*inputs.tensors, theirs)
    copied = duplicate(inputs.metadata)
    assert int(copied.number) != int(inputs.metadata.number)
    tensors = inputs.tensors[:4]
    object.__setattr__(inputs, "metadata", None)
    inputs.layer(*tensors, copied, ours)
    assert torch.equal(ours, theirs)


def test_errors_keep_their_sentence_and_come_before_anything_is_written() -> None:
    inputs = draw(STEPS[0])
    compiled = torch.compile(forward_of(inputs.layer), fullgraph=True, backend="aot_eager")
    output = torch.full((8, FEATURES), 7.0, dtype=torch.bfloat16)
    cut = [tensor[:8] for tensor in inputs.tensors[:3]]
    with pytest.raises(ValueError, match="q must have the 9 tokens of metadata, or more, got 8"):
        compiled(*cut, inputs.kv_cache, inputs.metadata, output)
    assert bool((output == 7.0).all())
