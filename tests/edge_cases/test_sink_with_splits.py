"""The sink enters the denominator once for any split count, and the cast comes after the merge.

BC-07, ROCm/rocm-libraries#12227 (also vllm-project/FlashMLA#25): an empty first split published the
sink, the next one seeded it again; other paths dropped it for quantised caches.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mlacast
from tests.format_cases import FAMILIES, NVFP4, FormatCase, bytes_of, case_id
from tests.oracles import BF16_HALF_ULP
from tests.scenarios import CACHES, CacheCase, cache_id

SPLITS = (1, 2, 3, 8)
# Two live columns among 64: in the first split only, in the last only, in the middle, at both ends.
PLACES = {"first": (0, 1), "last": (62, 63), "middle": (31, 33), "both_ends": (0, 63)}


def _indices(columns: tuple[int, int]) -> Tensor:
    indices = torch.full((1, 64), -1, dtype=torch.int32)
    indices[0, columns[0]], indices[0, columns[1]] = 2, 5
    return indices


def _decode(
    cache: CacheCase,
    tensor: Tensor,
    columns: tuple[int, int],
    sink: float | None,
    num_splits: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Attend with a zero query: both live keys have logit 0."""
    out, lse = mlacast.sparse_mla_decode(
        torch.zeros(1, 1, cache.d_qk, dtype=torch.bfloat16),
        tensor,
        _indices(columns),
        kv_format=mlacast.KvFormat.from_name(cache.name),
        sm_scale=1.0,
        attn_sink=None if sink is None else torch.tensor([sink]),
        num_splits=num_splits,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    return out, lse


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_two_keys_and_a_sink_share_in_three(
    cache: CacheCase, num_splits: int, backend: str
) -> None:
    """Two logits of 0 and sink 0: (v1 + v2) / 3. Counting twice would give / 4, dropping / 2. The
    LSE is ln 2.
    """
    filled = cache.fill(num_pages=2, page_size=4, slots=[2, 5])
    total = filled.rows[2, :512] + filled.rows[5, :512]
    for columns in PLACES.values():
        out, lse = _decode(cache, filled.cache, columns, 0.0, num_splits, backend)
        error = (out[0, 0].double() - total / 3).abs()
        # A handful of float32 roundings on |v1| + |v2|, then half a bf16 ulp.
        size = filled.rows[2, :512].abs() + filled.rows[5, :512].abs()
        assert bool((error <= BF16_HALF_ULP * total.abs() / 3 + 16 * 2.0**-24 * size).all())
        assert float(lse) == pytest.approx(math.log(2.0), abs=4 * 2.0**-24)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("place", PLACES)
def test_infinite_sinks(place: str, num_splits: int, backend: str) -> None:
    """-inf changes no bit, +inf gives exact zeros; the LSE is the same in both."""
    cache = CacheCase("V4", 512)
    filled = cache.fill(num_pages=2, page_size=4, slots=[2, 5])
    arguments = (cache, filled.cache, PLACES[place])
    plain, lse = _decode(*arguments, None, num_splits, backend)
    without, lse_without = _decode(*arguments, -math.inf, num_splits, backend)
    drowned, lse_drowned = _decode(*arguments, math.inf, num_splits, backend)
    assert torch.equal(plain, without)
    assert torch.equal(drowned, torch.zeros_like(drowned))
    assert torch.equal(lse, lse_without) and torch.equal(lse, lse_drowned)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quantised_bytes_hardly_depend_on_the_split_count(case: FormatCase, backend: str) -> None:
    """Splits exchange float32 partials and quantise the merged value: equal scales, codes at most
    one step apart.
    """
    cache = CacheCase("V4", 512)
    filled = cache.fill(num_pages=13, page_size=5, slots=range(65))
    q = torch.randn(2, 2, 512).bfloat16()
    indices = torch.randint(0, 65, (2, 64), dtype=torch.int32)
    indices[1, :40] = -1
    results = [
        mlacast.sparse_mla_decode(
            q,
            filled.cache,
            indices,
            kv_format=mlacast.KvFormat.V4,
            sm_scale=0.02,
            attn_sink=torch.zeros(2),
            num_splits=num_splits,
            out_format=case.build(),
            backend=backend,
        )[0]
        for num_splits in SPLITS
    ]
    first = results[0]
    assert isinstance(first, mlacast.QuantizedTensor)
    for other in results[1:]:
        assert isinstance(other, mlacast.QuantizedTensor)
        steps = (_ordered_codes(first, case) - _ordered_codes(other, case)).abs()
        assert int(steps.max()) <= 1
        # Few values lie within float32 error of a rounding boundary: none or a handful of 2048.
        assert float((steps > 0).float().mean()) < 0.01
        if first.sf is not None and other.sf is not None:
            if first.sf.dtype == torch.float32:
                assert torch.allclose(first.sf, other.sf, rtol=1e-5, atol=0)
            else:
                assert torch.equal(bytes_of(first.sf), bytes_of(other.sf))


def _ordered_codes(buffer: mlacast.QuantizedTensor, case: FormatCase) -> Tensor:
    """Codes as integers whose order is that of the values, so that neighbours differ by one."""
    codes = buffer.data.view(torch.uint8).to(torch.int64)
    if case == NVFP4:
        codes = torch.stack((codes & 15, codes >> 4), -1)
        return torch.where(codes >= 8, -(codes - 8), codes)
    return torch.where(codes >= 128, -(codes - 128), codes)
