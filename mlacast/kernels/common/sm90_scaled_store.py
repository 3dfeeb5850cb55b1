"""Storing epilogue of Hopper kernels whose rows have a factor: accumulators to the buffers.

Same formats and bits as ``mlacast.kernels.common.store`` of the normalised output. Codes leave from
registers: staging them in the ring would hold a slot back, and with it the next tile's first keys.
The next tile's products wait for every instruction here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mlacast.kernels.common.sm90_division import invert
from mlacast.kernels.common.sm90_group_scales import divide_by_scales, find_group_scales
from mlacast.kernels.common.sm90_nvfp4 import quantise_to_nvfp4, store_scale_bytes
from mlacast.kernels.common.sm90_pack import pack_bf16, pack_e4m3
from mlacast.kernels.common.sm90_rotation import find_aligned_offset, hide_rows, hide_value
from mlacast.kernels.common.sm90_store import BF16, FP8_TENSOR, FP8_UE8M0, NVFP4


@gluon.jit
def _store_rows(
    values,
    data_ptr,
    stride_group,
    head_start,
    num_heads,
    FIRST,
    OUTPUT: gl.constexpr,
    FULL_TILES: gl.constexpr,
    PER_VALUE: gl.constexpr,
):
    """Store values [64, 128 / PER_VALUE], of dimensions ``FIRST``.., into the token's row.

    A value has ``PER_VALUE`` dimensions. Codes leave as words of four bytes.
    """
    WORD: gl.constexpr = 1 if PER_VALUE == 1 else 4
    if WORD == 4:
        data_ptr = data_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    LAYOUT: gl.constexpr = values.type.layout
    COLUMNS: gl.constexpr = 128 // PER_VALUE
    HEADS: gl.constexpr = OUTPUT.features // 512
    CHUNK: gl.constexpr = 32 // PER_VALUE
    HEAD_STEP: gl.constexpr = CHUNK if OUTPUT.chunk32 else 512 // PER_VALUE
    head = head_start + hide_rows(gl.SliceLayout(1, LAYOUT))  # [64]
    column = FIRST // PER_VALUE + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))  # [COLUMNS]
    if OUTPUT.chunk32:
        column = (column // CHUNK) * (HEADS * CHUNK) + column % CHUNK
    rows = find_aligned_offset(head // HEADS, stride_group // WORD) + (head % HEADS) * HEAD_STEP
    pointers = data_ptr + rows[:, None] + column[None, :]  # [64, COLUMNS]
    if FULL_TILES:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=(head < num_heads)[:, None])


@gluon.jit
def _store_scales(
    scales,
    sf_ptr,
    stride_token,
    stride_group,
    stride_word,
    row,
    head_start,
    num_heads,
    FIRST,
    FULL_TILES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Store scales [64, n] of heads and blocks; those of blocks of 64 come, and leave, twice.

    Those of a token's group are less than 2**31 apart (``scales:far_apart`` in ``ops.layout``), so
    that within it 32 bits are enough.
    """
    GROUP: gl.constexpr = OUTPUT.group
    HEADS: gl.constexpr = OUTPUT.features // 512
    LAYOUT: gl.constexpr = scales.type.layout
    COPIES: gl.constexpr = 2 if GROUP == 64 else 1
    head = head_start + hide_rows(gl.SliceLayout(1, LAYOUT))  # [64]
    place = hide_value(gl.arange(0, scales.shape[1], gl.SliceLayout(0, LAYOUT)))  # [n]
    block = FIRST // GROUP + place // COPIES  # [n]
    within = head % HEADS  # [64]
    group = (head // HEADS).to(gl.int64) * stride_group  # [64], int64
    if OUTPUT.kind == FP8_UE8M0:
        # Scale ``index`` of a group is byte index % 4 of word index // 4.
        if not OUTPUT.chunk32:
            in_row = (group + within * (128 // GROUP) * stride_word) * 4
            in_column = (block // 4) * stride_word * 4 + block % 4
            offsets = in_row[:, None] + in_column[None, :]  # [64, n]
        elif HEADS % 4 == 0:
            in_row = (group + (within // 4) * stride_word) * 4 + within % 4
            in_column = block * (HEADS // 4) * stride_word * 4
            offsets = in_row[:, None] + in_column[None, :]  # [64, n]
        else:
            index = (block * HEADS)[None, :] + within[:, None]  # [64, n]
            offsets = (group[:, None] + (index // 4) * stride_word) * 4 + index % 4
        pointers = sf_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + row * stride_token * 4
        stored = scales.to(gl.uint8)
    else:
        if OUTPUT.chunk32:
            offsets = (group + within * stride_word)[:, None]
            offsets += (block * HEADS * stride_word)[None, :]
        else:
            offsets = (group + within * (512 // GROUP) * stride_word)[:, None]
            offsets += (block * stride_word)[None, :]
        pointers = sf_ptr + row * stride_token
        stored = scales
    if FULL_TILES:
        gl.store(pointers + offsets, stored)
    else:
        gl.store(pointers + offsets, stored, mask=(head < num_heads)[:, None])


@gluon.jit
def _store_nvfp4(
    quantised,
    data_ptr,
    stride_data_group,
    sf_ptr,
    row_start,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST,
    FULL_TILES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Store what ``quantise_to_nvfp4`` returns: words of codes [64, 16], scales of both halves.

    ``row`` counts from ``row_start``, a row of the buffer; scales of ``padding_rows`` behind it are
    zeroed.
    """
    words, left, right = quantised
    _store_rows(
        words,
        data_ptr,
        stride_data_group,
        head_start,
        num_heads,
        FIRST,
        OUTPUT,
        FULL_TILES,
        8,
    )
    for part in gl.static_range(2):
        store_scale_bytes(
            left if part == 0 else right,
            head_start + hide_rows(gl.SliceLayout(1, left.type.layout)),
            sf_ptr,
            row_start + row,
            padding_rows,
            num_heads,
            FIRST + part * 64,
            FULL_TILES,
        )


@gluon.jit
def _store_e4m3(
    x,
    factor,
    alive,
    data_ptr,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    scale_ptr,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST,
    FULL_TILES: gl.constexpr,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """``store_scaled_block`` [64, 128] to e4m3 codes: one scale of the tensor, or one a group."""
    COLUMN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if OUTPUT.kind == FP8_TENSOR:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]  # [64, 1]
        ratio = x * per_head * invert(gl.load(scale_ptr))
    else:
        pairs, scale, scales = find_group_scales(x, factor, alive, MASKED, OUTPUT)
        _store_scales(
            scales,
            sf_ptr,
            stride_sf_token,
            stride_sf_group,
            stride_sf_word,
            row,
            head_start,
            num_heads,
            FIRST,
            FULL_TILES,
            OUTPUT,
        )
        ratio = divide_by_scales(pairs, scale, OUTPUT)
    _store_rows(
        pack_e4m3(ratio, alive, MASKED),
        data_ptr,
        stride_data_group,
        head_start,
        num_heads,
        FIRST,
        OUTPUT,
        FULL_TILES,
        4,
    )
    if OUTPUT.kind != FP8_TENSOR:
        # Last, where the registers of the block are free.
        for padding in range(padding_rows):
            _store_scales(
                gl.zeros_like(scales),
                sf_ptr,
                stride_sf_token,
                stride_sf_group,
                stride_sf_word,
                row + 1 + padding,
                head_start,
                num_heads,
                FIRST,
                FULL_TILES,
                OUTPUT,
            )


@gluon.jit
def store_scaled_block(
    x,
    factor,
    alive,
    data_ptr,
    stride_data_group,
    sf_ptr,
    stride_sf_token,
    stride_sf_group,
    stride_sf_word,
    scale_ptr,
    row,
    padding_rows,
    head_start,
    num_heads,
    FIRST,
    FULL_TILES: gl.constexpr,
    MASKED: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    """Quantise and store dimensions ``FIRST``.. of 64 heads of one token: ``x * factor``.

    ``x`` is [64, 128] float32, ``factor`` float32 [64]. With ``MASKED``, rows where ``alive``
    (int32 [64], all ones or zero) is zero are stored as zeros whatever they hold.
    ``data_ptr`` is the token's row of codes, ``row`` (int64) that of its scales. ``padding_rows``
    of scales after it are zeroed: 0 except for the buffer's last token. Of NVFP4, whose scales have
    no strides, ``stride_sf_word`` is the range's first row. OUTPUT is an `OutputConfig`.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    # ``per_head`` is [64, 1].
    if OUTPUT.kind == BF16:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
        _store_rows(
            pack_bf16(x * per_head, alive, MASKED),
            data_ptr,
            stride_data_group,
            head_start,
            num_heads,
            FIRST,
            OUTPUT,
            FULL_TILES,
            1,
        )
    elif OUTPUT.kind == NVFP4:
        per_head = gl.convert_layout(factor, COLUMN, assert_trivial=True)[:, None]
        _store_nvfp4(
            quantise_to_nvfp4(x * per_head, alive, gl.load(scale_ptr), MASKED),
            data_ptr,
            stride_data_group,
            sf_ptr,
            stride_sf_word,
            row,
            padding_rows,
            head_start,
            num_heads,
            FIRST,
            FULL_TILES,
            OUTPUT,
        )
    else:
        _store_e4m3(
            x,
            factor,
            alive,
            data_ptr,
            stride_data_group,
            sf_ptr,
            stride_sf_token,
            stride_sf_group,
            stride_sf_word,
            scale_ptr,
            row,
            padding_rows,
            head_start,
            num_heads,
            FIRST,
            FULL_TILES,
            MASKED,
            OUTPUT,
        )
