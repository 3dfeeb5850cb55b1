"""The implementation under test: a backend of the public functions, or interpreted launchers.

Triton's interpreter is wrong in bfloat16, so its launchers get float32 tensors, and a bfloat16
output is a float32 one there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mlacast
from mlacast.dispatch.impls import IMPLS, Impl
from mlacast.dispatch.select import load
from mlacast.ops.grouped_out_project import required_features as required_for_groups
from mlacast.ops.output import from_arguments, prepare_output
from mlacast.ops.project_weights import as_bytes
from mlacast.ops.quantized_linear import required_features as required_for_linear
from tests.fuzz.attention import Precision
from tests.fuzz.draw import Draw


@dataclass(frozen=True)
class Sizes:
    """Largest sizes of a drawn problem; heads are compile-time values of kernels."""

    tokens: int = 3
    heads: tuple[int, ...] = (1, 2, 3)
    width: int = 40
    rows: int = 50


@dataclass(frozen=True)
class Under:
    """What is tested.

    Attributes:
        device: Where tensors are.
        backend: Name for the public functions.
        interpreted: Launch the portable kernels through Triton's interpreter.
        precision: How it calculates.
        sizes: Of problems.
        exact_share: Percent of cases whose inputs are compared before and after.
    """

    device: torch.device = torch.device("cpu")
    backend: str | None = "reference"
    interpreted: bool = False
    precision: Precision = field(default_factory=Precision)
    sizes: Sizes = field(default_factory=Sizes)
    exact_share: int = 100

    @property
    def rows_dtype(self) -> torch.dtype:
        """Type of what is bfloat16 elsewhere."""
        return torch.float32 if self.interpreted else torch.bfloat16

    def unit(self, draw: Draw) -> int:
        """What divides the distances of rows: kernels with bulk copies want multiples of 16."""
        return 1 if self.device.type == "cpu" else draw.fixed.choice((16, 16, 16, 16, 1))

    def call(self, op: str, **arguments: Any) -> Any:
        """Call the operation; results are those of the public function."""
        if self.interpreted:
            return _INTERPRETED[op](_portable(op), arguments)
        return getattr(mlacast, op)(**arguments, backend=self.backend)


def _impl(op: str) -> Impl:
    (impl,) = (impl for impl in IMPLS if impl.op == op and impl.backend == "triton")
    return impl


def _portable(op: str) -> Any:
    return load(_impl(op).target)


def _place(
    op: str, arguments: dict[str, Any], shape: tuple[int, ...]
) -> tuple[Any, mlacast.QuantizedTensor, dict[str, Any]]:
    """The result object, the buffer for the launcher, and the other arguments."""
    rest = dict(arguments)
    out, fmt, groups = (
        rest.pop("out", None),
        rest.pop("out_format", None),
        rest.pop("num_groups", 1),
    )
    result, target = prepare_output(op, out, fmt, groups, shape=shape, device=torch.device("cpu"))
    buffer = from_arguments(*target[:6])
    if buffer.format.key == "bf16":
        wide = torch.full(buffer.data.shape, 7.0)
        buffer.data = wide
        if isinstance(result, mlacast.QuantizedTensor):
            result.data = wide
        else:
            result = wide.view(shape)
    return result, buffer, rest


def _with(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **given}


def _prefill(launch: Any, arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    result, buffer, rest = _place("sparse_mla_prefill", arguments, (*q.shape[:2], 512))
    options = _with(
        {
            "topk_length": None,
            "attn_sink": None,
            "q_norm_eps": None,
            "rope": None,
            "q_order": "head",
        },
        rest,
    )
    kv, indices = options.pop("kv"), options.pop("indices")
    max_logits, lse = torch.full(q.shape[:2], 7.0), torch.full(q.shape[:2], 7.0)
    if q.shape[0]:
        launch(
            options.pop("q"),
            kv[:, 0] if kv.dim() == 3 else kv,
            indices[:, 0] if indices.dim() == 3 else indices,
            **options,
            out=buffer,
            max_logits=max_logits,
            lse=lse,
        )
    return result, max_logits, lse


def _decode(launch: Any, arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    result, buffer, rest = _place("sparse_mla_decode", arguments, (*q.shape[:2], 512))
    options = _with(
        dict.fromkeys(
            (
                "topk_length",
                "extra_k_cache",
                "extra_indices",
                "extra_topk_length",
                "extra_kv_format",
                "attn_sink",
                "q_norm_eps",
                "rope",
                "num_splits",
                "workspace",
            )
        )
        | {"q_order": "head", "batch_invariant": False},
        rest,
    )
    schedule = options.pop("schedule", None)
    if schedule is not None:
        options["num_splits"] = schedule.num_splits
    lse = torch.full(q.shape[:2], 7.0)
    if q.shape[0]:
        launch(
            options.pop("q"),
            options.pop("k_cache"),
            options.pop("indices"),
            **options,
            out=buffer,
            lse=lse,
        )
    return result, lse


def _dense_decode(launch: Any, arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    result, buffer, rest = _place("dense_mla_decode", arguments, (*q.shape[:3], 512))
    options = _with({"v_scale": 1.0, "causal": True, "attn_sink": None}, rest)
    lse = torch.full(q.shape[:3], 7.0)
    if q.shape[0] * q.shape[1]:
        launch(**options, out=buffer, lse=lse)
    return result, lse


def _dense_prefill(launch: Any, arguments: dict[str, Any]) -> Any:
    q = arguments["q"]
    result, buffer, rest = _place("dense_mla_prefill", arguments, (*q.shape[:2], 128))
    options = _with({"softmax_scale": 192**-0.5, "causal": True}, rest)
    lse = torch.full((q.shape[1], q.shape[0]), 7.0)
    if q.shape[0]:
        launch(**options, out=buffer, lse=lse)
    return result, lse


def _merge(launch: Any, arguments: dict[str, Any]) -> Any:
    outs = arguments["outs"]
    result, buffer, rest = _place("merge_attention_states", arguments, tuple(outs[0].shape))
    options = _with({"lse_layout": "ht"}, rest)
    lse = torch.full(arguments["lses"][0].shape, 7.0)
    if outs[0].shape[0]:
        launch(**options, out=buffer, lse=lse)
    return result, lse


def _v_up(launch: Any, arguments: dict[str, Any]) -> Any:
    latent = arguments["latent_out"]
    result, buffer, rest = _place("v_up_project", arguments, (*latent.shape[:2], 128))
    if latent.shape[0]:
        launch(**rest, out=buffer)
    return result


_NEEDED: dict[str, Any] = {
    "grouped_out_project": required_for_groups,
    "quantized_linear": required_for_linear,
}


def _project(op: str, launch: Any, arguments: dict[str, Any]) -> Any:
    out, weight = arguments["out"], arguments["weight"]
    weight_sf = as_bytes(arguments.get("weight_sf"))
    needed = _NEEDED[op](out, weight, weight_sf, "head")
    if not needed <= _impl(op).features:
        # Dispatch keeps such a call from the launcher, which does not look again.
        return getattr(mlacast, op)(**arguments, backend="reference")
    dtype = torch.float32 if weight.dtype.itemsize == 1 else weight.dtype
    projected = torch.full((out.num_tokens, *weight.shape[:-1]), 7.0, dtype=dtype)
    if projected.numel():
        launch(out, weight, weight_sf, projected=projected)
    return projected


def _append(launch: Any, arguments: dict[str, Any]) -> None:
    options = _with({"norm_weight": None, "norm_eps": None, "rope": None}, arguments)
    if options["slots"].shape[0]:
        launch(**options)


def _gather(launch: Any, arguments: dict[str, Any]) -> Any:
    return launch(**arguments).result


_INTERPRETED: dict[str, Any] = {
    "sparse_mla_prefill": _prefill,
    "sparse_mla_decode": _decode,
    "dense_mla_decode": _dense_decode,
    "dense_mla_prefill": _dense_prefill,
    "merge_attention_states": _merge,
    "v_up_project": _v_up,
    "grouped_out_project": partial(_project, "grouped_out_project"),
    "quantized_linear": partial(_project, "quantized_linear"),
    "kv_cache_append": _append,
    "kv_cache_gather": _gather,
}


INTERPRETED = Under(
    interpreted=True,
    precision=Precision(rounds_query=False),
    sizes=Sizes(tokens=2, heads=(1, 2), width=40, rows=40),
)


def all_tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """Every tensor that is only read, those inside of descriptors too."""
    found: list[Tensor] = []
    for name, value in arguments.items():
        if name == "workspace":
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, mlacast.Rope):
            found += [value.cos_sin_cache, value.positions]
        elif isinstance(value, (list, tuple)):
            found += [part for part in value if isinstance(part, Tensor)]
    return found
