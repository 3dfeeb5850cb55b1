"""Tensors spread over devices: an error that names the argument, never a call on the wrong memory.

BC-45, deepseek-ai/FlashMLA#158 (also Dao-AILab/flash-attention#2356), CPU part: meta tensors stand
for another device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import MXFP8_HEAD, poisoned_buffer
from tests.ops.rejections import (
    Arguments,
    good_decode,
    good_dense,
    good_dense_prefill,
    good_prefill,
    good_v_up,
)

CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sparse_mla_prefill": (good_prefill, ("kv", "indices", "topk_length", "attn_sink", "out")),
    "sparse_mla_decode": (
        good_decode,
        (
            "k_cache",
            "indices",
            "topk_length",
            "extra_k_cache",
            "extra_indices",
            "extra_topk_length",
            "attn_sink",
            "out",
        ),
    ),
    "dense_mla_decode": (good_dense, ("k_cache", "page_table", "seq_lens", "attn_sink", "out")),
    "dense_mla_prefill": (
        good_dense_prefill,
        ("k", "v", "cu_seqlens_q", "cu_seqlens_k", "out"),
    ),
    "v_up_project": (good_v_up, ("w_uv", "out")),
}
PAIRS = [(op, argument) for op, (_, arguments) in CALLS.items() for argument in arguments]


def _spoiled(op: str, argument: str) -> Arguments:
    arguments: Arguments = CALLS[op][0]()
    return arguments | {argument: arguments[argument].to("meta")}


@pytest.mark.parametrize(("op", "argument"), PAIRS, ids=lambda value: value)
def test_one_tensor_elsewhere_is_named(op: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{op}: {argument} must be on cpu.*got meta"):
        getattr(mlacast, op)(**_spoiled(op, argument))


@pytest.mark.parametrize("op", CALLS)
def test_only_the_query_elsewhere(op: str) -> None:
    """Then either side may be named, but the sentence has both devices."""
    arguments: Arguments = CALLS[op][0]()
    query = "latent_out" if op == "v_up_project" else "q"
    with pytest.raises(ValueError, match=rf"{op}: \w+.* must be on .*(meta.*cpu|cpu.*meta)"):
        getattr(mlacast, op)(**(arguments | {query: arguments[query].to("meta")}))


def test_a_buffer_elsewhere_is_named() -> None:
    buffer = mlacast.QuantizedTensor.empty(3, 1, 1024, mlacast.Mxfp8(), device="meta")
    with pytest.raises(ValueError, match=r"sparse_mla_prefill: out.* must be on cpu.*got meta"):
        mlacast.sparse_mla_prefill(**(good_prefill() | {"out": buffer}))


def test_halves_of_a_buffer_on_two_devices_are_refused() -> None:
    whole = poisoned_buffer(MXFP8_HEAD, 3, 1, 512)
    assert whole.sf is not None
    elsewhere = whole.sf.to("meta")
    with pytest.raises(ValueError, match="QuantizedTensor: sf must be on cpu.*got meta"):
        mlacast.QuantizedTensor(whole.data, elsewhere, mlacast.Mxfp8())


def test_a_scale_tensor_elsewhere_is_refused() -> None:
    scale = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="scale"):
        mlacast.sparse_mla_prefill(
            **(good_prefill() | {"out": None, "out_format": mlacast.Fp8Tensor(scale)})
        )


@pytest.mark.parametrize("part", ["outs", "lses"])
def test_merge_parts_elsewhere_are_named(part: str) -> None:
    arguments: dict[str, list[Tensor]] = {
        "outs": [torch.zeros(2, 1, 512), torch.zeros(2, 1, 512)],
        "lses": [torch.zeros(1, 2), torch.zeros(1, 2)],
    }
    arguments[part][1] = arguments[part][1].to("meta")
    with pytest.raises(
        ValueError, match=rf"merge_attention_states: {part}.* must be on cpu.*got meta"
    ):
        mlacast.merge_attention_states(**arguments)  # type: ignore[arg-type]
