"""Comparison of what a replayed call gave with what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlacast.call_log.regions import Region, alias_bytes, extent, view_of
from mlacast.call_log.restore import TreeDecoder
from mlacast.call_log.tree import Node, describe, parts_of

# Every other dtype holds codes, counts or packed bytes, for which only equality means anything.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tolerance:
    """How far bfloat16, float16, float32 and float64 elements may be apart.

    Both 0: bit for bit. FP8, FP4 and integers are always compared as bytes.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True)
class TensorComparison:
    """One tensor, recorded and replayed.

    Attributes:
        path: Where it is, for example ``"result[0]"``.
        dtype: Name of the dtype.
        shape: Its shape.
        elements: Number of elements.
        different: Elements that differ by more than is allowed.
        largest: Largest difference of two finite elements, read as numbers.
    """

    path: str
    dtype: str
    shape: list[int]
    elements: int
    different: int
    largest: float


class Comparison:
    """Compares nodes whose tensors stand in two sets of regions.

    Args:
        expected: Recorded regions, on the CPU.
        actual: Regions after the replay, on any device; those of the inputs have the same numbers.
        num_inputs: How many regions are those of the inputs.
        tolerance: For floating-point elements.

    Attributes:
        tensors: Every tensor that could be compared.
        differences: Sentences about what differs, empty if nothing does.
    """

    def __init__(
        self,
        expected: Sequence[Region],
        actual: Sequence[Region],
        num_inputs: int,
        tolerance: Tolerance,
    ) -> None:
        self.tensors: list[TensorComparison] = []
        self.differences: list[str] = []
        self._expected = expected
        self._actual = actual
        self._num_inputs = num_inputs
        self._tolerance = tolerance
        self._decoders = (
            TreeDecoder(expected, torch.device),
            TreeDecoder(actual, torch.device),
        )

    def compare(self, expected: Node, actual: Node, path: str) -> None:
        """Compare two nodes, part by part."""
        parts, others = list(parts_of(expected, path)), list(parts_of(actual, path))
        if _shell(expected) != _shell(actual) or len(parts) != len(others):
            self.differences.append(f"{path} is {describe(actual)}, recorded {describe(expected)}")
        elif isinstance(expected, dict) and "$tensor" in expected:
            self._compare_tensors(expected["$tensor"], actual["$tensor"], path)
        elif parts:
            for (name, part), (other_name, other) in zip(parts, others, strict=True):
                if name != other_name:
                    self.differences.append(f"{other_name} stands where {name} was recorded")
                else:
                    self.compare(part, other, name)

    def compare_rest(self, number: int, nodes: Sequence[dict[str, Any]], path: str) -> None:
        """Compare the bytes of an input's region that belong to none of its tensors.

        Args:
            number: The region.
            nodes: Bodies of the ``$tensor`` nodes in it.
            path: Name of one of the tensors, for the message.
        """
        expected, actual = self._expected[number].content, self._actual[number].content.to("cpu")
        apart = expected != actual
        for node in nodes:
            _clear(apart, node)
        count = int(apart.sum())
        if count:
            self.differences.append(f"{count} bytes between the elements of {path} differ")

    def _compare_tensors(self, node: dict[str, Any], other: dict[str, Any], path: str) -> None:
        if (node["dtype"], node["shape"]) != (other["dtype"], other["shape"]):
            now, then = describe({"$tensor": other}), describe({"$tensor": node})
            self.differences.append(f"{path} is a {now}, recorded a {then}")
            return
        if _steps(node) != _steps(other):
            self.differences.append(
                f"{path} has strides {other['stride']}, recorded {node['stride']}"
            )
        if self._shared(node) != self._shared(other):
            was, is_now = self._shared(node), self._shared(other)
            self.differences.append(
                f"{path} {'shares' if is_now is not None else 'does not share'} memory with an "
                f"argument, recorded {'that it does' if was is not None else 'that it does not'}"
            )
        expected, actual = self._decoders[0].tensor(node), self._decoders[1].tensor(other)
        self._compare_elements(expected, actual.to("cpu"), node, path)

    def _shared(self, node: dict[str, Any]) -> int | None:
        """The input region that a tensor lies in, if any."""
        number = node["storage"]
        return number if number is not None and number < self._num_inputs else None

    def _compare_elements(
        self, expected: Tensor, actual: Tensor, node: dict[str, Any], path: str
    ) -> None:
        different, largest = 0, 0.0
        tolerance = self._tolerance
        loose = expected.dtype in _FLOATS and (tolerance.rtol > 0 or tolerance.atol > 0)
        for one, other in _rows(expected, actual):
            apart = (_bytes_of(one) != _bytes_of(other)).any(dim=-1)
            if not bool(apart.any()):
                continue
            numbers = _numbers(one)[apart], _numbers(other)[apart]
            if loose:
                close = torch.isclose(
                    numbers[1],
                    numbers[0],
                    rtol=tolerance.rtol,
                    atol=tolerance.atol,
                    equal_nan=True,
                )
                different += int((~close).sum())
            else:
                different += int(apart.sum())
            gap = (numbers[0] - numbers[1]).abs()
            gap = gap[gap.isfinite()]
            largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        self.tensors.append(
            TensorComparison(
                path, node["dtype"], node["shape"], expected.numel(), different, largest
            )
        )
        if different:
            self.differences.append(
                f"{path}: {different} of {expected.numel()} {node['dtype']} elements differ, "
                f"by up to {largest:.6g}"
            )


