"""merge_attention_states and v_up_project through the portable kernels on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import FAMILIES, QUANTISED, FormatCase, case_id
from tests.gpu.cache_steps import kernels_of, nothing_compiles, replayed
from tests.gpu.steps import CUDA, same_bits
from tests.kernels import store_cases

BF16 = torch.bfloat16


def draw_parts(
    tokens: int, heads: int, width: int, count: int, dtype: torch.dtype = BF16
) -> tuple[list[Tensor], list[Tensor]]:
    """Parts on the CPU, sums token-major; some are empty, and hold NaN there."""
    outs = [torch.randn(tokens, heads, width).to(dtype) for _ in range(count)]
    lses = [torch.randn(tokens, heads) * 2 for _ in range(count)]
    for part, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        empty = torch.rand(tokens, heads) < 0.2
        lse[empty] = math.inf if part % 2 else -math.inf
        out[empty] = math.nan
    return outs, lses


def merge(outs: list[Tensor], lses: list[Tensor], **more: Any) -> tuple[Any, Tensor]:
    """Merge copies on the device."""
    options = {"lse_layout": "th", "backend": "triton", **more}
    return mlacast.merge_attention_states(
        [out.to(CUDA) for out in outs], [lse.to(CUDA) for lse in lses], **options
    )


@pytest.mark.parametrize("layout", ["ht", "th"])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "count"),
    [(9, 3, 128, 2), (40, 16, 512, 4), (5, 2, 128, 7), (3, 20, 24, 3), (17, 1, 200, 2)],
)
def test_merges_match_float64(tokens: int, heads: int, width: int, count: int, layout: str) -> None:
    outs, lses = draw_parts(tokens, heads, width, count)
    given = [lse.t().contiguous() if layout == "ht" else lse for lse in lses]
    out, lse = merge(outs, given, lse_layout=layout)
    expected, expected_lse = oracles.merge_parts(outs, lses)
    # Weights are good to some 2**-17: exponents up to 16 and the device's exp2 and log2, of 2 ulp;
    # outputs below 8; half a bf16 step.
    allowed = 2.0**-8 * expected.abs() + 2.0**-16 * 8
    assert bool(((out.cpu().double() - expected).abs() <= allowed).all())
    found = (lse.t() if layout == "ht" else lse).cpu().double()
    finite = expected_lse.isfinite()
    assert torch.equal(found[~finite], expected_lse[~finite])
    assert float((found - expected_lse)[finite].abs().max()) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("width", [80, 128, 512])
def test_a_lone_live_part_comes_back_bit_for_bit(width: int, count: int) -> None:
    live, lse = torch.randn(33, 5, width).to(BF16), torch.randn(33, 5) * 30
    live[0, 0, ::3], live[0, 1, ::3] = -0.0, 1e-39
    for place in range(count):
        outs = [torch.full_like(live, float("nan")) for _ in range(count)]
        lses = [torch.full_like(lse, -math.inf if at % 2 else math.inf) for at in range(count)]
        outs[place], lses[place] = live, lse
        out, merged = merge(outs, lses)
        assert oracles.same_bits(out.cpu(), live)
        assert oracles.same_bits(merged.cpu(), lse)


@pytest.mark.parametrize("case", QUANTISED, ids=case_id)
def test_stored_bytes_are_the_reference_s(case: FormatCase) -> None:
    """One float32 part with the sum zero is stored as it is: every power of two, NaN, infinity.

    The only place where the epilogue of these kernels gets the same numbers as the reference.
    """
    group = {"Mxfp8": 32, "Nvfp4": 16, "Fp8Tensor": 64}.get(case.kind, case.group)
    x = store_cases.hostile_rows(group, 16)
    tokens = x.shape[0]
    for first, total in ((0, tokens), (2, tokens + 5)):
        actual = store_cases.empty_buffer(case, total, 1, 16 * 512, CUDA)
        expected = store_cases.empty_buffer(case, total, 1, 16 * 512, "cpu")
        part = x.reshape(tokens, 64, 128)
        merge([part], [torch.zeros(tokens, 64)], out=actual[first : first + tokens])
        mlacast.reference.quantize_output(x.view(tokens, 1, -1), expected[first : first + tokens])
        store_cases.assert_same_storages(actual, expected)


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_quotients_at_the_ties_of_codes(case: FormatCase) -> None:
    """Multiples of a quarter of a group's scale, ties of many codes among them, and neighbours."""
    group, largest = {"Mxfp8": (32, 448), "Nvfp4": (16, 6)}.get(case.kind, (case.group, 448))
    quarters = torch.arange(-61, 62).float() * 0.25
    scales = torch.exp2(torch.arange(-20.0, 20.0, 0.37))[:, None]
    near = torch.stack([torch.nextafter(quarters, quarters + by) for by in (-1, 0, 1)]).flatten()
    rows = torch.zeros(scales.shape[0], 512)
    rows[:, : near.numel()] = near * scales
    rows[:, ::group] = largest * scales
    actual = store_cases.empty_buffer(case, rows.shape[0], 1, 512, CUDA)
    expected = store_cases.empty_buffer(case, rows.shape[0], 1, 512, "cpu")
    merge([rows.view(-1, 4, 128)], [torch.zeros(rows.shape[0], 4)], out=actual)
    mlacast.reference.quantize_output(rows[:, None], expected)
    store_cases.assert_same_storages(actual, expected)


