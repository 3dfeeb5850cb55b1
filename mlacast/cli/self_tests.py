"""What ``mlacast check`` computes: small cases with known answers, run on the device under test.

Nothing here calls the reference backend to know an answer. Number formats are compared with values
worked out from their bit fields, fused calls with a float64 computation in plain torch
(``mlacast.cli.self_oracle``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import mlacast
from mlacast.cli.self_oracle import Case, attend64, budget_bf16, budget_e4m3, make_case
from mlacast.descriptors.kv_format import ALL_KV_FORMATS

Outcome = tuple[bool, str]


@dataclass(frozen=True)
class SelfTest:
    """One test: a title and a function of (device, backend) that says (passed, detail)."""

    title: str
    run: Callable[[torch.device, str | None], Outcome]


@dataclass(frozen=True)
class Result:
    """Outcome of one test."""

    name: str
    passed: bool
    detail: str


def run_self_test(test: SelfTest, device: torch.device, backend: str | None) -> Result:
    """Run one test. An exception is a failure with its text as the detail; the others still run."""
    try:
        passed, detail = test.run(device, backend)
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Result(test.title, passed, detail)


def _used_budget(found: torch.Tensor, wanted: torch.Tensor, budget: torch.Tensor) -> float:
    """Return the largest error as a share of the error allowed; NaN counts as infinite."""
    share = (found.double().cpu() - wanted).abs() / budget
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def _e4m3_value(code: int) -> float:
    """Value of an e4m3 code from its bit fields: 4 exponent bits with bias 7, 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if code & 128 else magnitude


def _e4m3(device: torch.device, backend: str | None) -> Outcome:
    codes = [code for code in range(256) if code & 127 != 127]
    # A value is its own code; the midpoint of neighbours goes to the even one of the two codes.
    values = [_e4m3_value(code) for code in codes]
    ties = [code for code in range(126)]
    midpoints = [(_e4m3_value(code) + _e4m3_value(code + 1)) / 2 for code in ties]
    x = torch.tensor([values + midpoints + [1e9, -1e9]], device=device)
    wanted = codes + [code + (code & 1) for code in ties] + [0x7E, 0xFE]
    found = mlacast.quantize_output(x, mlacast.Fp8Tensor(1.0), backend=backend)
    wrong = (found.data.view(torch.uint8).flatten().cpu() != torch.tensor(wanted)).sum().item()
    back = found.dequantize().flatten().cpu()[: len(codes)]
    wrong += (back != torch.tensor(values)).sum().item()
    return wrong == 0, f"{len(codes)} codes and {len(ties)} ties, {wrong} wrong"


def _ue8m0(device: torch.device, backend: str | None) -> Outcome:
    # Smallest power of two not below amax / 448, biased by 127.
    known = {448.0: 127, 449.0: 128, 3.5: 120, 7.0: 121, 0.875: 118, 3.0: 120, 458752.03125: 138}
    x = torch.zeros(1, 32 * 8, device=device)
    for group, amax in enumerate(known):
        x[0, 32 * group + group] = -amax
    packed = mlacast.Fp8Group(32, "ue8m0_packed", "mn_major")
    sf = mlacast.quantize_output(x, packed, backend=backend).sf
    assert sf is not None, "a group format has scale factors"
    scale_bytes = sf.cpu().contiguous().view(torch.uint8).flatten().tolist()
    # The group of zeros gets the power of two above 1e-10 / 448, which is 2 ** -42.
    wanted = [*known.values(), 85]
    wrong = sum(found != known for found, known in zip(scale_bytes, wanted, strict=True))
    return wrong == 0, f"{len(wanted)} scales, {wrong} wrong"


def _nvfp4(device: torch.device, backend: str | None) -> Outcome:
    # Magnitudes and their codes; midpoints go to the even code.
    known = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}
    known |= {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 0.125: 0}
    positive = torch.tensor(list(known), device=device)
    x = torch.cat([positive, -positive])[None]
    found = mlacast.quantize_output(x, mlacast.Nvfp4(1.0), backend=backend)
    codes = [*known.values(), *(code | 8 for code in known.values())]
    wanted = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    packed = found.data.flatten().tolist()
    assert found.sf is not None, "nvfp4 has scale factors"
    # amax 6 gives the scale 1.0, which is e4m3 byte 0x38; rows 1.. and columns 2.. are padding.
    swizzled = found.sf.view(torch.uint8).flatten().tolist()
    scales_right = swizzled == [0x38, 0x38] + [0] * (len(swizzled) - 2)
    return packed == wanted and scales_right, f"{len(codes)} codes, 2 scales, padding"


