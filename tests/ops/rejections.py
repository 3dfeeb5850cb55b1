"""A table-driven check of refused calls: error type, sentence, and outputs left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import storage_bytes
from tests.oracles import exact_queries

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rejection:
    """One wrong call.

    Attributes:
        id: Readable name of the mistake.
        change: Arguments that replace the good ones (a value, or a function of the good value).
        argument: The argument the sentence has to name.
        requirement: Regular expression for what it demands.
        given: Regular expression for what it says it got; empty where the sentence has no such
            part.
        error: Exception type.
    """

    id: str
    change: Arguments
    argument: str
    requirement: str
    given: str = ""
    error: type[Exception] = ValueError
    drop: tuple[str, ...] = field(default=())

    def pattern(self, op: str) -> str:
        """The sentence as a regular expression: op, argument, requirement, actual value."""
        name = rf"{re.escape(self.argument)}\b" if self.argument else ""
        sentence = rf"{op}: {name}.*(?:{self.requirement})"
        return sentence + (rf".*got .*(?:{self.given})" if self.given else "")


def rejection_id(rejection: Rejection) -> str:
    """Readable parametrisation id."""
    return rejection.id


def of(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Mark a function of the good value: ``"q": of(lambda q: q.float())``."""
    change.__rejection__ = True  # type: ignore[attr-defined]
    return change


def wrong_arguments(good: Arguments, rejection: Rejection) -> Arguments:
    """The good arguments with the mistake put in."""
    arguments = {name: value for name, value in good.items() if name not in rejection.drop}
    for name, value in rejection.change.items():
        arguments[name] = value(good[name]) if hasattr(value, "__rejection__") else value
    return arguments


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of 0x5A bytes."""
    tensor = torch.empty(shape, dtype=dtype)
    storage_bytes(tensor).fill_(0x5A)
    return tensor


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, mlacast.QuantizedTensor):
        return [value.data] + ([] if value.sf is None else [value.sf])
    return []


def assert_rejected(op: str, arguments: Arguments, rejection: Rejection) -> None:
    """Call the public op; it must raise the sentence and leave every byte of ``out``, ``cache`` and
    ``workspace``.
    """
    watched = [
        tensor
        for name in ("out", "cache", "workspace")
        for tensor in _tensors(arguments.get(name))
        if tensor.device.type == "cpu"
    ]
    before = [storage_bytes(tensor).clone() for tensor in watched]
    with pytest.raises(rejection.error, match=rejection.pattern(op)):
        getattr(mlacast, op)(**arguments)
    for tensor, copy in zip(watched, before, strict=True):
        assert torch.equal(storage_bytes(tensor), copy), "a refused call must write nothing"


def meta(tensor: Tensor) -> Tensor:
    """The same tensor on another device."""
    return tensor.to("meta")


def last_dim_strided(tensor: Tensor) -> Tensor:
    """The same values with stride 2 on the last dimension."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def good_prefill() -> Arguments:
    """A correct call of sparse_mla_prefill with every optional argument."""
    return {
        "q": exact_queries(3, 2, 512),
        "kv": torch.randn(6, 512).bfloat16(),
        "indices": torch.randint(0, 6, (3, 4), dtype=torch.int32),
        "sm_scale": 0.1,
        "topk_length": torch.tensor([4, 2, 0], dtype=torch.int32),
        "attn_sink": torch.zeros(2),
        "q_norm_eps": 1e-6,
        "rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32)),
        "out": poisoned(3, 2, 512),
    }


def good_decode() -> Arguments:
    """A correct call of sparse_mla_decode over two V4 caches."""
    return {
        "q": exact_queries(3, 2, 512),
        "k_cache": mlacast.KvFormat.V4.allocate(2, 4),
        "indices": torch.randint(0, 8, (3, 4), dtype=torch.int32),
        "kv_format": mlacast.KvFormat.V4,
        "sm_scale": 0.1,
        "topk_length": torch.tensor([4, 2, 0], dtype=torch.int32),
        "extra_k_cache": mlacast.KvFormat.V4.allocate(3, 2),
        "extra_indices": torch.randint(0, 6, (3, 5), dtype=torch.int32),
        "extra_topk_length": torch.tensor([5, 0, 1], dtype=torch.int32),
        "extra_kv_format": mlacast.KvFormat.V4,
        "attn_sink": torch.zeros(2),
        "rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32)),
        "out": poisoned(3, 2, 512),
    }


def good_dense() -> Arguments:
    """A correct call of dense_mla_decode."""
    return {
        "q": exact_queries(2, 1, 2, 576),
        "k_cache": torch.randn(3, 4, 1, 576).bfloat16(),
        "page_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
        "kv_format": mlacast.KvFormat.BF16,
        "sm_scale": 0.1,
        "attn_sink": torch.zeros(2),
        "out": poisoned(2, 1, 2, 512),
    }


def good_dense_prefill() -> Arguments:
    """A correct call of dense_mla_prefill: sequences of 3 and 2 tokens over 4 and 2 keys."""
    return {
        "q": torch.randn(5, 4, 192).bfloat16(),
        "k": torch.randn(6, 2, 192).bfloat16(),
        "v": torch.randn(6, 2, 128).bfloat16(),
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 6], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
        "softmax_scale": 0.1,
        "out": poisoned(5, 4, 128),
    }


def good_v_up() -> Arguments:
    """A correct call of v_up_project."""
    return {
        "latent_out": torch.randn(5, 4, 512).bfloat16(),
        "w_uv": torch.randn(4, 512, 128).bfloat16(),
        "out": poisoned(5, 4, 128),
    }
