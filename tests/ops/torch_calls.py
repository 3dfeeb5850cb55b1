"""Ways to look at a call from torch's side: the operators it dispatches to, and a run on fake
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import mlacast
from mlacast.ops.decode_metadata import decode_metadata
from tests.oracles import exact_queries, exact_rope_table
from tests.scenarios import CacheCase, draw_indices


@dataclass(frozen=True)
class OperatorCall:
    """One dispatched ``torch.ops.mlacast`` operator with copies of the arguments it got."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _copy(value: Any) -> Any:
    """The same strided view on a copy of the whole storage, so that padding and gaps survive."""
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()
    flat = torch.empty(0, dtype=value.dtype).set_(storage.untyped_storage())
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


class RecordOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the mlacast operators that run inside the block, before they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "mlacast":
            self.calls.append(
                OperatorCall(func, tree_map(_copy, args), tree_map(_copy, dict(kwargs or {})))
            )
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], Any]) -> list[OperatorCall]:
    """The mlacast operators that ``call`` dispatches to."""
    record = RecordOperators()
    with record:
        call()
    return record.calls


def describe(result: Any) -> list[tuple[Any, ...]]:
    """Shape, stride, dtype and device of every tensor in a result, buffers opened up."""
    tensors: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, mlacast.QuantizedTensor):
            collect(value.data)
            collect(value.sf)
        elif isinstance(value, (tuple, list)):
            for item in value:
                collect(item)

    collect(result)
    return [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device.type) for t in tensors]


def describe_on_fakes(call: Callable[..., Any], *tensors: Tensor) -> list[tuple[Any, ...]]:
    """``describe`` of the call run on fake copies of its tensors: no kernel can run, only the fakes
    answer.
    """
    with FakeTensorMode() as mode:
        return describe(call(*(mode.from_tensor(tensor) for tensor in tensors)))


