"""``torch.ops.mlacast.mla_attention`` called as it is: whoever watches a layer sees this call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mlacast
from mlacast.distributed.groups import group_named, name_of_group
from mlacast.layers import MLAAttention, MLAMetadata
from tests.format_cases import QUANTISED, FormatCase, buffer_bytes, case_id, poisoned_buffer
from tests.layers.steps import HEADS, PAGE, Inputs, Step, draw
from tests.oracles import same_bits

FEATURES = 4 * 128
MIXED = Step("mixed", (1, 1, 4, 3), (7, 3, 0, 0), padding=2)
CHUNKS = Step("chunks", (1, 3, 5), (8, 19, 6), padding=2, workspace=3)
FP8 = Step("fp8_cache", (1, 3, 4), (8, 9, 0), kv_format="FP8", workspace=4)
V32 = Step("v32_cache", (1, 3, 4), (8, 9, 0), kv_format="V32", workspace=4)
NOTHING = Step("nothing", (), (), padding=3)
EMPTY = Step("no_rows", (), ())
NAMES = [argument.name for argument in torch.ops.mlacast.mla_attention.default._schema.arguments]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the operators of this package that run inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "mlacast":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def seen(layer: MLAAttention, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Make a step that somebody watches; return the arguments of its one operator."""
    with Recorder() as recorder:
        layer(*arguments, **options)
    ((operator, given),) = recorder.calls
    assert operator is torch.ops.mlacast.mla_attention.default
    return dict(zip(NAMES, given, strict=True))


def plain_output(inputs: Inputs) -> Tensor:
    """A bfloat16 output that holds NaN."""
    shape = (inputs.q.shape[0], inputs.layer.num_heads * 128)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("place", ["whole", "front", "middle"])
@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_buffers_come_through_it(case: FormatCase, place: str) -> None:
    """Same bytes as without it, padding of scales and rows around the range included."""
    inputs = draw(CHUNKS, 4)
    tokens = inputs.q.shape[0]
    before, behind = {"whole": (0, 0), "front": (0, 3), "middle": (2, 1)}[place]
    total = before + tokens + behind
    watched, unwatched = (poisoned_buffer(case, total, 1, FEATURES) for _ in range(2))
    range_of = slice(before, before + tokens)
    seen(inputs.layer, *inputs.tensors, watched[range_of])
    inputs.layer(*inputs.tensors, unwatched[range_of])
    for one, other in zip(buffer_bytes(watched), buffer_bytes(unwatched), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert bool((buffer_bytes(watched)[0] != 0x5A).any())


@pytest.mark.parametrize("step", [MIXED, FP8, V32, NOTHING, EMPTY], ids=lambda step: step.id)
def test_steps_come_through_it(step: Step) -> None:
    inputs = draw(step)
    ours, theirs = plain_output(inputs), plain_output(inputs)
    given = seen(inputs.layer, *inputs.tensors, ours, return_lse=True)
    _, lse = inputs.layer(*inputs.tensors, theirs, return_lse=True)
    assert same_bits(ours, theirs)
    assert same_bits(given["lse"], lse)
    assert not ours.isnan().any()


@pytest.mark.parametrize("kind", ["rows", "heads"])
def test_outputs_with_gaps_come_through_it(kind: str) -> None:
    inputs = draw(MIXED)
    plain = plain_output(inputs)
    inputs.layer(*inputs.tensors, plain)
    memory = torch.full((11, 6 * 128), 7.0, dtype=torch.bfloat16)
    output = memory[:, 128:384] if kind == "rows" else memory.view(11, 2, 384)[:, :, 128:256]
    seen(inputs.layer, *inputs.tensors, output)
    assert torch.equal(output.flatten(1), plain)
    output.fill_(7.0)
    assert bool((memory == 7.0).all())


def test_settings_come_through_it() -> None:
    """Each has an effect of its own on the numbers."""
    inputs = draw(FP8)
    layer = inputs.layer
    found = []
    for changes in (
        {},
        {"q_scale": 0.25},
        {"q_scale": torch.tensor([0.125])},
        {"k_scale": 0.1},
        {"k_scale": torch.tensor(0.2)},
        {"scale": 0.2},
        {"context_workspace_tokens": 1},
    ):
        changed = copy.copy(layer)
        for name, value in changes.items():
            setattr(changed, name, value)
        ours, theirs = plain_output(inputs), plain_output(inputs)
        seen(changed, *inputs.tensors, ours)
        changed(*inputs.tensors, theirs)
        assert same_bits(ours, theirs)
        found.append(ours)
    for at, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:at])


@pytest.mark.parametrize("rows", [2, 9, 11])
def test_selections_come_through_it(rows: int) -> None:
    inputs = draw(MIXED)
    indices = torch.randint(0, inputs.kv_cache.shape[0] * PAGE, (rows, 6), dtype=torch.int32)
    cache = torch.nan_to_num(inputs.kv_cache)
    lengths = torch.randint(1, 7, (rows,), dtype=torch.int32)
    found = []
    for topk_length in (None, lengths):
        ours, theirs = plain_output(inputs), plain_output(inputs)
        arguments = (*inputs.tensors[:3], cache, inputs.metadata)
        options = {"indices": indices, "topk_length": topk_length}
        given = seen(inputs.layer, *arguments, ours, **options)
        assert given["indices"] is indices
        inputs.layer(*arguments, theirs, **options)
        assert same_bits(ours, theirs)
        found.append(ours)
    assert not torch.equal(*found)


