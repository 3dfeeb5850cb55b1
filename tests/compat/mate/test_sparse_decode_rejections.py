"""Wrong calls of sparse_mla_fp8_decode: MATE's type of error, the argument, what it must be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat import mate
from tests.compat.mate.calls import Call, draw_call, run

Change = Any | Callable[[Call], Any]


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Attributes:
        id: Readable name.
        argument: Argument that is replaced.
        value: The wrong value, or a function of the call that makes it.
        error: Exception type.
        message: Regular expression of the sentence after the function's name.
    """

    id: str
    argument: str
    value: Change
    error: type[Exception]
    message: str


def _strided(tensor: Tensor) -> Tensor:
    """The same shape, every other element of something wider."""
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    return wide[..., ::2]


def _metadata(call: Call, **changes: Any) -> object:
    arguments = {"query": call.query, "seq_lens": call.seq_lens, "sparse_mla_top_k": 64}
    return mate.get_batch_decode_metadata_mla(**{**arguments, **changes})


OUT = torch.zeros(2, 1, 3, 512, dtype=torch.bfloat16)
LSE = torch.zeros(2, 3)
UNSUPPORTED = mlacast.UnsupportedError
WRONG = (
    Wrong("topk_zero", "sparse_mla_top_k", 0, ValueError, "sparse_mla_top_k must be positive.* 0"),
    Wrong(
        "topk_negative", "sparse_mla_top_k", -64, ValueError, "sparse_mla_top_k must be positive"
    ),
    Wrong("lora_256", "kv_lora_rank", 256, ValueError, ".*must be 512 and 64, got 256 and 64"),
    Wrong("rope_0", "qk_rope_head_dim", 0, ValueError, ".*must be 512 and 64, got 512 and 0"),
    Wrong(
        "bmm1_tensor",
        "bmm1_scale",
        torch.ones(1),
        NotImplementedError,
        "bmm1_scale must be a number",
    ),
    Wrong(
        "bmm2_tensor",
        "bmm2_scale",
        torch.ones(1),
        NotImplementedError,
        "bmm2_scale must be a number",
    ),
    Wrong("bmm1_text", "bmm1_scale", "1", TypeError, "bmm1_scale must be a number, got str"),
    Wrong(
        "bmm2_nan",
        "bmm2_scale",
        float("nan"),
        ValueError,
        "bmm2_scale must be finite in float32, got nan",
    ),
    Wrong("sinks", "sinks", torch.zeros(3), UNSUPPORTED, "sinks must be None"),
    Wrong("sinks_listed", "sinks", [torch.zeros(3)], UNSUPPORTED, "sinks must be None"),
    Wrong(
        "skip_softmax",
        "skip_softmax_threshold_scale_factor",
        0.5,
        UNSUPPORTED,
        "skip_softmax_threshold_scale_factor must be None or 0",
    ),
    Wrong(
        "two_id_tables",
        "uses_shared_paged_kv_idx",
        False,
        UNSUPPORTED,
        "uses_shared_paged_kv_idx must be True",
    ),
    Wrong(
        "ragged",
        "cum_seq_lens_q",
        torch.tensor([0, 1, 2], dtype=torch.int32),
        UNSUPPORTED,
        "cum_seq_lens_q must be None",
    ),
    Wrong("ragged_length", "max_q_len", 1, UNSUPPORTED, "max_q_len must be None"),
    Wrong("query_list", "query", [1], TypeError, "query must be a torch.Tensor, got list"),
    Wrong("cache_none", "kv_cache", None, TypeError, "kv_cache must be a torch.Tensor, got None"),
    Wrong("ids_list", "block_tables", [[1]], TypeError, "block_tables must be a torch.Tensor"),
    Wrong(
        "cache_elsewhere",
        "kv_cache",
        lambda call: call.kv_cache.to("meta"),
        ValueError,
        "kv_cache must be on cpu like query, got meta",
    ),
    Wrong(
        "ids_elsewhere",
        "block_tables",
        lambda call: call.block_tables.to("meta"),
        ValueError,
        "block_tables must be on cpu like query, got meta",
    ),
    Wrong(
        "query_3d",
        "query",
        lambda call: call.query[0],
        ValueError,
        r"query must have shape \[B, Q, H, 576\], got \[1, 3, 576\]",
    ),
    Wrong(
        "query_512",
        "query",
        lambda call: call.query[..., :512].contiguous(),
        ValueError,
        r"query must have shape \[B, Q, H, 576\].*got \[2, 1, 3, 512\]",
    ),
    Wrong(
        "query_bf16",
        "query",
        lambda call: call.query.bfloat16(),
        TypeError,
        "query must have dtype float8_e4m3fn, got bfloat16",
    ),
    Wrong(
        "query_strided",
        "query",
        lambda call: _strided(call.query),
        TypeError,
        "query must be contiguous, got strides",
    ),
    Wrong(
        "no_query_token",
        "query",
        lambda call: call.query[:, :0],
        ValueError,
        "query must have Q of at least 1",
    ),
    Wrong(
        "no_head",
        "query",
        lambda call: call.query[:, :, :0],
        ValueError,
        "query must have H of at least 1",
    ),
    Wrong(
        "heads_96",
        "query",
        torch.zeros(2, 1, 96, 576, dtype=torch.float8_e4m3fn),
        ValueError,
        "query must have at most 64 heads or a multiple of 64, got 96",
    ),
    Wrong(
        "cache_2d",
        "kv_cache",
        lambda call: call.kv_cache[0],
        ValueError,
        r"kv_cache must have shape \[pages, page_size, 576\] or \[pages, 1, page_size, 576\]",
    ),
    Wrong(
        "cache_512",
        "kv_cache",
        lambda call: call.kv_cache[..., :512].contiguous(),
        ValueError,
        r"kv_cache must have shape .*got \[2, 53, 512\]",
    ),
    Wrong(
        "cache_two_heads",
        "kv_cache",
        torch.zeros(2, 2, 8, 576, dtype=torch.float8_e4m3fn),
        ValueError,
        r"kv_cache must have shape .*got \[2, 2, 8, 576\]",
    ),
    Wrong(
        "empty_pages",
        "kv_cache",
        lambda call: call.kv_cache[:, :0].contiguous(),
        ValueError,
        "kv_cache must have at least one token per page",
    ),
    Wrong(
        "cache_bytes",
        "kv_cache",
        lambda call: call.kv_cache.view(torch.uint8),
        TypeError,
        "kv_cache must have dtype float8_e4m3fn, got uint8",
    ),
    Wrong(
        "cache_strided",
        "kv_cache",
        lambda call: _strided(call.kv_cache),
        TypeError,
        "kv_cache must be contiguous",
    ),
    Wrong(
        "ids_2d",
        "block_tables",
        lambda call: call.block_tables[:, 0],
        ValueError,
        r"block_tables must have shape \[B, Q, K\], got \[2, 64\]",
    ),
    Wrong(
        "ids_of_other_width",
        "block_tables",
        lambda call: call.block_tables.repeat(1, 1, 2),
        ValueError,
        r"block_tables must have shape \[B, Q, K\] with B=2, Q=1, K=64, got \[2, 1, 128\]",
    ),
    Wrong(
        "ids_int64",
        "block_tables",
        lambda call: call.block_tables.long(),
        TypeError,
        "block_tables must have dtype int32, got int64",
    ),
    Wrong(
        "ids_strided",
        "block_tables",
        lambda call: _strided(call.block_tables),
        TypeError,
        "block_tables must be contiguous",
    ),
    Wrong("out_list", "out", [1], TypeError, "out must be a torch.Tensor, got list"),
    Wrong("out_shape", "out", OUT[:1], ValueError, r"out must have shape \[B, Q, H, 512\] with B="),
    Wrong("out_dtype", "out", OUT.half(), TypeError, "out must have dtype bfloat16, got float16"),
    Wrong("out_strided", "out", _strided(OUT), TypeError, "out must be contiguous"),
    Wrong("out_elsewhere", "out", OUT.to("meta"), ValueError, "out must be on cpu like query, got"),
    Wrong("lse_list", "lse", [1.0], TypeError, "lse must be a torch.Tensor or None, got list"),
    Wrong("lse_dtype", "lse", LSE.double(), TypeError, "lse must be a contiguous float32"),
    Wrong("lse_elsewhere", "lse", LSE.to("meta"), TypeError, "lse must be a contiguous .* on meta"),
    Wrong("lse_strided", "lse", _strided(LSE), TypeError, "lse must be a contiguous float32"),
    Wrong(
        "lse_shape",
        "lse",
        torch.zeros(3, 2),
        ValueError,
        r"lse must have shape \[2, 3\] or \[2, 1, 3\], got \[3, 2\]",
    ),
    Wrong(
        "no_lengths", "seq_lens", None, TypeError, "seq_lens must be a torch.Tensor, got NoneType"
    ),
    Wrong(
        "lengths_shape",
        "seq_lens",
        lambda call: call.seq_lens[:1],
        ValueError,
        r"seq_lens must have shape \[B\] or \[B, 1\] with B=2, got \[1\]",
    ),
    Wrong(
        "lengths_dtype",
        "seq_lens",
        lambda call: call.seq_lens.long(),
        TypeError,
        "seq_lens must have dtype int32, got int64",
    ),
    Wrong(
        "lengths_elsewhere",
        "seq_lens",
        lambda call: call.seq_lens.to("meta"),
        ValueError,
        "seq_lens must be on cpu like query, got meta",
    ),
    Wrong(
        "lengths_strided",
        "seq_lens",
        torch.zeros(4, dtype=torch.int32)[::2],
        ValueError,
        "seq_lens must be contiguous",
    ),
    Wrong("return_lse_int", "return_lse", 1, TypeError, "return_lse must be a bool, got int"),
    Wrong("metadata_type", "metadata", (1, 2), TypeError, "metadata must be what get_batch_decode"),
    Wrong(
        "metadata_of_other_topk",
        "metadata",
        lambda call: _metadata(call, sparse_mla_top_k=128),
        ValueError,
        "metadata must be prepared for topk=64, got 128; prepare it again",
    ),
    Wrong(
        "metadata_of_other_heads",
        "metadata",
        lambda call: _metadata(call, query=call.query[:, :, :2]),
        ValueError,
        "metadata must be prepared for heads=3, got 2; prepare it again",
    ),
    Wrong(
        "metadata_of_other_q_len",
        "metadata",
        lambda call: _metadata(call, query=call.query.repeat(1, 2, 1, 1)),
        ValueError,
        "metadata must be prepared for q_len=1, got 2; prepare it again",
    ),
    Wrong(
        "metadata_of_another_batch",
        "metadata",
        lambda call: _metadata(call, query=call.query[:1], seq_lens=call.seq_lens[:1]),
        ValueError,
        "metadata must be prepared for batch=2, got 1; prepare it again",
    ),
    Wrong(
        "metadata_elsewhere",
        "metadata",
        lambda call: _elsewhere(_metadata(call)),
        ValueError,
        "metadata must be on cpu, got meta; prepare it again",
    ),
)


