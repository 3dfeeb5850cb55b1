"""Accumulators for the storing epilogues of the Hopper kernels, and the bytes they must become."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import mlacast
from tests.format_cases import (
    FP8_GROUPS,
    FP8_TENSOR,
    MXFP8_CHUNK32,
    MXFP8_HEAD,
    NVFP4,
    FormatCase,
)
from tests.gpu.hopper_cases import storage_of
from tests.kernels import store_cases

BF16 = FormatCase("Bf16")
SATURATED = FormatCase("Fp8Tensor", scale=2.0**-12)
# The layout of scales is a matter of strides: formats that share a variant of the kernels.
FAMILIES: tuple[tuple[FormatCase, ...], ...] = (
    (BF16,),
    (FP8_TENSOR, SATURATED),
    (MXFP8_HEAD,),
    (MXFP8_CHUNK32,),
    (NVFP4, FormatCase("Nvfp4", scale=1.0), FormatCase("Nvfp4", scale=2.0**-20)),
    *(FP8_GROUPS[first : first + 2] for first in range(0, len(FP8_GROUPS), 2)),
)
Store = Callable[[Tensor, Tensor, mlacast.QuantizedTensor], None]
"""Store float32 rows [s_q, h, 512] times factors [s_q, h]."""


def family_id(family: tuple[FormatCase, ...]) -> str:
    """Readable parametrisation id."""
    return family[0].id.removesuffix("_row_major")


def _group_of(case: FormatCase) -> int:
    return {"Mxfp8": 32, "Nvfp4": 16, "Fp8Tensor": 64, "Bf16": 64}.get(case.kind, case.group)


def boundary_rows(case: FormatCase, heads: int) -> Tensor:
    """Groups around every power of two, NaN and infinity among them, each at several places."""
    group = _group_of(case)
    rows = torch.cat([store_cases.hostile_rows(group, heads) for _ in range(3)])
    groups = rows.view(-1, group)
    return groups[torch.randperm(len(groups))].view(rows.shape)


def special_rows(heads: int) -> Tensor:
    """Rows of one special value each, and rows that hold it here and there."""
    values = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, -3.4e38)
    rows = torch.randn(2 * len(values), heads, 512)
    for at, value in enumerate(values):
        rows[2 * at] = value
        rows[2 * at + 1, 1::3, ::37] = value
    return rows


def draw_factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and factors [T, h] whose products are about ``x``.

    Powers of two and others of at most one; and 2**64 times those, under which the decode kernel
    has its accumulators.
    """
    choices = torch.tensor((1.0, 0.5, 0.7, 1 / 3, 2.0**-20))
    factors = choices[torch.randint(0, len(choices), x.shape[:2])]
    is_large = torch.rand(x.shape[:2]) < 0.3
    factors = torch.where(is_large, factors * 2.0**64, factors)
    return torch.where(is_large[..., None], x * 2.0**-64, x), factors


def check_store(
    store: Store,
    case: FormatCase,
    x: Tensor,
    factors: Tensor,
    num_groups: int,
    device: str,
    bounds: Sequence[int] | None = None,
    total: int | None = None,
) -> None:
    """Store range by range with the kernel and with the reference, and compare every byte.

    ``x`` and ``factors`` are on the CPU; rows whose factor is zero count as zeros. ``bounds`` are
    ends of ranges (default: all of ``x``), ``total`` the tokens of the buffer.
    """
    tokens, heads, _ = x.shape
    features = heads * 512 // num_groups
    rows = tokens if total is None else total
    actual = store_cases.empty_buffer(case, rows, num_groups, features, device)
    expected = store_cases.empty_buffer(case, rows, num_groups, features, "cpu")
    products = torch.where((factors == 0)[..., None], 0.0, x * factors[..., None])
    for first, last in itertools.pairwise((0, *(bounds or (tokens,)))):
        part = slice(first, last)
        store(x[part].to(device), factors[part].to(device), actual[part])
        grouped = products[part].reshape(last - first, num_groups, features)
        mlacast.reference.quantize_output(grouped, expected[part])
    if case.kind == "Bf16":
        for buffer in (actual, expected):
            _unify_nan(buffer.data)
    store_cases.assert_same_storages(actual, expected)


def _unify_nan(data: Tensor) -> None:
    """Which of the NaNs a conversion to bfloat16 gives depends on the device."""
    values = storage_of(data).view(torch.bfloat16)
    values.masked_fill_(values.isnan(), float("nan"))
