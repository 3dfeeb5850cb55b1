"""What the decode shims launch around the operator, and that they never wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mlacast.compat import mate
from tests.compat.flashinfer.dsv4_calls import joint_call, separate_call
from tests.compat.flashinfer.mla_calls import dense_call, sparse_call
from tests.compat.mate import calls

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "_to_copy")
# Views and allocations, which launch nothing.
FREE = {
    "view", "_unsafe_view", "reshape", "expand", "squeeze", "unsqueeze", "slice", "select",
    "permute", "transpose", "as_strided", "empty", "empty_like", "alias", "detach", "t", "split",
    "_reshape_alias", "unbind", "new_empty", "empty_strided",
}  # fmt: skip


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that a call dispatches, free ones left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in SYNCHRONISING, f"{name} waits for the device"
        if name not in FREE:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))


def _launched(call: Callable[[], Any]) -> list[str]:
    watch = Watch()
    with watch:
        call()
    return watch.launched


def test_mate() -> None:
    call = calls.draw_call((40, 3))
    two = calls.draw_call((40, 3), q_len=2)
    assert _launched(lambda: calls.run(call)) == ["sparse_mla_decode"]
    # The marker of empty rows; lengths for each token.
    with_lse = _launched(lambda: calls.run(call, return_lse=True))
    assert with_lse == ["sparse_mla_decode", "nan_to_num"]
    assert len(_launched(lambda: calls.run(two))) <= 2


def test_rope_and_quantise() -> None:
    """One launch, whether outputs are given or not, and none for a converted argument."""
    q, k = torch.randn(5, 3, 576).bfloat16(), torch.randn(5, 576).bfloat16()
    parts = (q[..., 512:], k[:, 512:], q[..., :512], k[:, :512])
    positions = torch.arange(5, dtype=torch.int32)
    arguments = (*parts, torch.randn(9, 64), positions)
    whole = torch.empty(5, 3, 576, dtype=torch.float8_e4m3fn)
    outputs: dict[str, Any] = {"q_rope_out": whole[..., 512:], "q_nope_out": whole[..., :512]}
    for given in ({}, outputs):
        for is_neox in (True, False):
            launched = _launched(
                functools.partial(mate.mla_rope_quantize_fp8, *arguments, is_neox=is_neox, **given)
            )
            assert launched == ["rope_quantize_fp8"]


def test_metadata() -> None:
    call = calls.draw_call((40, 3))
    launched = _launched(lambda: mate.get_batch_decode_metadata_mla(call.query, call.seq_lens, 64))
    assert launched == ["decode_metadata", "clone"]


@pytest.mark.parametrize(
    ("make", "changes", "around"),
    [
        (dense_call, {}, 0),
        (dense_call, {"return_lse": True}, 1),
        (dense_call, {"return_lse": True, "sinks": torch.zeros(3)}, 2),
        (sparse_call, {}, 2),
        (lambda: sparse_call("V32"), {}, 0),
        (joint_call, {}, 1),
        (separate_call, {}, 0),
    ],
)
def test_flashinfer(make: Any, changes: dict[str, Any], around: int) -> None:
    call = make()
    assert len(_launched(lambda: call.run(**changes))) == 1 + around


def test_flashinfer_with_an_fp8_output() -> None:
    call = joint_call()
    scales, table = torch.zeros(1, 8, 4, dtype=torch.int32), torch.ones(9, 64)
    launched = _launched(lambda: call.run(out_scales=scales, cos_sin_cache=table))
    # The length of the second list, and positions.
    assert launched == ["sub", "arange", "add", "sparse_mla_decode"]


def test_ragged_with_the_longest_request_given() -> None:
    call = dense_call(q_lens=(1, 2), seq_lens=(9, 5), ragged=True)
    assert "dense_mla_decode" in _launched(lambda: call.run(max_q_len=2))
