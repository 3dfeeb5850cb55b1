"""Caller-owned outputs: exactly the elements of the given views are written.

BC-34, deepseek-ai/TileKernels#15 (also Dao-AILab/flash-attention#2670): tail tiles stored outside
the grid, kernels assumed contiguous outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, FormatCase, buffer_bytes, case_id, poisoned_buffer
from tests.oracles import same_bits

POISON = 0x5A5A
BEFORE, AFTER = 2, 2


def _parents(tokens: int, heads: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(parent, view [tokens, heads, 512]) pairs whose parent has something around every row."""

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.int16).view(torch.bfloat16)

    rows = BEFORE + tokens + AFTER
    wide = poisoned(rows, heads * 512 + 48)
    padded_heads = poisoned(rows, heads, 560)
    more_heads = poisoned(rows, heads + 2, 512)
    return {
        "wide_rows": (
            wide,
            wide[BEFORE : BEFORE + tokens, : heads * 512].view(tokens, heads, 512),
        ),
        "padded_heads": (padded_heads, padded_heads[BEFORE : BEFORE + tokens, :, 24:536]),
        "other_heads": (more_heads, more_heads[BEFORE : BEFORE + tokens, 1 : 1 + heads]),
    }


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 5, 33])
def test_bf16_views_are_written_through_their_strides(
    tokens: int, heads: int, backend: str
) -> None:
    q, kv = oracles.exact_queries(tokens, heads, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (tokens, 6), dtype=torch.int32)
    cache = kv.view(2, 4, 1, 512)

    def prefill(out: Tensor | None) -> Tensor:
        result = mlacast.sparse_mla_prefill(
            q, kv, indices, sm_scale=0.02, out=out, backend=backend
        )[0]
        assert isinstance(result, Tensor)
        return result

    def decode(out: Tensor | None) -> Tensor:
        result = mlacast.sparse_mla_decode(
            q,
            cache,
            indices,
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=0.02,
            out=out,
            num_splits=2,
            backend=backend,
        )[0]
        assert isinstance(result, Tensor)
        return result

    calls: tuple[Callable[[Tensor | None], Tensor], ...] = (prefill, decode)
    for call in calls:
        fresh = call(None)
        for name, (parent, view) in _parents(tokens, heads).items():
            address = view.data_ptr()
            assert call(view) is view, name
            assert view.data_ptr() == address
            assert same_bits(view.contiguous(), fresh), name
            # Undo the one write that was allowed; nothing else may differ from the poison.
            view.view(torch.int16).fill_(POISON)
            assert bool((parent.view(torch.int16) == POISON).all()), name


@pytest.mark.parametrize("tokens", [1, 3, 5, 33])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_in_the_middle_of_a_buffer_changes_nothing_else(
    case: FormatCase, tokens: int, backend: str
) -> None:
    """Two more rows on either side; running the range twice over different poison shows every byte
    it wrote.
    """
    q, kv = oracles.exact_queries(tokens, 2, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (tokens, 6), dtype=torch.int32)
    fresh = mlacast.sparse_mla_prefill(
        q, kv, indices, sm_scale=0.02, out_format=case.build(), num_groups=2, backend=backend
    )[0]
    assert isinstance(fresh, mlacast.QuantizedTensor)
    written_bytes = []
    for poison in (0x5A, 0xA5):
        buffer = poisoned_buffer(case, BEFORE + tokens + AFTER, 2, 512, poison)
        view = buffer[BEFORE : BEFORE + tokens]
        assert (
            mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02, out=view, backend=backend)[0]
            is view
        )
        assert torch.equal(view.data.view(torch.uint8), fresh.data.view(torch.uint8))
        assert torch.equal(view.dequantize(), fresh.dequantize())
        written_bytes.append(buffer_bytes(buffer))
    width = fresh.data.shape[1] * fresh.data.shape[2]
    same = written_bytes[0][0] == written_bytes[1][0]
    assert int(same.sum()) == tokens * width
    assert bool(same[BEFORE * width : (BEFORE + tokens) * width].all())
    if written_bytes[0][1] is not None and written_bytes[1][1] is not None:
        scales = int((written_bytes[0][1] == written_bytes[1][1]).sum())
        per_token = {"Nvfp4": 64}.get(case.kind, 0) or 2 * fresh.sf.shape[2] * 4  # type: ignore[union-attr]
        assert scales == tokens * per_token


