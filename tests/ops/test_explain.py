"""explain: which backend a call gets and why, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast

Q = torch.zeros(2, 2, 512, dtype=torch.bfloat16)
KV = torch.zeros(4, 512, dtype=torch.bfloat16)
INDICES = torch.zeros(2, 3, dtype=torch.int32)


def test_names_the_backend_of_a_cpu_call_and_runs_nothing(poison: Callable[..., Tensor]) -> None:
    out = poison(2, 2, 512)
    text = str(mlacast.explain("sparse_mla_prefill", Q, KV, INDICES, sm_scale=1.0, out=out))
    assert "reference" in text
    assert "cpu" in text.lower()
    assert bool((out.view(torch.uint8) == 0x5A).all())


def test_a_backend_that_does_not_apply_is_explained_as_such() -> None:
    """Either the explanation or an error: what matters is that it names the backend and does not
    promise it.
    """
    try:
        text = str(
            mlacast.explain("sparse_mla_prefill", Q, KV, INDICES, sm_scale=1.0, backend="hopper")
        )
    except mlacast.UnsupportedError as error:
        text = str(error)
    assert "hopper" in text
    assert "hopper: covers the call" not in text


def test_a_named_backend_is_explained_as_such() -> None:
    text = str(
        mlacast.explain("sparse_mla_prefill", Q, KV, INDICES, sm_scale=1.0, backend="reference")
    )
    assert "reference" in text


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("fused_norm_rope_attn_rope_cast.prefill", "sparse_mla_prefill"),
        ("fused_norm_rope_attn_rope_cast.decode", "sparse_mla_decode"),
        ("flash_mla_sparse_fwd", "sparse_mla_prefill"),
        ("flash_mla_with_kvcache", "sparse_mla_decode"),
    ],
)
def test_functions_of_flash_mla_are_explained_as_their_operations(name: str, op: str) -> None:
    found = mlacast.explain(name)
    assert found.op == op
    assert found.verdicts == mlacast.explain(op).verdicts
    assert found.not_built


def test_arguments_that_do_not_fit_name_the_operation() -> None:
    with pytest.raises(TypeError, match="explain: arguments must be those of sparse_mla_prefill"):
        mlacast.explain("sparse_mla_prefill", sm_scale=1.0)


def test_a_refusal_says_each_reason_once() -> None:
    with pytest.raises(mlacast.UnsupportedError, match="hopper") as error:
        mlacast.sparse_mla_prefill(Q, KV, INDICES, sm_scale=1.0, backend="hopper")
    assert str(error.value).count("hopper: needs sm90") == 1
    assert str(mlacast.explain("sparse_mla_prefill")).count("hopper: needs sm90") == 1


@pytest.mark.parametrize(
    "op",
    [
        "sparse_mla_decode",
        "dense_mla_decode",
        "dense_mla_prefill",
        "merge_attention_states",
        "v_up_project",
        "quantize_output",
        "rope_quantize_fp8",
        "kv_cache_append",
        "kv_cache_gather",
        "grouped_out_project",
        "quantized_linear",
    ],
)
def test_every_core_op_can_be_explained(op: str) -> None:
    cache = mlacast.KvFormat.V4.allocate(1, 4)
    slots = torch.zeros(2, dtype=torch.int64)
    buffer = mlacast.QuantizedTensor.empty(2, 1, 512, mlacast.Mxfp8())
    v4 = mlacast.KvFormat.V4
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "sparse_mla_decode": ((Q, cache, INDICES), {"kv_format": v4, "sm_scale": 1.0}),
        "dense_mla_decode": (
            (Q.unsqueeze(1), cache, INDICES, torch.ones(2, dtype=torch.int32)),
            {"kv_format": v4, "sm_scale": 1.0},
        ),
        "dense_mla_prefill": (
            (Q[..., :192], Q[..., :192], Q[..., :128]),
            {
                "cu_seqlens_q": slots.int(),
                "cu_seqlens_k": slots.int(),
                "max_seqlen_q": 2,
                "max_seqlen_k": 2,
            },
        ),
        "merge_attention_states": (([Q], [torch.zeros(2, 2)]), {}),
        "v_up_project": ((Q, torch.zeros(2, 512, 128, dtype=torch.bfloat16)), {}),
        "quantize_output": ((torch.zeros(2, 512), mlacast.Mxfp8()), {}),
        "rope_quantize_fp8": ((Q, KV[:2], Q, KV[:2], torch.zeros(3, 512), slots), {}),
        "kv_cache_append": ((torch.zeros(2, 512, dtype=torch.bfloat16), slots, cache, v4), {}),
        "kv_cache_gather": ((cache, slots, v4), {}),
        "grouped_out_project": ((buffer, torch.zeros(1, 8, 512)), {}),
        "quantized_linear": ((buffer, torch.zeros(8, 512)), {}),
    }
    args, kwargs = arguments[op]
    assert "reference" in str(mlacast.explain(op, *args, **kwargs))


def test_an_unknown_op_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="explain: op must .*sparse_mla_prefill.*got 'sparse_mla'"):
        mlacast.explain("sparse_mla")
