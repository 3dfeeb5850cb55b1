"""Let tests that are written for CPU tensors run on the device.

`run_on_device` wraps the public functions: tensors go to the device with all that lies around them
in their storages, results and everything that was written come back. So a test keeps its canaries,
its strides and its identities, and runs through kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import storage_bytes
from tests.oracles import AttentionOracle

FUNCTIONS = (
    "sparse_mla_prefill",
    "sparse_mla_decode",
    "dense_mla_decode",
    "dense_mla_prefill",
    "merge_attention_states",
    "kv_cache_append",
    "kv_cache_gather",
)


class Transfer:
    """The tensors of one call, on the device and back.

    Views of one storage stay views of one storage, so overlaps and shared buffers survive.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        # Storage on the CPU by its address, with its copy; the first keeps the address taken.
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        self._twins: dict[int, tuple[Any, Any]] = {}

    def to_device(self, value: Any) -> Any:
        """``value`` with every tensor in it on the device."""
        if isinstance(value, Tensor):
            return self._remember(value, self._view(value))
        if isinstance(value, mlacast.QuantizedTensor):
            twin = mlacast.QuantizedTensor(
                self._view(value.data),
                None if value.sf is None else self._view(value.sf),
                value.format,
                value.row_start,
                total_tokens=value.total_tokens,
            )
            return self._remember(value, twin)
        if isinstance(value, mlacast.Rope):
            return dataclasses.replace(
                value,
                cos_sin_cache=self._view(value.cos_sin_cache),
                positions=self._view(value.positions),
            )
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(part) for part in value)
        return value

    def back(self, result: Any) -> Any:
        """Bring the storages of the arguments and ``result`` back."""
        for ours, theirs in self._storages.values():
            ours.copy_(theirs)
        return self._result(result)

    def _result(self, result: Any) -> Any:
        known = self._twins.get(id(result))
        if known is not None:
            return known[0]
        if isinstance(result, Tensor):
            return result.cpu()
        if isinstance(result, mlacast.QuantizedTensor):
            sf = result.sf
            return mlacast.QuantizedTensor(
                result.data.cpu(),
                None if sf is None else _view(storage_bytes(sf).cpu(), sf),
                result.format,
                result.row_start,
                total_tokens=result.total_tokens,
            )
        if isinstance(result, tuple):
            return tuple(self._result(part) for part in result)
        return result

    def _remember(self, ours: Any, theirs: Any) -> Any:
        self._twins[id(theirs)] = (ours, theirs)
        return theirs

    def _view(self, tensor: Tensor) -> Tensor:
        raw = storage_bytes(tensor)
        if raw.data_ptr() not in self._storages:
            self._storages[raw.data_ptr()] = (raw, raw.to(self._device, copy=True))
        return _view(self._storages[raw.data_ptr()][1], tensor)


def _view(raw: Tensor, like: Tensor) -> Tensor:
    """The place of ``like`` in the bytes of another storage."""
    whole = raw[: raw.numel() // like.element_size() * like.element_size()].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


def run_on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Wrap the public functions for one test."""
    for name in FUNCTIONS:
        function = getattr(mlacast, name)

        def wrapped(*args: Any, _function: Callable[..., Any] = function, **options: Any) -> Any:
            transfer = Transfer(device)
            moved = transfer.to_device(list(args))
            result = _function(*moved, **{k: transfer.to_device(v) for k, v in options.items()})
            return transfer.back(result)

        monkeypatch.setattr(mlacast, name, functools.wraps(function)(wrapped))


def expect_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ``oracles`` the bounds of kernels whose weights are bfloat16.

    A weight is off by a share 2**-8 at most, half a bf16 ulp, so an output by 2**-8 times the
    largest value. Tensor cores drop two bits below float32's when they align the summands of a
    step: logits, and what float32 does with them, are off by four times as much.
    """
    exact, ulps = oracles.attend, oracles.assert_within_bf16_ulps

    def attend(q: Tensor, selected: Sequence[Tensor], **options: Any) -> AttentionOracle:
        found = exact(q, selected, **options)
        largest = torch.tensor(
            [float(rows[:, :512].abs().max()) if rows.shape[0] else 0.0 for rows in selected],
            dtype=torch.float64,
        )
        share = 2.0**-8 * (1 if options.get("rope") is None else 2)
        return dataclasses.replace(
            found,
            logit_error=4 * found.logit_error + 2.0**-20,
            out_error=4 * found.out_error + share * largest[:, None],
        )

    def within(actual: Tensor, expected: Tensor, steps: int, floor: float) -> None:
        # ``floor`` is 128 units of 2**-24 of the largest value: two such results may be 2 * 2**-8
        # of it apart.
        ulps(actual, expected, steps, floor * 2.0**10)

    monkeypatch.setattr(oracles, "attend", attend)
    monkeypatch.setattr(oracles, "assert_within_bf16_ulps", within)