def _shell(node: Node) -> Node:
    """What a node says besides its parts."""
    if not isinstance(node, dict):
        return type(node).__name__, node
    if "$tensor" in node:
        return "$tensor"
    if any(kind in node for kind in ("$list", "$tuple", "$dict")):
        return sorted(node)
    if "$dataclass" in node or "$quantized_tensor" in node:
        return sorted(node), node.get("name")
    return node


def _steps(node: dict[str, Any]) -> list[int]:
    """Strides that matter: of no dimension of size 1, and of no empty tensor."""
    if 0 in node["shape"]:
        return []
    return [step for size, step in zip(node["shape"], node["stride"], strict=True) if size > 1]


def _rows(expected: Tensor, actual: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching pieces as contiguous vectors."""
    if expected.numel() == 0:
        return
    if expected.numel() <= 1 << 22:
        yield expected.reshape(-1).contiguous(), actual.reshape(-1).contiguous()
        return
    longest = max(range(expected.dim()), key=lambda dim: expected.shape[dim])
    for one, other in zip(expected.chunk(2, longest), actual.chunk(2, longest), strict=True):
        yield from _rows(one, other)


def _bytes_of(vector: Tensor) -> Tensor:
    """View [n] elements as [n, itemsize] uint8."""
    return vector.view(torch.uint8).view(vector.shape[0], vector.element_size())


def _numbers(vector: Tensor) -> Tensor:
    try:
        return vector.float().double() if vector.element_size() == 1 else vector.double()
    # Packed and scale dtypes that torch does not convert: their bytes are numbers enough.
    except (NotImplementedError, RuntimeError):
        return _bytes_of(vector)[:, 0].double()


def _clear(apart: Tensor, node: dict[str, Any]) -> None:
    """Set the bytes of a tensor's elements to False in a mask of its region."""
    dtype = getattr(torch, node["dtype"])
    itemsize = torch.empty(0, dtype=dtype, device="cpu").element_size()
    # A repeated dimension names the same bytes again.
    dims = [
        (size, step * itemsize)
        for size, step in zip(node["shape"], node["stride"], strict=True)
        if step != 0
    ]
    shape = [size for size, _ in dims] + [itemsize]
    stride = [step for _, step in dims] + [1]
    mask = Region(alias_bytes(apart.untyped_storage(), 0, apart.shape[0]), 0, 0)
    assert extent(shape, stride, 1) + node["offset"] <= mask.size, "a tensor lies in its region"
    view_of(mask, node["offset"], torch.bool, shape, stride).fill_(False)