def draw_latents(tokens: int, heads: int) -> tuple[Tensor, Tensor]:
    """A latent output and weights on the device."""
    latent = torch.randn(tokens, heads, 512, dtype=BF16, device=CUDA)
    return latent, (torch.randn(heads, 512, 128, device=CUDA) / 22).to(BF16)


def project(latent: Tensor, w_uv: Tensor, **more: Any) -> Any:
    """Call the public function."""
    return mlacast.v_up_project(latent, w_uv, backend="triton", **more)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 5), (64, 16), (65, 2), (300, 128)])
def test_products_match_float64(tokens: int, heads: int, as_view: bool) -> None:
    latent, w_uv = draw_latents(tokens, heads)
    if as_view:
        up = torch.full((heads, 256, 512), float("nan"), dtype=BF16, device=CUDA)
        up[:, 128:] = w_uv.transpose(1, 2)
        w_uv = up[:, 128:].transpose(1, 2)
    out = project(latent, w_uv)
    exact = torch.einsum("thl,hlv->thv", latent.double(), w_uv.double())
    sums = torch.einsum("thl,hlv->thv", latent.abs().double(), w_uv.abs().double())
    # lambda * sqrt(512) * 2**-22 * sum|x w|, lambda = 4, as in the CPU test; then half a step.
    allowed = 4 * 512**0.5 * 2.0**-22 * sums
    allowed += 2.0**-8 * (exact.abs() + allowed)
    assert bool(((out.double() - exact).abs() <= allowed).all())


def test_rows_do_not_depend_on_the_others_or_on_the_tile() -> None:
    latent, w_uv = draw_latents(300, 4)
    for fmt in (mlacast.Bf16(), mlacast.Fp8Group(128)):
        together = project(latent, w_uv, out_format=fmt, num_groups=2)
        for first, last in ((0, 1), (7, 71), (100, 300)):
            alone = project(latent[first:last], w_uv, out_format=fmt, num_groups=2)
            assert same_bits(alone, together[first:last])


