"""The append kernel, interpreted: bytes equal the reference's, whatever the latents hold."""

from __future__ import annotations

import mmap

import pytest
import torch

from mlacast.kernels.config.caches import AppendConfig
from mlacast.kernels.triton import kv_cache_append
from tests.kernels.cache_launches import (
    assert_append_equals_reference,
    fused_options,
    hostile_latents,
)
from tests.scenarios import CACHES, CacheCase, cache_id

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_every_format_and_dtype(cache: CacheCase, dtype: torch.dtype) -> None:
    """Slots are scattered, repeated, negative and past the end."""
    latent = hostile_latents(18, cache.d_qk, dtype)
    slots = torch.randint(-2, 36, (18,), dtype=torch.int32 if dtype == FP16 else torch.int64)
    assert_append_equals_reference(cache, latent, slots, fused_options("plain", 18))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("norm", FP32),
        ("weight", BF16),
        ("half", BF16),
        ("half", FP16),
        ("half", FP32),
        ("all", FP32),
    ],
)
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_norm_and_rotation(cache: CacheCase, kind: str, dtype: torch.dtype) -> None:
    latent = hostile_latents(14, cache.d_qk, dtype)
    slots = torch.randperm(30)[:14]
    assert_append_equals_reference(cache, latent, slots, fused_options(kind, 14))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["V32", "V4", "V41"])
