"""Scales of "V32" on a Hopper GPU: a block whose scales bfloat16 holds has a program of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cache_writers import Records, draw_records
from tests.gpu.hopper_cases import Case, Shape, on_hopper
from tests.gpu.hopper_checks import Written, assert_right, assert_same
from tests.gpu.hopper_decode_calls import DecodeCall, draw_decode
from tests.gpu.hopper_pools import MAIN, Pool, build_pool, decoded, layout_of
from tests.gpu.steps import CUDA

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.gluon.sm90.sparse_mla_decode import launch_sparse_mla_decode  # noqa: E402

pytestmark = on_hopper

CASE = Case("v32", 128, pools=("V32",))
LAYOUT = layout_of("V32")
BLOCK, UNITS = 64, 4
# 12 bits, which is as many as are rounded once; bfloat16 has 8.
LONG_SCALE = 1.0 + 2.0**-3 + 2.0**-8 + 2.0**-11


def _draw_powers(count: int) -> Records:
    """Records whose scales are powers of two, their codes finite numbers."""
    records = draw_records(LAYOUT, count)
    powers = torch.exp2(torch.randint(-3, 3, (count, UNITS)).float())
    _put_scales(records, powers)
    return records


def _put_scales(records: Records, scales: Tensor) -> None:
    records.data[:, 512:528] = scales.contiguous().view(torch.uint8)


def _set_scales(records: Records, row: int, scale: float) -> None:
    """The same scale for all units of a row."""
    records.data[row, 512:528] = torch.full((UNITS,), scale).view(torch.uint8)


def _pool(records: Records) -> Pool:
    return build_pool("V32", MAIN, range(len(records.data)), decoded(LAYOUT, records))


def _draw_call(pool: Pool, tokens: int, topk: int) -> DecodeCall:
    return draw_decode(CASE, Shape(tokens, topk), "cpu", pools=[pool])


def _run(call: DecodeCall) -> Written:
    return call.run(launch_sparse_mla_decode, CASE)


def test_one_long_scale_of_a_block_is_enough() -> None:
    """Each of the 256 scales of a block is the only one that is no bfloat16, in a row of its own.

    All other rows are zeros and weights are equal, so the output is a 64th of the row itself.
    """
    records = _draw_powers(UNITS + 1)
    scales = torch.ones(UNITS + 1, UNITS)
    scales[torch.arange(UNITS), torch.arange(UNITS)] = LONG_SCALE
    _put_scales(records, scales)
    records.data[UNITS, :512] = 0
    pool = _pool(records)
    # Two more tokens than scales: not a multiple of 16.
    call = _draw_call(pool, BLOCK * UNITS + 2, BLOCK)
    call.q.zero_()
    call.indices.fill_(UNITS)
    scale = torch.arange(BLOCK * UNITS)
    call.indices[scale, scale // UNITS] = (scale % UNITS).to(torch.int32)
    written = _run(call.on(CUDA))
    rows = torch.cat((pool.rows[scale % UNITS, :512], torch.zeros(2, 512))) / BLOCK
    found = written.out.data.view(-1, CASE.heads, 512).double().cpu()
    assert torch.equal(found, rows[:, None].expand_as(found))
    short = (rows[:-2].view(BLOCK, UNITS, UNITS, 128) * BLOCK).abs().amax((0, 3))
    assert bool((short > 0).all()), "every unit has something to be wrong"


def test_both_programs_give_the_same_bits() -> None:
    """Rows of powers of two beside one of zeros, whose scales alone choose the program."""
    records = _draw_powers(MAIN.slots)
    records.data[BLOCK, :512] = 0
    _set_scales(records, BLOCK, 1.0)
    call = _draw_call(_pool(records), 38, 4 * BLOCK)
    # The first and the third of four blocks have that row.
    call.indices[:, :: 2 * BLOCK] = BLOCK
    short = call.on(CUDA)
    _set_scales(records, BLOCK, LONG_SCALE)
    long = replace(call, pools=(_pool(records),)).on(CUDA)
    written = _run(short)
    assert_same(written, _run(long), "the other program")
    assert_right(CASE, True, written, short.expected())


def test_blocks_of_both_kinds_in_turn() -> None:
    """A long scale here and there: some blocks have none, others several, in any row and unit."""
    records = _draw_powers(MAIN.slots)
    scales = records.data[:, 512:528].contiguous().view(torch.float32)
    scales[torch.rand_like(scales) < 1 / 256] *= LONG_SCALE
    _put_scales(records, scales)
    for tokens, topk in ((6, 512), (290, 256)):
        call = _draw_call(_pool(records), tokens, topk).on(CUDA)
        written = _run(call)
        assert_right(CASE, True, written, call.expected())
