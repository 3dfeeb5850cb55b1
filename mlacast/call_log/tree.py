"""Arguments and results as JSON, with the tensors set aside.

Numbers, strings and None stand for themselves. Everything else is an object with one key that
begins with ``$`` and names the kind, so that a reader needs no type but those of this file and the
classes of mlacast:

=====================  =====================================================================
``$tensor``            dtype, shape, stride, device, storage (number or null), offset in bytes
``$float``             ``"nan"``, ``"inf"``, ``"-inf"``
``$list``, ``$tuple``  items; a named tuple also has its name and the names of its fields
``$size``              sizes of a torch.Size
``$dict``              pairs of key and value
``$dtype $device``     name
``$bytes``             hexadecimal digits
``$enum``              class and member, of mlacast
``$kv_format``         name of a KvFormat
``$quantized_tensor``  tensors, format and rows of a QuantizedTensor
``$dataclass``         class, of mlacast, and fields
``$opaque``            name of a type that cannot be recorded
=====================  =====================================================================
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mlacast.call_log.errors import DumpError
from mlacast.call_log.regions import Place
from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.errors import dtype_name

Node = Any

# Lists of lists are no deeper than this; a list that holds itself is.
_MAX_DEPTH = 32


class TreeEncoder:
    """Turns values into nodes and collects the tensors in them, without looking at their data.

    Attributes:
        tensors: Every plain strided tensor met.
        nodes: The node of each of them, its place not filled in yet.
        paths: Where each of them is, for example ``"rope.positions"``.
        opaque: Places and types of what cannot be recorded.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.opaque: list[str] = []

    def encode(self, value: object, path: str, depth: int = 0) -> Node:
        """Return the node of ``value``, which is called ``path``."""
        if depth > _MAX_DEPTH:
            return self._opaque(value, path)
        scalar = _encode_scalar(value)
        if scalar is not None or value is None:
            return scalar
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, tuple) or type(value) is list:
            return self._items(value, path, depth)
        if type(value) is dict:
            keys = [self.encode(key, f"{path} key", depth + 1) for key in value]
            items = [
                self.encode(item, f"{path}[{describe(key)}]", depth + 1)
                for key, item in zip(keys, value.values(), strict=True)
            ]
            return {"$dict": [list(pair) for pair in zip(keys, items, strict=True)]}
        return self._object(value, path, depth)

    def _tensor(self, tensor: Tensor, path: str) -> Node:
        # Wrappers of other kinds (fake, functional, distributed) have no bytes of their own.
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not is_plain or tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
            return self._opaque(tensor, path)
        node = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "device": str(tensor.device),
            "storage": None,
            "offset": 0,
        }
        self.tensors.append(tensor)
        self.nodes.append(node)
        self.paths.append(path)
        return {"$tensor": node}

    def _items(self, value: tuple[Any, ...] | list[Any], path: str, depth: int) -> Node:
        fields = getattr(value, "_fields", None)
        names = [f"{path}[{i}]" for i in range(len(value))]
        if isinstance(fields, tuple):
            names = [f"{path}.{field}" for field in fields]
        items = [
            self.encode(item, name, depth + 1) for item, name in zip(value, names, strict=True)
        ]
        if isinstance(value, list):
            return {"$list": items}
        if isinstance(fields, tuple):
            kind = type(value)
            return {"$tuple": items, "name": _class_name(kind), "fields": list(fields)}
        if type(value) is not tuple:
            return self._opaque(value, path)
        return {"$tuple": items}

    def _object(self, value: object, path: str, depth: int) -> Node:
        kind = type(value)
        if isinstance(value, KvFormat):
            return {"$kv_format": value.name}
        if isinstance(value, QuantizedTensor):
            parts = {
                "data": value.data,
                "sf": value.sf_rows_with_padding(),
                "format": value.format,
                "row_start": value.row_start,
                "num_tokens": value.num_tokens,
                "total_tokens": value.total_tokens,
            }
            return {"$quantized_tensor": self._fields(parts, path, depth)}
        if kind.__module__.partition(".")[0] == "mlacast":
            if isinstance(value, enum.Enum):
                return {"$enum": value.name, "name": _class_name(kind)}
            if dataclasses.is_dataclass(value):
                known = {field.name for field in dataclasses.fields(value) if field.init}
                parts = {name: getattr(value, name) for name in known}
                fields = self._fields(dict(sorted(parts.items())), path, depth)
                return {"$dataclass": fields, "name": _class_name(kind)}
        return self._opaque(value, path)

    def _fields(self, parts: dict[str, Any], path: str, depth: int) -> Node:
        return {
            name: self.encode(part, f"{path}.{name}", depth + 1) for name, part in parts.items()
        }

    def _opaque(self, value: object, path: str) -> Node:
        name = _class_name(type(value))
        self.opaque.append(f"{path} is a {name}")
        return {"$opaque": name}

    def set_places(self, places: list[Place]) -> None:
        """Fill in where each tensor stands."""
        for node, place in zip(self.nodes, places, strict=True):
            node["storage"], node["offset"] = place.region, place.offset


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _encode_scalar(value: object) -> Node:
    """Node of a value without parts; None for anything else, and for None."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    return None


def is_scalar(node: Node) -> bool:
    """Whether a node is the value itself."""
    return node is None or isinstance(node, (bool, int, float, str))


def kind_of(node: Node) -> str:
    """Return the key of a node that names its kind.

    Raises:
        DumpError: It has none, or more than one.
    """
    keys = node if isinstance(node, dict) else ()
    kinds: list[str] = [key for key in keys if key.startswith("$")]
    if len(kinds) != 1:
        raise DumpError(f"no value and no kind of value: {node!r:.80}")
    return kinds[0]


def leaves_of(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the path and node of every part without parts of its own, in order."""
    for name, part in walk(node, path):
        if not any(parts_of(part, name)):
            yield name, part


