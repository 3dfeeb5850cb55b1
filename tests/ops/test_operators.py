"""torch.ops.mlacast: every public op dispatches to its operator, whose schema and fake tell the
truth.

BC-39, ROCm/aiter#2780: schemas that declared inputs mutated, fakes with other strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import QUANTISED, FormatCase, bytes_of, case_id
from tests.ops.torch_calls import (
    OP_CASES,
    OpCase,
    describe,
    describe_on_fakes,
    op_case_id,
    operators_of,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUT_NAMES = {
    "q",
    "kv",
    "k_cache",
    "indices",
    "topk_length",
    "attn_sink",
    "extra_k_cache",
    "extra_indices",
    "extra_topk_length",
    "page_table",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "latent_out",
    "w_uv",
    "seq_lens",
    "latent",
    "slots",
    "lengths",
    "sm_scale_tensor",
    "v_scale_tensor",
    "weight",
    "x",
}


@pytest.fixture
def _float8_compared_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck compares arguments with torch.allclose, which has no float8 kernel on CPU: compare
    their bytes.
    """
    allclose = torch.allclose

    def compare(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> bool:
        if left.dtype in FLOAT8:
            return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        return allclose(left, right, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", compare)


@pytest.mark.usefixtures("_float8_compared_as_bytes")
@pytest.mark.parametrize("case", OP_CASES, ids=op_case_id)
def test_opcheck(case: OpCase) -> None:
    tensors = case.make(4)
    calls = [
        call
        for call in operators_of(lambda: case.call(*tensors))
        if call.operator.name().split("::")[1].split(".")[0] == case.name
    ]
    assert len(calls) == 1, f"{case.name} must be one call of torch.ops.mlacast.{case.name}"
    torch.library.opcheck(calls[0].operator, calls[0].args, calls[0].kwargs)


@pytest.mark.parametrize("case", OP_CASES, ids=op_case_id)
def test_only_outputs_are_declared_mutated(case: OpCase) -> None:
    case.call(*case.make(1))
    schema = getattr(torch.ops.mlacast, case.name).default._schema
    mutated = {
        arg.name
        for arg in schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write
    }
    assert mutated or schema.returns, "the results must come out somewhere"
    assert not mutated & INPUT_NAMES
    assert ("cache" in mutated) == case.mutates_input
    for returned in schema.returns:
        assert returned.alias_info is None, "an operator may not return an aliased argument"


@pytest.mark.parametrize("case", OP_CASES, ids=op_case_id)
def test_inputs_keep_their_bytes(case: OpCase) -> None:
    if case.mutates_input:
        pytest.skip("this op writes into its cache by contract")
    tensors = case.make(3)
    before = [bytes_of(tensor).clone() for tensor in tensors]
    case.call(*tensors)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(bytes_of(tensor), copy)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("case", OP_CASES, ids=op_case_id)
def test_fake_results_look_like_real_ones(case: OpCase, tokens: int) -> None:
    tensors = case.make(tokens)
    assert describe_on_fakes(case.call, *tensors) == describe(case.call(*tensors))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_fake_buffers_have_the_real_strides_in_every_layout(
    case: FormatCase, tokens: int, heads: int
) -> None:
    q = torch.randn(heads, tokens, 512).bfloat16().transpose(0, 1)
    kv, indices = torch.randn(4, 512).bfloat16(), torch.zeros(tokens, 2, dtype=torch.int32)

    def call(q: Tensor, kv: Tensor, indices: Tensor) -> Any:
        return mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.1, out_format=case.build())

    assert describe_on_fakes(call, q, kv, indices) == describe(call(q, kv, indices))


@pytest.mark.parametrize(
    "lay_out", [Tensor.contiguous, lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)]
)
def test_opcheck_with_either_query_layout(lay_out: Callable[[Tensor], Tensor]) -> None:
    q = lay_out(torch.randn(3, 2, 512).bfloat16())
    kv, indices = torch.randn(4, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
    call = operators_of(lambda: mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.1))[0]
    torch.library.opcheck(call.operator, call.args, call.kwargs)
