"""Values from their JSON nodes, whose form has been checked.

A node comes from a file, so the rest is not taken on trust either: classes are looked up among
those of mlacast, and every view has to lie inside its saved bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlacast.call_log.errors import DumpError
from mlacast.call_log.regions import Region, view_of
from mlacast.call_log.tree import Node, is_scalar, kind_of
from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor

DeviceMap = Callable[[str], torch.device]


class _NotRebuilt(DumpError):
    """The innermost value that cannot be rebuilt has been named."""


class TreeDecoder:
    """Rebuilds values over restored regions.

    Args:
        regions: Restored bytes, by storage number.
        device_of: Where something recorded on a device goes.
    """

    def __init__(self, regions: Sequence[Region], device_of: DeviceMap) -> None:
        self._regions = regions
        self._device_of = device_of

    def decode(self, node: Node, path: str) -> Any:
        """Return the value of a node, called ``path`` in messages.

        Raises:
            DumpError: The node is of no known kind, or is not sound.
        """
        try:
            return self._decode(node, path)
        except _NotRebuilt:
            raise
        except (
            AttributeError,
            DumpError,
            IndexError,
            KeyError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise _NotRebuilt(f"argument {path} cannot be rebuilt: {error}") from None

    def _decode(self, node: Node, path: str) -> Any:
        if is_scalar(node):
            return node
        kind = kind_of(node)
        value = node[kind]
        if kind == "$tensor":
            return self.tensor(value)
        if kind == "$float":
            return {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}[value]
        if kind == "$list":
            return self._items(value, path)
        if kind == "$tuple":
            return self._tuple(node, path)
        if kind == "$size":
            return torch.Size(value)
        if kind == "$dict":
            return {self.decode(key, path): self.decode(item, path) for key, item in value}
        if kind == "$dtype":
            return _dtype(value)
        if kind == "$device":
            return self._device_of(value)
        if kind == "$bytes":
            return bytes.fromhex(value)
        if kind == "$kv_format":
            return KvFormat.from_name(value)
        if kind == "$enum":
            return _class(node["name"], enum.Enum)[value]
        if kind == "$quantized_tensor":
            return self._quantized_tensor(value, path)
        if kind == "$dataclass":
            return _dataclass(node["name"])(**self._fields(value, path))
        assert kind == "$opaque", f"{kind} has passed the checks of records"
        raise DumpError(f"a {value} was not recorded and cannot be rebuilt")

    def tensor(self, node: dict[str, Any]) -> Tensor:
        """Return the view that the body of a ``$tensor`` node describes."""
        dtype = _dtype(node["dtype"])
        shape, stride, number = node["shape"], node["stride"], node["storage"]
        if number is None:
            device = self._device_of(node["device"])
            if 0 not in shape and device.type != "meta":
                raise DumpError(f"no bytes for shape {shape}")
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if number >= len(self._regions):
            raise DumpError(f"storage {number} of {len(self._regions)}")
        return view_of(self._regions[number], node["offset"], dtype, shape, stride)

    def _items(self, nodes: Sequence[Node], path: str) -> list[Any]:
        return [self.decode(node, f"{path}[{index}]") for index, node in enumerate(nodes)]

    def _fields(self, nodes: dict[str, Node], path: str) -> dict[str, Any]:
        return {name: self.decode(node, f"{path}.{name}") for name, node in nodes.items()}

    def _tuple(self, node: dict[str, Any], path: str) -> tuple[Any, ...]:
        items = self._items(node["$tuple"], path)
        if "fields" not in node:
            return tuple(items)
        module, _, name = node["name"].rpartition(":")
        kind: Callable[..., tuple[Any, ...]]
        if module.partition(".")[0] == "mlacast":
            kind = _class(node["name"], tuple)
        else:
            # A class of the user's: its fields are all that a callee can see of it.
            kind = _named_tuple(name.rpartition(".")[2], node["fields"])
        return kind(*items)

    def _quantized_tensor(self, node: dict[str, Node], path: str) -> QuantizedTensor:
        parts = self._fields(node, path)
        rows, format, count = parts["sf"], parts["format"], parts["num_tokens"]
        sf = rows
        if rows is not None and format.sf_layout == "mn_major":
            sf = rows[:count]
        buffer = QuantizedTensor(
            parts["data"], sf, format, parts["row_start"], count, parts["total_tokens"]
        )
        owned = buffer.sf_rows_with_padding()
        if buffer.total_tokens != parts["total_tokens"] or (
            owned is not None and owned.shape != rows.shape
        ):
            raise DumpError("its padding rows cannot be rebuilt")
        return buffer


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DumpError(f"{name!r} is no dtype of this torch")
    return dtype


def _class(name: str, base: type) -> Any:
    """Look up a class that mlacast defines, and no other."""
    module_name, _, qualified = name.partition(":")
    if module_name.partition(".")[0] != "mlacast":
        raise DumpError(f"{name} is no class of mlacast")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError:
        raise DumpError(f"{name} is no class of this mlacast") from None
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_class = isinstance(found, type) and issubclass(found, base)
    if not is_class or (found.__module__, found.__qualname__) != (module_name, qualified):
        raise DumpError(f"{name} is no {base.__name__} of this mlacast")
    return found


def _named_tuple(name: str, fields: Sequence[str]) -> Any:
    # The names are data, which no type checker can follow.
    make: Any = collections.namedtuple
    return make(name, fields)


def _dataclass(name: str) -> Any:
    found = _class(name, object)
    if not dataclasses.is_dataclass(found):
        raise DumpError(f"{name} is no dataclass")
    return found
