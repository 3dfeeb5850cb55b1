"""Selection as a pure function over a small table of its own."""

from __future__ import annotations

import pytest

import mlacast
from mlacast.dispatch.impls import IMPLS, OPS, Impl
from mlacast.dispatch.select import cuda_of_torch, judge, load, select

FAST = Impl("op", "hopper", "m:f", frozenset({"sm90"}), frozenset({"a"}))
WIDE = Impl("op", "triton", "m:f", frozenset({"sm80", "sm90"}), frozenset({"a", "b"}))
ABSENT = Impl("op", "triton", "m:f", None, frozenset({"a"}), ("surely_not_installed",))
TRUTH = Impl("op", "reference", "m:f")
NEWER = Impl("op", "hopper", "m:f", None, frozenset({"a"}), cuda=(12, 9))
TABLE = (FAST, WIDE, TRUTH)


def test_the_first_row_that_covers_the_call_is_chosen() -> None:
    assert select("op", frozenset({"a"}), "sm90", impls=TABLE) is FAST
    assert select("op", frozenset({"a", "b"}), "sm90", impls=TABLE) is WIDE
    assert select("op", frozenset({"a"}), "sm80", impls=TABLE) is WIDE
    assert select("op", frozenset({"c"}), "sm90", impls=TABLE) is TRUTH
    assert select("op", frozenset({"a"}), "cpu", impls=TABLE) is TRUTH


def test_a_named_backend_never_falls_back() -> None:
    with pytest.raises(mlacast.UnsupportedError, match=r"hopper: missing b") as caught:
        select("op", frozenset({"a", "b"}), "sm90", "hopper", TABLE)
    assert caught.value.backend == "hopper"
    with pytest.raises(mlacast.UnsupportedError, match=r"triton: needs sm80 or sm90, .* on cpu"):
        select("op", frozenset({"a"}), "cpu", "triton", TABLE)


def test_a_missing_package_is_skipped_or_named() -> None:
    assert select("op", frozenset({"a"}), "sm90", impls=(ABSENT, TRUTH)) is TRUTH
    with pytest.raises(ImportError, match=r"'triton' needs surely_not_installed, found none"):
        select("op", frozenset({"a"}), "sm90", "triton", (ABSENT, TRUTH))
    # Another row of the same backend does as well; a missing package is no excuse for what a row
    # could not do with it either.
    assert select("op", frozenset({"a", "b"}), "sm90", "triton", (ABSENT, WIDE)) is WIDE
    with pytest.raises(mlacast.UnsupportedError, match=r"triton: missing b"):
        select("op", frozenset({"a", "b"}), "sm90", "triton", (ABSENT, TRUTH))


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [("12.9", True), ("13.0", True), ("12.10", True), ("13", True), ("12.8", False), (None, False)],
)
def test_a_row_may_need_a_newer_cuda(
    version: str | None, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", version)
    cuda_of_torch.cache_clear()
    try:
        chosen = select("op", frozenset({"a"}), "sm90", impls=(NEWER, TRUTH))
        said = judge(NEWER, frozenset({"a"}), "sm90").reason
    finally:
        cuda_of_torch.cache_clear()
    assert chosen is (NEWER if is_enough else TRUTH)
    found = "12.8" if version else "0.0"
    assert said == ("" if is_enough else f"needs torch built for CUDA 12.9, found {found}")


def test_only_the_reference_claims_everything_and_covers_every_operation() -> None:
    with pytest.raises(ValueError, match="must declare its features"):
        Impl("op", "triton", "m:f")
    for op in OPS:
        rows = [impl.backend for impl in IMPLS if impl.op == op]
        assert rows[-1] == "reference"
        assert callable(load(next(i.target for i in IMPLS if i.op == op and i.features is None)))
