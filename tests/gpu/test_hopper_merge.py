"""The merge of Hopper decode splits on the device: bytes of the portable merge, and float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mlacast
from tests.gpu.hopper_cases import BEFORE, on_hopper
from tests.gpu.hopper_checks import nvfp4_scales
from tests.gpu.split_states import (
    EMPTY_TOKEN,
    Merge,
    States,
    draw_states,
    merge_in_float64,
    merge_into,
)
from tests.gpu.steps import CUDA
from tests.kernels.store_cases import assert_same_storages, fill_storage_on

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from mlacast.kernels.common.combine_splits import combine_splits  # noqa: E402
from mlacast.kernels.config.sparse_attention import FEW, MANY, merge_plan  # noqa: E402
from mlacast.kernels.gluon.sm90.sparse_mla_decode_merge import (  # noqa: E402
    merge_splits,
    merge_splits_kernel,
)

pytestmark = on_hopper

# What float32 may be off by, as a share of the magnitudes added up: 33 summands and ten roundings
# are less than 2**-18.
FLOAT32_ERROR = 2.0**-18


@dataclass(frozen=True)
class Case:
    """Options of a merge that are compile-time values of its kernel.

    Attributes:
        name: Test id.
        out_format: Format of the output.
        group_heads: Heads of an output group.
        pairing: RoPE pairing, or None.
        sink: With sinks.
        d_qk: Width of the query; the output is rotated for 512 only.
        sizes: Tokens, heads and splits of the calls.
    """

    name: str
    out_format: mlacast.OutFormat
    group_heads: int = 8
    pairing: str | None = None
    sink: bool = False
    d_qk: int = 512
    sizes: tuple[tuple[int, int, int], ...] = (
        (3, 16, 1),
        (2, 64, 33),
        (5, 96, 8),
        (1, 128, 17),
        (70, 16, 2),
        (21, 64, 3),
        (11, 128, 2),
    )

    def buffer(self, tokens: int, heads: int, ends: bool, device: str) -> mlacast.QuantizedTensor:
        """A poisoned buffer of ``tokens`` and some more before and, unless it ends, behind them."""
        total = BEFORE + tokens + (0 if ends else 3)
        features = self.group_heads * 512
        groups = heads // self.group_heads
        buffer = mlacast.QuantizedTensor.empty(total, groups, features, self.out_format, device)
        fill_storage_on(buffer.data)
        if buffer.sf is not None:
            fill_storage_on(buffer.sf)
        return buffer


FEW_HEADS = ((4, 1, 5), (1100, 1, 2))
PARTIAL = ((3, 12, 7), (90, 12, 4), (41, 36, 2))
MX = mlacast.Mxfp8("head")
MX32 = mlacast.Mxfp8("chunk32")
NVFP4 = mlacast.Nvfp4(1.0)
CASES = (
    Case("bf16", mlacast.Bf16(), 16),
    Case("bf16-576-partial", mlacast.Bf16(), 4, "half", True, 576, PARTIAL),
    Case("tensor", mlacast.Fp8Tensor(0.05), 16, "interleaved", True),
    Case("mxfp8", MX, 8, "interleaved", True),
    Case("mxfp8-half", MX, 8, "half"),
    Case("mxfp8-one-head", MX, 1, "half", True, sizes=FEW_HEADS),
    Case("chunk32", MX32, 8, "interleaved", True),
    Case("chunk32-half-of-16", MX32, 16, "half"),
    Case("chunk32-of-3-partial", MX32, 3, "half", True, sizes=PARTIAL),
    Case("group128-float32", mlacast.Fp8Group(128, "float32", "mn_major"), 8, "interleaved", True),
    Case("group64-float32", mlacast.Fp8Group(64, "float32", "row_major"), 8, "half"),
    Case("group32-float32", mlacast.Fp8Group(32, "float32", "row_major"), 4, sizes=PARTIAL),
    Case("group128-pow2", mlacast.Fp8Group(128, "float32_pow2", "row_major"), 8),
    Case("group64-pow2", mlacast.Fp8Group(64, "float32_pow2", "mn_major"), 8, "half", True),
    Case("group128-packed", mlacast.Fp8Group(128, "ue8m0_packed", "mn_major"), 8, "half", True),
    Case("group64-packed", mlacast.Fp8Group(64, "ue8m0_packed", "row_major"), 8, None, True),
    Case("group32-packed", mlacast.Fp8Group(32, "ue8m0_packed", "mn_major"), 8, "interleaved"),
    Case("nvfp4", NVFP4, 8, "interleaved", True),
    Case("nvfp4-half-of-16", NVFP4, 16, "half"),
    Case("nvfp4-one-head", NVFP4, 1, "half", True, sizes=FEW_HEADS),
    Case("nvfp4-partial", NVFP4, 4, None, True, sizes=PARTIAL),
)


def case_id(case: Case) -> str:
    """Readable parametrisation id."""
    return case.name


def run(
    merge: Merge, case: Case, states: States, ends: bool
) -> tuple[mlacast.QuantizedTensor, mlacast.QuantizedTensor, Tensor]:
    """Merge into rows of a buffer; the buffer, the rows, lse."""
    device = states.maxima.device.type
    _, tokens, heads = states.maxima.shape
    buffer = case.buffer(tokens, heads, ends, device)
    rows = buffer[BEFORE : BEFORE + tokens]
    lse = torch.full((tokens, heads), torch.nan, device=device)
    merge_into(merge, states, rows, lse, case.d_qk)
    return buffer, rows, lse


def assert_same_bytes(merge: Merge, case: Case, states: States, ends: bool) -> None:
    """``merge`` must leave the bytes of the portable merge, in and around its rows.

    A code of zero may have either sign: that of a rotated zero depends on the order of products.
    """
    buffer, _, lse = run(merge, case, states, ends)
    expected, _, expected_lse = run(combine_splits, case, states, ends)
    if case.out_format.key != "bf16":
        for written in (buffer, expected):
            codes = written.data.view(torch.uint8)
            if case.out_format.key == "nvfp4":
                low, high = codes & 0xF, codes & 0xF0
                codes.copy_(low.masked_fill(low == 8, 0) | high.masked_fill(high == 0x80, 0))
            else:
                codes.masked_fill_(codes == 0x80, 0)
    assert_same_storages(buffer, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_same_bytes_as_the_portable_merge(case: Case) -> None:
    for number, (tokens, heads, splits) in enumerate(case.sizes):
        states = draw_states(tokens, heads, splits, case.pairing, case.sink).on(CUDA)
        assert_same_bytes(merge_splits, case, states, ends=number % 2 == 0)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_infinities_and_nan_of_values_as_in_the_portable_merge(case: Case) -> None:
    for tokens, heads, splits in case.sizes[:: len(case.sizes) - 1]:
        states = draw_states(tokens, heads, splits, case.pairing, case.sink)
        for value in (torch.inf, -torch.inf, torch.nan, -0.0, 1e-42, 3e38):
            at = torch.rand(states.outputs.shape) < 0.001
            states.outputs[at & ~states.maxima.isneginf()[..., None]] = value
        if case.out_format.key == "bf16":
            # NaN of bfloat16 is not compared: it has many bit patterns.
            states.outputs[~states.outputs.isfinite()] = 2.0
        assert_same_bytes(merge_splits, case, states.on(CUDA), ends=True)


def half_steps(rows: mlacast.QuantizedTensor, exact: Tensor, values: Tensor) -> Tensor:
    """How far the nearest number of the format may be from ``exact`` [s_q, h, 512]."""
    fmt = rows.format
    if isinstance(fmt, mlacast.Nvfp4):
        return torch.maximum(values.abs(), nvfp4_scales(rows).cpu().reshape(exact.shape)) / 4
    if isinstance(fmt, mlacast.Bf16):
        return 2.0**-8 * exact.abs()
    if isinstance(fmt, mlacast.Fp8Tensor):
        return values.abs() / 16 + 2.0**-10 * 0.05
    # Half a step of the subnormal codes is 2**-10 of a scale, which is at most 2 * amax / 448.
    group = fmt.sf_vec_size
    blocks = exact.abs().view(*exact.shape[:2], 512 // group, group).amax(3)
    largest = blocks.clamp_min(fmt.amax_floor).repeat_interleave(group, 2)
    return values.abs() / 16 + largest * (2.0**-9 / 448)


def assert_logarithms(lse: Tensor, exact: Tensor) -> None:
    """Compare sums of at most 65 positive terms, of which few are large.

    Exponentials and the logarithm are right to 2**-22, terms and sums are rounded to 2**-24, maxima
    of this size and their sum with the logarithm too: 16 such roundings, 2**-20.
    """
    finite = exact.isfinite()
    error = (lse[finite] - exact[finite]).abs()
    assert bool((error <= 2.0**-20 * (1 + exact[finite].abs())).all()), float(error.max())


def assert_near_float64(merge: Merge, case: Case, states: States) -> None:
    """Values, scales and codes of ``merge`` against the exact merge and the reference's store."""
    exact, exact_lse, size = merge_in_float64(states, case.d_qk)
    _, rows, lse = run(merge, case, states, ends=True)
    finite = exact_lse.isfinite()
    assert torch.equal(lse.cpu().isneginf(), ~finite)
    assert_logarithms(lse.cpu(), exact_lse)
    values = rows.dequantize().cpu().reshape(exact.shape).double()
    assert not bool(values[~finite].any()), "a row without keys is not zero"
    slack = FLOAT32_ERROR * size
    wanted = exact
    if isinstance(case.out_format, mlacast.Fp8Tensor):
        wanted = exact.clamp(-448 * 0.05, 448 * 0.05)
    elif isinstance(case.out_format, mlacast.Nvfp4):
        largest = 6 * nvfp4_scales(rows).cpu().reshape(exact.shape)
        wanted = torch.copysign(torch.minimum(exact.abs(), largest), exact)
    excess = (values - wanted).abs() - half_steps(rows, exact, values) - 2 * slack
    # Nothing but the rounding of these lines, in float64.
    assert float(excess.max()) <= 1e-12, f"{float(excess.max()):.3e} further off than any rounding"
    if rows.sf is None:
        return
    smaller, equal, larger = (
        stored(case, torch.copysign(magnitude, exact))
        for magnitude in ((exact.abs() - slack).clamp_min(0), exact.abs(), exact.abs() + slack)
    )
    scales, least, most = (scale_values(part) for part in (rows, smaller, larger))
    assert bool(((least <= scales) & (scales <= most)).all())
    codes, expected = (part.data.cpu().view(torch.uint8) for part in (rows, equal))
    # A number within the slack of the middle between two codes may have either: 2**-17 of one in
    # steps of at least 2**-4 of it is one in 8000, more where a sum is small beside its terms. A
    # wrong factor, scale or angle moves several per cent of the codes.
    assert float((codes != expected).float().mean()) <= 0.01


