"""``explain``: which backend a call gets, and why."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Bf16, OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.dispatch.arch import arch_of
from mlacast.dispatch.drop_ins import DROP_INS
from mlacast.dispatch.impls import BACKENDS, IMPLS, OPS
from mlacast.dispatch.select import Verdict, judge, requested_backend
from mlacast.errors import check_choice, fail
from mlacast.ops.output import D_V
from mlacast.ops.query import check_backend


@dataclass(frozen=True)
class Explanation:
    """Why a call runs where it runs.

    Attributes:
        op: Name of the operation.
        arch: Architecture the call runs on.
        requested: Backend asked for by argument or MLACAST_BACKEND, or None.
        backend: Backend that runs the call, or None if none does.
        features: What the call needs; empty when only the operation was named.
        verdicts: Every backend, candidates first in order of preference, with what it lacks.
        not_built: For a drop-in function, what of it raises here.
    """

    op: str
    arch: str
    requested: str | None
    backend: str | None
    features: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    not_built: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Several short lines of text."""
        asked = f" (asked for: {self.requested})" if self.requested else ""
        lines = [
            f"{self.op} on {self.arch}{asked}: {self.backend or 'no backend covers this call'}"
        ]
        if self.features:
            lines.append(f"  needs: {', '.join(self.features)}")
        for verdict in self.verdicts:
            lines.append(f"  {verdict.backend}: {verdict.reason or 'covers the call'}")
        lines.extend(f"  not built: {missing}" for missing in self.not_built)
        return "\n".join(lines)


def _out_format_of(bound: Mapping[str, Any]) -> str:
    for name in ("out", "out_format", "format"):
        value = bound.get(name)
        if isinstance(value, QuantizedTensor):
            return value.format.key
        if isinstance(value, OutFormat):
            return value.key
    return Bf16().key


def _group_features_of(bound: Mapping[str, Any], head_features: int) -> int:
    out, q = bound.get("out"), bound.get("q")
    if isinstance(out, QuantizedTensor):
        return out.features
    heads = q.shape[-2] if isinstance(q, torch.Tensor) else 1
    return heads * head_features // max(int(bound.get("num_groups", 1)), 1)


def _scales_of(bound: Mapping[str, Any], head_features: int) -> torch.Tensor | None:
    """Scales of the output, those of a buffer that the call would allocate on no device."""
    out, q, out_format = bound.get("out"), bound.get("q"), bound.get("out_format")
    features = _group_features_of(bound, head_features)
    # Groups of parts of heads go to the portable kernels whatever their scales.
    is_whole = features > 0 and features % head_features == 0
    if out is None and is_whole and isinstance(out_format, OutFormat):
        assert isinstance(q, torch.Tensor), "an operation that is asked for scales has a query"
        groups = q.shape[-2] * head_features // features
        out = QuantizedTensor.empty(q.shape[0], groups, features, out_format, "meta")
    return out.sf if isinstance(out, QuantizedTensor) else None


def _feature_arguments(
    bound: Mapping[str, Any], wanted: Mapping[str, Any], head_features: int
) -> dict[str, Any]:
    """Translate a public call into the arguments of the operation's ``required_features``.

    ``head_features`` is the width of a head of its output.
    """
    rope, out = bound.get("rope"), bound.get("out")
    translated: dict[str, Any] = {
        "rope_pairing": rope.pairing if isinstance(rope, Rope) else None,
        "rotates_query": rope.rotate_query if isinstance(rope, Rope) else True,
        "out_format": _out_format_of(bound),
        "format": _out_format_of(bound),
        "group_features": _group_features_of(bound, head_features),
        "out_data": out.data if isinstance(out, QuantizedTensor) else None,
        "out_sf": _scales_of(bound, head_features) if "out_sf" in wanted else None,
    }
    arguments = {}
    for name in wanted:
        value = translated[name] if name in translated else bound.get(name)
        arguments[name] = value.name if isinstance(value, KvFormat) else value
    return arguments


def _device_of(bound: Mapping[str, Any]) -> torch.device | None:
    for value in bound.values():
        candidate = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(candidate, QuantizedTensor):
            return candidate.data.device
        if isinstance(candidate, torch.Tensor):
            return candidate.device
    return None


def explain(
    op: str, *args: Any, device: torch.device | str | None = None, **kwargs: Any
) -> Explanation:
    """Say which backend a call gets and why, without running it.

    Args:
        op: Name of a public operation, such as "sparse_mla_decode"; or of an attention function of
            ``mlacast.compat.flash_mla``, ``mate`` or ``flashinfer``, such as
            "fused_norm_rope_attn_rope_cast.prefill", whose operation is then explained; of one that
            is sparse or dense, the sparse operation.
        *args: Positional arguments of that operation. None at all: the candidates for the device
            are listed.
        device: Where the call would run; None means the device of its tensors, else the CPU.
        **kwargs: Keyword arguments of that operation, ``backend`` included.

    Returns:
        An Explanation; ``print`` it.

    Raises:
        ValueError: ``op`` or ``backend`` is unknown.
        TypeError: The arguments do not fit the operation's signature.
    """
    check_choice("explain", "op", op, (*OPS, *DROP_INS))
    not_built: tuple[str, ...] = ()
    if op in DROP_INS:
        op, not_built = DROP_INS[op].op, DROP_INS[op].not_built
    module = importlib.import_module(f"mlacast.ops.{op}")
    backend = kwargs.get("backend")
    check_backend("explain", backend)
    bound: Mapping[str, Any] = {}
    features: frozenset[str] = frozenset()
    if args or set(kwargs) - {"backend"}:
        try:
            signature = inspect.signature(getattr(module, op)).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"explain: arguments must be those of {op}, got {error}") from None
        signature.apply_defaults()
        bound = signature.arguments
        wanted = inspect.signature(module.required_features).parameters
        features = module.required_features(
            **_feature_arguments(bound, wanted, getattr(module, "D_V", D_V))
        )
    place = torch.device(device) if device is not None else _device_of(bound) or torch.device("cpu")
    if place.type == "cuda" and not torch.cuda.is_available():
        fail("explain", "device", "be available here", place)
    requested = requested_backend(op, backend)
    arch = arch_of(place)
    # Kernels of one backend that lack the same are one line.
    verdicts = tuple(dict.fromkeys(judge(impl, features, arch) for impl in IMPLS if impl.op == op))
    listed = {verdict.backend for verdict in verdicts}
    verdicts += tuple(
        Verdict(name, "does not implement this operation")
        for name in BACKENDS
        if name not in listed
    )
    chosen = next(
        (v.backend for v in verdicts if v.covers and requested in (None, v.backend)), None
    )
    needs = tuple(sorted(features))
    return Explanation(op, arch, requested, chosen, needs, verdicts, not_built)