def test_largest_numbers_around_powers_of_two(name: str, dtype: torch.dtype) -> None:
    """448 times a power of two, and its neighbours, on both sides of the floor of scales.

    A row has three of them, each in a part whose groups have scales of their own.
    """
    limits = (1.75 * torch.exp2(torch.arange(-9.0, 21.0))).to(dtype)
    around = [limits, limits.nextafter(limits * 0), limits.nextafter(limits * 2)]
    width = 576 if name == "V32" else 512
    largest = torch.stack(around, 1)[:, (torch.arange(width) // 128) % 3]
    latent = (torch.rand(30, width) * 0.5 * largest.float()).to(dtype)
    latent[:, ::32] = -largest[:, ::32]
    slots = torch.randperm(30)
    options = fused_options("plain", 30)
    assert_append_equals_reference(
        CacheCase(name, width), latent, slots, options, pages=6, page_size=5
    )


def test_interleaved_rotation_of_strided_rows() -> None:
    latent = hostile_latents(12, 600, BF16)[:, 8:584]
    slots = torch.randperm(60)[:24][::2]
    options = fused_options("interleaved", 12)
    assert_append_equals_reference(
        CacheCase("V32", 576), latent, slots, options, pages=10, page_size=7
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("interleaved", BF16), ("interleaved", FP16), ("half", FP16), ("all", BF16), ("all", FP32)],
)
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_rows_in_parts(
    cache: CacheCase, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of a program of many rows, in one of eight."""
    program = AppendConfig(rows=8, num_warps=2, tile=16, step=8, parts=4)
    monkeypatch.setattr(kv_cache_append, "append_config", lambda *sizes: program)
    latent = hostile_latents(13, cache.d_qk, dtype)
    slots = torch.randperm(30)[:13]
    assert_append_equals_reference(cache, latent, slots, fused_options(kind, 13))


# Tiles are looked at in four groups: of as many rows as a program has, of more than a program has
# before it at times, and of several loads of a thread.
TINY = {
    "ranges": AppendConfig(rows=4, num_warps=4, tile=16, step=8),
    "larger_groups": AppendConfig(rows=4, num_warps=4, tile=32, step=8),
    "several_loads": AppendConfig(rows=4, num_warps=1, tile=256, step=8),
    "each_row": AppendConfig(rows=4, num_warps=4, tile=0, step=8),
}


def _page_runs(*firsts: int) -> torch.Tensor:
    """Runs of five neighbours, so that programs of four rows cross from one into the next."""
    return torch.cat([torch.arange(first, first + 5) for first in firsts])


@pytest.fixture(params=list(TINY))
def _tiny_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a few rows already fill: the look at earlier slots takes many steps."""
    monkeypatch.setattr(kv_cache_append, "append_config", lambda *sizes: TINY[request.param])


@pytest.mark.usefixtures("_tiny_tiles")
@pytest.mark.parametrize(
    "slots",
    [
        torch.arange(70) % 30,
        torch.arange(69, -1, -1) // 3,
        torch.tensor([5] * 70),
        torch.tensor([29, *[-1] * 68, 29]),
        torch.cat((torch.arange(35), torch.arange(35).flip(0))),
        torch.randint(-3, 34, (70,)),
        _page_runs(25, 5, 15, 0, 20, 10),
        # The second run of a program, and the first one, were written before.
        _page_runs(10, 0, 25, 0, 15, 25, 5),
        # Both runs alternate, and one of their slots comes twice.
        torch.tensor([0, 1, 2, 3, 8, 20, 9, 21, 10, 25, 10, 26, 11, 27, 12, 27]),
        # Back to a slot of the first run after one of the second, or after no slot.
        torch.tensor([20, 3, 20, 21, 1, -1, 1, 2, 12, 4, 13, 12]),
        # A run that does not rise; rows without a slot before and between others.
        torch.tensor([6, 7, 7, 8, 22, 21, 22, 23, -1, 12, 13, 12, 17, -1, 18, 17]),
        # Slots that are not in the cache, but whose low halves are.
        torch.tensor([2**32 + 3, 2**33 + 4, 5, 6, 3, 4, 5, 6, 7, 2**32 + 8, 8, 9]),
        torch.randint(-3, 34, (70,), dtype=torch.int32),
        # The last slots of the third program's runs, and of the fourth's, were written before.
        torch.tensor([3, 13, 24, 28, 19, 5, 6, 7, 10, 11, 12, 13, 0, 1, 23, 24]),
    ],
    ids=[
        "cyclic",
        "falling",
        "one_slot",
        "ends",
        "mirrored",
        "random",
        "pages",
        "pages_again",
        "alternating",
        "back",
        "not_rising",
        "low_halves",
        "random_int32",
        "last_of_runs",
    ],
)
@pytest.mark.parametrize("is_followed", [False, True], ids=["alone", "followed"])
def test_the_lowest_row_wins_across_programs_and_tiles(
    slots: torch.Tensor, is_followed: bool
) -> None:
    """Alone, and followed by as many rows without a slot.

    Of a call's programs the later half runs first, and last those with the first rows: what they
    write over a twin, which should not have been written, does not show. Followed, they run in the
    order of their rows.
    """
    if is_followed:
        slots = torch.cat((slots, torch.full_like(slots, -1)))
    rows = slots.shape[0]
    latent = torch.randn(rows, 512).bfloat16()
    options = fused_options("plain", rows)
    assert_append_equals_reference(CacheCase("V41", 512), latent, slots, options)


# Of Linux; Python has a name for it from 3.11 on.
MAP_NORESERVE = 0x4000


def test_slots_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tile, and in the rest of one, slots are 2**31 elements from its first.

    Rows without a slot follow: programs with many rows before them run first, and here those that
    have a lower twin must not.
    """
    program = AppendConfig(rows=4, num_warps=1, tile=64, step=8)
    monkeypatch.setattr(kv_cache_append, "append_config", lambda *sizes: program)
    given = torch.cat((torch.arange(72), torch.full((72,), -1))).int()
    # The last slots of programs, of which rows 35 and 40 have the same.
    given[39], given[71] = given[35], given[40]
    distance = 2**26 + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    # Nothing but what is written takes memory. As much again before the first slot: what is too
    # negative is found there.
    space = torch.frombuffer(
        mmap.mmap(-1, 4 * (2**31 + 144 * distance), flags=flags), dtype=torch.int32
    )
    slots = space.as_strided((144,), (distance,), 2**31)
    slots.copy_(given)
    latent = torch.randn(144, 512).bfloat16()
    options = fused_options("plain", 144)
    assert_append_equals_reference(
        CacheCase("V41", 512), latent, slots, options, pages=9, page_size=8
    )


def test_the_sizes_of_many_rows() -> None:
    """32 rows a program, the first of the duplicates far before the others.

    Another is the last slot of the program behind them. Rows without a slot follow, as above.
    """
    slots = torch.full((2112,), -1)
    slots[:1056] = torch.arange(1056)
    slots[1000:1024] = torch.arange(24)
    slots[999] = 1055
    latent = torch.randn(2112, 512).bfloat16()
    options = fused_options("plain", 2112)
    assert_append_equals_reference(
        CacheCase("BF16", 512), latent, slots, options, pages=17, page_size=64
    )


def test_slots_whose_low_half_is_valid_are_skipped() -> None:
    latent = torch.randn(5, 512).bfloat16()
    slots = torch.tensor([2**32 + 3, 2**40, -(2**40), 5, 2**31])
    options = fused_options("plain", 5)
    assert_append_equals_reference(CacheCase("V4", 512), latent, slots, options)
