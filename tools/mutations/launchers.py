"""Faults in what launchers compute on the host, those of Hopper kernels among them."""

from __future__ import annotations

from tools.mutations.fault import Fault

_SM90 = "mlacast/kernels/gluon/sm90/"

LAUNCHERS = (
    Fault(
        "target-padding",
        "kernels",
        "padding of swizzled scales is counted from the range",
        "mlacast/kernels/common/targets.py",
        "owned.shape[0] - (out.total_tokens if swizzled else out.num_tokens)",
        "owned.shape[0] - out.num_tokens",
        ("tests/kernels/test_store_interpreted.py",),
    ),
    Fault(
        "target-word-stride",
        "kernels",
        "Hopper stores swizzled scales from row 0",
        "mlacast/kernels/common/targets.py",
        "return out.row_start\n",
        "return 0\n",
        ("tests/kernels/test_store_target.py",),
    ),
    Fault(
        "page-division",
        "sparse_mla_decode",
        "page numbers are one too low at some slots",
        "mlacast/kernels/common/record_places.py",
        "multiplier = -(-(1 << (31 + shift)) // page_size)",
        "multiplier = (1 << (31 + shift)) // page_size",
        ("tests/kernels/test_page_division.py",),
    ),
    Fault(
        "plan-offset",
        "dispatch",
        "a repeated call forgets where views start",
        "mlacast/kernels/common/launch.py",
        "offset = tensor.data_ptr() - base.data_ptr()",
        "offset = 0",
        ("tests/kernels/test_launch.py",),
    ),
    Fault(
        "plan-scratch",
        "dispatch",
        "a repeated call's scratch is half as long",
        "mlacast/kernels/common/launch.py",
        "sizes = [scratch.numel() for scratch in self._scratch]",
        "sizes = [scratch.numel() // 2 for scratch in self._scratch]",
        ("tests/kernels/test_launch.py",),
    ),
    Fault(
        "plan-triton-version",
        "dispatch",
        "launches of an unknown triton are bound too",
        "mlacast/kernels/common/launch.py",
        'if ".".join(triton.__version__.split(".")[:2]) not in _KNOWN_TRITON:',
        'if ".".join(triton.__version__.split(".")[:1]) in _KNOWN_TRITON:',
        ("tests/kernels/test_launch.py",),
    ),
    Fault(
        "hopper-extra-length",
        "sparse_mla_decode",
        "the Hopper kernel looks at the extra length when there is a main one",
        _SM90 + "sparse_mla_decode.py",
        "hopper_pool_config(extra.kv_format, d_qk, extra.lengths)",
        "hopper_pool_config(extra.kv_format, d_qk, topk_length)",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-full-tiles",
        "sparse_mla_decode",
        "the Hopper kernel writes 64 heads whatever their number",
        "mlacast/kernels/config/sparse_attention.py",
        "num_heads % 64 == 0, num_splits > 1",
        "num_heads % 16 == 0, num_splits > 1",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-page-stride",
        "sparse_mla_decode",
        "the Hopper kernel takes the page stride in words",
        _SM90 + "sparse_mla_decode.py",
        "        cache.stride(0) // 16,\n",
        "        cache.stride(0) // 4,\n",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-rotate-query",
        "sparse_mla_decode",
        "a query that comes rotated is rotated again",
        "mlacast/kernels/config/attention.py",
        "is_rotated=rope is not None and rope.rotate_query",
        "is_rotated=rope is not None",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-codes-kernel",
        "sparse_mla_decode",
        "e4m3 queries go to the kernel for bfloat16 ones",
        _SM90 + "sparse_mla_decode.py",
        "has_codes = q.dtype == torch.float8_e4m3fn",
        "has_codes = q.dtype == torch.float8_e5m2",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-codes-strides",
        "sparse_mla_decode",
        "tokens of e4m3 queries are as far apart as packed ones",
        _SM90 + "sparse_mla_decode.py",
        "q.stride(0) // 16,",
        "q.shape[1] * q.stride(1) // 16,",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-codes-norm",
        "sparse_mla_decode",
        "the norm of e4m3 queries is left out silently",
        _SM90 + "sparse_mla_decode.py",
        "query == QueryConfig(d_qk, half_pairing=query.half_pairing)",
        "query._replace(has_norm=False) == QueryConfig(d_qk, half_pairing=query.half_pairing)",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-prefill-head-blocks",
        "sparse_mla_prefill",
        "the last heads of a token have no program",
        "mlacast/kernels/config/sparse_attention.py",
        "WorkConfig(-(-num_heads // 64),",
        "WorkConfig(max(num_heads // 64, 1),",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "hopper-merge-rotates",
        "sparse_mla_decode",
        "the merge rotates 576-wide outputs back",
        "mlacast/kernels/config/attention.py",
        "rotates_back=rope is not None and d_qk == 512",
        "rotates_back=rope is not None",
        ("tests/kernels/test_hopper_launchers.py",),
    ),
    Fault(
        "prefill-sign",
        "dense_mla_prefill",
        "a negative softmax scale counts as positive",
        "mlacast/kernels/config/dense_prefill.py",
        "float((softmax_scale > 0) - (softmax_scale < 0))",
        "float((softmax_scale > 0) + (softmax_scale < 0))",
        ("tests/kernels/test_dense_mla_prefill_interpreted.py",),
    ),
    Fault(
        "project-operands",
        "grouped_out_project",
        "weights of float16 are rounded to bfloat16",
        "mlacast/kernels/config/grouped_out_project.py",
        "weight.dtype in (torch.float32, torch.float16)",
        "weight.dtype == torch.float32",
        ("tests/kernels/test_launch_plans.py",),
    ),
    Fault(
        "rope-position-early",
        "rope_quantize_fp8",
        "positions are read before the kernel before has ended",
        "mlacast/kernels/triton/rope_quantize_fp8_rows.py",
        """    wait_for_previous_kernel(PDL)
    if PAGED:
        exists = exists & (tl.load(requests_ptr + token, mask=exists, other=-1) >= 0)
    position = tl.load(positions, mask=exists, other=0)
""",
        """    position = tl.load(positions, mask=exists, other=0)
    wait_for_previous_kernel(PDL)
    if PAGED:
        exists = exists & (tl.load(requests_ptr + token, mask=exists, other=-1) >= 0)
""",
        ("tests/kernels/test_cache_kernels_compile.py",),
    ),
    Fault(
        "decode-most-splits",
        "sparse_mla_decode",
        "a list has two splits at most",
        "mlacast/kernels/config/sparse_attention.py",
        "splits = min(splits, max(-(-width // tiles.block_n), 2))",
        "splits = min(splits, 2)",
        ("tests/kernels/test_decode_splits.py", "tests/kernels/test_launch.py"),
    ),
)
