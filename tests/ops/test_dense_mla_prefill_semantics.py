"""dense_mla_prefill on every backend against the float64 oracle and by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import dense_prefill, oracles
from tests.dense_prefill import CASES, Packed, PackedCase, cumulative, draw, packed_id
from tests.format_cases import (
    FAMILIES,
    NVFP4,
    FormatCase,
    assert_buffer_holds,
    buffer_bytes,
    case_id,
    poisoned_buffer,
)

MIXED = PackedCase("mixed", (3, 0, 4), (5, 2, 4), heads=4)


def _run(packed: Packed, backend: str, **more: Any) -> tuple[Any, Tensor]:
    return mlacast.dense_mla_prefill(**packed.arguments, backend=backend, **more)


def _exact(packed: Packed) -> Tensor:
    """The reference's float32 output."""
    arguments = packed.arguments
    del arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    return oracles.plain(mlacast.reference.dense_mla_prefill(**arguments)[0])


@pytest.mark.parametrize("case", CASES, ids=packed_id)
def test_every_batch_matches_float64(case: PackedCase, backend: str) -> None:
    packed = draw(case)
    out, lse = _run(packed, backend)
    tokens = sum(case.q_lens) + case.q_tail
    assert (out.shape, out.dtype) == ((tokens, case.heads, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((case.heads, tokens), torch.float32)
    assert out.is_contiguous() and lse.is_contiguous()
    oracles.assert_matches(out, lse.t(), dense_prefill.attend(packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=packed_id)
def test_the_reference_computes_in_the_dtype_asked_for(
    case: PackedCase, dtype: torch.dtype
) -> None:
    packed = draw(case)
    arguments = packed.arguments
    del arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    out, lse = mlacast.reference.dense_mla_prefill(**arguments, compute_dtype=dtype)
    assert out.dtype == lse.dtype == dtype
    oracles.assert_matches(out, lse.t(), dense_prefill.attend(packed))


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.25, 1])
def test_the_scale_multiplies_the_logits(scale: float, backend: str) -> None:
    packed = draw(MIXED)
    out, lse = _run(packed, backend, softmax_scale=scale)
    oracles.assert_matches(out, lse.t(), dense_prefill.attend(packed, scale))


def test_logits_zero_and_ln_3_by_hand(backend: str) -> None:
    """One query token sees two keys of its own head, the weights are 1/4 and 3/4."""
    q, k, v = torch.zeros(1, 2, 192), torch.zeros(2, 2, 192), torch.zeros(2, 2, 128)
    q[0, :, 0] = 1.0
    k[1, 0, 0] = k[0, 1, 0] = 2.0
    v[0], v[1] = 4.0, 8.0
    bounds = cumulative((1,)), cumulative((2,))
    out, lse = mlacast.dense_mla_prefill(
        *(tensor.bfloat16() for tensor in (q, k, v)),
        cu_seqlens_q=bounds[0],
        cu_seqlens_k=bounds[1],
        max_seqlen_q=1,
        max_seqlen_k=2,
        softmax_scale=math.log(3.0) / 2,
        backend=backend,
    )
    # Head 1 has the larger logit at the other key.
    assert oracles.plain(out)[0].tolist() == [[7.0] * 128, [5.0] * 128]
    assert lse.flatten().tolist() == pytest.approx([math.log(4.0)] * 2, abs=1e-6)


def test_the_last_token_sees_every_key_and_the_first_the_fewest(backend: str) -> None:
    """Three tokens of five keys see 3, 4 and 5 of them; of two keys 0, 1 and 2."""
    q = torch.zeros(3, 1, 192).bfloat16()
    for keys, counts in ((5, (3, 4, 5)), (2, (0, 1, 2))):
        _, lse = mlacast.dense_mla_prefill(
            q,
            torch.zeros(keys, 1, 192).bfloat16(),
            torch.zeros(keys, 1, 128).bfloat16(),
            cu_seqlens_q=cumulative((3,)),
            cu_seqlens_k=cumulative((keys,)),
            max_seqlen_q=3,
            max_seqlen_k=keys,
            backend=backend,
        )
        expected = [math.log(count) if count else -math.inf for count in counts]
        # Logits and sums are exact; the logarithm is off by an ulp or two of float32.
        assert lse[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_neighbouring_sequences_do_not_matter(backend: str) -> None:
    packed = draw(PackedCase("", (3, 4, 2), (5, 4, 6), heads=4, kv_heads=2))
    together, lse = _run(packed, backend)
    q, k, v = packed.q[3:7], packed.k[5:9], packed.v[5:9]
    alone = Packed(PackedCase("", (4,), (4,)), q, k, v, cumulative((4,)), cumulative((4,)))
    out, lse_alone = _run(alone, backend)
    assert oracles.same_bits(out, together[3:7])
    assert oracles.same_bits(lse_alone, lse[:, 3:7])


def test_upper_bounds_may_be_larger_than_the_lengths(backend: str) -> None:
    packed = draw(MIXED)
    arguments = packed.arguments | {"max_seqlen_q": 1000, "max_seqlen_k": 70000}
    for one, other in zip(
        _run(packed, backend),
        mlacast.dense_mla_prefill(**arguments, backend=backend),
        strict=True,
    ):
        assert oracles.same_bits(one, other)


def test_bounds_outside_of_the_tensors_are_clamped(backend: str) -> None:
    """No value of the bounds makes the call touch anything beyond its tensors."""
    packed = draw(PackedCase("", (3, 2), (4, 2)))
    wrong = dataclasses.replace(
        packed,
        cu_seqlens_q=torch.tensor([-7, 3, 2**31 - 1], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([-(2**31), 4, 900], dtype=torch.int32),
    )
    for one, other in zip(_run(packed, backend), _run(wrong, backend), strict=True):
        assert oracles.same_bits(one, other)


def test_strided_inputs_equal_their_contiguous_copies(backend: str) -> None:
    packed = draw(MIXED)
    q = packed.q.transpose(0, 1).contiguous().transpose(0, 1)
    k = torch.cat((packed.k, packed.k), -1)[..., :192]
    before = [tensor.clone() for tensor in (q, k, packed.v)]
    strided = dataclasses.replace(packed, q=q, k=k)
    plain = dataclasses.replace(packed, v=packed.v.contiguous())
    for one, other in zip(_run(strided, backend), _run(plain, backend), strict=True):
        assert oracles.same_bits(one, other)
    for tensor, copy in zip((q, k, packed.v), before, strict=True):
        assert oracles.same_bits(tensor, copy)


@pytest.mark.parametrize("stride", [0, 7, 10**9])
def test_strides_of_axes_of_size_one_are_ignored(stride: int, backend: str) -> None:
    packed = draw(PackedCase("", (1,), (1,), heads=2, kv_heads=1))
    odd = dataclasses.replace(
        packed,
        q=packed.q.as_strided((1, 2, 192), (stride, 192, 1)),
        k=packed.k.as_strided((1, 1, 192), (stride, stride, 1)),
    )
    for one, other in zip(_run(odd, backend), _run(packed, backend), strict=True):
        assert oracles.same_bits(one, other)


def test_a_plain_output_is_written_through_its_strides(backend: str) -> None:
    packed = draw(MIXED)
    parent = torch.full((7, 5, 136), 7.0, dtype=torch.bfloat16)
    view = parent[:, 1:, 3:131]
    assert _run(packed, backend, out=view)[0] is view
    assert oracles.same_bits(view.contiguous(), _run(packed, backend)[0])
    view.fill_(7.0)
    assert bool((parent == 7.0).all())


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_output_has_the_bytes_of_the_quantised_reference(
    case: FormatCase, backend: str
) -> None:
    packed = draw(PackedCase("", (3, 0, 4), (5, 2, 4), heads=8, q_tail=2))
    out, lse = _run(packed, backend, out_format=case.build(), num_groups=2)
    assert isinstance(out, mlacast.QuantizedTensor)
    assert_buffer_holds(out, case.expect(_exact(packed).view(9, 2, 512)), case)
    assert oracles.same_bits(lse, _run(packed, backend)[1])


@pytest.mark.parametrize("first", [0, 3, 127])
@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_range_of_a_shared_buffer(case: FormatCase, first: int, backend: str) -> None:
    """Rows of another writer before and behind, in the same tile of 128 rows, keep their bytes."""
    packed = draw(dataclasses.replace(MIXED, heads=8, kv_heads=2))
    total = first + 7 + 2
    filler = torch.randn(total, 1024)
    buffer = poisoned_buffer(case, total, 2, 512)
    mlacast.quantize_output(filler, case.build(), out=buffer, backend=backend)
    view = buffer[first : first + 7]
    assert _run(packed, backend, out=view)[0] is view
    whole = filler.view(total, 2, 512).clone()
    whole[first : first + 7] = _exact(packed).view(7, 2, 512)
    assert_buffer_holds(buffer, case.expect(whole), case)


def test_only_the_range_that_ends_the_buffer_clears_its_padding(backend: str) -> None:
    packed = draw(MIXED)
    for total, padding in ((9, 0x5A), (7, 0)):
        buffer = poisoned_buffer(NVFP4, total, 1, 512)
        _run(packed, backend, out=buffer[:7])
        _, sf = buffer_bytes(buffer)
        assert sf is not None
        tile = sf.view(1, 8, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(128, 32)
        assert bool((tile[total:] == padding).all())
        assert bool((tile[7:total] == 0x5A).all())


def test_no_tokens(backend: str) -> None:
    for case in (PackedCase("", (), ()), PackedCase("", (0, 0), (0, 3))):
        packed = draw(case)
        out, lse = _run(packed, backend)
        assert (out.shape, out.dtype) == ((0, 2, 128), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 0), torch.float32)
        buffer, _ = _run(packed, backend, out_format=mlacast.Nvfp4(1.0))
        assert len(buffer) == 0
