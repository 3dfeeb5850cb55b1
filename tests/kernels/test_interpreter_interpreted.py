"""What ``tests.interpreter`` replaces gives what Triton's interpreter gives."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language import core as language_core
from triton.runtime import interpreter

from tests.kernels.probes import apply_helper


@pytest.mark.parametrize("sizes", [(1,), (16,), (2, 4), (4, 2), (1, 2, 8)])
@pytest.mark.parametrize("kind", [tl.float32, tl.bfloat16, tl.pointer_type(tl.int32)])
def test_types_and_tensors_have_their_shape(sizes: tuple[int, ...], kind: Any) -> None:
    for shape in (list(sizes), tl.tuple([tl.constexpr(size) for size in sizes])):
        block = tl.block_type(kind, shape)
        assert [*block.shape] == [*sizes] and all(type(size) is int for size in block.shape)
        assert block.numel == np.prod(sizes)
        assert block.scalar == kind
        assert block.name == f"<{[str(size) for size in sizes]}, {kind}>"
        tensor = tl.tensor(object(), block)
        assert tensor.type is block and tensor.dtype == kind
        assert [size.value for size in tensor.shape] == [*sizes]
        assert tensor.numel.value == np.prod(sizes)
        assert block == tl.block_type(kind, [*sizes]) != tl.block_type(kind, [*sizes, 2])
        assert block != tl.block_type(tl.int64, [*sizes])


def test_scalars_have_no_shape() -> None:
    for kind in (tl.float32, tl.int64, tl.pointer_type(tl.float32)):
        scalar = tl.tensor(object(), kind)
        assert len(scalar.shape) == 0 and scalar.numel.value == 1
        assert scalar.type is kind and scalar.dtype == kind.scalar


@pytest.mark.parametrize("sizes", [(3,), (16, 6), (2**21,)])
def test_sizes_that_a_block_cannot_have_are_refused_every_time(sizes: tuple[int, ...]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError):
            tl.block_type(tl.float32, [*sizes])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tl.int1, np.bool_),
        (tl.uint8, np.uint8),
        (tl.int32, np.int32),
        (tl.int64, np.int64),
        (tl.float32, np.float32),
        (tl.float64, np.float64),
        # Kept as their bits.
        (tl.bfloat16, np.uint16),
        (tl.pointer_type(tl.float32), np.uint64),
    ],
)
def test_types_of_arrays(kind: Any, expected: Any) -> None:
    for one in (kind, tl.block_type(kind, [4]), kind):
        assert interpreter._get_np_dtype(one) == expected


@pytest.mark.parametrize(
    ("one", "other", "shape"),
    [((4,), (4,), [4]), ((4, 1), (4,), [4, 4]), ((1, 8), (2, 1), [2, 8]), ((), (2,), [2])],
)
def test_two_tensors_are_broadcast_to_one_shape(
    one: tuple[int, ...], other: tuple[int, ...], shape: list[int]
) -> None:
    def make(sizes: tuple[int, ...], value: int) -> Any:
        handle = interpreter.TensorHandle(np.full(sizes or 1, value, np.int32), tl.int32)
        return tl.tensor(handle, tl.block_type(tl.int32, [*sizes]) if sizes else tl.int32)

    for first, second in ((one, other), (other, one), (one, one)):
        pair = interpreter.interpreter_semantic.broadcast_impl_value(
            make(first, 1), make(second, 2)
        )
        wanted = list(one) if first == second else shape
        for tensor, value in zip(pair, (1, 2), strict=True):
            assert [size.value for size in tensor.shape] == wanted
            assert tensor.handle.data.size == np.prod(wanted)
            assert bool((tensor.handle.data == value).all())


def _builtins(place: Any) -> dict[str, Any]:
    """What a kernel replaces of a module or class."""
    return dict(inspect.getmembers(place, language_core.is_builtin))


def test_a_kernel_replaces_the_language_once_and_restores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of device functions that call others: two kernels, each of which replaces everything."""
    replaced: list[Any] = []
    plain = interpreter._patch_builtin

    def spy(package: Any, *rest: Any) -> None:
        replaced.append(package)
        plain(package, *rest)

    monkeypatch.setattr(interpreter, "_patch_builtin", spy)
    places = (tl, tl.core, tl.math, tl.tensor)
    before = [_builtins(place) for place in places]
    assert all(before)
    for kernels in (1, 2):
        codes = apply_helper("encode_e4m3", torch.tensor([1.0, -2.0]))
        assert codes.tolist() == [0x38, 0xC0]
        assert [_builtins(place) for place in places] == before
        assert [replaced.count(place) for place in (tl, tl.tensor, tl.math)] == [kernels] * 3
