"""Portable ``merge_attention_states``: one launch for up to four parts, quantised as it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.common.dependents import overlaps_launches, wait_for_previous_kernel
from mlacast.kernels.common.fp8_casts import has_fp8_casts
from mlacast.kernels.common.launch import Launches
from mlacast.kernels.common.packed_bf16 import widen
from mlacast.kernels.common.store import NVFP4, Padding, Target, store_rows
from mlacast.kernels.common.targets import StoreTarget, store_target
from mlacast.kernels.config.merge_attention_states import PARTS_AT_ONCE, merge_plan, merge_rounds
from mlacast.kernels.config.output import float32_config

# Counts and strides that vary while serving must not pick another variant of the kernel.
_VARYING = [
    "stride_token_lse0",
    "stride_head_lse0",
    "stride_token_lse1",
    "stride_head_lse1",
    "stride_token_lse2",
    "stride_head_lse2",
    "stride_token_lse3",
    "stride_head_lse3",
    "stride_token_lse",
    "stride_head_lse",
    "num_tokens",
    "row_start",
    "padding_rows",
    "stride_sf_token",
    "stride_sf_group",
    "stride_sf_word",
]
# Nor must where a slice of a bigger buffer happens to start.
_UNALIGNED = ["lse0_ptr", "lse1_ptr", "lse2_ptr", "lse3_ptr", "lse_ptr", "sf_ptr", "scale_ptr"]


class Part(NamedTuple):
    """Output and lse of a part, each with the strides of tokens and heads."""

    out_ptr: Any
    stride_token_out: Any
    stride_head_out: Any
    lse_ptr: Any
    stride_token_lse: Any
    stride_head_lse: Any


class Places(NamedTuple):
    """What the elements of a tile are, [ROWS, 1] or [ROWS, WIDTH] each; ``token`` is an int64.

    Attributes:
        token: Their token.
        head: Their head.
        dim: Their dimension in it; with whole pieces of 16 the first of their row.
        mask: Whether they exist.
        is_first: Whether they are the first of their head, of whose rows one stores the lse.
    """

    token: Any
    head: Any
    dim: Any
    mask: Any
    is_first: Any


@triton.jit
def _find_places(token, block, in_range, MERGE: tl.constexpr, BY_16: tl.constexpr):
    """The `Places` of blocks of features; arguments [ROWS, 1], of which ``in_range`` exist."""
    D: tl.constexpr = MERGE.d
    FEATURES: tl.constexpr = MERGE.features
    WIDTH: tl.constexpr = MERGE.width
    element = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    if D % WIDTH == 0:
        head = block // (D // WIDTH)  # [ROWS, 1]
        dim = (block % (D // WIDTH)) * WIDTH  # [ROWS, 1]
        if not BY_16:
            dim += element  # [ROWS, WIDTH]
        mask = in_range  # [ROWS, 1]
        is_first = in_range & (block % (D // WIDTH) == 0)  # [ROWS, 1]
    else:
        # All of them [ROWS, WIDTH]: a row has elements of more heads than one.
        feature = block * WIDTH + element
        head = feature // D
        dim = feature % D
        mask = in_range & (feature < FEATURES if FEATURES else feature >= 0)
        is_first = mask & (dim == 0)
    return Places(token, head, dim, mask, is_first)


@triton.jit
def _load_lse(part, places):
    """Sums of a part at `Places`, of their shape; every marker of an empty part becomes -inf."""
    offsets = places.token * part.stride_token_lse + places.head.to(tl.int64) * part.stride_head_lse
    lse = tl.load(part.lse_ptr + offsets, mask=places.mask, other=-float("inf"))
    return tl.where(lse == float("inf"), -float("inf"), lse)


@triton.jit
def _load_out(part, places, lse, BY_16: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    """Output of a part in float32 [ROWS, WIDTH]; where it is empty it is not read, and 0.

    BY_16: a row has one head, whose dimensions from ``dim`` [ROWS, 1] on it holds. Loaded as twice
    eight, so that the 16 elements of a scale lie in one thread. Else elements have a ``dim`` each.
    """
    ptr, token, head = part.out_ptr, places.token, places.head
    # [ROWS, 1] with BY_16, else [ROWS, WIDTH], and so is what is live.
    offsets = token * part.stride_token_out + head.to(tl.int64) * part.stride_head_out + places.dim
    live = places.mask & (lse != -float("inf"))
    if BY_16:
        # Pieces come first: of dimensions that are not contiguous threads go along the first.
        # [WIDTH / 16, 1, 8]
        element = tl.arange(0, WIDTH // 16)[:, None, None] * 16 + tl.arange(0, 8)[None, None, :]
        pieces = tl.expand_dims(ptr + offsets, 0) + element  # [WIDTH / 16, ROWS, 8]
        live = tl.expand_dims(live, 0)
        low = tl.load(pieces, mask=live, other=0.0)  # [WIDTH / 16, ROWS, 8]
        both = tl.join(low, tl.load(pieces + 8, mask=live, other=0.0))  # [.., 8, 2]
        # [ROWS, WIDTH / 16, 2, 8], then [ROWS, WIDTH].
        loaded = tl.reshape(tl.permute(both, (1, 0, 3, 2)), (offsets.shape[0], WIDTH))
    else:
        loaded = tl.load(ptr + offsets, mask=live, other=0.0)
    if NATIVE and loaded.dtype == tl.bfloat16:
        return widen(loaded.to(tl.int16, bitcast=True), NATIVE)
    else:
        return loaded.to(tl.float32)


@triton.jit
def _share_weight(weight, lse, inverse, is_empty):
    """Weight of a part among all. That of an empty one is -0.0, so that it adds -0.0: nothing.

    Arguments and result have the shape of the sums, [ROWS, 1] or [ROWS, WIDTH]. A lone live part so
    keeps the sign of its zeros. Rows of empty parts only are 0.0.
    """
    return weight * tl.where((lse == -float("inf")) & (is_empty == 0), -1.0, inverse)


@triton.jit
def _merge_parts(
    parts,
    places,
    sums,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_16: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store the lse of all parts at ``sums``, and return their output [ROWS, WIDTH] in float32.

    Sums, maxima and weights are [ROWS, 1] where a row has one head, else [ROWS, WIDTH].
    ``parts`` are four `Part`, of which PARTS are looked at; ``sums`` is the pointer to the lse
    with its strides of tokens and heads.
    """
    lses = (_load_lse(parts[0], places),)
    largest = lses[0]
    for number in tl.static_range(1, PARTS):
        lses = lses + (_load_lse(parts[number], places),)
        largest = tl.maximum(largest, lses[number])
    # -inf - -inf is NaN: shift by 0 where every part is empty.
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    weights = (tl.exp(lses[0] - shift),)
    total = weights[0]
    for number in tl.static_range(1, PARTS):
        weights = weights + (tl.exp(lses[number] - shift),)
        total += weights[number]
    is_empty = total == 0.0
    lse = tl.where(is_empty, -float("inf"), shift + tl.log(tl.where(is_empty, 1.0, total)))
    lse_ptr, stride_token_lse, stride_head_lse = sums
    lse_offsets = places.token * stride_token_lse + places.head.to(tl.int64) * stride_head_lse
    tl.store(lse_ptr + lse_offsets, lse, mask=places.is_first)

    # A lone live part has the weight 1 and comes back as it is.
    inverse = tl.math.div_rn(1.0, tl.where(is_empty, 1.0, total))
    x = _load_out(parts[0], places, lses[0], BY_16, WIDTH, NATIVE)  # [ROWS, WIDTH]
    out = x * _share_weight(weights[0], lses[0], inverse, is_empty)
    for number in tl.static_range(1, PARTS):
        x = _load_out(parts[number], places, lses[number], BY_16, WIDTH, NATIVE)
        factor = _share_weight(weights[number], lses[number], inverse, is_empty)
        out = tl.fma(x, tl.broadcast_to(factor, x.shape), out)
    return out


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _merge_attention_states_kernel(
    out0_ptr,
    stride_token_out0,
    stride_head_out0,
    lse0_ptr,
    stride_token_lse0,
    stride_head_lse0,
    out1_ptr,
    stride_token_out1,
    stride_head_out1,
    lse1_ptr,
    stride_token_lse1,
    stride_head_lse1,
    out2_ptr,
    stride_token_out2,
    stride_head_out2,
    lse2_ptr,
    stride_token_lse2,
    stride_head_lse2,
    out3_ptr,
    stride_token_out3,
    stride_head_out3,
    lse3_ptr,
    stride_token_lse3,
    stride_head_lse3,
    lse_ptr,
    stride_token_lse,
    stride_head_lse,
    num_tokens,
    num_blocks,
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
    MERGE: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """BLOCK_T tokens by BLOCK_B blocks of WIDTH features.

    A token's features are cut into ``num_blocks`` blocks, whatever its heads. Where D, the width of
    a head, is a multiple of WIDTH, a row of the tile [BLOCK_T * BLOCK_B, WIDTH] has one head and
    one weight for each part; else every element has its own. FEATURES is the number of them where
    the last block is not full, else 0. Grid: (ceil(T / BLOCK_T) * ceil(num_blocks / BLOCK_B),).
    """
    BLOCK_T: tl.constexpr = MERGE.block_t
    BLOCK_B: tl.constexpr = MERGE.block_b
    WIDTH: tl.constexpr = MERGE.width
    D: tl.constexpr = MERGE.d
    FEATURES: tl.constexpr = MERGE.features
    ROWS: tl.constexpr = BLOCK_T * BLOCK_B
    BY_16: tl.constexpr = D % WIDTH == 0 and OUTPUT.kind == NVFP4
    wait_for_previous_kernel(PDL)
    columns = tl.cdiv(num_blocks, BLOCK_B)
    first_token = (tl.program_id(0) // columns) * BLOCK_T
    lane = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    token = first_token + lane // BLOCK_B  # [ROWS, 1]
    block = (tl.program_id(0) % columns) * BLOCK_B + lane % BLOCK_B  # [ROWS, 1]
    has_block = block < num_blocks  # [ROWS, 1]
    in_range = has_block & (token < num_tokens)  # [ROWS, 1]
    token = token.to(tl.int64)
    places = _find_places(token, block, in_range, MERGE, BY_16)
    parts = (
        Part(
            out0_ptr,
            stride_token_out0,
            stride_head_out0,
            lse0_ptr,
            stride_token_lse0,
            stride_head_lse0,
        ),
        Part(
            out1_ptr,
            stride_token_out1,
            stride_head_out1,
            lse1_ptr,
            stride_token_lse1,
            stride_head_lse1,
        ),
        Part(
            out2_ptr,
            stride_token_out2,
            stride_head_out2,
            lse2_ptr,
            stride_token_lse2,
            stride_head_lse2,
        ),
        Part(
            out3_ptr,
            stride_token_out3,
            stride_head_out3,
            lse3_ptr,
            stride_token_lse3,
            stride_head_lse3,
        ),
    )
    sums = (lse_ptr, stride_token_lse, stride_head_lse)
    out = _merge_parts(parts, places, sums, MERGE.parts, WIDTH, BY_16, NATIVE)  # [ROWS, WIDTH]
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
    padding = Padding(
        num_tokens.to(tl.int64),
        tl.where(first_token + BLOCK_T >= num_tokens, padding_rows, 0),
        lane // BLOCK_B,
        has_block,
    )
    store_rows(
        out, block, token, in_range, 0, target, padding, WIDTH, OUTPUT, FEATURES, BLOCK_T, NATIVE
    )


def _part(out: torch.Tensor, lse: torch.Tensor, is_token_major: bool) -> list[Any]:
    """Arguments of one part: its output [T, h, d] and its lse with their strides."""
    token, head = (0, 1) if is_token_major else (1, 0)
    return [out, out.stride(0), out.stride(1), lse, lse.stride(token), lse.stride(head)]


def _float32_target(scratch: torch.Tensor, features: int) -> StoreTarget:
    """Rows of ``features`` numbers, one after the other, in float32."""
    tensors = {"data_ptr": scratch, "sf_ptr": scratch, "scale_ptr": scratch}
    numbers = {
        "stride_data_token": features,
        "stride_data_group": features,
        "stride_sf_token": 0,
        "stride_sf_group": 0,
        "stride_sf_word": 0,
        "row_start": 0,
        "padding_rows": 0,
    }
    return StoreTarget(tensors, tensors, numbers, float32_config(features))


def launch_merge_attention_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    lse_layout: str,
    out: QuantizedTensor,
    lse: torch.Tensor,
) -> Launches:
    """Fill ``out`` and ``lse``; arguments as in ``mlacast.merge_attention_states``."""
    num_tokens, num_heads, width = outs[0].shape
    features = num_heads * width
    final = store_target(out)
    launches = Launches(lse.device, final)
    is_token_major = lse_layout == "th"
    parts = [_part(*part, is_token_major) for part in zip(outs, lses, strict=True)]
    *early, _ = merge_rounds(len(parts))
    for count in early:
        # Two results in turn, because a program reads sums that another one writes.
        scratch = launches.scratch(num_tokens * (features + num_heads))
        sums = launches.inside(scratch, scratch[num_tokens * features :])
        merged = [scratch, features, width, sums, num_heads, 1]
        target = _float32_target(scratch, features)
        _launch(launches, parts[:count], merged[3:], target, num_tokens, num_heads, width)
        parts = [merged, *parts[count:]]
    strides = lse.stride() if is_token_major else lse.stride()[::-1]
    _launch(launches, parts, [lse, *strides], final, num_tokens, num_heads, width)
    return launches


def _launch(
    launches: Launches,
    parts: Sequence[list[Any]],
    lse: Sequence[Any],
    target: StoreTarget,
    num_tokens: int,
    num_heads: int,
    width: int,
) -> None:
    """Merge at most ``PARTS_AT_ONCE`` parts into ``target`` and ``lse``, given with its strides."""
    plan = merge_plan(len(parts), num_tokens, num_heads, width)
    device = target.tensors["data_ptr"].device
    overlaps = overlaps_launches(device)
    # The arguments of absent parts are those of the first one, and not looked at.
    given = [*parts, *[parts[0]] * (PARTS_AT_ONCE - len(parts))]
    launches.launch(
        _merge_attention_states_kernel,
        (plan.num_programs,),
        *(argument for part in given for argument in part),
        *lse,
        num_tokens,
        plan.num_blocks,
        *target.tensors.values(),
        *target.numbers.values(),
        MERGE=plan.config,
        NATIVE=has_fp8_casts(device),
        PDL=overlaps,
        OUTPUT=target.config,
        num_warps=plan.config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps,
    )