def test_lse_and_max_logits_are_fresh_and_contiguous(backend: str) -> None:
    q, kv = oracles.exact_queries(3, 2, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (3, 6), dtype=torch.int32)
    _, max_logits, lse = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02, backend=backend)
    for tensor in (max_logits, lse):
        assert tensor.is_contiguous() and tensor.shape == (3, 2)
    assert lse.data_ptr() != max_logits.data_ptr()


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(4, torch.bfloat16), (6, torch.bfloat16), (5, torch.float16), (5, torch.float32)],
    ids=["a_row_less", "a_row_more", "float16", "float32"],
)
def test_a_tensor_that_does_not_fit_keeps_its_bytes(
    tokens: int, dtype: torch.dtype, backend: str
) -> None:
    q, kv = oracles.exact_queries(5, 2, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (5, 6), dtype=torch.int32)
    out = torch.full((tokens, 2, 512), 3.0, dtype=dtype)
    with pytest.raises(ValueError, match="sparse_mla_prefill: out must"):
        mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02, out=out, backend=backend)
    with pytest.raises(ValueError, match="sparse_mla_decode: out must"):
        mlacast.sparse_mla_decode(
            q,
            kv.view(2, 4, 1, 512),
            indices,
            kv_format=mlacast.KvFormat.BF16,
            sm_scale=0.02,
            out=out,
            backend=backend,
        )
    assert bool((out == 3.0).all())


@pytest.mark.parametrize("tokens", [4, 6], ids=["a_row_less", "a_row_more"])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_that_does_not_fit_keeps_its_bytes(
    case: FormatCase, tokens: int, backend: str
) -> None:
    q, kv = oracles.exact_queries(5, 2, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (5, 6), dtype=torch.int32)
    buffer = poisoned_buffer(case, 9, 2, 512)
    before = buffer_bytes(buffer)
    with pytest.raises(
        ValueError, match=rf"sparse_mla_prefill: out must have num_tokens=5.*{tokens}"
    ):
        mlacast.sparse_mla_prefill(
            q, kv, indices, sm_scale=0.02, out=buffer[2 : 2 + tokens], backend=backend
        )
    for left, right in zip(before, buffer_bytes(buffer), strict=True):
        assert left is None or right is None or torch.equal(left, right)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_of_who_knows_what_owns_no_padding(case: FormatCase, backend: str) -> None:
    """The last rows of a buffer as raw tensors, without the total: what follows keeps its bytes.

    Nobody knows whether these rows are the last, so only their own scales may change.
    """
    q, kv = oracles.exact_queries(3, 2, 512), torch.randn(8, 512).bfloat16()
    indices = torch.randint(0, 8, (3, 6), dtype=torch.int32)
    changed = []
    for poison in (0x5A, 0xA5):
        whole = poisoned_buffer(case, 9, 2, 512, poison)
        swizzled = case.kind == "Nvfp4"
        sf = whole.sf if whole.sf is None or swizzled else whole.sf[6:]
        part = mlacast.QuantizedTensor(whole.data[6:], sf, whole.format, row_start=6)
        assert part.total_tokens is None and not part.ends_buffer
        mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.02, out=part, backend=backend)
        changed.append(buffer_bytes(whole)[1])
    first, second = changed
    if first is not None and second is not None:
        scales = int((first == second).sum())
        assert part.sf is not None
        assert scales == 3 * (64 if swizzled else 2 * part.sf.shape[2] * 4)
