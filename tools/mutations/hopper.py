"""Faults that only a GPU shows: in the bodies of the Hopper kernels, and in far addresses.

Each names one small test, because compiling a variant takes longer than running it. None changes
how roles wait for each other: that would hang and not fail.
"""

from __future__ import annotations

from tools.mutations.fault import Fault

_SM90 = "mlacast/kernels/gluon/sm90/"
_DECODE = "tests/gpu/test_hopper_decode.py::test_one_split_against_float64"
_SPLITS = "tests/gpu/test_hopper_decode.py::test_splits_against_float64"
_CACHES = "tests/gpu/test_hopper_decode.py::test_caches"
_CODES = (
    "tests/gpu/test_fp8_decode.py::"
    "test_scores_of_codes_are_as_good_as_the_unit_that_sums_them[576-1]"
)
_MERGE = "tests/gpu/test_hopper_merge.py::test_near_float64"
_PREFILL = "tests/gpu/test_hopper_prefill.py::test_against_float64"
_PREFILL_576 = "tests/gpu/test_hopper_prefill_576.py::test_against_float64"
_DENSE = "tests/gpu/test_hopper_dense_prefill.py::"
_STORE = "tests/gpu/test_hopper_store.py::test_bytes"
_PRODUCTS = "tests/gpu/test_out_project.py::test_hopper_linear"

