"""Gluon kernels around parts of the Hopper kernels, the storing epilogue and divisions; launches.

The bodies of kernels are another language in Python's clothes, hence no type checks in this file.
"""
# mypy: ignore-errors

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import mlacast
from mlacast.kernels.common.sm90_division import (
    divide_by_6,
    divide_by_6_in_float32,
    divide_by_448,
    divide_by_short,
    divide_numbers,
    invert,
    invert_normal,
)
from mlacast.kernels.common.sm90_rotation import split_halves
from mlacast.kernels.common.sm90_scaled_store import store_scaled_block
from mlacast.kernels.common.targets import store_target

BLOCK_H = gl.constexpr(64)
OPTIONS = {"num_warps": 4}
# One variant for every shape and place of a buffer; codes stand at multiples of 16 bytes.
_VARYING = [
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
    "padding_rows",
    "num_heads",
]


@gluon.jit
def _load_accumulator(x_ptr, token, head_start, num_heads, FIRST: gl.constexpr, N: gl.constexpr):
    """Dimensions ``FIRST``.. of 64 heads as the accumulator [64, N] of a warpgroup's products.

    Heads past the last are NaN, as garbage in an accumulator may be.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    head = head_start + gl.arange(0, BLOCK_H, gl.SliceLayout(1, OUT))
    d = FIRST + gl.arange(0, N, gl.SliceLayout(0, OUT))
    rows = (token * num_heads + head) * 512
    mask = (head < num_heads)[:, None] & (d >= 0)[None, :]
    return gl.load(x_ptr + rows[:, None] + d[None, :], mask=mask, other=float("nan"))


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["sf_ptr", "scale_ptr"])
def store_scaled_block_kernel(
    x_ptr,
    factor_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    padding_rows,
    num_heads,
    FULL_TILES: gl.constexpr,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Store 64 heads of one token of ``x * factor``, factors [s_q, h]. Grid: (s_q, ceil(h / 64)).

    Halves of an accumulator [64, 256], as the prefill kernel has them.
    """
    token = gl.program_id(0).to(gl.int64)
    head_start = gl.program_id(1) * BLOCK_H
    padding = gl.where(token == gl.num_programs(0) - 1, padding_rows, 0)
    for half in gl.static_range(2):
        o = _load_accumulator(x_ptr, token, head_start, num_heads, half * 256, 256)
        head = head_start + gl.arange(0, BLOCK_H, gl.SliceLayout(1, o.type.layout))
        factor = gl.load(
            factor_ptr + token * num_heads + head, mask=head < num_heads, other=float("nan")
        )
        alive = gl.where(factor == 0.0, 0, -1)
        left, right = split_halves(o, 256)
        for part in gl.static_range(2):
            store_scaled_block(
                left if part == 0 else right,
                factor,
                alive,
                data_ptr + token * stride_data_token,
                stride_data_group,
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                scale_ptr,
                token,
                padding,
                head_start,
                num_heads,
                half * 256 + part * 128,
                FULL_TILES,
                MASKED,
                OUTPUT,
            )


def constants_of(out: mlacast.QuantizedTensor, heads: int) -> dict[str, object]:
    """Compile-time arguments that the kernel takes from the target."""
    return {"FULL_TILES": heads % 64 == 0, "OUTPUT": store_target(out).hopper_config}


def store_scaled(x: Tensor, factor: Tensor, out: mlacast.QuantizedTensor, masked: bool) -> None:
    """Run ``store_scaled_block`` on float32 ``x [s_q, h, 512]`` and ``factor [s_q, h]``.

    With ``masked``, rows whose factor is zero are zeros whatever ``x`` holds.
    """
    constants = {**constants_of(out, x.shape[1]), "MASKED": masked}
    tokens, heads, _ = x.shape
    target = store_target(out)
    numbers = [value for name, value in target.numbers.items() if name != "row_start"]
    with torch.cuda.device_of(x):
        store_scaled_block_kernel[(tokens, -(-heads // 64))](
            x, factor, *target.tensors.values(), *numbers, heads, **constants, **OPTIONS
        )


@gluon.jit
def divide_kernel(x_ptr, y_ptr, out_ptr, count, WAY: gl.constexpr):
    """A division of float32 numbers by its name in ``sm90_division``. Grid: (ceil(count / 1024),).

    ``y_ptr`` are the divisors of ``divide_numbers`` and ``divide_by_short``; the others have none.
    """
    place = gl.program_id(0).to(gl.int64) * 1024
    place += gl.arange(0, 1024, gl.BlockedLayout([4], [32], [4], [0]))
    inside = place < count
    x = gl.load(x_ptr + place, mask=inside, other=1.0)
    if WAY == "divide_numbers":
        out = divide_numbers(x, gl.load(y_ptr + place, mask=inside, other=1.0))
    elif WAY == "divide_by_short":
        out = divide_by_short(x, gl.load(y_ptr + place, mask=inside, other=1.0))
    elif WAY == "invert":
        out = invert(x)
    elif WAY == "invert_normal":
        out = invert_normal(x)
    elif WAY == "divide_by_448":
        out = divide_by_448(x)
    elif WAY == "divide_by_6_in_float32":
        out = divide_by_6_in_float32(x)
    else:
        out = divide_by_6(x)
    gl.store(out_ptr + place, out, mask=inside)


def divide(way: str, x: Tensor, y: Tensor) -> Tensor:
    """Run a division of ``sm90_division`` on float32 numbers [n]."""
    out = torch.empty_like(x)
    grid = (-(-x.numel() // 1024),)
    divide_kernel[grid](x, y, out, x.numel(), way, **OPTIONS)
    return out
