"""Later calls of every function that an engine calls per layer launch what the first one does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mlacast
from mlacast.compat import flash_attn, flash_mla, flashinfer, mate
from mlacast.ops.decode_metadata import decode_metadata
from tests.kernels.fake_gpu import FakeGpu, fake_gpu
from tests.kernels.repeated import assert_repeated

pytest.importorskip("triton", reason="the portable kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Arguments = dict[str, Any]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.setenv("MLACAST_BACKEND", "triton")
    with fake_gpu(monkeypatch) as fake:
        yield fake


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(FP8)


def _append(**changes: Any) -> Arguments:
    return {
        "latent": _bf16(3, 512),
        "slots": torch.zeros(3, dtype=torch.int64),
        "cache": mlacast.KvFormat.V4.allocate(2, 4),
        "kv_format": mlacast.KvFormat.V4,
        **changes,
    }


def _normed_append() -> Arguments:
    rope = mlacast.Rope(torch.zeros(9, 64), torch.zeros(3, dtype=torch.int64), "half")
    return _append(norm_weight=_bf16(512), norm_eps=1e-6, rope=rope)


def _gather() -> Arguments:
    return {name: value for name, value in _append().items() if name != "latent"}


def _decode_metadata() -> Arguments:
    return {"lengths": _ints(3), "num_parts": 4, "topk": 128}


def _rope_quantize() -> Arguments:
    return {
        # A slice of wider rows.
        "q_rope": _bf16(3, 4, 192)[..., 128:],
        "k_rope": _bf16(3, 64),
        "q_nope": None,
        "k_nope": _bf16(3, 512),
        "cos_sin_cache": torch.zeros(9, 64),
        "positions": torch.zeros(3, dtype=torch.int64),
        "dtype": torch.float8_e5m2,
    }


def _flashinfer_rope_quantize() -> Arguments:
    arguments = _rope_quantize()
    del arguments["dtype"]
    positions = arguments.pop("positions")
    return {
        **arguments,
        "pos_ids": positions,
        "q_nope": _bf16(4, 3, 512).transpose(0, 1),
        "q_nope_out": _fp8(3, 4, 512),
    }


def _mate_rope_quantize() -> Arguments:
    arguments = _flashinfer_rope_quantize()
    del arguments["q_nope_out"]
    return arguments


def _rope_quantize_append() -> Arguments:
    cache = _fp8(2, 4, 512), _fp8(2, 4, 64)
    page_table = {"kv_indices": _ints(2), "kv_indptr": _ints(2)}
    page_table |= {"batch_indices": _ints(3), "positions": _ints(3)}
    arguments = {**_mate_rope_quantize(), "v": None, "paged_kv_cache": cache, **page_table}
    return {**arguments, "page_size": 4, "is_neox": False}


def _merge() -> Arguments:
    return {"outs": [_bf16(2, 3, 128)] * 2, "lses": [torch.zeros(3, 2) for _ in range(2)]}


def _v_up() -> Arguments:
    out = mlacast.QuantizedTensor.empty(2, 1, 512, mlacast.Fp8Tensor(torch.ones(1)))
    return {"latent_out": _bf16(2, 4, 512), "w_uv": _bf16(4, 512, 128), "out": out}


def _dense_prefill(**changes: Any) -> Arguments:
    return {
        "q": _bf16(2, 4, 192),
        "k": _bf16(3, 2, 192),
        "v": _bf16(3, 2, 128),
        "cu_seqlens_q": _ints(2),
        "cu_seqlens_k": _ints(2),
        "max_seqlen_q": 2,
        "max_seqlen_k": 3,
        **changes,
    }


def _varlen() -> Arguments:
    return _dense_prefill(causal=True, return_softmax_lse=True)


def _dense_decode() -> Arguments:
    return {
        "q": _bf16(2, 3, 4, 576),
        "k_cache": _bf16(4, 64, 1, 576),
        "page_table": _ints(2, 2),
        "seq_lens": _ints(2),
        "kv_format": mlacast.KvFormat.BF16,
        "sm_scale": 0.1,
        # Tokens apart from each other, so the operator gets a view of it.
        "out": _bf16(2, 3, 4, 1024)[..., :512],
    }


def _sparse_fwd() -> Arguments:
    return {
        "q": _bf16(2, 4, 512),
        "kv": _bf16(9, 1, 512),
        "indices": _ints(2, 1, 5),
        "sm_scale": 0.5,
        "topk_length": _ints(2),
    }


def _metadata(
    make: Callable[[flash_mla.FlashMLASchedMeta], Arguments],
) -> flash_mla.FlashMLASchedMeta:
    """An object that a call of these shapes has filled."""
    metadata, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(**make(metadata))
    return metadata


def _with_kvcache(metadata: flash_mla.FlashMLASchedMeta) -> Arguments:
    return {
        "q": _bf16(2, 1, 4, 512),
        "k_cache": mlacast.KvFormat.V4.allocate(2, 8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "is_fp8_kvcache": True,
        "indices": _ints(2, 1, 5),
        "topk_length": _ints(2),
        "extra_k_cache": mlacast.KvFormat.V4.allocate(2, 16),
        "extra_indices_in_kvcache": _ints(2, 1, 3),
        "out": _bf16(2, 1, 4, 512),
    }


def _dense_with_kvcache(metadata: flash_mla.FlashMLASchedMeta) -> Arguments:
    return {
        "q": _bf16(2, 1, 4, 576),
        "k_cache": _bf16(3, 64, 1, 576),
        "block_table": _ints(2, 2),
        "cache_seqlens": _ints(2),
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "causal": True,
    }


def _trtllm(**changes: Any) -> Arguments:
    return {
        "query": _bf16(2, 1, 4, 576),
        "kv_cache": _bf16(3, 64, 576),
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": _ints(2, 2),
        "seq_lens": _ints(2),
        "max_seq_len": 128,
        "out": _bf16(2, 1, 4, 512),
        "bmm1_scale": 0.1,
        "bmm2_scale": torch.ones(1),
        **changes,
    }


def _trtllm_packed() -> Arguments:
    cache = torch.zeros(3, 64, 656, dtype=torch.uint8)
    lists = {"block_tables": _ints(2, 1, 128), "sparse_mla_top_k": 128, "seq_lens": _ints(2)}
    return _trtllm(kv_cache=cache, bmm2_scale=1.0, **lists)


def _dsv4() -> Arguments:
    return {
        "query": _bf16(2, 1, 64, 512),
        "swa_kv_cache": torch.zeros(2, 64, 584, dtype=torch.uint8),
        "workspace_buffer": None,
        "sparse_indices": _ints(2, 128),
        "swa_topk_lens": _ints(2),
        "bmm1_scale": 0.1,
        "out": _bf16(2, 1, 64, 512),
    }


def _mate_decode() -> Arguments:
    return {
        "query": _fp8(2, 1, 64, 576),
        "kv_cache": _fp8(3, 64, 576),
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": _ints(2, 1, 64),
        "seq_lens": _ints(2),
        "max_seq_len": 64,
        "sparse_mla_top_k": 64,
        "out": _bf16(2, 1, 64, 512),
        "bmm1_scale": 0.1,
    }


def _mate_planned_decode() -> Arguments:
    arguments = _mate_decode()
    plan = mate.get_batch_decode_metadata_mla(arguments["query"], arguments["seq_lens"], 64)
    return {**arguments, "metadata": plan}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "append": (mlacast.kv_cache_append, _append),
    "append with norm and rope": (mlacast.kv_cache_append, _normed_append),
    "gather": (mlacast.kv_cache_gather, _gather),
    "decode_metadata": (decode_metadata, _decode_metadata),
    "rope_quantize_fp8": (mlacast.rope_quantize_fp8, _rope_quantize),
    "merge": (mlacast.merge_attention_states, _merge),
    "v_up_project": (mlacast.v_up_project, _v_up),
    "dense prefill": (mlacast.dense_mla_prefill, _dense_prefill),
    "dense decode": (mlacast.dense_mla_decode, _dense_decode),
    "flash_mla sparse": (flash_mla.flash_mla_sparse_fwd, _sparse_fwd),
    "flash_attn": (flash_attn.flash_attn_varlen_func, _varlen),
    "flashinfer rope": (flashinfer.rope_quantize_fp8, _flashinfer_rope_quantize),
    "flashinfer mla rope": (flashinfer.mla_rope_quantize_fp8, _flashinfer_rope_quantize),
    "flashinfer append": (
        flashinfer.rope_quantize_fp8_append_paged_kv_cache,
        _rope_quantize_append,
    ),
    "trtllm dense": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, _trtllm),
    "trtllm packed": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, _trtllm_packed),
    "trtllm dsv4": (flashinfer.trtllm_batch_decode_sparse_mla_dsv4, _dsv4),
    "mate rope": (mate.mla_rope_quantize_fp8, _mate_rope_quantize),
    "mate decode": (mate.sparse_mla_fp8_decode, _mate_decode),
    "mate decode with a plan": (mate.sparse_mla_fp8_decode, _mate_planned_decode),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call(name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call, make = CALLS[name]
    assert_repeated(call, make, gpu, monkeypatch)


@pytest.mark.parametrize("make", [_with_kvcache, _dense_with_kvcache])
def test_a_repeated_call_with_a_scheduling_object(
    make: Callable[[flash_mla.FlashMLASchedMeta], Arguments],
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = _metadata(make)
    call = flash_mla.flash_mla_with_kvcache
    assert_repeated(call, lambda: make(metadata), gpu, monkeypatch)


def test_a_scheduling_object_of_other_shapes_is_refused_every_time(gpu: FakeGpu) -> None:
    call = flash_mla.flash_mla_with_kvcache
    good, other = _metadata(_with_kvcache), _metadata(_dense_with_kvcache)
    for _ in range(4):
        call(**_with_kvcache(good))
        with pytest.raises(ValueError, match="tile_scheduler_metadata must be used with"):
            call(**_with_kvcache(other))
    new, _ = flash_mla.get_mla_metadata()
    call(**_with_kvcache(new))
    assert new.have_initialized, "an empty one is filled, however well the call is known"


def test_a_plan_of_other_shapes_is_refused_every_time(gpu: FakeGpu) -> None:
    good = _mate_planned_decode()
    other = mate.get_batch_decode_metadata_mla(_fp8(3, 1, 64, 576), _ints(3), 64)
    for _ in range(4):
        mate.sparse_mla_fp8_decode(**good)
        with pytest.raises(ValueError, match="metadata must be prepared for batch=2"):
            mate.sparse_mla_fp8_decode(**{**good, "metadata": other})


def test_what_a_call_does_besides_launching_is_done_every_time(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    lse = torch.zeros(2, 4)
    arguments = _trtllm(return_lse=True, lse=lse)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(0.0)
    )
    for _ in range(4):
        lse.fill_(1.0)
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        assert lse.tolist() == [[0.0] * 4] * 2, "log2 of what the kernel left"
    by_head = torch.ones(2, 64)
    for _ in range(4):
        by_head.fill_(1.0)
        mate.sparse_mla_fp8_decode(**_mate_decode(), lse=by_head)
        assert by_head.tolist() == [[0.0] * 64] * 2


def test_starts_of_requests_are_read_every_time(gpu: FakeGpu) -> None:
    ragged = _trtllm_packed() | {"query": _bf16(2, 4, 576), "out": _bf16(2, 4, 512)}
    ragged |= {"block_tables": _ints(2, 128)}
    good, bad = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 1, 2], [0, 2, 1]))
    call = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    for _ in range(4):
        call(**ragged, cum_seq_lens_q=good)
        with pytest.raises(ValueError, match="cum_seq_lens_q must not decrease"):
            call(**ragged, cum_seq_lens_q=bad)


def test_the_end_of_a_buffer_is_looked_for_every_time(gpu: FakeGpu) -> None:
    """Whether codes end with their buffer, whose padding is zeroed then, shows in their storage."""
    whole, part = _fp8(3, 4, 128), _fp8(5, 4, 128)[:3]
    scales = torch.zeros(4, 1, 4).permute(2, 0, 1)[:3]
    numbers = []
    for out in (whole, part) * 4:
        gpu.runs.clear()
        arguments = _dense_prefill(q=_bf16(3, 4, 192))
        flash_attn.flash_attn_varlen_func(**arguments, out=out, output_scales=scales)
        values = gpu.runs[0][1][9:]
        numbers.append([v for v in values if isinstance(v, int) and v < 2**20])
    assert numbers == numbers[:2] * 4
    assert numbers[0] != numbers[1]
