"""The separate kernels that a fused call replaces, written for the comparison in plain Triton.

Both are bound by memory: a program moves a few kilobytes in 16-byte pieces and keeps all else in
registers. The bodies of kernels are another language in Python's clothes, hence no type checks.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

import mlacast

# The best of a few tiles on an H200 at 64 and 4096 tokens, within 5 % of it at one.
NORM_HEADS = 2
NORM_WARPS = 1
CAST_TOKENS = 8
CAST_WARPS = 1


@triton.jit
def norm_rope_kernel(
    q_ptr, out_ptr, table_ptr, positions_ptr, num_heads, eps, BLOCK_H: tl.constexpr
):
    """Norm and rotate BLOCK_H heads of one token. Grid: (tokens, ceil(num_heads / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    mask = (head < num_heads)[:, None]  # [BLOCK_H, 1]
    offsets = (token * num_heads + head)[:, None] * 512 + tl.arange(0, 512)[None, :]
    x = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / 512.0 + eps)[:, None]
    first, second = tl.split(tl.reshape(x, (BLOCK_H, 256, 2)))
    # 256 pairs, of which the first 224 do not turn.
    pair = tl.arange(0, 256) - 224  # [256]
    at = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * 64 + pair
    cos = tl.load(at, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(at + 32, mask=pair >= 0, other=0.0)[None, :]
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    out = tl.reshape(turned, (BLOCK_H, 512)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=mask)


@triton.jit
def rope_cast_kernel(
    x_ptr,
    codes_ptr,
    sf_ptr,
    stride_sf_group,
    stride_sf_word,
    table_ptr,
    positions_ptr,
    num_tokens,
    num_heads,
    BLOCK_T: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
):
    """Cast 128 values of one head, a word of scales, of BLOCK_T tokens; the last turn back first.

    e4m3 codes in head order; a ue8m0 byte per 32 values, four to a word, words contiguous along
    tokens. Grid: (num_heads * 4, ceil(num_tokens / BLOCK_T)).
    """
    head, word = tl.program_id(0) // 4, tl.program_id(0) % 4
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    is_token = token < num_tokens
    mask = is_token[:, None, None]
    group, within = tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    start = (token * num_heads + head) * 512 + word * 128
    offsets = start[:, None, None] + group * 32 + within  # [BLOCK_T, 4, 32]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if word == 3:
        # 64 pairs, of which the first 32 do not turn.
        pair = group * 16 + tl.arange(0, 16)[None, None, :] - 32
        row = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)  # [BLOCK_T]
        at = table_ptr + row[:, None, None] * 64 + pair
        turns = mask & (pair >= 0)
        cos = tl.load(at, mask=turns, other=1.0)
        sin = tl.load(at + 32, mask=turns, other=0.0)
        first, second = tl.split(tl.reshape(x, (BLOCK_T, 4, 16, 2)))
        turned = tl.join(first * cos + second * sin, second * cos - first * sin)
        x = tl.reshape(turned, (BLOCK_T, 4, 32))
    amax = tl.maximum(tl.max(tl.abs(x), 2), 1e-4)  # [BLOCK_T, 4]
    # The smallest power of two not below amax / 448, where 448 is 1.75 * 2**8; dividing by it is
    # exact as a product.
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(codes_ptr + offsets, (x * inverse[:, :, None]).to(tl.float8e4nv), mask=mask)
    packed = tl.sum(exponent << (tl.arange(0, 4) * 8)[None, :], 1)  # [BLOCK_T]
    column = (head // GROUP_HEADS).to(tl.int64) * stride_sf_group
    column += ((head % GROUP_HEADS) * 4 + word).to(tl.int64) * stride_sf_word
    tl.store(sf_ptr + column + token, packed, mask=is_token)


def norm_rope(q: torch.Tensor, eps: float, rope: mlacast.Rope, out: torch.Tensor) -> None:
    """Norm the heads of ``q`` [tokens, heads, 512] and rotate their last 64 dimensions."""
    tokens, heads, _ = q.shape
    norm_rope_kernel[(tokens, triton.cdiv(heads, NORM_HEADS))](
        q,
        out,
        rope.cos_sin_cache,
        rope.positions,
        heads,
        eps,
        BLOCK_H=NORM_HEADS,
        num_warps=NORM_WARPS,
    )


def rope_cast(x: torch.Tensor, rope: mlacast.Rope, out: mlacast.QuantizedTensor) -> None:
    """Rotate ``x`` [tokens, heads, 512] back and cast it into ``out``, a whole Mxfp8 buffer."""
    tokens, heads, _ = x.shape
    rope_cast_kernel[(heads * 4, triton.cdiv(tokens, CAST_TOKENS))](
        x,
        out.data,
        out.sf,
        out.sf.stride(1),
        out.sf.stride(2),
        rope.cos_sin_cache,
        rope.positions,
        tokens,
        heads,
        BLOCK_T=CAST_TOKENS,
        GROUP_HEADS=out.features // 512,
        num_warps=CAST_WARPS,
    )
