"""What the launchers of the Hopper kernels tell them, which no machine without such a GPU runs.

Expectations are those of the kernels' docstrings: lengths are looked at where there are any, tiles
of 64 heads are full or not, page strides count 16 bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import mlacast
from mlacast import KvFormat

pytest.importorskip("triton", reason="the launchers import triton")

from mlacast.kernels.common.launch import Launches  # noqa: E402

SM90 = "mlacast.kernels.gluon.sm90"
BF16, INT32 = torch.bfloat16, torch.int32
Told = list[dict[str, Any]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Arguments by name, grid and name of every launch; nothing runs."""
    launches: Told = []

    def record(self: Launches, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        names = kernel.arg_names[: len(arguments)]
        named = dict(zip(names, arguments, strict=True))
        launches.append({**named, **constants, "grid": grid, "kernel": kernel.__name__})

    monkeypatch.setattr(Launches, "launch", record)
    return launches


def _output(tokens: int, heads: int) -> dict[str, Any]:
    buffer = mlacast.QuantizedTensor.empty(tokens, 1, heads * 512, mlacast.Mxfp8())
    return {"out": buffer, "lse": torch.zeros(tokens, heads)}


def _decode(
    heads: int = 64,
    kv_format: KvFormat = KvFormat.V41,
    *,
    q: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    **options: Any,
) -> None:
    d_qk = kv_format.d_qk or (576 if q is None else q.shape[2])
    if cache is None:
        cache = kv_format.allocate(3, 8, d_qk=None if kv_format.d_qk else d_qk)
    plain: dict[str, Any] = {
        "sm_scale": 0.1,
        "topk_length": None,
        "extra_k_cache": None,
        "extra_indices": None,
        "extra_topk_length": None,
        "extra_kv_format": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "q_order": "head",
        "num_splits": 1,
        "batch_invariant": False,
        "workspace": None,
    }
    importlib.import_module(f"{SM90}.sparse_mla_decode").launch_sparse_mla_decode(
        torch.zeros(2, heads, d_qk, dtype=BF16) if q is None else q,
        cache,
        torch.zeros(2, 130, dtype=INT32),
        kv_format=kv_format,
        **{**plain, **options},
        **_output(2, heads),
    )


def _prefill(heads: int, d_qk: int, tokens: int = 2, **options: Any) -> None:
    name = "sparse_mla_prefill" + ("_576" if d_qk == 576 else "")
    plain: dict[str, Any] = {
        "sm_scale": 0.1,
        "topk_length": None,
        "attn_sink": None,
        "q_norm_eps": None,
        "rope": None,
        "q_order": "head",
    }
    getattr(importlib.import_module(f"{SM90}.{name}"), f"launch_{name}")(
        torch.zeros(tokens, heads, d_qk, dtype=BF16),
        torch.zeros(8, d_qk, dtype=BF16),
        torch.zeros(tokens, 4, dtype=INT32),
        max_logits=torch.zeros(tokens, heads),
        **{**plain, **options},
        **_output(tokens, heads),
    )


def _rope(**options: Any) -> mlacast.Rope:
    return mlacast.Rope(torch.zeros(9, 64), torch.zeros(2, dtype=INT32), **options)


@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 48, 63, 64, 65, 96, 128])
def test_tiles_of_heads_cover_all_and_say_whether_they_are_full(heads: int, told: Told) -> None:
    _decode(heads)
    _prefill(heads, 512)
    _prefill(heads, 576)
    for launch in told:
        assert launch["WORK"].head_blocks == (heads + 63) // 64
        rows = launch.get("HEADS", 64)
        assert launch["WORK"].full_tiles == (heads % rows == 0)
        assert launch["num_heads"] == heads