def _elsewhere(metadata: Any) -> Any:
    object.__setattr__(metadata, "num_splits", metadata.num_splits.to("meta"))
    return metadata


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.id)
def test_wrong_calls_write_nothing(wrong: Wrong) -> None:
    call = draw_call((40, 3))
    out, lse = torch.full_like(OUT, 7.0), torch.full_like(LSE, 7.0)
    value = wrong.value(call) if callable(wrong.value) else wrong.value
    changes = {"out": out, "lse": lse, wrong.argument: value}
    with pytest.raises(wrong.error, match=f"sparse_mla_fp8_decode: {wrong.message}"):
        run(call, **changes)
    assert bool((out == 7.0).all()) and bool((lse == 7.0).all())


def test_the_width_is_checked_after_the_table() -> None:
    call = draw_call((40, 3))
    ids = call.block_tables[..., :60].contiguous()
    with pytest.raises(ValueError, match="block_tables must have shape"):
        run(call, sparse_mla_top_k=60)
    with pytest.raises(ValueError, match="sparse_mla_top_k must be a multiple of 64, got 60"):
        run(call, sparse_mla_top_k=60, block_tables=ids)


def test_the_width_comes_first_of_all() -> None:
    call = draw_call((40, 3))
    with pytest.raises(ValueError, match="sparse_mla_top_k must be positive"):
        run(call, sparse_mla_top_k=0, kv_lora_rank=1, query=None, bmm1_scale=torch.ones(1))


