"""The lazy schedule object: filled by the first call, reusable for equal configurations only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mlacast.compat import flash_mla
from tests.cache_writers import V4, V32
from tests.compat.flash_mla.compare import assert_same_bits
from tests.compat.flash_mla.kvcache_cases import (
    DenseCase,
    KvCall,
    SparseCase,
    dense_call,
    sparse_call,
)

TWO_CACHES = SparseCase("two", (V4, V4), b=2, s_q=2, h_q=8)
DENSE = DenseCase("dense", lengths=(9, 12), s_q=2)
CallMaker = Callable[[], KvCall]


def sparse_with(**changes: Any) -> CallMaker:
    return lambda: sparse_call(replace(TWO_CACHES, **changes))


def dense_with(**changes: Any) -> CallMaker:
    return lambda: dense_call(replace(DENSE, **changes))


@dataclass(frozen=True)
class Change:
    """A first call and a second one that differs in one field of the configuration."""

    id: str
    first: CallMaker
    second: CallMaker


CHANGES = (
    Change("batch", sparse_with(), sparse_with(b=3)),
    Change("tokens", sparse_with(), sparse_with(s_q=1)),
    Change("heads", sparse_with(), sparse_with(h_q=16)),
    Change("page-size", sparse_with(), sparse_with(page_size=4)),
    Change("topk", sparse_with(), sparse_with(topk=12)),
    Change("extra-page-size", sparse_with(), sparse_with(extra_page_size=8)),
    Change("extra-topk", sparse_with(), sparse_with(extra_topk=8)),
    Change("extra-cache-gone", sparse_with(), sparse_with(caches=(V4,))),
    Change("dense-batch", dense_with(), dense_with(lengths=(9,))),
    Change("dense-tokens", dense_with(), dense_with(s_q=1)),
    Change("dense-heads", dense_with(), dense_with(h_q=16)),
    Change("dense-page-size", dense_with(), dense_with(page_size=4)),
    Change("causal", dense_with(), dense_with(causal=True)),
    Change("fp8", dense_with(), lambda: sparse_call(SparseCase("s", (V32,), b=2, s_q=2))),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.id)
def test_other_configuration_is_refused(change: Change) -> None:
    metadata = flash_mla.get_mla_metadata()[0]
    first, second = change.first(), change.second()
    expected = first.run(metadata)
    out = torch.full((*second.arguments["q"].shape[:3], 512), 3.0).bfloat16()
    with pytest.raises(ValueError, match=r"tile_scheduler_metadata must "):
        second.run(metadata, out=out)
    assert bool((out == 3.0).all())
    # The refusal leaves the object usable for what it was made for.
    for one, other in zip(first.run(metadata), expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("first", [sparse_with(), dense_with()], ids=["sparse", "dense"])
def test_first_call_fills_the_object(first: CallMaker) -> None:
    metadata = flash_mla.get_mla_metadata()[0]
    first().run(metadata)
    assert metadata.have_initialized is True
    assert metadata.config is not None
    assert metadata.tile_scheduler_metadata is not None
    assert metadata.num_splits is not None


@pytest.mark.parametrize(
    "first", [sparse_with(lengths=True), dense_with()], ids=["sparse", "dense"]
)
def test_reuse_gives_the_bits_of_a_fresh_object(first: CallMaker) -> None:
    """Layers of one step share the object: other queries and cache contents, same lengths."""
    metadata = flash_mla.get_mla_metadata()[0]
    call = first()
    call.run(metadata)
    call.arguments["q"] = torch.randn_like(call.arguments["q"])
    for one, other in zip(call.run(metadata), call.run(), strict=True):
        assert_same_bits(one, other)


def test_refused_first_call_does_not_fill_the_object() -> None:
    metadata = flash_mla.get_mla_metadata()[0]
    call = sparse_with()()
    with pytest.raises(ValueError, match="head_dim_v"):
        call.run(metadata, head_dim_v=256)
    assert metadata.have_initialized is False
    assert metadata.config is None


@pytest.mark.parametrize(
    "value", [3, "metadata", (None, None), torch.zeros(4, 8, dtype=torch.int32)], ids=type
)
def test_only_the_schedule_object_is_accepted(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"tile_scheduler_metadata must .*first value of get_mla_metadata.*got"
    ):
        sparse_with()().run(value)
