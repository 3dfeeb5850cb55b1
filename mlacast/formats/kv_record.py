"""Bytes of one cached token: encode latent rows into KV cache records and decode them back.

A record has two planes, ``data`` and ``scale``. Here they are separate [n, bytes] tensors; whether
a cache puts the scale plane beside each token or at the end of a page is a matter of
``mlacast.layouts.paging``.

===============  =======================================  =====================
name             data plane                               scale plane
===============  =======================================  =====================
``"fp8"``        d e4m3                                   none
``"v32"``        512 e4m3, 4 float32 scales, 64 bfloat16  none
``"v4"``         448 e4m3, 64 bfloat16                    7 ue8m0, 1 zero byte
``"v41"``        512 e4m3                                 16 ue8m0
``"v41_fp4"``    512 e2m1 in 256 bytes                    32 e4m3
``"nvfp4_384"``  448 e2m1 in 224 bytes, 64 bfloat16       28 e4m3, 4 zero bytes
===============  =======================================  =====================

Latent rows are already normalised and rotated; nothing here rotates. The formulas follow FlashMLA's
(``v32``, ``v4``) and FlashInfer's (``v41``, ``v41_fp4``, ``nvfp4_384``) cache writers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlacast.errors import check_choice, check_tensor, fail
from mlacast.formats.e2m1 import (
    E2M1_MAX,
    E2M1_NAN,
    decode_e2m1,
    encode_e2m1,
    pack_e2m1,
    unpack_e2m1,
)
from mlacast.formats.e4m3 import E4M3_MAX, E4M3_NAN, decode_e4m3, encode_e4m3
from mlacast.formats.inputs import as_float32, divide_by
from mlacast.formats.ue8m0 import decode_ue8m0, encode_ue8m0

__all__ = ["KV_RECORD_NAMES", "decode_kv_record", "encode_kv_record", "kv_record_bytes"]

# The floor is on amax / 448, not on amax: no scale of these formats is below 2**-13.
_MIN_RATIO = 1e-4
_MIN_FP4_SCALE = 2.0**-9
_UE8M0_NAN = 0xFF
_FP4_TILE = 16


@dataclass(frozen=True)
class _Record:
    """Sizes of one record; ``features`` is None where any width is allowed."""

    features: int | None
    quantised: int
    tile: int
    data_bytes: int
    scale_bytes: int


_RECORDS = {
    "fp8": _Record(features=None, quantised=0, tile=0, data_bytes=0, scale_bytes=0),
    "v32": _Record(features=576, quantised=512, tile=128, data_bytes=656, scale_bytes=0),
    "v4": _Record(features=512, quantised=448, tile=64, data_bytes=576, scale_bytes=8),
    "v41": _Record(features=512, quantised=512, tile=32, data_bytes=512, scale_bytes=16),
    "v41_fp4": _Record(features=512, quantised=512, tile=16, data_bytes=256, scale_bytes=32),
    "nvfp4_384": _Record(features=512, quantised=448, tile=16, data_bytes=352, scale_bytes=32),
}
KV_RECORD_NAMES = tuple(_RECORDS)


def kv_record_bytes(name: str, features: int) -> tuple[int, int]:
    """Return (data_bytes, scale_bytes) of one token.

    Args:
        name: One of ``KV_RECORD_NAMES``.
        features: Width d of a latent row.

    Raises:
        ValueError: Unknown name, or a width that the record does not have.
    """
    record = _record("kv_record_bytes", name)
    if record.features is None:
        return features, 0
    if features != record.features:
        fail("kv_record_bytes", "features", f"be {record.features} for {name!r}", features)
    return record.data_bytes, record.scale_bytes


def encode_kv_record(latent: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode latent rows into records.

    Per tile of neighbours, with ``amax`` the tile's largest magnitude and ``pow2`` the smallest
    power of two not below:

    - ``v32`` (128), ``v4`` (64), ``v41`` (32): ``scale = pow2(max(amax / 448, 1e-4))``, ``code =
      e4m3(x / scale)``.
    - ``v41_fp4`` (16): ``scale = e4m3(clamp(amax / 6, 2**-9, 448))``, ``code = e2m1(x / scale)``.
    - ``nvfp4_384`` (16): ``scale = e4m3(min(amax / 6, 448))``, ``code = e2m1(x * (1 / scale))``, 0
      where scale is 0.
    - ``fp8``: ``code = e4m3(x)``; the cache-wide scale is divided out by the caller.

    All codes saturate. A tile with NaN or infinity: ``v32`` scale NaN, codes 0x7F; ``v4`` and
    ``v41`` scale byte 0xFF with codes 0x7F throughout if there is a NaN, else 0x7F at the
    infinities and signed zero elsewhere; FP4 scale byte 0x7F, codes 0x7. bfloat16 parts are copied
    bit for bit; other dtypes are rounded to nearest even, NaN to 0x7FC0.

    Args:
        latent: [n, d] floating-point, d as the record says (any for "fp8"); n may be 0.
        name: One of ``KV_RECORD_NAMES``.

    Returns:
        (data, scale): contiguous uint8 [n, data_bytes] and [n, scale_bytes].

    Raises:
        TypeError: ``latent`` is not a tensor.
        ValueError: Unknown name, wrong shape or a dtype that is not floating point.
    """
    op = "encode_kv_record"
    record = _record(op, name)
    width = "d" if record.features is None else str(record.features)
    check_tensor(op, "latent", latent, f"n {width}", {})
    values = as_float32(op, "latent", latent)
    if name == "fp8":
        codes = encode_e4m3(values).contiguous()
        return codes, codes.new_empty((codes.shape[0], 0))
    rope = _as_bytes(_to_bfloat16(latent.detach()[:, record.quantised :]))
    tiles = _to_tiles(values[:, : record.quantised], record.tile)
    if name == "v32":
        codes, exponent = _encode_pow2_tiles(tiles)
        broken = ~tiles.isfinite().all(dim=-1)
        scales = decode_ue8m0(exponent).masked_fill(broken, float("nan"))
        codes = codes.masked_fill(broken.unsqueeze(-1), E4M3_NAN).flatten(-2)
        data = torch.cat((codes, _as_bytes(scales), rope), dim=-1)
        return data, data.new_empty((data.shape[0], 0))
    if name in ("v4", "v41"):
        codes, exponent = _encode_pow2_tiles(tiles)
        codes, scale = _mark_non_finite_tiles(tiles, codes, exponent)
    elif name == "v41_fp4":
        codes, scale = _encode_fp4_tiles(tiles)
    else:
        codes, scale = _encode_nvfp4_tiles(tiles)
    codes = codes.flatten(-2)
    if record.tile == _FP4_TILE:
        codes = pack_e2m1(codes)
    padding = record.scale_bytes - scale.shape[-1]
    return torch.cat((codes, rope), dim=-1), torch.nn.functional.pad(scale, (0, padding))


