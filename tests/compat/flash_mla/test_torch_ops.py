"""The operators behind the fused step: schema text, opcheck, compilation, mutated buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import flash_mla
from tests.cache_writers import V4, V41, V41_FP4
from tests.compat.flash_mla.cases import FusedCall, FusedCase, decode_call, prefill_call
from tests.compat.flash_mla.compare import assert_same_bits
from tests.compat.flash_mla.shared_buffers import step_buffer

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
MODES = ("prefill", "decode", "decode-extra")


def op_of(mode: str) -> Any:
    name = mode.split("-")[0]
    return getattr(torch.ops.mlacast, f"fused_norm_rope_attn_rope_cast_{name}").default


def shim_of(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    function: Callable[..., tuple[Tensor, ...]] = getattr(FUSED, mode.split("-")[0])
    return function


def make_call(mode: str, s_q: int = 3) -> FusedCall:
    case = FusedCase(mode, s_q=s_q, groups=2, topk=4, rows=12, norm=True, sink="finite")
    if mode == "prefill":
        return prefill_call(case)
    caches = (V41, V41_FP4) if mode == "decode-extra" else (V4,)
    decode_case = FusedCase(
        mode, s_q=s_q, groups=2, topk=4, rows=12, norm=True, lengths=True, caches=caches
    )
    return decode_call(decode_case)


def buffer_of(call: FusedCall) -> tuple[Tensor, Tensor]:
    case = call.case
    return step_buffer(case.s_q + 3, case.groups, case.w).rows(2, 2 + case.s_q)


@pytest.mark.parametrize("mode", MODES[:2])
def test_schema_names_the_two_mutated_buffers(mode: str) -> None:
    schema = op_of(mode)._schema
    text = str(schema)
    assert "Tensor(d!)? out_fp8=None, Tensor(e!)? out_sf=None) ->" in text
    shim = [name for name in inspect.signature(shim_of(mode)).parameters if name != "out"]
    names = [a.name for a in schema.arguments]
    assert names[: len(shim)] == shim
    assert names[-2:] == ["out_fp8", "out_sf"]
    # Whatever else the operator takes, a call by the pinned names does not need it.
    assert all(a.has_default_value() for a in schema.arguments[len(shim) :])
    written = [a.name for a in schema.arguments if a.alias_info is not None]
    assert written == ["out_fp8", "out_sf"]
    assert len(schema.returns) == (4 if mode == "prefill" else 3)
    assert all(r.alias_info is None for r in schema.returns)


@pytest.mark.parametrize("mode", MODES)
def test_op_equals_the_shim(mode: str) -> None:
    call = make_call(mode)
    expected = shim_of(mode)(**call.arguments)
    for one, other in zip(op_of(mode)(**call.arguments), expected, strict=True):
        assert_same_bits(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("mode", MODES)
def test_op_with_buffers_returns_two_empty_tensors(mode: str) -> None:
    call = make_call(mode)
    expected = shim_of(mode)(**call.arguments)
    out_fp8, out_sf = buffer_of(call)
    returned = op_of(mode)(**call.arguments, out_fp8=out_fp8, out_sf=out_sf)
    assert returned[0].numel() == returned[1].numel() == 0
    assert (returned[0].dtype, returned[1].dtype) == (torch.float8_e4m3fn, torch.int32)
    for one, other in zip((out_fp8, out_sf, *returned[2:]), expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: str, s_q: int) -> None:
    torch.library.opcheck(op_of(mode), (), make_call(mode, s_q).arguments)


@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_with_buffers(mode: str, s_q: int) -> None:
    """All but test_schema, which finds mutations by allclose, and torch has none for float8.

    That the operator writes these two buffers and nothing else is asserted in this module and in
    test_fused_selection.py.
    """
    call = make_call(mode, s_q)
    arguments = dict(call.arguments)
    arguments["out_fp8"], arguments["out_sf"] = buffer_of(call)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op_of(mode), (), arguments, test_utils=checks)


@pytest.mark.parametrize("s_q", [0, 1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_fake_outputs_equal_real_ones(mode: str, s_q: int) -> None:
    call = make_call(mode, max(s_q, 1))
    per_row = ["token_positions", "q", "indices", "indices_in_kvcache", "topk_length"]
    per_row += ["extra_indices_in_kvcache", "extra_topk_length"]
    for name in per_row:
        if call.arguments.get(name) is not None:
            call.arguments[name] = call.arguments[name][:s_q]
    real = op_of(mode)(**call.arguments)
    meta = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in call.arguments.items()
    }
    for fake, other in zip(op_of(mode)(**meta), real, strict=True):
        assert fake.shape == other.shape
        assert fake.stride() == other.stride()
        assert fake.dtype == other.dtype


# Capture and functionalisation are what the operators promise; generated code would add only time.
BACKEND = "aot_eager"


@pytest.mark.parametrize("mode", MODES)
def test_compiled_with_dynamic_tokens(mode: str) -> None:
    def step(scaled: float, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        changed = arguments | {"q": arguments["q"] * scaled}
        out_fp8, out_sf, *rest = shim_of(mode)(**changed)
        return out_fp8, out_sf + 1, *rest

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=BACKEND)
    for s_q in (4, 7, 1, 0, 4):
        call = make_call(mode, s_q)
        saved = call.arguments["q"].clone()
        for one, other in zip(
            compiled(2.0, call.arguments), step(2.0, call.arguments), strict=True
        ):
            assert_same_bits(one, other)
        assert_same_bits(call.arguments["q"], saved)


@pytest.mark.parametrize("mode", MODES)
def test_compiled_with_out_writes_the_buffers(mode: str) -> None:
    def step(arguments: dict[str, Any], out: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        returned = shim_of(mode)(**arguments, out=out)
        return out[1].sum(), returned[1] + 1, *returned[2:]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=BACKEND)
    for s_q in (4, 7):
        call = make_call(mode, s_q)
        eager, traced = (step_buffer(s_q + 3, 2, 4) for _ in range(2))
        expected = step(call.arguments, eager.rows(2, 2 + s_q))
        actual = compiled(call.arguments, traced.rows(2, 2 + s_q))
        for one, other in zip(actual, expected, strict=True):
            assert_same_bits(one, other)
        assert torch.equal(traced.fp8_storage, eager.fp8_storage)
        assert torch.equal(traced.sf_storage, eager.sf_storage)


def test_compiled_call_follows_the_placement() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(FUSED.decode, fullgraph=True, backend=BACKEND)
    call = make_call("decode-extra")
    results = []
    for placement in ("footer", "inline"):
        flash_mla.set_v41_placement(placement)
        results.append(compiled(**call.arguments))
        for one, other in zip(results[-1], FUSED.decode(**call.arguments), strict=True):
            assert_same_bits(one, other)
    assert not torch.equal(results[0][2], results[1][2])


def test_compiled_rejection_is_still_clear() -> None:
    call = make_call("prefill")
    wrong = step_buffer(2, 2, 4).rows(0, 2)
    compiled = torch.compile(FUSED.prefill, fullgraph=True, backend=BACKEND)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"out_fp8 must .*got .*2, 2, 2048"):
        compiled(**call.arguments, out=wrong)
