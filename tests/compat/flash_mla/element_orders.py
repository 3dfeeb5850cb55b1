"""The permuted element orders of the fused step as index tables, by their definitions."""

from __future__ import annotations

import torch
from torch import Tensor

D_V = 512
CHUNKS = D_V // 32


def ceil4(count: int) -> int:
    """``count`` rounded up to a multiple of four."""
    return -(-count // 4) * 4


def chunk16_positions(h_q: int) -> Tensor:
    """[h_q, 512] int64: where element d of head h sits among a token's query elements."""
    rows = [
        [(d // 16) * (h_q * 16) + head * 16 + d % 16 for d in range(D_V)] for head in range(h_q)
    ]
    return torch.tensor(rows)


def chunk32_positions(w: int) -> Tensor:
    """[w, 512] int64: where element d of a group's head h sits among the group's outputs."""
    rows = [[((d // 32) * w + head) * 32 + d % 32 for d in range(D_V)] for head in range(w)]
    return torch.tensor(rows)


def to_chunk16(q: Tensor) -> Tensor:
    """Natural [s_q, h_q, 512] -> the same shape in chunk16 order."""
    s_q, h_q, _ = q.shape
    flat = torch.empty_like(q).view(s_q, h_q * D_V)
    flat[:, chunk16_positions(h_q)] = q
    return flat.view(s_q, h_q, D_V)


def natural_codes(out_fp8: Tensor, w: int) -> Tensor:
    """Output [s_q, g, w * 512] in chunk32 order -> natural codes uint8 [s_q, g * w, 512]."""
    s_q, groups, _ = out_fp8.shape
    codes = out_fp8.view(torch.uint8)[:, :, chunk32_positions(w)]
    return codes.reshape(s_q, groups * w, D_V)


def natural_scale_bytes(out_sf: Tensor, w: int) -> Tensor:
    """Little-endian words [s_q, g, w * 4] -> bytes int64 [s_q, g * w, 16] in natural order."""
    s_q, groups, _ = out_sf.shape
    position = torch.tensor([[chunk * w + head for chunk in range(CHUNKS)] for head in range(w)])
    words = out_sf.long()[:, :, position // 4]
    return ((words >> (8 * (position % 4))) & 0xFF).reshape(s_q, groups * w, CHUNKS)
