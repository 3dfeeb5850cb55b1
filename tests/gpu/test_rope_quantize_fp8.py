"""rope_quantize_fp8 on the device: the bytes of the CPU, in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat import mate
from mlacast.compat.flashinfer import rope_quantize_fp8_append_paged_kv_cache
from tests.gpu.cache_steps import kernels_of, nothing_compiles, replayed
from tests.gpu.steps import CUDA
from tests.rope_quantize_cases import CASES, E4M3, E5M2, RopeQuantizeCase, case_id, draw


def _arguments(case: RopeQuantizeCase, tokens: int, heads: int, device: str) -> dict[str, Any]:
    inputs, nope = draw(case, tokens, heads), case.nope
    q, k = inputs.q.to(device), inputs.k.to(device)
    return {
        "q_rope": q[..., nope:],
        "k_rope": k[..., nope:],
        "q_nope": q[..., :nope],
        "k_nope": k[..., :nope],
        "cos_sin_cache": inputs.table.to(device),
        "positions": inputs.positions.to(device),
    }


def _same_bytes(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.uint8).cpu(), other.contiguous().view(torch.uint8))
        for one, other in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_bytes_of_every_case(case: RopeQuantizeCase, tokens: int) -> None:
    options: dict[str, Any] = {"pairing": case.pairing, "dtype": case.dtype, "q_scale": 0.37}
    here = _arguments(case, tokens, 5, "cpu")
    there = {name: value.to(CUDA) for name, value in here.items()}
    expected = mlacast.rope_quantize_fp8(**here, **options, backend="reference")
    assert _same_bytes(mlacast.rope_quantize_fp8(**there, **options, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype: torch.dtype, inputs: torch.dtype) -> None:
    """All bit patterns as they are and scaled: each rounds, saturates and loses its NaN alike."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(inputs)
    nope = bits.view(128, 1, 512)
    rope, k = torch.zeros(128, 1, 2, dtype=inputs), torch.zeros(128, 2, dtype=inputs)
    table, positions = torch.zeros(1, 2), torch.zeros(128, dtype=torch.int64)
    parts = (rope, k, nope, None, table, positions)
    for scale in (1.0, 0.001, 777.0):
        options: dict[str, Any] = {"dtype": dtype, "q_scale": scale}
        expected = mlacast.rope_quantize_fp8(*parts, **options, backend="reference")
        there = [None if part is None else part.to(CUDA) for part in parts]
        actual = mlacast.rope_quantize_fp8(*there, **options, backend="triton")  # type: ignore[arg-type]
        assert _same_bytes(actual, expected)


def _paged(device: str) -> tuple[dict[str, Any], list[Tensor]]:
    """A call on pages in a scattered order, its inputs drawn from one seed."""
    torch.manual_seed(5)
    case = RopeQuantizeCase()
    arguments = _arguments(case, 100, 3, device)
    arguments["pos_ids"] = arguments.pop("positions")
    caches = [
        torch.full((40, 16, width), 0x5A, dtype=torch.uint8, device=device) for width in (512, 64)
    ]
    requests = torch.arange(100) % 4
    requests[::9] = -1
    tables = {
        "kv_indices": torch.randperm(40),
        "kv_indptr": torch.tensor([0, 3, 13, 20, 40]),
        "batch_indices": requests,
        "positions": torch.arange(100) // 4 + 7,
    }
    outputs = [
        torch.full((100, 3, width), 0x5A, dtype=torch.uint8, device=device).view(E4M3)
        for width in (64, 512)
    ]
    arguments |= {name: table.to(device, torch.int32) for name, table in tables.items()}
    arguments |= {"v": None, "paged_kv_cache": tuple(cache.view(E4M3) for cache in caches)}
    arguments |= {"q_rope_out": outputs[0], "q_nope_out": outputs[1]}
    return arguments, [*caches, *outputs]


def test_pages() -> None:
    results = []
    for device in ("cpu", CUDA):
        arguments, written = _paged(device)
        rope_quantize_fp8_append_paged_kv_cache(**arguments)
        results.append(tuple(written))
    assert _same_bytes(results[1], results[0])


@pytest.mark.parametrize("tokens", [64, 4096])
def test_one_launch_that_graphs_capture(tokens: int) -> None:
    arguments = _arguments(RopeQuantizeCase(), tokens, 128, CUDA)
    whole = torch.empty(tokens, 128, 576, dtype=E4M3, device=CUDA)
    outputs: dict[str, Any] = {"q_rope_out": whole[..., 512:], "q_nope_out": whole[..., :512]}

    def call() -> None:
        mlacast.rope_quantize_fp8(**arguments, **outputs, backend="triton")

    names = kernels_of(call)
    assert len(names) == 1 and "rope_quantize_fp8" in names[0], names
    graph = replayed(call)
    expected = whole.view(torch.uint8).clone()
    whole.view(torch.uint8).fill_(0x5A)
    graph.replay()
    assert torch.equal(whole.view(torch.uint8), expected)


def test_mates_function_takes_one_launch() -> None:
    arguments = _arguments(RopeQuantizeCase(), 33, 128, CUDA)
    arguments["pos_ids"] = arguments.pop("positions")
    names = kernels_of(lambda: mate.mla_rope_quantize_fp8(**arguments))
    assert len(names) == 1 and "rope_quantize_fp8" in names[0], names


def test_pages_take_one_launch() -> None:
    arguments, _ = _paged(CUDA)
    names = kernels_of(lambda: rope_quantize_fp8_append_paged_kv_cache(**arguments))
    assert len(names) == 1, names


def test_rows_past_two_to_the_31_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 20e9:
        pytest.skip(f"needs 20 GB of free device memory, has {free / 1e9:.1f}")
    compact = _arguments(RopeQuantizeCase(), 3, 4, CUDA)
    memory = torch.empty(4_200_000_000, dtype=torch.bfloat16, device=CUDA)
    far = memory.as_strided((3, 4, 512), (2_000_000_000, 512, 1))
    far.copy_(compact["q_nope"])
    bytes_far = torch.empty(4_200_000_000, dtype=torch.uint8, device=CUDA).view(E4M3)
    out = bytes_far.as_strided((3, 4, 512), (2_000_000_000, 512, 1))
    expected = mlacast.rope_quantize_fp8(**compact, backend="triton")
    options = {**compact, "q_nope": far, "q_nope_out": out}
    actual = mlacast.rope_quantize_fp8(**options, backend="triton")
    assert _same_bytes((actual[2],), (expected[2].cpu(),))


def test_nothing_compiles_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tables may change; a call of few rows and one of many have been seen."""
    arguments = _arguments(RopeQuantizeCase(index=torch.int32), 300, 5, CUDA)
    table = arguments.pop("cos_sin_cache")
    longer = torch.cat((table, table))

    def call(first: int, last: int, table: Tensor = table) -> None:
        rows = {name: value[first:last] for name, value in arguments.items()}
        mlacast.rope_quantize_fp8(**rows, cos_sin_cache=table, backend="triton")

    call(0, 16)
    call(0, 200)
    with nothing_compiles(monkeypatch):
        for first, last in ((0, 1), (0, 15), (0, 300), (1, 18), (2, 66), (3, 250)):
            call(first, last)
        call(0, 16, longer)
