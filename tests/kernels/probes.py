"""Tiny kernels around the device helpers under test, and functions that launch them.

The bodies of kernels are another language in Python's clothes, hence no type checks in this file.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

import mlacast
from mlacast.kernels.common.numbers import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    make_negative_zero,
)
from mlacast.kernels.common.record_places import find_record_places, page_division
from mlacast.kernels.common.store import Target, store_output
from mlacast.kernels.common.targets import store_target
from mlacast.kernels.config.caches import RecordConfig


@triton.jit
def _number_kernel(x_ptr, out_ptr, count, HELPER: tl.constexpr, BLOCK: tl.constexpr):
    """Apply one helper to BLOCK numbers. Grid: (ceil(count / BLOCK),)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0)
    if HELPER == "encode_e4m3":
        result = encode_e4m3(x)
    elif HELPER == "decode_e4m3":
        result = decode_e4m3(x)
    elif HELPER == "encode_e2m1":
        result = encode_e2m1(x)
    elif HELPER == "decode_e2m1":
        result = decode_e2m1(x.to(tl.int32))
    elif HELPER == "encode_ue8m0":
        result = encode_ue8m0(x)
    else:
        result = decode_ue8m0(x.to(tl.int32))
    tl.store(out_ptr + at, result, mask=at < count)


def apply_helper(helper: str, x: Tensor) -> Tensor:
    """Codes (int32) of float32 ``x [n]``, or float32 values of uint8 codes ``x [n]``."""
    dtype = torch.int32 if helper.startswith("encode") else torch.float32
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = 1024
    _number_kernel[(triton.cdiv(x.shape[0], block),)](x, out, x.shape[0], helper, block)
    return out


@triton.jit
def _zero_kernel(out_ptr):
    """Store a negative zero. One program."""
    tl.store(out_ptr, make_negative_zero())


def stored_negative_zero() -> Tensor:
    """What a kernel makes of -0.0, float32 [1]."""
    out = torch.empty(1)
    _zero_kernel[(1,)](out)
    return out


@triton.jit
def _places_kernel(
    slots_ptr,
    out_ptr,
    page_size,
    page_inverse,
    page_shift,
    stride_page,
    N: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Places of N slots, the data's and the scales', as int64 [2, N]. One program."""
    at = tl.arange(0, N)
    slot = tl.load(slots_ptr + at)
    data, scale = find_record_places(
        slot, slot >= 0, page_size, page_inverse, page_shift, stride_page, RECORD
    )
    tl.store(out_ptr + at, data)
    tl.store(out_ptr + N + at, scale)


def record_places_of(
    slots: Tensor, page_size: int, stride_page: int, inline: bool, data: int, scale: int
) -> Tensor:
    """int64 [2, n]: where the data and the scales of n slots begin, n a power of two."""
    count = slots.shape[0]
    out = torch.empty(2, count, dtype=torch.int64)
    record = RecordConfig("bytes", inline, data, scale, d_qk=512, keeps_tail=False)
    _places_kernel[(1,)](
        slots, out, page_size, *page_division(page_size), stride_page, count, record
    )
    return out


@triton.jit
def _store_kernel(
    x_ptr,
    data_ptr,
    sf_ptr,
    scale_ptr,
    stride_data_token,
    stride_data_group,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    row_start,
    padding_rows,
    num_tokens,
    num_heads,
    BLOCK_H: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """Store BLOCK_H heads of one token of ``x [s_q, h, 512]``. Grid: (s_q, ceil(h / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    head_start = tl.program_id(1) * BLOCK_H
    head = head_start + tl.arange(0, BLOCK_H)
    d = tl.arange(0, 512)
    x = tl.load(
        x_ptr + (token * num_heads + head[:, None]) * 512 + d[None, :],
        mask=(head < num_heads)[:, None],
        other=0.0,
    )
    target = Target(
        data_ptr,
        sf_ptr,
        scale_ptr,
        stride_data_token,
        stride_data_group,
        stride_sf_token,
        stride_sf_group,
        stride_sf_word,
        row_start,
    )
    padding = tl.where(token == num_tokens - 1, padding_rows, 0)
    store_output(x, head_start, num_heads, token, padding, target, 0, OUTPUT)


def store(x: Tensor, out: mlacast.QuantizedTensor, block_h: int = 4) -> None:
    """Run the storing epilogue on float32 ``x [s_q, h, 512]``."""
    target = store_target(out)
    tokens, heads, _ = x.shape
    _store_kernel[(tokens, triton.cdiv(heads, block_h))](
        x,
        *target.tensors.values(),
        *target.numbers.values(),
        tokens,
        heads,
        BLOCK_H=block_h,
        OUTPUT=target.config,
        num_warps=4,
        enable_fp_fusion=False,
    )
