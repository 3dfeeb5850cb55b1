"""Reference of ``rope_quantize_fp8``: rotate, scale and cast queries, keys and values."""

from __future__ import annotations

import torch

from mlacast.formats.e4m3 import encode_e4m3
from mlacast.formats.e5m2 import encode_e5m2

_ENCODERS = {torch.float8_e4m3fn: encode_e4m3, torch.float8_e5m2: encode_e5m2}

# Pages of all requests, start of each request in that list, request of each token, and its place in
# the request.
PageTable = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _rotate(
    x: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor, pairing: str
) -> torch.Tensor:
    """Rotate the pairs of ``x [n, h, r]`` in float32; positions are clamped to the table."""
    half = x.shape[-1] // 2
    rows = positions.long().clamp(0, cos_sin_cache.shape[0] - 1)
    angles = cos_sin_cache[rows].float()[:, None, :]
    cos, sin = angles[..., :half], angles[..., half:]
    x = x.float()
    if pairing == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if pairing == "interleaved":
        return torch.stack(rotated, dim=-1).flatten(-2)
    return torch.cat(rotated, dim=-1)


def _codes(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return _ENCODERS[dtype](values.float() * scale).view(dtype)


def _slots(
    page_table: PageTable, num_pages: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that are written, their pages and their offsets; the rest is outside the tables."""
    entries, starts, requests, places = (part.long() for part in page_table)
    tokens = torch.arange(requests.shape[0], device=requests.device)
    kept = (requests >= 0) & (requests < starts.shape[0] - 1) & (places >= 0)
    tokens = tokens[kept]
    start = starts[requests[tokens]]
    entry = start + places[tokens] // page_size
    kept = (start >= 0) & (entry < entries.shape[0])
    tokens, entry = tokens[kept], entry[kept]
    page = entries[entry]
    kept = (page >= 0) & (page < num_pages)
    tokens, page = tokens[kept], page[kept]
    return tokens, page, places[tokens] % page_size


def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_rope_out: torch.Tensor,
    k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor,
    k_nope_out: torch.Tensor,
    v_out: torch.Tensor | None,
    page_table: PageTable | None,
    pairing: str,
    q_scale: float,
    kv_scale: float,
) -> None:
    """Fill the outputs.

    Args:
        q_rope: [n, h_q, r], any float dtype, like the other inputs.
        k_rope: [n, h_kv, r].
        q_nope: [n, h_q, d], d may be 0.
        k_nope: [n, h_kv, d].
        v: [n, h_kv, d_v] or None.
        cos_sin_cache: [max_pos, r], r / 2 cosines then r / 2 sines a row.
        positions: [n], clamped to the table.
        q_rope_out: As ``q_rope`` in an FP8 dtype.
        k_rope_out: As ``k_rope``; with a page table [num_pages, page_size, h_kv, r].
        q_nope_out: As ``q_nope``.
        k_nope_out: Like ``k_rope_out``.
        v_out: Like ``k_rope_out``, or None with ``v``.
        page_table: Pages of all requests, start of each request among them [B + 1], request of
            each token [n] and its place there [n]; or None. A token whose request is negative is
            left out, also of the query; one whose place does not exist writes no key and value.
        pairing: "interleaved" or "half".
        q_scale: Multiplies queries before the cast.
        kv_scale: Multiplies keys and values.
    """
    dtype = q_rope_out.dtype
    rotated = _codes(_rotate(q_rope, cos_sin_cache, positions, pairing), q_scale, dtype)
    plain = _codes(q_nope, q_scale, dtype)
    keys = _codes(_rotate(k_rope, cos_sin_cache, positions, pairing), kv_scale, dtype)
    parts = [(keys, k_rope_out), (_codes(k_nope, kv_scale, dtype), k_nope_out)]
    if v is not None and v_out is not None:
        parts.append((_codes(v, kv_scale, dtype), v_out))
    # Indexed writes have no FP8 kernel everywhere; bytes do.
    if page_table is None:
        q_rope_out.copy_(rotated)
        q_nope_out.copy_(plain)
        for codes, out in parts:
            out.copy_(codes)
        return
    live = page_table[2] >= 0
    for codes, out in ((rotated, q_rope_out), (plain, q_nope_out)):
        out.view(torch.uint8)[live] = codes.view(torch.uint8)[live]
    tokens, page, offset = _slots(page_table, k_rope_out.shape[0], k_rope_out.shape[1])
    for codes, out in parts:
        out.view(torch.uint8)[page, offset] = codes.view(torch.uint8)[tokens]