def refuse(*_: Any) -> None:
    raise AssertionError("called")


def test_eager_mode_goes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(MIXED)
    monkeypatch.setattr("mlacast.layers.step_operator.to_arguments", refuse)
    inputs.layer(*inputs.tensors, mlacast.QuantizedTensor.empty(11, 1, 256, mlacast.Bf16()))


@pytest.mark.parametrize("step", [MIXED, CHUNKS], ids=lambda step: step.id)
def test_opcheck(step: Step) -> None:
    inputs = draw(step)
    # opcheck compares inputs with allclose, to which NaN is never close.
    tensors = [torch.nan_to_num(tensor) for tensor in inputs.tensors[:4]]
    output = torch.zeros(inputs.q.shape[0], HEADS * 128, dtype=torch.bfloat16)
    given = seen(inputs.layer, *tensors, inputs.metadata, output, return_lse=True)
    torch.library.opcheck(torch.ops.mlacast.mla_attention.default, tuple(given.values()))


def test_the_schema_names_what_is_written() -> None:
    arguments = torch.ops.mlacast.mla_attention.default._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["out_data", "out_sf", "lse"]


def test_nothing_else_is_written() -> None:
    inputs = draw(CHUNKS)
    indices = torch.zeros(1, 3, dtype=torch.int32)
    before = [tensor.clone() for tensor in (*inputs.tensors[:4], inputs.layer.kv_b_proj)]
    seen(inputs.layer, *inputs.tensors, plain_output(inputs), indices=indices)
    for old, new in zip(before, (*inputs.tensors[:4], inputs.layer.kv_b_proj), strict=True):
        assert same_bits(old, new)
    assert not indices.any()


@pytest.mark.parametrize("is_active", [True, False])
def test_fake_tensors(is_active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not run the step, with their mode active or not."""
    monkeypatch.setattr("mlacast.layers.layer_step.LayerStep.write", refuse)
    inputs = draw(MIXED)
    layer = copy.deepcopy(inputs.layer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor) for tensor in inputs.tensors[:4]]
    layer.kv_b_proj = mode.from_tensor(inputs.layer.kv_b_proj)
    output = mode.from_tensor(plain_output(inputs))
    if is_active:
        with mode:
            returned, lse = layer(*fakes, inputs.metadata, output, return_lse=True)
    else:
        returned = layer(*fakes, inputs.metadata, output)
    assert returned is output
    assert not is_active or (lse.shape, lse.dtype) == ((11, HEADS), torch.float32)


def test_metadata_that_is_gone_is_named() -> None:
    inputs = draw(MIXED)
    output = torch.zeros(11, HEADS * 128, dtype=torch.bfloat16)
    given = seen(inputs.layer, *inputs.tensors, output.clone())
    # Nothing else has a reference to it.
    given["metadata"] = MLAMetadata.build(
        [1], [0], torch.zeros(1, 1, dtype=torch.int32), PAGE
    ).number
    given["out_data"] = output.view(11, HEADS, 128)
    with pytest.raises(ValueError, match="metadata must be kept until the step is done"):
        torch.ops.mlacast.mla_attention(**given)
    assert not output.any()


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, replace, lambda metadata: pickle.loads(pickle.dumps(metadata))],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_copies_of_metadata_are_metadata_of_their_own(duplicate: Callable[[Any], Any]) -> None:
    inputs = draw(MIXED)
    ours, theirs = plain_output(inputs), plain_output(inputs)
    inputs.layer(*inputs.tensors, theirs)
    copied = duplicate(inputs.metadata)
    assert copied.number is not None and inputs.metadata.number is not None
    assert int(copied.number) != int(inputs.metadata.number)
    tensors = inputs.tensors[:4]
    object.__setattr__(inputs, "metadata", None)
    seen(inputs.layer, *tensors, copied, ours)
    assert torch.equal(ours, theirs)


def test_metadata_with_other_pages_has_a_plan_of_its_own() -> None:
    inputs = draw(CHUNKS)
    inputs.layer(*inputs.tensors, plain_output(inputs))
    other = replace(inputs.metadata, block_table=inputs.metadata.block_table.flip(1))
    first, second = (metadata.prefill_runs(3) for metadata in (inputs.metadata, other))
    assert first is not second


def test_groups_have_names_of_their_own() -> None:
    first, second, again = object(), object(), object()
    names = [name_of_group(group) for group in (first, second, again, first)]  # type: ignore[arg-type]
    assert len(set(names[:3])) == 3
    assert names[3] == names[0]
    assert [group_named(name) for name in names] == [first, second, again, first]
    assert name_of_group(None) == ""
    assert group_named("") is None