@pytest.mark.parametrize(
    ("tokens", "heads", "parts", "programs"),
    [(1, 64, 2, 2), (3, 128, 2, 12), (6, 64, 2, 12), (7, 64, 1, 7), (40, 64, 1, 13)],
)
def test_few_tiles_have_two_programs_each(
    tokens: int, heads: int, parts: int, programs: int, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = importlib.import_module(f"{SM90}.sparse_mla_prefill")
    monkeypatch.setattr(prefill, "num_multiprocessors", lambda device: 13)
    _prefill(heads, 512, tokens)
    assert told[0]["WORK"].parts == parts
    assert told[0]["grid"] == (programs,)


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_each_list_has_its_own_length(main: bool, extra: bool, told: Told) -> None:
    lengths, extra_lengths = torch.tensor([5, 7], dtype=INT32), torch.tensor([1, 2], dtype=INT32)
    _decode(
        topk_length=lengths if main else None,
        extra_k_cache=KvFormat.V41.allocate(2, 4),
        extra_indices=torch.zeros(2, 20, dtype=INT32),
        extra_topk_length=extra_lengths if extra else None,
        extra_kv_format=KvFormat.V41,
    )
    (launch,) = told
    assert (launch["POOL"].has_length, launch["EXTRA"].has_length) == (main, extra)
    assert not main or launch["length_ptr"] is lengths
    assert not extra or launch["extra_length_ptr"] is extra_lengths
    assert launch["extra_topk"] == 20 and launch["topk"] == 130
    assert launch["extra_num_slots"] == 8 and launch["num_slots"] == 24


def test_a_second_list_is_not_looked_for_where_there_is_none(told: Told) -> None:
    _decode(topk_length=torch.tensor([5, 7], dtype=INT32))
    _prefill(64, 512, topk_length=torch.tensor([5, 7], dtype=INT32))
    _prefill(64, 576)
    decode, prefill, prefill_576 = told
    assert decode["POOL"].has_length and decode["EXTRA"] is None
    assert prefill["POOL"].has_length and not prefill_576["POOL"].has_length


@pytest.mark.parametrize("kv_format", [KvFormat.V4, KvFormat.V41, KvFormat.V41_INLINE])
@pytest.mark.parametrize("gap", [0, 48])
def test_page_strides_count_16_bytes(kv_format: KvFormat, gap: int, told: Told) -> None:
    step = kv_format.page_bytes(8) + gap
    width = kv_format.bytes_per_token()
    cache = torch.zeros(3 * step, dtype=torch.uint8).as_strided(
        (3, 8, 1, width), (step, width, width, 1)
    )
    _decode(kv_format=kv_format, cache=cache)
    assert told[0]["stride_page"] * 16 == step
    assert told[0]["page_size"] == 8


@pytest.mark.parametrize(
    ("rope", "prologue", "epilogue"),
    [
        (None, False, False),
        (_rope(), True, True),
        (_rope(pairing="half"), True, True),
        (_rope(rotate_query=False), False, True),
    ],
)
def test_what_is_rotated(
    rope: mlacast.Rope | None, prologue: bool, epilogue: bool, told: Told
) -> None:
    _decode(rope=rope, num_splits=2)
    attention, merge = told
    assert attention["QUERY"].is_rotated == prologue
    assert attention["END"].rotates_back == epilogue and merge["END"].rotates_back == epilogue
    half = rope is not None and rope.pairing == "half"
    query, end = attention["QUERY"], attention["END"]
    assert query.half_pairing == end.half_pairing == merge["END"].half_pairing == half


def test_outputs_of_576_wide_queries_are_not_rotated_back(told: Told) -> None:
    _decode(kv_format=KvFormat.V32, rope=_rope(), num_splits=2)
    attention, merge = told
    assert attention["QUERY"].is_rotated and attention["POOL"].record == "v32"
    assert not attention["END"].rotates_back and not merge["END"].rotates_back


@pytest.mark.parametrize("sink", [None, torch.zeros(64)])
@pytest.mark.parametrize("eps", [None, 0.0, 0.5])
def test_sinks_and_norms(sink: torch.Tensor | None, eps: float | None, told: Told) -> None:
    """An epsilon of 0 is a norm too."""
    _decode(attn_sink=sink, q_norm_eps=eps, num_splits=3)
    _prefill(64, 512, attn_sink=sink, q_norm_eps=eps)
    attention, merge, prefill = told
    assert attention["QUERY"].has_norm == prefill["QUERY"].has_norm == (eps is not None)
    assert attention["eps"] == prefill["eps"] == (eps or 0.0)
    has_sink = sink is not None
    assert attention["END"].has_sink == merge["END"].has_sink == prefill["END"].has_sink == has_sink
    assert merge["num_splits"] == attention["num_splits"] == 3 and attention["WORK"].is_split


def test_scales_that_are_tensors_are_read_on_the_device(told: Told) -> None:
    scale = torch.ones(1)
    _decode(sm_scale=scale)
    _decode(v_scale=scale)
    first, second = told
    assert first["SCALES"] == (True, False) and second["SCALES"] == (False, True)
    assert first["sm_scale_ptr"] is scale and second["v_scale_ptr"] is scale
    assert second["sm_scale"] == 0.1


def _codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("d_qk", "rope"), [(576, None), (512, None), (512, _rope())])
def test_codes_of_queries_are_multiplied_as_they_are(
    d_qk: int, rope: mlacast.Rope | None, told: Told
) -> None:
    if rope is not None:
        rope = _rope(rotate_query=False)
    sink, lengths = torch.zeros(48), torch.zeros(2, dtype=INT32)
    options: dict[str, Any] = {"rope": rope, "attn_sink": sink, "topk_length": lengths}
    q = _codes(2, 48, d_qk)
    _decode(48, KvFormat.FP8, q=q, num_splits=3, sm_scale=torch.ones(1), **options)
    attention, merge = told
    assert attention["kernel"] == "sparse_mla_decode_fp8_kernel"
    assert attention["POOL"].record == f"fp8_{d_qk}"
    assert attention["q_ptr"].dtype == INT32 and attention["q_ptr"].data_ptr() == q.data_ptr()
    assert attention["END"].rotates_back == merge["END"].rotates_back == (rope is not None)
    assert attention["END"].has_sink and attention["sink_ptr"] is sink
    assert attention["POOL"].has_length and attention["length_ptr"] is lengths
    assert attention["SCALES"] == (True, False)
    assert not attention["WORK"].full_tiles and attention["num_heads"] == 48
    assert attention["WORK"].is_split and attention["num_splits"] == merge["num_splits"] == 3