HOPPER = (
    Fault(
        "h-decode-slot-past-the-end",
        "sparse_mla_decode",
        "the slot one past the cache counts",
        _SM90 + "sparse_mla_decode_slots.py",
        "valid = (ids >= 0) & (ids < num_slots)",
        "valid = (ids >= 0) & (ids <= num_slots)",
        (_DECODE + "[v41-bf16]",),
    ),
    Fault(
        "h-decode-length",
        "sparse_mla_decode",
        "one entry past the length counts",
        _SM90 + "sparse_mla_decode_tiles.py",
        "length = gl.minimum(gl.maximum(length, 0), pool.topk)",
        "length = gl.minimum(gl.maximum(length + 1, 0), pool.topk)",
        (_DECODE + "[v41-inline-h96]",),
    ),
    Fault(
        "h-decode-tail-block",
        "sparse_mla_decode",
        "the columns that fill up the last block are slot 0",
        _SM90 + "sparse_mla_decode_slots.py",
        "mask=column < length, other=-1",
        "mask=column < length, other=0",
        ("tests/gpu/test_hopper_decode.py::test_lists_that_are_no_whole_blocks[widths0]",),
    ),
    Fault(
        "h-decode-extra-pool",
        "sparse_mla_decode",
        "a partial last block of the first list is taken from the second",
        _SM90 + "sparse_mla_decode_slots.py",
        "main_blocks = (length + BLOCK_N - 1) // BLOCK_N",
        "main_blocks = length // BLOCK_N",
        (_DECODE + "[v41-v41-fused]",),
    ),
    Fault(
        "h-decode-split-bound",
        "sparse_mla_decode",
        "splits begin where the ones before have not ended",
        _SM90 + "sparse_mla_decode_tiles.py",
        "first = gl.minimum((item % work.num_splits) * per_split, total)",
        "first = gl.minimum((item % work.num_splits) * (per_split - 1), total)",
        (_SPLITS + "[v41-bf16]",),
    ),
    Fault(
        "h-decode-sink",
        "sparse_mla_decode",
        "the sink counts twice",
        _SM90 + "sparse_mla_decode_softmax.py",
        "factor / (1.0 + gl.exp(shifted))",
        "factor / (1.0 + 2.0 * gl.exp(shifted))",
        (_DECODE + "[v41-inline-h96]",),
    ),
    Fault(
        "h-decode-rescale",
        "sparse_mla_decode",
        "sums under a lower base are not rescaled",
        _SM90 + "sparse_mla_decode_softmax.py",
        "partial_sum * rescale[:, None] + by_quad",
        "partial_sum + by_quad",
        ("tests/gpu/test_hopper_decode.py::test_scores_that_grow_along_a_row",),
    ),
    Fault(
        "h-decode-norm-eps",
        "sparse_mla_decode",
        "the norm ignores its epsilon",
        _SM90 + "sparse_mla_decode_score.py",
        "squares * (1.0 / 512.0) + eps)",
        "squares * (1.0 / 512.0))",
        (_DECODE + "[v41-v41-fused]",),
    ),
    Fault(
        "h-decode-scale-byte",
        "sparse_mla_decode",
        "pairs of units take each other's scales",
        _SM90 + "sparse_mla_decode_records.py",
        "words = scales[UNIT // 2]",
        "words = scales[1 - UNIT // 2]",
        (_CACHES + "[V41]",),
    ),
    Fault(
        "h-decode-v32-scale",
        "sparse_mla_decode",
        "a float32 scale is cut to its first eight bits",
        _SM90 + "sparse_mla_decode_records.py",
        "_e4m3_times_number(words, parts[:, None])",
        "_e4m3_times_number(words, parts[:, None] & 0xFFFF)",
        (_CACHES + "[V32]",),
    ),
    Fault(
        "h-decode-v-scale",
        "sparse_mla_decode",
        "split partials are stored without v_scale",
        _SM90 + "sparse_mla_decode_output.py",
        "                    unit,\n",
        "                    1.0,\n",
        ("tests/gpu/test_fp8_decode.py::test_mate_decode[16-2-53]",),
    ),
    Fault(
        "h-decode-codes-sum",
        "sparse_mla_decode",
        "of e4m3 queries the second sum of products is left out",
        _SM90 + "sparse_mla_decode_fp8_score.py",
        "                s += right\n",
        "",
        (_CODES,),
    ),
    Fault(
        "h-decode-codes-mask",
        "sparse_mla_decode",
        "beside e4m3 queries keys that do not count are zeros that do",
        _SM90 + "sparse_mla_decode_fp8_dequant.py",
        "gl.where(valid, 0, 1).to(gl.int8)",
        "gl.where(valid, 0, 0).to(gl.int8)",
        (_CODES,),
    ),
    Fault(
        "h-decode-codes-values",
        "sparse_mla_decode",
        "beside e4m3 queries the values of a unit are those of the next",
        _SM90 + "sparse_mla_decode_fp8_dequant.py",
        "_e4m3_as_float16(codes[unit].index(stage).load(_WORDS))",
        "_e4m3_as_float16(codes[(unit + 1) % 4].index(stage).load(_WORDS))",
        (_CODES,),
    ),
    Fault(
        "h-decode-codes-weights",
        "sparse_mla_decode",
        "beside e4m3 queries the largest weight is one, and small ones are lost",
        _SM90 + "sparse_mla_decode_softmax.py",
        "_HEADROOM_F16 = gl.constexpr(7.0)",
        "_HEADROOM_F16 = gl.constexpr(0.0)",
        ("tests/gpu/test_fp8_decode.py::test_many_small_weights_count",),
    ),
    Fault(
        "h-merge-weights",
        "sparse_mla_decode",
        "sums of splits are added without their weights",
        _SM90 + "sparse_mla_decode_merge.py",
        "running_sum = running_sum + sums[at] * weight",
        "running_sum = running_sum + sums[at]",
        (_MERGE + "[bf16]",),
    ),
    Fault(
        "h-merge-inverse-rope",
        "sparse_mla_decode",
        "the merged output is rotated forward",
        _SM90 + "sparse_mla_decode_merge.py",
        "gl.join(first * cos + second * sin, second * cos - first * sin)",
        "gl.join(first * cos - second * sin, second * cos + first * sin)",
        (_MERGE + "[mxfp8]",),
    ),
    Fault(
        "h-merge-closed-sink",
        "sparse_mla_decode",
        "a closed sink leaves NaN standing",
        _SM90 + "sparse_mla_decode_merge.py",
        "out = gl.where(dead[:, None], 0.0, acc * factor[:, None])",
        "out = acc * factor[:, None]",
        (
            "tests/gpu/test_hopper_merge.py::test_rows_that_are_zero_read_nothing_into_it"
            "[3-interleaved]",
        ),
    ),
    Fault(
        "h-merge-row-offset",
        "sparse_mla_decode",
        "swizzled scales are counted from the start of the range",
        "mlacast/kernels/common/sm90_store.py",
        "            stride_sf_word + row,\n",
        "            row,\n",
        (_MERGE + "[nvfp4]",),
    ),
    Fault(
        "h-prefill-index-past-the-end",
        "sparse_mla_prefill",
        "the index one past the rows counts",
        _SM90 + "sparse_mla_prefill_gather.py",
        "valid = (ids >= 0) & (ids < s_kv)",
        "valid = (ids >= 0) & (ids <= s_kv)",
        (_PREFILL + "[bf16]",),
    ),
    Fault(
        "h-prefill-length",
        "sparse_mla_prefill",
        "one entry past the length counts",
        _SM90 + "sparse_mla_prefill_gather.py",
        "mask=first + lane < length, other=-1",
        "mask=first + lane <= length, other=-1",
        (_PREFILL + "[bf16-h128-length-sink]",),
    ),
    Fault(
        "h-prefill-norm-rotated",
        "sparse_mla_prefill",
        "the norm is that of the rotated query",
        _SM90 + "sparse_mla_prefill_score.py",
        "            q_rope = gl.convert_layout(rotate(q_rope, cos, sin, QUERY.half_pairing), Q)\n",
        "            q_rope = gl.convert_layout(rotate(q_rope, cos, sin, QUERY.half_pairing), Q)\n"
        "            if QUERY.has_norm:\n"
        "                squares = sum_of_squares(q_rope, ROW)\n",
        (_PREFILL + "[mx-head]",),
    ),
    Fault(
        "h-prefill-padding",
        "sparse_mla_prefill",
        "padding rows of scales keep what they held",
        _SM90 + "sparse_mla_prefill_output.py",
        "padding = gl.where(token == num_tiles // WORK.head_blocks - 1, padding_rows, 0)",
        "padding = gl.where(token == num_tiles // WORK.head_blocks, padding_rows, 0)",
        (_PREFILL + "[mx-head]",),
    ),
    Fault(
        "h-prefill-576-mask",
        "sparse_mla_prefill",
        "invalid entries count as keys of zeros",
        _SM90 + "sparse_mla_prefill_576_gather.py",
        "gl.where(valid, 0, 1).to(gl.int8)",
        "gl.where(valid, 0, 0).to(gl.int8)",
        (_PREFILL_576 + "[bf16]",),
    ),
    Fault(
        "h-prefill-576-lse",
        "sparse_mla_prefill",
        "max_logits is to base 2 where heads fill their tiles",
        _SM90 + "sparse_mla_prefill_576_score.py",
        "        gl.store(max_logits_ptr + target + head, running_max * LN_2)\n",
        "        gl.store(max_logits_ptr + target + head, running_max)\n",
        (_PREFILL_576 + "[bf16]",),
    ),
    Fault(
        "h-dense-diagonal",
        "dense_mla_prefill",
        "a token sees the one after it",
        _SM90 + "dense_mla_prefill_attend.py",
        "gl.minimum(opaque_rows(ROW) + diagonal, num_keys - 1)",
        "gl.minimum(opaque_rows(ROW) + diagonal + 1, num_keys - 1)",
        (_DENSE + "test_causal_bf16",),
    ),
    Fault(
        "h-dense-alignment",
        "dense_mla_prefill",
        "the causal mask is aligned top left",
        _SM90 + "dense_mla_prefill_load.py",
        "offset = num_keys - length if CAUSAL else num_keys",
        "offset = 0 if CAUSAL else num_keys",
        (_DENSE + "test_causal_bf16",),
    ),
    Fault(
        "h-store-power-of-two",
        "quantize_output",
        "the scale of an amax of exactly 448 * 2**n is doubled",
        "mlacast/kernels/common/sm90_group_scales.py",
        "((bits + 0x1FFFFF) >> 23) - 8",
        "((bits + 0x200000) >> 23) - 8",
        (_STORE + "[mxfp8_head-scaled-40]",),
    ),
    Fault(
        "h-store-nibbles",
        "quantize_output",
        "the even element in the high nibble",
        "mlacast/kernels/common/sm90_nvfp4.py",
        "            zero,\n            one,\n",
        "            one,\n            zero,\n",
        (_STORE + "[nvfp4-scaled-40]",),
    ),
    Fault(
        "h-project-zero-scale",
        "grouped_out_project",
        "scales of the step before are used",
        _SM90 + "grouped_out_project_roles.py",
        "words1 = _load_words(pointers, steps, first + LOADERS, STEPS)",
        "words1 = _load_words(pointers, steps, first, STEPS)",
        (_PRODUCTS + "[mxfp8_head-words_32]",),
    ),
    Fault(
        "attend-int32",
        "sparse_mla_decode",
        "page times stride is a product of 32 bits in the attention",
        "mlacast/kernels/common/sparse_attention.py",
        "slot = tl.where(valid, slot, 0).to(tl.int64)",
        "slot = tl.where(valid, slot, 0)",
        ("tests/gpu/test_big_offsets.py::test_slots_past_two_gigabytes[triton-1-V4]",),
    ),
)