def decode_kv_record(data: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """Decode records: ``code * scale`` in float32, rounded once to bfloat16.

    Padding bytes of the scale plane are not read. A NaN scale makes its whole tile NaN, whatever
    the codes.

    Args:
        data: [n, data_bytes] uint8, any strides; n may be 0.
        scale: [n, scale_bytes] uint8; zero columns for "fp8" and "v32".
        name: One of ``KV_RECORD_NAMES``.

    Returns:
        bfloat16 [n, d].

    Raises:
        TypeError: ``data`` or ``scale`` is not a tensor.
        ValueError: Unknown name, wrong shape or dtype.
    """
    op = "decode_kv_record"
    record = _record(op, name)
    sizes: dict[str, int] = {}
    width = "d" if record.features is None else str(record.data_bytes)
    check_tensor(op, "data", data, f"n {width}", sizes, dtype=torch.uint8)
    check_tensor(op, "scale", scale, f"n {record.scale_bytes}", sizes, dtype=torch.uint8)
    if name == "fp8":
        return _to_bfloat16(decode_e4m3(data))
    num_tiles = record.quantised // record.tile
    if record.tile == _FP4_TILE:
        code_bytes = record.quantised // 2
        codes = decode_e2m1(unpack_e2m1(data[:, :code_bytes]))
        factors = decode_e4m3(scale[:, :num_tiles])
    else:
        code_bytes = record.quantised
        codes = decode_e4m3(data[:, :code_bytes])
        if name == "v32":
            code_bytes += 4 * num_tiles
            factors = _from_bytes(data[:, record.quantised : code_bytes], torch.float32)
        else:
            factors = decode_ue8m0(scale[:, :num_tiles])
    values = (_to_tiles(codes, record.tile) * factors.unsqueeze(-1)).flatten(-2)
    latent = _to_bfloat16(values)
    if code_bytes == record.data_bytes:
        return latent
    rope = _from_bytes(data[:, code_bytes:], torch.bfloat16)
    return torch.cat((latent, rope), dim=-1)


def _record(op: str, name: str) -> _Record:
    check_choice(op, "name", name, KV_RECORD_NAMES)
    return _RECORDS[name]


def _to_tiles(values: torch.Tensor, tile: int) -> torch.Tensor:
    """View [n, k] as [n, k / tile, tile]."""
    return values.reshape(values.shape[0], values.shape[1] // tile, tile)


def _to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16. bfloat16 input keeps its bits, any other NaN becomes 0x7FC0.

    PyTorch's own conversion writes 0x7FC0 or 0xFFFF for a NaN, depending on the strides of its
    input.
    """
    if values.dtype == torch.bfloat16:
        return values
    return values.to(torch.bfloat16).masked_fill(values.isnan(), float("nan"))


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of [n, k] values as uint8 [n, k * itemsize]."""
    # Not contiguous(): it returns zero-width rows as they are, and their strides then forbid the
    # view.
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _from_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo ``_as_bytes``. Copies first: a part of a record need not be aligned to the item size."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def _encode_pow2_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes [n, G, g] and UE8M0 bytes [n, G].

    Both are right for finite tiles; the caller overwrites those of the others.
    """
    ratio = divide_by(tiles.abs().amax(dim=-1), E4M3_MAX).clamp(min=_MIN_RATIO)
    exponent = encode_ue8m0(ratio)
    return encode_e4m3(tiles / decode_ue8m0(exponent).unsqueeze(-1)), exponent


def _mark_non_finite_tiles(
    tiles: torch.Tensor, codes: torch.Tensor, exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give tiles with NaN or infinity a NaN scale, and codes that still tell the two apart."""
    has_nan = tiles.isnan().any(dim=-1, keepdim=True)
    is_inf = tiles.isinf()
    broken = has_nan | is_inf.any(dim=-1, keepdim=True)
    signed_zero = tiles.signbit().to(torch.uint8) << 7
    codes = torch.where(broken, signed_zero, codes).masked_fill(has_nan | is_inf, E4M3_NAN)
    return codes, exponent.masked_fill(broken.squeeze(-1), _UE8M0_NAN)


def _encode_fp4_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E2M1 codes [n, G, 16] and E4M3 scale bytes [n, G], scale at least 2**-9."""
    broken = ~tiles.isfinite().all(dim=-1)
    ratio = divide_by(tiles.abs().amax(dim=-1), E2M1_MAX).clamp(_MIN_FP4_SCALE, E4M3_MAX)
    scale = encode_e4m3(ratio).masked_fill(broken, E4M3_NAN)
    codes = encode_e2m1(tiles / decode_e4m3(scale).unsqueeze(-1))
    return codes.masked_fill(broken.unsqueeze(-1), E2M1_NAN), scale


def _encode_nvfp4_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E2M1 codes [n, G, 16] and E4M3 scale bytes [n, G]; a scale of 0 has codes 0."""
    broken = ~tiles.isfinite().all(dim=-1)
    scale = encode_e4m3(divide_by(tiles.abs().amax(dim=-1), E2M1_MAX)).masked_fill(broken, E4M3_NAN)
    # A reciprocal and a product, not a quotient: the two differ by a code at rounding boundaries.
    decoded = decode_e4m3(scale)
    codes = encode_e2m1(tiles * (torch.ones_like(decoded) / decoded).unsqueeze(-1))
    codes = codes.masked_fill((scale == 0).unsqueeze(-1), 0)
    return codes.masked_fill(broken.unsqueeze(-1), E2M1_NAN), scale