@dataclass(frozen=True)
class OpCase:
    """A public call reduced to a function of tensors.

    Attributes:
        name: The public op and its operator.
        call: Takes the tensors of ``make``.
        make: ``make(tokens)`` draws the tensors; the first one has the tokens along ``token_dim``.
        variant: What sets the case apart from others of the same op.
        mutates_input: The op writes into one of its tensors by contract.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[int], tuple[Tensor, ...]]
    variant: str = "bf16"
    mutates_input: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}-{self.variant}"


def op_case_id(case: OpCase) -> str:
    """Readable parametrisation id."""
    return case.id


def _draw_prefill(tokens: int) -> tuple[Tensor, ...]:
    positions = torch.arange(tokens, dtype=torch.int32) % 5
    lengths = torch.arange(tokens, dtype=torch.int32) % 6
    indices = draw_indices(tokens, 5, 7)
    q = exact_queries(2, tokens, 512).transpose(0, 1)
    return (
        q,
        indices,
        positions,
        lengths,
        torch.randn(7, 512).bfloat16(),
        exact_rope_table(5),
        torch.zeros(2),
    )


def _prefill(out_format: mlacast.OutFormat | None) -> Callable[..., Any]:
    def call(
        q: Tensor,
        indices: Tensor,
        positions: Tensor,
        lengths: Tensor,
        kv: Tensor,
        table: Tensor,
        sink: Tensor,
    ) -> Any:
        return mlacast.sparse_mla_prefill(
            q,
            kv,
            indices,
            sm_scale=0.02,
            topk_length=lengths,
            attn_sink=sink,
            q_norm_eps=1e-6,
            rope=mlacast.Rope(table, positions),
            out_format=out_format,
            num_groups=2 if out_format is not None else 1,
        )

    return call


def _draw_decode(tokens: int) -> tuple[Tensor, ...]:
    main = CacheCase("V41", 512).fill(num_pages=2, page_size=3, slots=range(6))
    extra = CacheCase("V41_FP4", 512).fill(num_pages=2, page_size=2, slots=range(4))
    q = exact_queries(tokens, 2, 512)
    return q, draw_indices(tokens, 5, 6), draw_indices(tokens, 9, 4), main.cache, extra.cache


def _decode(out_format: mlacast.OutFormat | None, num_splits: int | None) -> Callable[..., Any]:
    def call(
        q: Tensor, indices: Tensor, extra_indices: Tensor, cache: Tensor, extra: Tensor
    ) -> Any:
        return mlacast.sparse_mla_decode(
            q,
            cache,
            indices,
            kv_format=mlacast.KvFormat.V41,
            sm_scale=0.02,
            extra_k_cache=extra,
            extra_indices=extra_indices,
            extra_kv_format=mlacast.KvFormat.V41_FP4,
            num_splits=num_splits,
            out_format=out_format,
        )

    return call


def _draw_dense(tokens: int) -> tuple[Tensor, ...]:
    cache = torch.randn(3, 2, 1, 576).bfloat16()
    table = torch.randint(0, 3, (tokens, 2), dtype=torch.int32)
    lens = torch.arange(tokens, dtype=torch.int32) % 5
    return exact_queries(tokens, 2, 2, 576), table, lens, cache


def _dense(q: Tensor, table: Tensor, lens: Tensor, cache: Tensor) -> Any:
    return mlacast.dense_mla_decode(
        q, cache, table, lens, kv_format=mlacast.KvFormat.BF16, sm_scale=0.02
    )


def _draw_fp8_decode(tokens: int) -> tuple[Tensor, ...]:
    cache = CacheCase("FP8", 512).fill(num_pages=2, page_size=3, slots=range(6)).cache
    q = torch.randn(tokens, 2, 512).to(torch.float8_e4m3fn)
    positions = torch.arange(tokens, dtype=torch.int32) % 5
    return (
        q,
        draw_indices(tokens, 5, 6),
        positions,
        cache,
        exact_rope_table(5),
        torch.full((1,), 0.02),
        torch.tensor(1.5),
    )


def _fp8_decode(
    q: Tensor,
    indices: Tensor,
    positions: Tensor,
    cache: Tensor,
    table: Tensor,
    sm_scale: Tensor,
    v_scale: Tensor,
) -> Any:
    return mlacast.sparse_mla_decode(
        q,
        cache,
        indices,
        kv_format=mlacast.KvFormat.FP8,
        sm_scale=sm_scale,
        v_scale=v_scale,
        rope=mlacast.Rope(table, positions, rotate_query=False),
    )


def _draw_fp8_dense(tokens: int) -> tuple[Tensor, ...]:
    q, table, lens, _ = _draw_dense(tokens)
    cache = CacheCase("FP8", 576).fill(num_pages=3, page_size=2, slots=range(6)).cache
    return q.to(torch.float8_e4m3fn), table, lens, cache, torch.full((1,), 0.02)


def _fp8_dense(q: Tensor, table: Tensor, lens: Tensor, cache: Tensor, sm_scale: Tensor) -> Any:
    return mlacast.dense_mla_decode(
        q, cache, table, lens, kv_format=mlacast.KvFormat.FP8, sm_scale=sm_scale, v_scale=2.0
    )


def _draw_lengths(tokens: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 3000, (tokens,), dtype=torch.int32),)


def _plan(lengths: Tensor) -> Any:
    return decode_metadata(lengths, num_parts=7, topk=2048)


def _draw_merge(tokens: int) -> tuple[Tensor, ...]:
    outs = [torch.randn(tokens, 2, 512).bfloat16() for _ in range(2)]
    return (*outs, *(torch.randn(tokens, 2) for _ in range(2)))


def _merge(left: Tensor, right: Tensor, left_lse: Tensor, right_lse: Tensor) -> Any:
    return mlacast.merge_attention_states([left, right], [left_lse, right_lse], lse_layout="th")


def _draw_dense_prefill(tokens: int) -> tuple[Tensor, ...]:
    first = tokens // 2
    bounds = torch.tensor([0, first, tokens], dtype=torch.int32)
    q = torch.randn(6, tokens, 192).bfloat16().transpose(0, 1)
    kv = torch.randn(7, 2, 256).bfloat16()
    keys = torch.tensor([0, 3, 7], dtype=torch.int32)
    return q, torch.randn(7, 2, 192).bfloat16(), kv[..., 128:], bounds, keys


def _dense_prefill(out_format: mlacast.OutFormat | None) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, keys: Tensor) -> Any:
        return mlacast.dense_mla_prefill(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=keys,
            max_seqlen_q=q.shape[0],
            max_seqlen_k=k.shape[0],
            out_format=out_format,
        )

    return call


def _draw_latent(tokens: int) -> tuple[Tensor, ...]:
    return torch.randn(tokens, 2, 512).bfloat16(), torch.randn(2, 512, 128).bfloat16()


def _v_up(out_format: mlacast.OutFormat | None) -> Callable[..., Any]:
    def call(latent: Tensor, w_uv: Tensor) -> Any:
        return mlacast.v_up_project(latent, w_uv, out_format=out_format)

    return call


def _quantize(out_format: mlacast.OutFormat) -> Callable[..., Any]:
    def call(x: Tensor) -> Any:
        return mlacast.quantize_output(x, out_format, num_groups=2)

    return call


def _draw_rows(tokens: int) -> tuple[Tensor, ...]:
    return (torch.randn(tokens, 2048),)


def _draw_gather(tokens: int) -> tuple[Tensor, ...]:
    filled = CacheCase("V4", 512).fill(num_pages=2, page_size=3, slots=range(6))
    return torch.arange(tokens) - 1, filled.cache


def _gather(slots: Tensor, cache: Tensor) -> Any:
    return mlacast.kv_cache_gather(cache, slots, mlacast.KvFormat.V4)


def _draw_append(tokens: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(tokens, 512).bfloat16(),
        torch.arange(tokens) - 1,
        mlacast.KvFormat.V4.allocate(2, 3),
    )


def _append(latent: Tensor, slots: Tensor, cache: Tensor) -> Any:
    return mlacast.kv_cache_append(latent, slots, cache, mlacast.KvFormat.V4)


def _draw_fused_append(tokens: int) -> tuple[Tensor, ...]:
    weight, table = torch.randn(512), exact_rope_table(5)
    return (*_draw_append(tokens), torch.arange(tokens) % 5, weight, table)


def _fused_append(
    latent: Tensor, slots: Tensor, cache: Tensor, positions: Tensor, weight: Tensor, table: Tensor
) -> Any:
    return mlacast.kv_cache_append(
        latent,
        slots,
        cache,
        mlacast.KvFormat.V4,
        norm_weight=weight,
        norm_eps=1e-6,
        rope=mlacast.Rope(table, positions),
    )


def _draw_rope_quantize(tokens: int) -> tuple[Tensor, ...]:
    q, k = torch.randn(tokens, 2, 576).bfloat16(), torch.randn(tokens, 576).bfloat16()
    return q, k, torch.arange(tokens) % 5, exact_rope_table(5)


def _rope_quantize(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Any:
    return mlacast.rope_quantize_fp8(
        q[..., 512:], k[..., 512:], q[..., :512], k[..., :512], table, positions, q_scale=2.0
    )


def _draw_project(tokens: int) -> tuple[Tensor, ...]:
    buffer = mlacast.quantize_output(torch.randn(tokens, 1024), mlacast.Mxfp8(), num_groups=2)
    assert buffer.sf is not None
    return buffer.data, buffer.sf, torch.randn(2, 8, 512)


def _project(data: Tensor, sf: Tensor, weight: Tensor) -> Any:
    return mlacast.grouped_out_project(mlacast.QuantizedTensor(data, sf, mlacast.Mxfp8()), weight)


def _draw_quantised_project(tokens: int) -> tuple[Tensor, ...]:
    data, sf, weight = _draw_project(tokens)
    scales = torch.randint(120, 130, (2, 8, 4), dtype=torch.int32)
    return data, sf, weight.to(torch.float8_e4m3fn), scales


def _quantised_project(data: Tensor, sf: Tensor, weight: Tensor, scales: Tensor) -> Any:
    out = mlacast.QuantizedTensor(data, sf, mlacast.Mxfp8())
    return mlacast.grouped_out_project(out, weight, weight_sf=scales)


def _draw_linear(tokens: int) -> tuple[Tensor, ...]:
    data, sf, _ = _draw_project(tokens)
    return data, sf, torch.randn(8, 1024).to(torch.float8_e4m3fn), torch.rand(1, 8)


def _linear(data: Tensor, sf: Tensor, weight: Tensor, scales: Tensor) -> Any:
    out = mlacast.QuantizedTensor(data, sf, mlacast.Mxfp8())
    return mlacast.quantized_linear(out, weight, weight_sf=scales)


PREFILL_CASES = (
    OpCase("sparse_mla_prefill", _prefill(None), _draw_prefill),
    OpCase("sparse_mla_prefill", _prefill(mlacast.Mxfp8(order="chunk32")), _draw_prefill, "mxfp8"),
    OpCase("sparse_mla_prefill", _prefill(mlacast.Nvfp4(672.0)), _draw_prefill, "nvfp4"),
    OpCase("sparse_mla_prefill", _prefill(mlacast.Fp8Tensor(0.03)), _draw_prefill, "fp8_tensor"),
)
DECODE_CASES = (
    OpCase("sparse_mla_decode", _decode(None, None), _draw_decode),
    OpCase("sparse_mla_decode", _decode(mlacast.Fp8Group(64), 3), _draw_decode, "fp8_group_splits"),
    OpCase("sparse_mla_decode", _fp8_decode, _draw_fp8_decode, "codes_and_device_scales"),
)
OTHER_CASES = (
    OpCase("dense_mla_decode", _dense, _draw_dense),
    OpCase("dense_mla_decode", _fp8_dense, _draw_fp8_dense, "codes_and_device_scales"),
    OpCase("dense_mla_prefill", _dense_prefill(None), _draw_dense_prefill),
    OpCase("dense_mla_prefill", _dense_prefill(mlacast.Nvfp4(672.0)), _draw_dense_prefill, "nvfp4"),
    OpCase("v_up_project", _v_up(None), _draw_latent),
    OpCase("v_up_project", _v_up(mlacast.Fp8Group(128)), _draw_latent, "fp8_group"),
    OpCase("decode_metadata", _plan, _draw_lengths, "plan"),
    OpCase("merge_attention_states", _merge, _draw_merge),
    OpCase("quantize_output", _quantize(mlacast.Mxfp8()), _draw_rows, "mxfp8"),
    OpCase("quantize_output", _quantize(mlacast.Nvfp4(672.0)), _draw_rows, "nvfp4"),
    OpCase("kv_cache_gather", _gather, _draw_gather, "v4"),
    OpCase("kv_cache_append", _append, _draw_append, "v4", mutates_input=True),
    OpCase("kv_cache_append", _fused_append, _draw_fused_append, "fused", mutates_input=True),
    OpCase("rope_quantize_fp8", _rope_quantize, _draw_rope_quantize, "e4m3"),
    OpCase("grouped_out_project", _project, _draw_project, "mxfp8"),
    OpCase("grouped_out_project", _quantised_project, _draw_quantised_project, "codes"),
    OpCase("quantized_linear", _linear, _draw_linear, "codes"),
)
OP_CASES = PREFILL_CASES + DECODE_CASES + OTHER_CASES