def _caches(device: torch.device, backend: str | None) -> Outcome:
    wrong = []
    for kv_format in ALL_KV_FORMATS:
        d_qk = kv_format.d_qk or 512
        # Multiples of 0.5 up to 6 with a 6 in every 16: each format holds them exactly.
        row = torch.tensor([6.0, -0.5, 1.0, 1.5, -2.0, 3.0, 4.0, 0.0]).repeat(d_qk // 8)
        latent = torch.stack([row, -row, row.flip(0), row * 0]).to(torch.bfloat16).to(device)
        cache = kv_format.allocate(3, 5, d_qk=None if kv_format.d_qk else d_qk, device=device)
        slots = torch.tensor([14, 0, 7, 5], device=device)
        mlacast.kv_cache_append(latent, slots, cache, kv_format, backend=backend)
        found = mlacast.kv_cache_gather(cache, slots, kv_format, backend=backend)
        if not torch.equal(found, latent):
            wrong.append(kv_format.name)
    return not wrong, f"{len(ALL_KV_FORMATS)} formats, wrong: {', '.join(wrong) or 'none'}"


def _prefill(device: torch.device, backend: str | None) -> Outcome:
    case = make_case(device)
    wanted, wanted_lse = attend64(case)
    out, _, lse = mlacast.sparse_mla_prefill(
        case.q, case.kv, case.indices, **case.keywords, backend=backend
    )
    assert isinstance(out, torch.Tensor), "without a format the output is a tensor"
    used = _used_budget(out, wanted, budget_bf16(wanted))
    # Empty rows are -inf on both sides, where a difference would be NaN.
    lse_right = torch.isclose(lse.double().cpu(), wanted_lse, rtol=0.0, atol=1e-5).all().item()
    return used <= 1 and bool(lse_right), f"error {used:.2f} of the budget, lse within 1e-5"


def _decode(device: torch.device, backend: str | None) -> Outcome:
    case = make_case(device)
    wanted, _ = attend64(case)
    kv_format = mlacast.KvFormat.V4
    num_slots = case.kv.shape[0]
    cache = kv_format.allocate(-(-num_slots // 5), 5, device=device)
    slots = torch.arange(num_slots, device=device)
    mlacast.kv_cache_append(case.kv, slots, cache, kv_format, backend=backend)
    used = 0.0
    for num_splits in (1, 3):
        out, _ = mlacast.sparse_mla_decode(
            case.q,
            cache,
            case.indices,
            kv_format=kv_format,
            num_splits=num_splits,
            **case.keywords,
            backend=backend,
        )
        assert isinstance(out, torch.Tensor), "without a format the output is a tensor"
        used = max(used, _used_budget(out, wanted, budget_bf16(wanted)))
    return used <= 1, f"1 and 3 splits, error {used:.2f} of the budget"


def _buffer(case: Case, backend: str | None, *bounds: int) -> mlacast.QuantizedTensor:
    """Run a case into one Mxfp8 buffer, one launch per token range between ``bounds``."""
    tokens, heads, _ = case.q.shape
    buffer = mlacast.QuantizedTensor.empty(
        tokens, 2, heads * 256, mlacast.Mxfp8("chunk32"), device=case.q.device
    )
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        part = case.tokens(start, stop)
        mlacast.sparse_mla_prefill(
            part.q, part.kv, part.indices, **part.keywords, out=buffer[start:stop], backend=backend
        )
    return buffer


def _quantised(device: torch.device, backend: str | None) -> Outcome:
    case = make_case(device)
    wanted, _ = attend64(case)
    tokens = wanted.shape[0]
    values = _buffer(case, backend, 0, tokens).dequantize().view_as(wanted)
    used = _used_budget(values, wanted, budget_e4m3(wanted))
    return used <= 1, f"error {used:.2f} of the budget"


def _shared_buffer(device: torch.device, backend: str | None) -> Outcome:
    case = make_case(device)
    tokens = case.q.shape[0]
    whole = _buffer(case, backend, 0, tokens)
    parts = _buffer(case, backend, 0, 3, 4, tokens)
    assert whole.sf is not None and parts.sf is not None, "Mxfp8 has scale factors"
    same = torch.equal(whole.data.view(torch.uint8), parts.data.view(torch.uint8))
    same = same and torch.equal(whole.sf, parts.sf)
    return same, "three launches into one buffer give the bits of one launch"


def _projection(device: torch.device, backend: str | None) -> Outcome:
    case = make_case(device)
    buffer = _buffer(case, backend, 0, case.q.shape[0])
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(2, 24, buffer.features, generator=generator)
    found = mlacast.grouped_out_project(buffer, weight.to(device), backend=backend)
    values = buffer.dequantize().double().cpu()
    wanted = torch.einsum("tgf,gdf->tgd", values, weight.double())
    # float32 accumulation of n products: at most n roundings of 2 ** -24 each of the absolute sum.
    bound = torch.einsum("tgf,gdf->tgd", values.abs(), weight.double().abs())
    bound = bound * (buffer.features * 2.0**-24)
    used = _used_budget(found, wanted, bound + 2.0**-126)
    return used <= 1, f"error {used:.2f} of the budget"


SELF_TESTS = (
    SelfTest("e4m3 codes", _e4m3),
    SelfTest("ue8m0 scales", _ue8m0),
    SelfTest("NVFP4 codes and scales", _nvfp4),
    SelfTest("KV caches hold exact values", _caches),
    SelfTest("prefill against float64", _prefill),
    SelfTest("decode against float64", _decode),
    SelfTest("MXFP8 output against float64", _quantised),
    SelfTest("shared output buffer", _shared_buffer),
    SelfTest("grouped projection against float64", _projection),
)