# One mistake of each stage, in the order in which MATE looks for them.
STAGES = (
    "topk_zero",
    "lora_256",
    "bmm1_tensor",
    "query_list",
    "cache_elsewhere",
    "query_3d",
    "cache_2d",
    "ids_int64",
    "out_shape",
    "lse_shape",
    "lengths_dtype",
    "metadata_type",
)


def _stage(name: str) -> Wrong:
    (wrong,) = (wrong for wrong in WRONG if wrong.id == name)
    return wrong


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for pair in itertools.combinations(STAGES, 2)
        if _stage(pair[0]).argument != _stage(pair[1]).argument
    ],
)
def test_of_two_mistakes_the_earlier_stage_is_named(first: str, second: str) -> None:
    call = draw_call((40, 3))
    changes = {
        wrong.argument: wrong.value(call) if callable(wrong.value) else wrong.value
        for wrong in (_stage(second), _stage(first))
    }
    with pytest.raises(_stage(first).error, match=_stage(first).message):
        run(call, **changes)


def test_an_lse_inside_of_out_is_refused() -> None:
    call = draw_call((40, 3))
    out = torch.zeros_like(OUT)
    lse = out.flatten()[:12].view(torch.float32).view(2, 3)
    with pytest.raises(ValueError, match="lse must not share memory with out"):
        run(call, out=out, lse=lse)


def test_an_out_inside_of_the_query_is_refused() -> None:
    call = draw_call((40, 3), heads=4)
    wide = torch.zeros(2, 1, 4, 576 * 2, dtype=torch.uint8)
    query = wide.view(-1)[: call.query.numel()].view(torch.float8_e4m3fn).view_as(call.query)
    out = wide.view(-1)[: 2 * 4 * 1024].view(torch.bfloat16).view(2, 1, 4, 512)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        run(call, query=query, out=out)
