"""One step's output buffer in a storage full of sentinels, so that a stray byte anywhere shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.compat.flash_mla.element_orders import D_V

SENTINEL = 0x5A
SENTINEL_WORD = 0x5A5A5A5A
GUARD = 128


@dataclass(frozen=True)
class StepBuffer:
    """Buffers for ``tokens`` tokens: the views to pass and the whole storages around them."""

    fp8: Tensor
    sf: Tensor
    fp8_storage: Tensor
    sf_storage: Tensor

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The pair to pass as ``out`` for tokens [start, stop)."""
        return self.fp8[start:stop], self.sf[start:stop]

    def untouched(self) -> bool:
        """Whether every byte still is a sentinel."""
        return bool(
            (self.fp8_storage == SENTINEL).all() and (self.sf_storage == SENTINEL_WORD).all()
        )

    def erase(self, start: int, stop: int) -> None:
        """Put the sentinels back into tokens [start, stop)."""
        fp8, sf = self.rows(start, stop)
        fp8.view(torch.uint8).fill_(SENTINEL)
        sf.fill_(SENTINEL_WORD)


def step_buffer(
    tokens: int, groups: int, w: int, *, sf_pitch: int | None = None, group_gap: int = 0
) -> StepBuffer:
    """A buffer for ``tokens`` tokens of ``groups`` groups of ``w`` heads.

    Args:
        tokens: Tokens of the step.
        groups: Groups.
        w: Heads of a group.
        sf_pitch: stride(2) of the scale words; default exactly ``tokens``.
        group_gap: Extra words between the scale planes of two groups.
    """
    words = 4 * w
    pitch = tokens if sf_pitch is None else sf_pitch
    plane = words * pitch + group_gap
    fp8_bytes = tokens * groups * w * D_V
    fp8_storage = torch.full((fp8_bytes + 2 * GUARD,), SENTINEL, dtype=torch.uint8)
    sf_storage = torch.full((groups * plane + 2 * GUARD,), SENTINEL_WORD, dtype=torch.int32)
    fp8 = fp8_storage[GUARD : GUARD + fp8_bytes].view(torch.float8_e4m3fn)
    sf = sf_storage.as_strided((tokens, groups, words), (1, plane, pitch), GUARD)
    return StepBuffer(fp8.view(tokens, groups, w * D_V), sf, fp8_storage, sf_storage)
