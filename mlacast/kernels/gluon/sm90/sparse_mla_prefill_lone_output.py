"""What the output roles of a Hopper prefill program with one tile do before the first weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlacast.kernels.common.sm90_rotation import find_row_offset
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_lone_score import find_score_scales
from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import TOTAL

# More tiles keep the memory busy: rows that are sent for delay those that are waited for.
_FEW_TILES = gl.constexpr(32)
# The gather role asks for the first two blocks at once; the next eight are sent for.
_FIRST = gl.constexpr(128)
_COLUMNS = gl.constexpr(256)


@gluon.jit
def serve_scores(early, k_smem, alpha_smem, k_free, p_go, QUERY: gl.constexpr):
    """Score scales of the query in the ring's first slot, for the score role (``p_go``).

    Consumes ``k_ready`` of the query, produces ``k_free`` of its slot beside the score role.
    """
    k_ready, eps, score_scale_log2, indices_ptr, stride_indices, kv_ptr, stride_kv, s_kv = early
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mbarrier.wait(k_ready.index(0), 0)
    scale = find_score_scales(k_smem.index(0), eps, score_scale_log2, S, QUERY)
    mbarrier.arrive(k_free.index(0), count=1)
    alpha_smem.index(TOTAL).store(scale)
    mbarrier.arrive(p_go.index(0), count=1)


@gluon.jit
def prefetch_rows(early, topk, WORK: gl.constexpr):
    """Send for half of the rows of later blocks into the L2 cache, as the tile's other program."""
    k_ready, eps, score_scale_log2, indices_ptr, stride_indices, kv_ptr, stride_kv, s_kv = early
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = gl.program_id(0) // (2 * WORK.head_blocks)
    # [256]
    column = _FIRST + (gl.program_id(0) % 2) * _COLUMNS + gl.arange(0, _COLUMNS, LAYOUT)
    limit = gl.where(gl.num_programs(0) <= 2 * _FEW_TILES, topk, 0)
    ids = gl.load(
        indices_ptr + find_row_offset(token, stride_indices) + column, mask=column < limit, other=-1
    )  # [256]
    valid = (ids >= 0) & (ids < s_kv)  # [256]
    rows = kv_ptr + ids.to(gl.int64) * stride_kv  # [256]
    gl.inline_asm_elementwise(
        """{
        .reg .pred there;
        setp.ne.b32 there, $2, 0;
        @there cp.async.bulk.prefetch.L2.global [$1], 1024;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [rows, valid.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