def stored(case: Case, rows: Tensor) -> mlacast.QuantizedTensor:
    """What the reference stores for float32 ``rows`` [s_q, h, 512]."""
    tokens, heads, _ = rows.shape
    buffer = case.buffer(tokens, heads, True, "cpu")[BEFORE:]
    groups = (tokens, heads // case.group_heads, case.group_heads * 512)
    mlacast.reference.quantize_output(rows.float().reshape(groups), buffer)
    return buffer


def scale_values(rows: mlacast.QuantizedTensor) -> Tensor:
    """Scales as float32, or as bytes of exponents."""
    assert rows.sf is not None
    scales = rows.sf.cpu().contiguous()
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_near_float64(case: Case) -> None:
    for tokens, heads, splits in case.sizes:
        states = draw_states(min(tokens, 90), heads, splits, case.pairing, case.sink)
        assert_near_float64(merge_splits, case, states.on(CUDA))


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_rows_that_are_zero_read_nothing_into_it(tokens: int, pairing: str) -> None:
    """Closed sinks and empty rows: no NaN of an accumulator or of the table, and no -0."""
    case = Case("zeros", MX32, 16, pairing, True)
    states = draw_states(tokens, 32, 4, pairing, True)
    assert states.sink is not None
    assert states.rope is not None
    states.sink[::2] = torch.inf
    states.outputs[:, :, ::4] = torch.nan
    states.outputs[:, :, 2::4] = -3.0
    table = states.rope.cos_sin_cache
    table[states.rope.positions[EMPTY_TOKEN].clamp(0, len(table) - 1)] = torch.nan
    _, rows, lse = run(merge_splits, case, states.on(CUDA), ends=True)
    groups = rows.data.view(torch.uint8).reshape(tokens, 2, 16, 16, 32)
    assert not bool(groups[:, :, :, ::2].any()), "a closed sink leaves a code"
    assert not bool(groups[EMPTY_TOKEN].any()), "an empty row leaves a code"
    assert bool(lse[EMPTY_TOKEN].isneginf().all())
    _, exact_lse, _ = merge_in_float64(states)
    assert torch.equal(lse.cpu().isneginf(), exact_lse.isneginf())
    assert_logarithms(lse.cpu(), exact_lse)


@pytest.mark.parametrize("tokens", [2, 66], ids=["few", "many"])
def test_every_number_of_splits_by_one_variant(tokens: int) -> None:
    program = MANY if tokens == 66 else FEW
    assert {merge_plan(count, 16).program for count in (tokens, 3 * tokens)} == {program}
    case = Case("splits", MX, 8, "interleaved", True)
    run(merge_splits, case, draw_states(3 * tokens, 16, 2, case.pairing, True).on(CUDA), True)
    variants = merge_splits_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(variants)
    for splits in (*range(1, 11), 15, 16, 17, 18, 33, 64, 65):
        states = draw_states(tokens, 16, splits, case.pairing, True).on(CUDA)
        assert_same_bytes(merge_splits, case, states, ends=splits % 2 == 0)
    assert len(variants) == before


@pytest.mark.parametrize("tokens", [2, 66], ids=["few", "many"])
def test_waits_for_the_kernel_that_writes_the_states(tokens: int) -> None:
    """Launched ahead of its end; also in a graph, where other merges come before."""
    case = Case("order", MX, 8, "interleaved", True)
    drawn = [draw_states(tokens, 64, 3, case.pairing, True).on(CUDA) for _ in range(2)]
    expected = []
    for states in drawn:
        buffer, _, lse = run(merge_splits, case, states, True)
        torch.cuda.synchronize()
        expected.append((buffer, lse))
    heads = drawn[0].maxima.shape[2]
    buffers = [case.buffer(tokens, heads, True, CUDA) for _ in range(12)]
    lses = [torch.zeros(tokens, heads, device=CUDA) for _ in buffers]

    def launch() -> None:
        for number, (buffer, lse) in enumerate(zip(buffers, lses, strict=True)):
            merge_into(merge_splits, drawn[number % 2], buffer[BEFORE:], lse)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lse in lses:
        lse.fill_(7.0)
    for _ in range(20):
        graph.replay()
    for number, (buffer, lse) in enumerate(zip(buffers, lses, strict=True)):
        assert_same_storages(buffer, expected[number % 2][0])
        assert torch.equal(lse, expected[number % 2][1])
