"""torch.compile with fullgraph and a dynamic number of tokens: same bits as eager, inputs
untouched, out= honoured.

BC-35, BC-39: a dynamic count that is 0 too, work around the call, outputs that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import MXFP8_CHUNK32, NVFP4, FormatCase, bytes_of, case_id
from tests.ops.torch_calls import DECODE_CASES, OTHER_CASES, PREFILL_CASES, OpCase, op_case_id
from tests.oracles import plain

COMPILED = (
    PREFILL_CASES[0],
    PREFILL_CASES[1],
    *DECODE_CASES,
    *(case for case in OTHER_CASES if case.name.startswith("dense") or case.name == "v_up_project"),
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, mlacast.QuantizedTensor):
        return [result.data] + ([] if result.sf is None else [result.sf])
    return [tensor for item in result for tensor in _tensors_of(item)]


def _assert_same(left: Any, right: Any) -> None:
    for one, other in zip(_tensors_of(left), _tensors_of(right), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(bytes_of(one), bytes_of(other))


def _mark_tokens_dynamic(case: OpCase, tensors: tuple[Tensor, ...]) -> None:
    """Mark every dimension that follows the number of tokens."""
    for tensor, longer in zip(tensors, case.make(tensors[0].shape[0] + 1), strict=True):
        for dim, (size, other) in enumerate(zip(tensor.shape, longer.shape, strict=True)):
            if size != other:
                torch._dynamo.mark_dynamic(tensor, dim)


@pytest.mark.parametrize("case", COMPILED, ids=op_case_id)
def test_compiled_once_for_4_0_4_and_7_tokens(case: OpCase) -> None:
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    def flat(*tensors: Tensor) -> list[Tensor]:
        return _tensors_of(case.call(*tensors))

    compiled = torch.compile(flat, fullgraph=True, dynamic=True, backend=count)
    for tokens in (4, 0, 4, 7):
        tensors = case.make(tokens)
        _assert_same(compiled(*tensors), flat(*tensors))
    # One graph for any count; 0 and 1 are sizes that torch may specialise on.
    assert graphs <= 2


@pytest.mark.parametrize(
    "case", [PREFILL_CASES[0], PREFILL_CASES[2], DECODE_CASES[1]], ids=op_case_id
)
def test_functionalised_graphs_give_the_eager_bits(case: OpCase) -> None:
    def flat(*tensors: Tensor) -> list[Tensor]:
        return [tensor.clone() for tensor in _tensors_of(case.call(*tensors))]

    compiled = torch.compile(flat, fullgraph=True, backend="aot_eager")
    for tokens in (4, 0, 4):
        tensors = case.make(tokens)
        if tokens > 1:
            _mark_tokens_dynamic(case, tensors)
        for one, other in zip(compiled(*tensors), flat(*tensors), strict=True):
            assert torch.equal(bytes_of(one), bytes_of(other))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_attention_between_other_operations_leaves_its_inputs_alone(backend: str) -> None:
    q, kv = torch.randn(4, 2, 512).bfloat16(), torch.randn(6, 512).bfloat16()
    indices = torch.randint(0, 6, (4, 5), dtype=torch.int32)

    def around(q: Tensor) -> Tensor:
        return plain(mlacast.sparse_mla_prefill(q * 2, kv, indices, sm_scale=0.02)[0]) + 1

    before, kv_before = q.clone(), kv.clone()
    compiled = torch.compile(around, fullgraph=True, backend=backend)
    assert torch.equal(compiled(q), around(q))
    assert torch.equal(q, before) and torch.equal(kv, kv_before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_tensor_given_as_out_is_written_before_it_is_used(backend: str) -> None:
    q, kv = torch.randn(4, 2, 512).bfloat16(), torch.randn(6, 512).bfloat16()
    indices = torch.randint(0, 6, (4, 5), dtype=torch.int32)

    def into(out: Tensor, q: Tensor) -> Tensor:
        mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02, out=out)
        return out.float().sum()

    eager_out, compiled_out = torch.zeros(4, 2, 512).bfloat16(), torch.zeros(4, 2, 512).bfloat16()
    expected = into(eager_out, q)
    assert torch.equal(
        torch.compile(into, fullgraph=True, backend=backend)(compiled_out, q), expected
    )
    assert torch.equal(compiled_out, eager_out)
    assert bool(compiled_out.any())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", [MXFP8_CHUNK32, NVFP4], ids=case_id)
def test_ranges_of_a_shared_buffer_under_compile(case: FormatCase, backend: str) -> None:
    q, kv = torch.randn(7, 2, 512).bfloat16(), torch.randn(6, 512).bfloat16()
    indices = torch.randint(0, 6, (7, 5), dtype=torch.int32)

    def into(buffer: mlacast.QuantizedTensor, q: Tensor) -> None:
        for first, last in ((0, 3), (3, 7)):
            mlacast.sparse_mla_prefill(
                q[first:last], kv, indices[first:last], sm_scale=0.02, out=buffer[first:last]
            )

    eager = mlacast.QuantizedTensor.empty(7, 1, 1024, case.build())
    compiled = mlacast.QuantizedTensor.empty(7, 1, 1024, case.build())
    into(eager, q)
    torch.compile(into, fullgraph=True, backend=backend)(compiled, q)
    assert torch.equal(bytes_of(compiled.data), bytes_of(eager.data))
    assert compiled.sf is not None and eager.sf is not None
    assert torch.equal(bytes_of(compiled.sf), bytes_of(eager.sf))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_append_then_gather_inside_one_graph(backend: str) -> None:
    latent, slots = torch.randn(3, 512).bfloat16(), torch.tensor([2, 0, 4])

    def step(cache: Tensor, latent: Tensor) -> Tensor:
        mlacast.kv_cache_append(latent, slots, cache, mlacast.KvFormat.V4)
        return mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.V4)

    eager, compiled = mlacast.KvFormat.V4.allocate(2, 3), mlacast.KvFormat.V4.allocate(2, 3)
    expected = step(eager, latent)
    assert torch.equal(
        torch.compile(step, fullgraph=True, backend=backend)(compiled, latent), expected
    )
    assert torch.equal(compiled, eager)


def test_errors_keep_their_sentence_under_compile() -> None:
    kv, indices = torch.randn(6, 512).bfloat16(), torch.zeros(4, 5, dtype=torch.int32)

    def wrong(q: Tensor) -> Tensor:
        return plain(mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02)[0])

    compiled = torch.compile(wrong, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="indices must have shape"):
        compiled(torch.randn(3, 2, 512).bfloat16())