def walk(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the path and node of every part, an object before its own parts."""
    yield path, node
    for name, part in parts_of(node, path):
        yield from walk(part, name)


def parts_of(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the path and node of the immediate parts of a list, tuple, dict or object."""
    if not isinstance(node, dict):
        return
    if "$tuple" in node or "$list" in node:
        items = node["$tuple"] if "$tuple" in node else node["$list"]
        names = [f".{field}" for field in node.get("fields", [])]
        names = names or [f"[{index}]" for index in range(len(items))]
        for name, item in zip(names, items, strict=True):
            yield path + name, item
    elif "$dict" in node:
        for key, item in node["$dict"]:
            yield f"{path}[{describe(key)}]", item
    else:
        for kind in ("$dataclass", "$quantized_tensor"):
            for name, part in node.get(kind, {}).items():
                yield f"{path}.{name}", part


def describe(node: Node) -> str:
    """Say in a few words what a value is; of a list, tuple or dict only its kind."""
    if not isinstance(node, dict):
        text = repr(node)
        return text if len(text) <= 80 else text[:77] + "..."
    if "$tensor" in node:
        tensor = node["$tensor"]
        return (
            f"Tensor {tensor['dtype']} {tensor['shape']} strides {tensor['stride']} "
            f"on {tensor['device']}"
        )
    if "$opaque" in node:
        return f"a {node['$opaque']}, not recorded"
    if "$kv_format" in node:
        return f"KvFormat.{node['$kv_format']}"
    if "$enum" in node:
        return f"{node['name'].rpartition(':')[2]}.{node['$enum']}"
    if "$dataclass" in node:
        return f"a {node['name'].rpartition(':')[2]}"
    if "$quantized_tensor" in node:
        return "a QuantizedTensor"
    kind = kind_of(node)
    value = node[kind]
    if kind in ("$list", "$tuple", "$dict"):
        return f"a {kind[1:]} of {len(value)}"
    return str(value)
