"""Whether a record says what a record can say. It may come from anywhere.

What is checked here is form: kinds, types, sizes. Whether a name exists, and whether a view lies
inside its bytes, shows when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlacast.call_log.arguments import KINDS
from mlacast.call_log.errors import DumpError
from mlacast.call_log.tree import Node, is_scalar, kind_of

INPUTS_SAVED = "inputs_saved"
COMPLETED = "completed"
RAISED = "raised"
STATUSES = (INPUTS_SAVED, COMPLETED, RAISED)
INPUTS = "inputs.safetensors"
OUTPUTS = "outputs.safetensors"

_NONE = type(None)
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "execution_status": str,
    "function": str,
    "call": int,
    "sequence": int,
    "timestamp": str,
    "process_id": int,
    "arguments": list,
    "opaque": list,
    "storages": list,
    "state": dict,
    "versions": dict,
    "outputs": (dict, _NONE),
    "outputs_missing": (str, _NONE),
    "error": (dict, _NONE),
    "seconds": (int, float, _NONE),
}
_QUANTIZED_TENSOR = {"data", "sf", "format", "row_start", "num_tokens", "total_tokens"}
# A value may be 32 deep, and an object in it adds a few levels.
_MAX_DEPTH = 64


def check_record(record: dict[str, Any]) -> None:
    """Raise DumpError unless every part of a record is of the form that is written."""
    _check_fields(record, _FIELDS, "the record")
    if record["execution_status"] not in STATUSES:
        raise DumpError(f"the record has execution_status {record['execution_status']!r}")
    for argument in record["arguments"]:
        _check_fields(argument, {"name": str, "kind": str, "value": object}, "an argument")
        if argument["kind"] not in KINDS:
            raise DumpError(f"argument {argument['name']} is of kind {argument['kind']!r}")
        check_node(argument["value"])
    _check_storages(record["storages"])
    for part in ("environment", "switches"):
        texts = record["state"].get(part)
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise DumpError(f"the state has no sound {part!r}")
    if record["error"] is not None:
        _check_fields(record["error"], {"type": str, "message": str}, "the error")
    outputs = record["outputs"]
    if outputs is not None:
        kinds = {"result": object, "arguments": dict, "storages": list}
        _check_fields(outputs, kinds, "the part of outputs")
        _check_storages(outputs["storages"])
        for node in (outputs["result"], *outputs["arguments"].values()):
            check_node(node)


def _check_fields(value: object, fields: dict[str, Any], what: str) -> None:
    for name, kind in fields.items():
        if not isinstance(value, dict) or name not in value or not isinstance(value[name], kind):
            raise DumpError(f"{what} has no sound {name!r}")


def _check_storages(storages: list[Any]) -> None:
    texts = {"file": str, "name": str, "device": str, "sha256": str}
    for number, storage in enumerate(storages):
        what = f"storage {number}"
        _check_fields(storage, texts, what)
        for name in ("bytes", "before", "after"):
            _check_size(storage.get(name))
        if storage["file"] not in (INPUTS, OUTPUTS):
            raise DumpError(f"{what} is in {storage['file']!r}, which is no file of a dump")


def check_node(node: Node, depth: int = 0) -> None:
    """Raise DumpError unless a node is of a kind that ``tree`` writes, with all of its parts."""
    if is_scalar(node):
        return
    if depth > _MAX_DEPTH:
        raise DumpError("values in values are nested too deep")
    kind = kind_of(node)
    check = _CHECKS.get(kind)
    if check is None:
        raise DumpError(f"unknown kind {kind!r}")
    try:
        parts = check(node)
    except DumpError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DumpError(f"a {kind} is not of the form that is written: {node!r:.200}") from None
    for part in parts:
        check_node(part, depth + 1)


def _check_size(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DumpError(f"{value!r} is no size")


def _tensor(node: Node) -> list[Node]:
    body = node["$tensor"]
    _check_fields(body, {"dtype": str, "shape": list, "stride": list, "device": str}, "a tensor")
    storage = body["storage"]
    for size in (
        *body["shape"],
        *body["stride"],
        body["offset"],
        0 if storage is None else storage,
    ):
        _check_size(size)
    if len(body["shape"]) != len(body["stride"]):
        raise DumpError(f"{len(body['stride'])} strides for shape {body['shape']}")
    return []


def _items(node: Node) -> list[Node]:
    items: list[Node] = _of_type(list, node[kind_of(node)])
    if "fields" in node:
        _of_type(str, node["name"])
        names = [_of_type(str, field) for field in _of_type(list, node["fields"])]
        if len(names) != len(items):
            raise ValueError
    return items


def _pairs(node: Node) -> list[Node]:
    return [part for key, item in _of_type(list, node["$dict"]) for part in (key, item)]


def _size_list(node: Node) -> list[Node]:
    for size in _of_type(list, node["$size"]):
        _check_size(size)
    return []


def _object(node: Node) -> list[Node]:
    _of_type(str, node["name"])
    return list(_of_type(dict, node["$dataclass"]).values())


def _quantized_tensor(node: Node) -> list[Node]:
    parts = _of_type(dict, node["$quantized_tensor"])
    if set(parts) != _QUANTIZED_TENSOR:
        raise ValueError
    return list(parts.values())


def _text(node: Node) -> list[Node]:
    _of_type(str, node[kind_of(node)])
    return []


def _enum(node: Node) -> list[Node]:
    _of_type(str, node["name"])
    return _text(node)


def _of_type(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


_CHECKS: dict[str, Callable[[Node], list[Node]]] = {
    "$tensor": _tensor,
    "$float": _text,
    "$list": _items,
    "$tuple": _items,
    "$size": _size_list,
    "$dict": _pairs,
    "$dtype": _text,
    "$device": _text,
    "$bytes": _text,
    "$enum": _enum,
    "$kv_format": _text,
    "$quantized_tensor": _quantized_tensor,
    "$dataclass": _object,
    "$opaque": _text,
}