@pytest.mark.parametrize("d_qk", [512, 576])
def test_other_queries_over_such_caches_are_multiplied_in_bfloat16(d_qk: int, told: Told) -> None:
    q = torch.zeros(2, 16, d_qk, dtype=BF16)
    _decode(16, KvFormat.FP8, q=q)
    (launch,) = told
    assert launch["kernel"] == "sparse_mla_decode_kernel" and launch["q_ptr"] is q
    assert (launch["stride_q_token"], launch["stride_q_head"]) == (16 * d_qk, d_qk)


@pytest.mark.parametrize("heads", [16, 5, 32, 24])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_few_heads_are_one_program_a_token_unless_split(
    heads: int, num_splits: int, told: Told
) -> None:
    sink, positions = torch.zeros(heads), _rope()
    _decode(heads, num_splits=num_splits, attn_sink=sink, rope=positions)
    launch = told[0]
    if num_splits > 1:
        assert [step["kernel"] for step in told] == [
            "sparse_mla_decode_kernel",
            "merge_splits_kernel",
        ]
        return
    assert launch["kernel"] == "sparse_mla_decode_few_kernel" and len(told) == 1
    assert launch["grid"] == (2,) == (launch["num_tokens"],)
    assert launch["HEADS"] == (16 if heads <= 16 else 32) and launch["num_heads"] == heads
    assert launch["WORK"] == (1, heads == launch["HEADS"], False)
    assert launch["sink_ptr"] is sink and launch["END"].has_sink
    assert launch["positions_ptr"] is positions.positions


def test_strides_of_codes_count_16_bytes(told: Told) -> None:
    wide = _codes(5, 20, 640)
    q = wide[1:5:2, 2:18, 16 : 16 + 576]
    _decode(16, KvFormat.FP8, q=q)
    (launch,) = told
    assert launch["stride_q_token"] * 16 == 2 * 20 * 640
    assert launch["stride_q_head"] * 16 == 640
    assert launch["q_ptr"].data_ptr() == wide.data_ptr() + 20 * 640 + 2 * 640 + 16


def _extra_pool() -> dict[str, Any]:
    return {
        "extra_k_cache": KvFormat.FP8.allocate(2, 4, d_qk=512),
        "extra_indices": torch.zeros(2, 20, dtype=INT32),
        "extra_kv_format": KvFormat.FP8,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"q_norm_eps": 1e-6},
        {"rope": _rope()},
        {"q_order": "chunk16"},
        {"kv_format": KvFormat.V41},
        _extra_pool(),
        {"q": _codes(2, 64, 520)[:, :, :512]},
        {"q": _codes(2 * 64 * 512 + 8).as_strided((2, 64, 512), (64 * 512 + 8, 512, 1))},
    ],
    ids=["norm", "rotation", "order", "format", "second pool", "heads", "tokens"],
)
def test_codes_are_launched_for_nothing_that_their_kernel_leaves_out(
    options: dict[str, Any], told: Told
) -> None:
    """The operation checks or dispatches all of it: a launch would give other numbers."""
    given = {"q": _codes(2, 64, 512), "kv_format": KvFormat.FP8, **options}
    with pytest.raises(AssertionError, match="codes|16 bytes"):
        _decode(**given)
    assert not told


@pytest.mark.parametrize("step", [0, 7, 10**9])
def test_copies_of_a_single_row_need_no_stride(step: int, told: Told) -> None:
    """BC-31: what a tensor of one token carries as its token stride means nothing.

    The copy engine refuses strides that are no multiples of 16 bytes.
    """
    flat = torch.zeros(4096, dtype=BF16)
    q, k = (flat.as_strided((1, 2, 192), (step, 192, 1)) for _ in range(2))
    v = flat.as_strided((1, 1, 128), (step, step, 1)).expand(1, 2, 128)
    importlib.import_module(f"{SM90}.dense_mla_prefill").launch_dense_mla_prefill(
        q,
        k,
        v.contiguous(),
        cu_seqlens_q=torch.tensor([0, 1], dtype=INT32),
        cu_seqlens_k=torch.tensor([0, 1], dtype=INT32),
        max_seqlen_q=1,
        max_seqlen_k=1,
        softmax_scale=0.1,
        causal=True,
        out=mlacast.QuantizedTensor.empty(1, 1, 256, mlacast.Bf16()),
        lse=torch.zeros(2, 1),
    )
    descriptors = [value for value in told[-1].values() if hasattr(value, "block_shape")]
    assert len(descriptors) == 3
    for descriptor in descriptors:
        assert descriptor.strides[0] * 2 % 16 == 0
        assert descriptor.strides[0] >= descriptor.shape[1]
