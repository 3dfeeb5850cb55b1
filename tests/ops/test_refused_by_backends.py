"""Legal calls that no backend covers, and backends that are named but not there."""

from __future__ import annotations

import pytest
import torch

import mlacast
from mlacast import UnsupportedError
from tests.ops.rejections import (
    Rejection,
    assert_rejected,
    good_prefill,
    poisoned,
)


def test_norm_is_not_defined_for_576() -> None:
    out = poisoned(3, 2, 512)
    arguments = {
        "q": torch.zeros(3, 2, 576).bfloat16(),
        "indices": torch.zeros(3, 4, dtype=torch.int32),
        "sm_scale": 1.0,
        "q_norm_eps": 1e-6,
        "out": out,
    }
    rejection = Rejection("", {}, "q_norm_eps", "512|576", error=UnsupportedError)
    assert_rejected(
        "sparse_mla_prefill", arguments | {"kv": torch.zeros(6, 576).bfloat16()}, rejection
    )
    cache = {"k_cache": mlacast.KvFormat.V32.allocate(2, 4), "kv_format": mlacast.KvFormat.V32}
    assert_rejected("sparse_mla_decode", arguments | cache, rejection)


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_named_backend_never_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors neither GPU backend applies; asked for by name or by environment, that is an
    error.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = good_prefill()
    expected = UnsupportedError if name == "hopper" else (UnsupportedError, ImportError)
    with pytest.raises(expected, match=rf"sparse_mla_prefill: .*{name}") as caught:
        mlacast.sparse_mla_prefill(**arguments, backend=name)
    if isinstance(caught.value, UnsupportedError):
        assert (caught.value.op, caught.value.backend) == ("sparse_mla_prefill", name)
    monkeypatch.setenv("MLACAST_BACKEND", name)
    with pytest.raises(expected, match=rf"sparse_mla_prefill: .*{name}"):
        mlacast.sparse_mla_prefill(**arguments)
    assert bool((arguments["out"].view(torch.uint8) == 0x5A).all())
    # The argument wins over the environment.
    mlacast.sparse_mla_prefill(**arguments, backend="reference")


def test_the_reference_may_be_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "reference")
    arguments = good_prefill()
    assert mlacast.sparse_mla_prefill(**arguments)[0] is arguments["out"]


def test_an_unknown_backend_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLACAST_BACKEND", "cuda")
    with pytest.raises(
        ValueError, match=r"MLACAST_BACKEND.*'reference'.*'triton'.*'hopper'.*got 'cuda'"
    ):
        mlacast.sparse_mla_prefill(**good_prefill())


def test_more_than_128_heads_are_refused() -> None:
    arguments = {
        "q": torch.zeros(1, 129, 512).bfloat16(),
        "kv": torch.zeros(2, 512).bfloat16(),
        "indices": torch.zeros(1, 1, dtype=torch.int32),
        "sm_scale": 1.0,
    }
    rejection = Rejection("", {}, "q", "128", "129", error=(ValueError, UnsupportedError))  # type: ignore[arg-type]
    assert_rejected("sparse_mla_prefill", arguments, rejection)
