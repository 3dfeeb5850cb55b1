"""RMSNorm and RoPE of the latent inside kv_cache_append."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from tests import oracles
from tests.format_cases import storage_bytes
from tests.ops.rejections import Arguments, Rejection, assert_rejected, poisoned, rejection_id
from tests.scenarios import CACHES, CacheCase, cache_id, poisoned_cache

BF16 = torch.bfloat16


def _append(
    cache: CacheCase, latent: Tensor, slots: Tensor, backend: str, **options: object
) -> Tensor:
    target = poisoned_cache(cache, 2, 3)
    kv_format = mlacast.KvFormat.from_name(cache.name)
    mlacast.kv_cache_append(latent, slots, target, kv_format, backend=backend, **options)  # type: ignore[arg-type]
    return storage_bytes(target)


def _signs(rows: int, width: int, size: float) -> Tensor:
    """Rows of numbers +-size: their root mean square is exactly ``size``."""
    return size * (1.0 - 2.0 * torch.randint(0, 2, (rows, width)).float())


def _exact_steps(
    latent: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pairing: str
) -> Tensor:
    """Rows of +-4 (the last 64 of 576: anything), normed without rounding, then rotated."""
    rows = latent.double().clone()
    rows[:, :512] = rows[:, :512] / 4.0 * weight.double()
    for row, position in zip(rows, positions.tolist(), strict=True):
        line = table[min(max(position, 0), table.shape[0] - 1)]
        row[-64:] = oracles.round_to_bf16(oracles.rotate(row[-64:], line, pairing))
    return rows


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("cache", CACHES, ids=cache_id)
def test_bytes_are_those_of_separate_steps(
    cache: CacheCase, dtype: torch.dtype, pairing: str, backend: str
) -> None:
    """With rows of one magnitude norm and weight are exact, and with a table of multiples of 1/64
    so is the rotation up to its rounding: the rows have one right answer.
    """
    latent = _signs(5, cache.d_qk, 4.0)
    if cache.d_qk == 576:
        latent[:, 512:] = oracles.exact_queries(5, 64).float()
    weight = oracles.exact_queries(512)
    table, positions = oracles.exact_rope_table(7), torch.tensor([3, 0, -2, 9, 6])
    slots = torch.tensor([4, 0, -1, 2, 4])
    rows = _exact_steps(latent, weight, table, positions, pairing)
    fused = _append(
        cache,
        latent.to(dtype),
        slots,
        backend,
        norm_weight=weight,
        norm_eps=0.0,
        rope=mlacast.Rope(table, positions, pairing),
    )
    assert torch.equal(fused, _append(cache, rows.to(BF16), slots, backend))


def test_norm_of_random_rows_is_rounded_once(backend: str) -> None:
    """Each bf16 result is the nearest one of a number within the error of a float32 evaluation."""
    latent = torch.randn(6, 576) * torch.tensor([1e-3, 0.1, 1.0, 10.0, 300.0, 1e4])[:, None]
    weight, eps = torch.randn(512), 1e-6
    cache = mlacast.KvFormat.BF16.allocate(1, 6, d_qk=576)
    slots = torch.arange(6)
    mlacast.kv_cache_append(
        latent,
        slots,
        cache,
        mlacast.KvFormat.BF16,
        norm_weight=weight,
        norm_eps=eps,
        backend=backend,
    )
    rows = cache.view(6, 576).double()
    x = latent[:, :512].double()
    exact = x / torch.sqrt((x * x).mean(1, keepdim=True) + eps) * weight.double()
    # Sum of 512 squares in a tree of nine levels, root, quotient and two products.
    slack = exact.abs() * 16 * 2.0**-24
    low, high = oracles.round_to_bf16(exact - slack), oracles.round_to_bf16(exact + slack)
    assert bool((rows[:, :512] >= torch.minimum(low, high)).all())
    assert bool((rows[:, :512] <= torch.maximum(low, high)).all())
    assert torch.equal(cache.view(6, 576)[:, 512:], latent[:, 512:].bfloat16())


def test_norm_alone_covers_the_rotary_part_of_512_only(backend: str) -> None:
    for width, changed in ((512, True), (576, False)):
        latent = _signs(1, width, 4.0)
        cache = mlacast.KvFormat.BF16.allocate(1, 1, d_qk=width)
        mlacast.kv_cache_append(
            latent,
            torch.tensor([0]),
            cache,
            mlacast.KvFormat.BF16,
            norm_eps=0.0,
            backend=backend,
        )
        row = cache.view(-1).float()
        assert torch.equal(row[:448], latent[0, :448] / 4)
        assert torch.equal(row[-64:], latent[0, -64:] / (4 if changed else 1))


def test_eps_enters_the_mean(backend: str) -> None:
    """A mean square of 16 and an eps of 9 make a root of 5."""
    latent = _signs(1, 512, 4.0)
    cache = mlacast.KvFormat.BF16.allocate(1, 1, d_qk=512)
    mlacast.kv_cache_append(
        latent, torch.tensor([0]), cache, mlacast.KvFormat.BF16, norm_eps=9.0, backend=backend
    )
    assert torch.equal(cache.view(1, 512), (latent / 5).bfloat16())


def test_untouched_parts_are_not_rounded(backend: str) -> None:
    """A rotation alone leaves a float32 latent's other dimensions as they are: 1 + 2**-4 + 2**-20
    rounds up in e4m3, its bfloat16 value would be a tie and round down.
    """
    latent = torch.full((1, 576), 1.0 + 2.0**-4 + 2.0**-20)
    cache = mlacast.KvFormat.FP8.allocate(1, 1, d_qk=576)
    table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    rope = mlacast.Rope(table, torch.tensor([0]))
    mlacast.kv_cache_append(
        latent, torch.tensor([0]), cache, mlacast.KvFormat.FP8, rope=rope, backend=backend
    )
    codes = cache.view(torch.uint8).flatten()
    assert bool((codes[:512] == 0x39).all())
    assert bool((codes[512:] == 0x38).all())


def _good() -> Arguments:
    return {
        "latent": torch.zeros(3, 512).bfloat16(),
        "slots": torch.arange(3),
        "cache": poisoned(2, 4, 1, 584, dtype=torch.uint8),
        "kv_format": mlacast.KvFormat.V4,
        "norm_weight": torch.ones(512),
        "norm_eps": 1e-6,
        "rope": mlacast.Rope(torch.zeros(5, 64), torch.zeros(3, dtype=torch.int32)),
    }


def _rope(rows: int = 3, **options: object) -> mlacast.Rope:
    return mlacast.Rope(torch.zeros(5, 64), torch.zeros(rows, dtype=torch.int32), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rejection",
    [
        Rejection("eps_left_out", {"norm_eps": None}, "norm_eps", "given together", "None"),
        Rejection("eps_negative", {"norm_eps": -1.0}, "norm_eps", "not negative", "-1"),
        Rejection("eps_past_float32", {"norm_eps": 10**400}, "norm_eps", "finite in float32"),
        Rejection("eps_is_true", {"norm_eps": True}, "norm_eps", "number", "bool", TypeError),
        Rejection("weight_of_448", {"norm_weight": torch.ones(448)}, "norm_weight", "512", "448"),
        Rejection(
            "weight_in_int", {"norm_weight": torch.ones(512).int()}, "norm_weight", "float", "int32"
        ),
        Rejection(
            "weight_elsewhere",
            {"norm_weight": torch.ones(512, device="meta")},
            "norm_weight",
            "on cpu",
            "meta",
        ),
        Rejection("rope_is_a_table", {"rope": torch.zeros(5, 64)}, "rope", "Rope", "", TypeError),
        Rejection("rope_of_other_rows", {"rope": _rope(2)}, "rope.positions", "=3", r"\[2\]"),
        Rejection(
            "rope_that_does_not_rotate",
            {"rope": _rope(rotate_query=False)},
            "rope",
            "True",
            "False",
        ),
    ],
    ids=rejection_id,
)
def test_wrong_calls_write_nothing(rejection: Rejection) -> None:
    assert_rejected("kv_cache_append", {**_good(), **rejection.change}, rejection)


def test_validation_finds_positions_of_written_rows(validate: None) -> None:
    arguments = {**_good(), "slots": torch.tensor([0, -1, 2])}
    table = torch.zeros(5, 64)
    arguments["rope"] = mlacast.Rope(table, torch.tensor([0, 99, 1]))
    mlacast.kv_cache_append(**arguments)
    arguments["rope"] = mlacast.Rope(table, torch.tensor([0, 99, 5]))
    with pytest.raises(ValueError, match=r"rope.positions must .*\[0, 5\), got 5"):
        mlacast.kv_cache_append(**arguments)
