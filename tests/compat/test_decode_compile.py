"""The decode shims trace whole, with dynamic shapes, and give the bits of the eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flashinfer, mate
from tests.compat.flashinfer.dsv4_calls import joint_call
from tests.compat.flashinfer.mla_calls import dense_call, sparse_call
from tests.compat.mate.calls import draw_call
from tests.format_cases import bytes_of

MLA = flashinfer.trtllm_batch_decode_with_kv_cache_mla
DSV4 = flashinfer.trtllm_batch_decode_sparse_mla_dsv4


def _mate() -> dict[str, Any]:
    return {**draw_call((40, 3), q_len=2).arguments, "lse": torch.zeros(4, 3), "return_lse": True}


def _ragged() -> dict[str, Any]:
    call = dense_call(q_lens=(1, 2), seq_lens=(9, 5), ragged=True)
    return {**call.arguments, "max_q_len": 2}


def _fp8_out() -> dict[str, Any]:
    scales = torch.zeros(1, 8, 4, dtype=torch.int32)
    return {**joint_call().arguments, "out_scales": scales, "cos_sin_cache": torch.ones(9, 64)}


def _plan(query: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    metadata = mate.get_batch_decode_metadata_mla(query, seq_lens, 64)
    return metadata.scheduler_metadata, metadata.num_splits


def _lengths() -> dict[str, Any]:
    call = draw_call((40, 3))
    return {"query": call.query, "seq_lens": call.seq_lens}


CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "mate": (mate.sparse_mla_fp8_decode, _mate),
    "metadata": (_plan, _lengths),
    "sparse": (MLA, lambda: {**sparse_call().arguments, "return_lse": True}),
    "dense": (MLA, lambda: {**dense_call("FP8").arguments, "return_lse": True}),
    "ragged": (MLA, _ragged),
    "dsv4_fp8_out": (DSV4, _fp8_out),
}


@pytest.mark.parametrize("name", CASES)
def test_traces_whole_and_gives_the_same_bits(name: str) -> None:
    function, make = CASES[name]
    arguments = make()
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    rest = {key: value for key, value in arguments.items() if key not in tensors}

    def call(**given: Tensor) -> Any:
        return function(**given, **rest)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    actual, expected = compiled(**tensors), call(**tensors)
    if isinstance(actual, Tensor):
        actual, expected = (actual,), (expected,)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(bytes_of(left), bytes_of(right))
