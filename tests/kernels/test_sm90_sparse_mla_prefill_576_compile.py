"""The Hopper prefill kernel for d_qk 576 compiles for sm_90a as its pipeline needs it; no GPU used.

Registers and shared memory are both all but exhausted: a spilled query or one barrier too many
costs more than any tuning wins.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton to compile kernels")

from mlacast.kernels.config.attention import EndConfig, PoolConfig, QueryConfig  # noqa: E402
from mlacast.kernels.config.output import OutputConfig  # noqa: E402
from mlacast.kernels.config.sparse_attention import work_config  # noqa: E402
from tests.kernels.sm90_build import build, needs_gated_triton  # noqa: E402

pytestmark = needs_gated_triton

PLAIN = {
    "WORK": work_config(128, 1),
    "QUERY": QueryConfig(576),
    "POOL": PoolConfig("rows"),
    "END": EndConfig(),
    "OUTPUT": OutputConfig(0, 512, 65536, False, 0.0, 0),
}
LENGTH = {"POOL": PoolConfig("rows", has_length=True)}
ROTATED = PLAIN | {
    "WORK": work_config(127, 1),
    "QUERY": QueryConfig(576, is_rotated=True, half_pairing=True),
    "END": EndConfig(has_sink=True, half_pairing=True),
}
# The variant that needs most shared memory: every argument is one that the roles keep there.
CHUNKED = {
    **PLAIN,
    **LENGTH,
    "QUERY": QueryConfig(576, is_rotated=True),
    "END": EndConfig(has_sink=True),
    "OUTPUT": OutputConfig(4, 32, 4096, True, 1e-4, 0),
}
NVFP4 = CHUNKED | {"OUTPUT": OutputConfig(5, 16, 4096, False, 0.0, 0)}
GROUP64 = {"OUTPUT": OutputConfig(2, 64, 65536, False, 1e-10, 0)}
CASES = {
    "plain-bf16": PLAIN,
    "rotated-half-sink-partial-bf16": ROTATED,
    "fused-chunk32-mxfp8": CHUNKED,
    "rotated-half-sink-partial-group64-float32": ROTATED | LENGTH | GROUP64,
    "fused-nvfp4": NVFP4,
    "rotated-half-sink-partial-nvfp4": ROTATED
    | {"OUTPUT": OutputConfig(5, 16, 65536, False, 0.0, 0)},
}
# As with 512 dimensions.
STORES = {0: {"128": 32}, 5: {"128": 8}}


@pytest.mark.parametrize("constants", CASES.values(), ids=CASES)
def test_fits_without_spills_or_serialised_wgmma(constants: dict[str, Any]) -> None:
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_576 import (
        OPTIONS,
        sparse_mla_prefill_576_kernel,
    )
    from mlacast.kernels.gluon.sm90.sparse_mla_prefill_tiles import UNALIGNED

    built = build(sparse_mla_prefill_576_kernel, OPTIONS, constants, UNALIGNED)
    # First scores and those of the loop: 576 dimensions each; two output roles: 256 by 64 keys.
    assert built.products == {"64x64": 2 * 36, "64x128": 2 * 8}
    assert built.copy_bits == {"128"}, "rows travel in 16-byte pieces"
    assert built.wide_stores == STORES.get(constants["OUTPUT"].kind, {"64": 32})
