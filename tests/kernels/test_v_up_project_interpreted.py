"""The portable product with W_UV, interpreted: tiles and tails, layouts, outputs."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.kernels.triton.v_up_project import launch_v_up_project
from tests.format_cases import FAMILIES, NVFP4, QUANTISED, FormatCase, case_id
from tests.kernels import launches, store_cases
from tests.oracles import same_bits

# Of Linux; Python has a name for it from 3.11 on.
MAP_NORESERVE = 0x4000


def draw(tokens: int, heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A latent output and weights of about the size a model has."""
    latent = torch.randn(tokens, heads, 512).to(dtype)
    return latent, (torch.randn(heads, 512, 128) / 22).to(dtype)


def project(latent: Tensor, w_uv: Tensor) -> Tensor:
    """The kernel's float32 output."""
    buffer = launches.float32_buffer(latent.shape[0], latent.shape[1], features=128)
    launch_v_up_project(latent, w_uv, out=buffer)
    return buffer.data


def check_store(case: FormatCase, latent: Tensor, w_uv: Tensor, first: int, total: int) -> None:
    """Rows ``first``.. of a buffer: codes and scales of the float32 output, nothing else."""
    tokens, heads = latent.shape[:2]
    groups = 2 if heads % 8 == 0 else 1
    actual, expected = (
        store_cases.empty_buffer(case, total, groups, heads * 128 // groups, "cpu")
        for _ in range(2)
    )
    launch_v_up_project(latent, w_uv, out=actual[first : first + tokens])
    values = project(latent, w_uv).view(tokens, groups, -1)
    mlacast.reference.quantize_output(values, expected[first : first + tokens])
    store_cases.assert_same_storages(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 5), (64, 1), (65, 2), (130, 1)])
def test_tiles_and_tails(tokens: int, heads: int, dtype: torch.dtype) -> None:
    latent, w_uv = draw(tokens, heads, dtype)
    exact = mlacast.reference.v_up_project(latent, w_uv, compute_dtype=torch.float64)
    sums = mlacast.reference.v_up_project(latent.abs(), w_uv.abs(), compute_dtype=torch.float64)
    # The probabilistic bound of a float32 sum of 512 products, with lambda = 4.
    allowed = 4 * 512**0.5 * 2.0**-24 * sums
    assert bool(((project(latent, w_uv).double() - exact).abs() <= allowed).all())


def test_latents_and_weights_through_their_strides() -> None:
    latent, w_uv = draw(3, 4)
    expected = project(latent, w_uv)
    turned = latent.transpose(0, 1).contiguous().transpose(0, 1)
    up = torch.full((4, 256, 512), float("nan"))
    up[:, 128:] = w_uv.transpose(1, 2)
    assert same_bits(project(turned, up[:, 128:].transpose(1, 2)), expected)


@pytest.mark.parametrize(
    ("stride_latent", "stride_value"),
    # 63 and 127 steps in one tile, past 2**31 elements each; and 448 of the first, in seven tiles.
    [(2**31 // 63 + 1, 1), (1, 2**31 // 127 + 1)],
    ids=["latent", "value"],
)
def test_strides_of_weights_that_32_bits_do_not_multiply(
    stride_latent: int, stride_value: int
) -> None:
    latent, w_uv = draw(2, 1, torch.float16)
    count = 511 * stride_latent + 127 * stride_value + 1
    # Address space alone: memory that nobody touches costs nothing, and is not asked for.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    space = torch.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), dtype=torch.float16)
    far = space.as_strided(w_uv.shape, (count, stride_latent, stride_value))
    far.copy_(w_uv)
    assert same_bits(project(latent, far), project(latent, w_uv))


def test_rows_do_not_depend_on_the_others() -> None:
    """At the same place of a tile: numpy's products differ in the last bit between places."""
    latent, w_uv = draw(64, 2)
    together = project(latent, w_uv)
    others = torch.full_like(latent, float("nan"))
    others[40:43] = latent[40:43]
    assert same_bits(project(others, w_uv)[40:43], together[40:43])
    assert same_bits(project(latent[:7].contiguous(), w_uv), together[:7])


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_bytes_of_every_format_in_a_range(case: FormatCase) -> None:
    latent, w_uv = draw(3, 8)
    check_store(case, latent, w_uv, 2, 9)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_the_last_range_clears_the_padding(case: FormatCase) -> None:
    for tokens in (64, 67):
        latent, w_uv = draw(tokens, 4)
        check_store(case, latent, w_uv, 66, 66 + tokens)


@pytest.mark.parametrize(("first", "total"), [(0, 5), (126, 131), (120, 130)])
def test_swizzled_scales_across_tiles_of_rows(first: int, total: int) -> None:
    latent, w_uv = draw(5, 4)
    check_store(NVFP4, latent, w_uv, first, total)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_a_group_with_a_nan_or_an_infinity(case: FormatCase) -> None:
    latent, w_uv = draw(3, 4)
    latent[0, 1, 7], latent[1, 2, 9], latent[2] = float("nan"), float("inf"), 0.0
    check_store(case, latent, w_uv, 0, 3)
