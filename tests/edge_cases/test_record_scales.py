"""The 656-byte record takes any float32 scale.

BC-09, deepseek-ai/FlashMLA#184: one path read the scale through an exponent-only type, so 0.3
became a power of two.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests.cache_writers import float32_bytes


def _cache(scales: list[list[float]]) -> Tensor:
    """One page; token i has all codes 1.0 and the given four tile scales; rope part zero."""
    cache = torch.zeros(1, len(scales), 1, 656, dtype=torch.uint8)
    for token, tiles in enumerate(scales):
        cache[0, token, 0, :512] = 0x38
        cache[0, token, 0, 512:528] = torch.tensor(float32_bytes(tiles), dtype=torch.uint8)
    return cache


def _value_of_token_zero(cache: Tensor, backend: str, num_splits: int = 1) -> Tensor:
    out, _ = mlacast.sparse_mla_decode(
        torch.zeros(1, 1, 576, dtype=torch.bfloat16),
        cache,
        torch.zeros(1, 1, dtype=torch.int32),
        kv_format=mlacast.KvFormat.V32,
        sm_scale=1.0,
        num_splits=num_splits,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    return out[0, 0]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_scales_that_are_no_powers_of_two(num_splits: int, backend: str) -> None:
    cache = _cache([[0.3, 3.0, 0.7, 1 / 3]])
    value = _value_of_token_zero(cache, backend, num_splits)
    for tile, expected in enumerate([0.30078125, 3.0, 0.69921875, 0.333984375]):
        assert set(value[tile * 128 : (tile + 1) * 128].tolist()) == {expected}
    rows = mlacast.kv_cache_gather(cache, torch.tensor([0]), mlacast.KvFormat.V32, backend=backend)
    assert torch.equal(rows[0, :512], value)


def test_very_small_and_large_scales(backend: str) -> None:
    value = _value_of_token_zero(_cache([[1e-6, 1000.0, 2.0**-13, 1.0]]), backend)
    # bf16 has eight significant bits: 1e-6 = 1.048576 * 2**-20, nearest multiple of 2**-7 is
    # 134/128; 1000 is exact.
    assert value[[0, 128, 256, 384]].tolist() == [134 / 128 * 2.0**-20, 1000.0, 2.0**-13, 1.0]


def test_a_nan_scale_on_a_token_nobody_selects_is_harmless(backend: str) -> None:
    value = _value_of_token_zero(_cache([[1.0] * 4, [float("nan")] * 4]), backend)
    assert set(value.tolist()) == {1.0}