@pytest.mark.parametrize("case", FAMILIES, ids=case_id)
def test_products_into_ranges_of_a_shared_buffer(case: FormatCase) -> None:
    """Ranges written apart equal the whole, and other rows keep their bytes."""
    latent, w_uv = draw_latents(140, 8)
    whole = store_cases.empty_buffer(case, 145, 2, 512, CUDA)
    project(latent, w_uv, out=whole[3:143])
    pieces = store_cases.empty_buffer(case, 145, 2, 512, CUDA)
    for first, last in ((0, 1), (1, 70), (70, 140)):
        project(latent[first:last], w_uv, out=pieces[3 + first : 3 + last])
    store_cases.assert_same_storages(pieces, whole)
    exact = torch.einsum("thl,hlv->thv", latent.float(), w_uv.float()).reshape(140, 2, 512)
    limit = {"Nvfp4": 0.15, "Bf16": 6e-3}.get(case.kind, 0.05)
    error = (whole[3:143].dequantize() - exact).norm() / exact.norm()
    assert float(error) < limit
    codes = whole.data.view(torch.uint8)
    for rows in (codes[:3], codes[143:]):
        assert bool((rows == store_cases.POISON).all())


def test_one_launch_each_that_graphs_capture() -> None:
    latent, w_uv = draw_latents(40, 8)
    parts = [latent, latent.flip(0)]
    lses = [torch.randn(8, 40, device=CUDA) for _ in range(2)]
    buffer = mlacast.QuantizedTensor.empty(40, 1, 1024, mlacast.Nvfp4(448.0), CUDA)
    wide = mlacast.QuantizedTensor.empty(40, 1, 4096, mlacast.Nvfp4(448.0), CUDA)

    def both() -> None:
        project(latent, w_uv, out=buffer)
        mlacast.merge_attention_states(parts, lses, out=wide, backend="triton")

    names = kernels_of(both)
    for kernel in ("v_up_project", "merge_attention_states"):
        assert len([name for name in names if kernel in name]) == len(names) / 2, names
    graph = replayed(both)
    latent.normal_()
    lses[0][:, 3] = float("inf")
    graph.replay()
    torch.cuda.synchronize()
    replay = [*store_cases.storages(buffer), *store_cases.storages(wide)]
    both()
    for left, right in zip(
        replay, [*store_cases.storages(buffer), *store_cases.storages(wide)], strict=True
    ):
        assert torch.equal(left, right)


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    latent, w_uv = draw_latents(400, 5)
    buffer = mlacast.QuantizedTensor.empty(500, 1, 640, mlacast.Fp8Group(128), CUDA)
    values = torch.randn(400, 5, 128, dtype=BF16, device=CUDA)
    lses = [torch.randn(5, 400, device=CUDA) for _ in range(2)]

    def calls(first: int, tokens: int, row: int) -> None:
        rows = slice(first, first + tokens)
        project(latent[rows], w_uv, out=buffer[row : row + tokens])
        mlacast.merge_attention_states(
            [values[rows], values[rows]],
            [lse[:, rows] for lse in lses],
            out=buffer[row : row + tokens],
            backend="triton",
        )

    calls(0, 16, 0)
    calls(0, 100, 0)
    with nothing_compiles(monkeypatch):
        for tokens in (1, 2, 15, 17, 64, 65, 128, 399):
            calls(0, tokens, 0)
        for first in (1, 2, 3, 16):
            calls(first, 33, first + 1)


def test_rows_past_two_to_the_31st_element() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip(f"needs 40 GB of free device memory, has {free / 1e9:.1f}")
    tokens, heads = 33000, 128
    latent = torch.zeros(tokens, heads, 512, dtype=BF16, device=CUDA)
    latent[-3:].normal_()
    assert latent.numel() > 2**31
    w_uv = draw_latents(1, heads)[1]
    out = project(latent, w_uv)
    assert oracles.same_bits(out[-3:], project(latent[-3:], w_uv))
    assert not out[:-3].any()
    lses = [torch.zeros(heads, tokens, device=CUDA) for _ in range(2)]
    merged, _ = mlacast.merge_attention_states([latent, latent], lses, backend="triton")
    assert oracles.same_bits(oracles.plain(merged)[-3:], latent[-3:])
    assert not oracles.plain(merged)[:-3].any()
