"""The storing epilogue as a function on given float32 accumulators, against the reference.

Both sides start from buffers of 0x5A bytes and whole storages are compared, so a stray byte, a
missing padding byte or a touched neighbour shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

import mlacast
from tests.format_cases import FormatCase, buffer_bytes, fill_storage
from tests.kernels import probes
from tests.kernels.number_cases import neighbours

POISON = 0x5A


def special_amax() -> Tensor:
    """Largest magnitudes of a group: 448 and 6 times every power of two with their surroundings
    (where the scale changes), the floors 1e-10 and 1e-4, zero, subnormals, the largest number,
    infinity and NaN.
    """
    powers = torch.ldexp(torch.ones(253, dtype=torch.float64), torch.arange(-126, 127))
    thresholds = torch.cat((448 * powers, 6 * powers)).float()
    thresholds = thresholds[thresholds.isfinite()]
    floors = torch.tensor([1e-10, 1e-4, 448e-10, 3.4028234663852886e38])
    edges = torch.tensor([0.0, -0.0, 1e-45, 1e-40, float("inf"), float("nan")])
    return torch.cat((neighbours(thresholds, 1), neighbours(floors, 2), edges))


def groups_of(amax: Tensor, group: int) -> Tensor:
    """One group [n, group] per largest magnitude; the others are a random share of it."""
    share = torch.rand(amax.shape[0], group) * 2 - 1
    # Shares that are e4m3 ties, and zeros of both signs.
    ties = torch.randint(-17, 18, share.shape) / 17.0
    share = torch.where(torch.rand(share.shape) < 0.3, ties, share)
    share = torch.where(
        torch.rand(share.shape) < 0.1, torch.copysign(torch.zeros(()), share), share
    )
    values = share * torch.where(amax.isfinite(), amax, torch.ones_like(amax))[:, None]
    at = torch.randint(0, group, (amax.shape[0],))
    sign = torch.where(torch.rand(amax.shape) < 0.5, -1.0, 1.0)
    values[torch.arange(amax.shape[0]), at] = amax * sign
    return values


def hostile_rows(group: int, heads: int) -> Tensor:
    """Rows [T, heads, 512] whose groups have every largest magnitude of ``special_amax``."""
    amax = special_amax()
    per_token = heads * 512 // group
    tokens = -(-amax.shape[0] // per_token)
    filler = amax[torch.randint(0, amax.shape[0], (tokens * per_token - amax.shape[0],))]
    return groups_of(torch.cat((amax, filler)), group).view(tokens, heads, 512)


def empty_buffer(
    case: FormatCase, tokens: int, groups: int, features: int, device: str
) -> mlacast.QuantizedTensor:
    """A whole buffer of poison on ``device``."""
    fmt = case.build()
    buffer = mlacast.QuantizedTensor.empty(tokens, groups, features, fmt, device)
    fill_storage_on(buffer.data)
    if buffer.sf is not None:
        fill_storage_on(buffer.sf)
    return buffer


def fill_storage_on(tensor: Tensor) -> None:
    """``fill_storage`` for a tensor on any device."""
    if tensor.device.type == "cpu":
        fill_storage(tensor, POISON)
    else:
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage()).fill_(POISON)


def storages(buffer: mlacast.QuantizedTensor) -> list[Tensor]:
    """Bytes of the storages of data and, if any, scales, on the CPU."""
    if buffer.data.device.type == "cpu":
        data, sf = buffer_bytes(buffer)
        return [data] if sf is None else [data, sf]
    parts = [buffer.data] if buffer.sf is None else [buffer.data, buffer.sf]
    return [
        torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage()).cpu()
        for part in parts
    ]


def assert_same_storages(
    actual: mlacast.QuantizedTensor, expected: mlacast.QuantizedTensor
) -> None:
    """Every byte behind both buffers, padding and neighbours included."""
    for name, got, want in zip(("data", "sf"), storages(actual), storages(expected), strict=False):
        wrong = torch.nonzero(got != want).flatten()
        assert wrong.numel() == 0, (
            f"{name}: {wrong.numel()} of {got.numel()} bytes differ, first at {int(wrong[0])}: "
            f"{int(got[wrong[0]]):#x} instead of {int(want[wrong[0]]):#x}"
        )


def check_store(
    case: FormatCase,
    x: Tensor,
    num_groups: int,
    device: str,
    bounds: Sequence[int] | None = None,
    total: int | None = None,
    block_h: int = 8,
) -> None:
    """Store ``x [T, h, 512]`` range by range with the kernel and with the reference.

    Args:
        case: Output format.
        x: float32 accumulators.
        num_groups: Groups of the buffer.
        device: Where the kernel runs.
        bounds: Ends of the ranges, stored in this order; None is the whole buffer at once.
        total: Tokens of the buffers; None means those of ``x``.
        block_h: Heads of a program.
    """
    tokens, heads, _ = x.shape
    features = heads * 512 // num_groups
    rows = tokens if total is None else total
    actual = empty_buffer(case, rows, num_groups, features, device)
    expected = empty_buffer(case, rows, num_groups, features, "cpu")
    for first, last in itertools.pairwise((0, tokens) if bounds is None else bounds):
        part = x[first:last].contiguous()
        probes.store(part.to(device), actual[first:last], block_h)
        mlacast.reference.quantize_output(
            part.reshape(last - first, num_groups, features), expected[first:last]
        )
    assert_same_storages(actual, expected)
