"""KV cache formats: the bytes of a cached token, the shape of a page, writing and reading by slot.

A format is always named by the caller. Two formats can have the same number of bytes per token
(528: V4.1 with its scales in a page footer, and inline), so none is guessed from a shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mlacast.errors import check_tensor, check_type, dtype_name, fail
from mlacast.formats.kv_record import decode_kv_record, encode_kv_record
from mlacast.layouts.paging import PageLayout, read_records, write_records

BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
LATENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Sizes are symbols while a graph is traced with dynamic shapes.
INTS = (int, torch.SymInt)
SLOT_DTYPES = (torch.int32, torch.int64)
ELEMENT_D_QK = (512, 576)


@dataclass(frozen=True)
class ByteField:
    """One part of a token's record.

    Args:
        name: What it holds.
        start: First byte, counted in its plane of the record.
        stop: Byte after the last.
        dtype: Name of the element type.
        plane: ``"data"``, or ``"scale"`` for bytes that a footer format keeps at the end of the
            page.
        note: Meaning in a few words.
    """

    name: str
    start: int
    stop: int
    dtype: str
    plane: str = "data"
    note: str = ""


@dataclass(frozen=True, repr=False)
class KvFormat:
    """Byte layout of a cached token; use the instances ``KvFormat.V32``, ``KvFormat.V4``, ...

    Args:
        name: Name of the instance, its identity in comparisons.
        d_qk: Values of a token; None for BF16 and FP8, whose caches have 512 or 576.
        data_bytes: Bytes of the data part of a record; None for BF16 and FP8 (``d_qk`` elements).
        scale_bytes: Bytes of the scale part; 0 if a record has none or keeps its scales inside its
            data.
        placement: ``"inline"``, scales behind each token's data, or ``"footer"``, behind the data
            of the whole page.
        page_align: Multiple that the bytes of an allocated page are rounded up to.
        byte_map: Fields of a record; for BF16 and FP8 those of 576 values.
        element_dtype: Element type of BF16 and FP8, None for byte records.
        record: Name of the record's encoding in ``mlacast.formats.kv_record``; None for BF16.
    """

    name: str
    d_qk: int | None = field(compare=False)
    data_bytes: int | None = field(compare=False)
    scale_bytes: int = field(compare=False)
    placement: str = field(compare=False)
    page_align: int = field(compare=False)
    byte_map: tuple[ByteField, ...] = field(compare=False)
    element_dtype: torch.dtype | None = field(compare=False)
    record: str | None = field(compare=False)

    BF16: ClassVar[KvFormat]
    FP8: ClassVar[KvFormat]
    V32: ClassVar[KvFormat]
    V4: ClassVar[KvFormat]
    V41: ClassVar[KvFormat]
    V41_FP4: ClassVar[KvFormat]
    V41_INLINE: ClassVar[KvFormat]
    V41_FP4_INLINE: ClassVar[KvFormat]
    NVFP4_384: ClassVar[KvFormat]

    @staticmethod
    def from_name(name: str) -> KvFormat:
        """Return the format called ``name``, for example ``"V4"``.

        Raises:
            ValueError: No format has this name.
        """
        check_type("KvFormat.from_name", "name", name, str, "a str")
        for known in ALL_KV_FORMATS:
            if known.name == name:
                return known
        names = ", ".join(repr(known.name) for known in ALL_KV_FORMATS)
        fail("KvFormat.from_name", "name", f"be one of {names}", repr(name))

    def __repr__(self) -> str:
        return f"KvFormat.{self.name}"

    def __reduce__(self) -> tuple[object, ...]:
        return KvFormat.from_name, (self.name,)

    def record_data_bytes(self, d_qk: int | None = None) -> int:
        """Return the bytes of a record's data part; ``d_qk`` as in `bytes_per_token`."""
        return self._data_bytes("KvFormat.record_data_bytes", d_qk)

    def bytes_per_token(self, d_qk: int | None = None) -> int:
        """Return the bytes of a token, scales and their padding included.

        Args:
            d_qk: Values of a token, 512 or 576, required for BF16 and FP8; the others know their
                own.

        Raises:
            ValueError: ``d_qk`` is missing or does not fit the format.
        """
        return self._data_bytes("KvFormat.bytes_per_token", d_qk) + self.scale_bytes

    def page_bytes(self, page_size: int, d_qk: int | None = None) -> int:
        """Return the bytes of a page of ``page_size`` tokens, rounded up to ``page_align``."""
        payload = self._payload("KvFormat.page_bytes", page_size, d_qk)
        return (payload + self.page_align - 1) // self.page_align * self.page_align

    def page_layout(self, page_size: int, d_qk: int | None = None) -> PageLayout:
        """Return where the bytes of each token stand inside a page."""
        data_bytes = self._data_bytes("KvFormat.page_layout", d_qk)
        return PageLayout(data_bytes, self.scale_bytes, self.placement, page_size)

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        *,
        d_qk: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return a zero-filled cache, its pages ``page_bytes`` apart.

        Args:
            num_pages: Pages, 0 allowed.
            page_size: Tokens of a page.
            d_qk: Values of a token, 512 or 576, required for BF16 and FP8.
            device: Where to allocate.

        Returns:
            [num_pages, page_size, 1, bytes_per_token] uint8; BF16 and FP8 [num_pages, page_size, 1,
            d_qk] bfloat16 or float8_e4m3fn. With a footer the last two dimensions are nominal:
            element [p, t] is not token t.
        """
        op = "KvFormat.allocate"
        check_type(op, "num_pages", num_pages, INTS, "an int")
        if num_pages < 0:
            fail(op, "num_pages", "be at least 0", num_pages)
        payload = self._payload(op, page_size, d_qk)
        page_bytes = (payload + self.page_align - 1) // self.page_align * self.page_align
        storage = torch.zeros(num_pages * page_bytes, dtype=torch.uint8, device=device)
        storage = storage.view(self.element_dtype or torch.uint8)
        size = storage.element_size()
        width = payload // page_size // size
        strides = (page_bytes // size, width, width, 1)
        return storage.as_strided((num_pages, page_size, 1, width), strides)

    def check_cache(self, op: str, argument: str, cache: object) -> tuple[int, int, int]:
        """Check a cache against the format.

        Args:
            op: Name that opens the message.
            argument: Name of the cache argument.
            cache: [num_pages, page_size, B] or [num_pages, page_size, 1, B]. Byte formats and FP8:
                uint8, int8 or float8_e4m3fn; BF16: bfloat16. Tokens of a page packed; pages at any
                distance that does not overlap. Strides of dimensions of size 1 do not matter.

        Returns:
            (num_pages, page_size, d_qk).

        Raises:
            TypeError: Not a tensor.
            ValueError: Dtype, shape, bytes per token or strides do not fit.
        """
        dims = ("num_pages page_size width", "num_pages page_size h_kv width")
        check_tensor(op, argument, cache, dims, {}, remedy=f"the format is {self!r}")
        assert isinstance(cache, Tensor), "check_tensor let something else than a tensor pass"
        self._check_width(op, argument, cache)
        num_pages, page_size, width = cache.shape[0], cache.shape[1], cache.shape[-1]
        if cache.dim() == 4 and cache.shape[2] != 1:
            requirement = f"have h_kv = 1 in shape [num_pages, page_size, 1, {width}] for {self!r}"
            fail(op, argument, requirement, f"shape {list(cache.shape)}")
        if page_size < 1:
            fail(op, argument, "have at least one token per page", f"shape {list(cache.shape)}")
        if num_pages > 0:
            self._check_strides(op, argument, cache)
        return num_pages, page_size, width if self.d_qk is None else self.d_qk

    def append(self, latent: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Encode tokens and write them into their slots, in place.

        Rows whose slot is negative or past the end are skipped. Of several rows with the same slot
        the lowest wins. Only the bytes of the written records change, the zero pad bytes of a
        record included. Which rows remain is read on the host.

        Args:
            latent: [n, d_qk] bfloat16, float16 or float32, RoPE already applied.
            slots: [n] int32 or int64, ``page * page_size + offset``.
            cache: As in `check_cache`.

        Raises:
            TypeError: Not a tensor.
            ValueError: Dtype, shape, stride or device do not fit; nothing was written.
        """
        op = "kv_cache_append"
        num_pages, page_size, d_qk = self.check_cache(op, "cache", cache)
        sizes = {"d_qk": d_qk}
        device = cache.device
        check_tensor(op, "latent", latent, "n d_qk", sizes, dtype=LATENT_DTYPES, device=device)
        check_tensor(op, "slots", slots, "n", sizes, dtype=SLOT_DTYPES, device=device)
        rows = _rows_to_write(slots, num_pages * page_size)
        data, scale = self._encode(latent[rows])
        write_records(cache, slots[rows], data, scale, self.placement)

    def gather(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Decode the tokens in ``slots``.

        Args:
            cache: As in `check_cache`.
            slots: [n] int32 or int64. A slot outside the cache gives a zero row and reads nothing.

        Returns:
            [n, d_qk] bfloat16, contiguous.

        Raises:
            TypeError: Not a tensor.
            ValueError: Dtype, shape, stride or device do not fit.
        """
        op = "kv_cache_gather"
        num_pages, page_size, d_qk = self.check_cache(op, "cache", cache)
        check_tensor(op, "slots", slots, "n", {}, dtype=SLOT_DTYPES, device=cache.device)
        out = torch.zeros((slots.shape[0], d_qk), dtype=torch.bfloat16, device=cache.device)
        rows = _valid_rows(slots, num_pages * page_size)
        data_bytes = self._data_bytes(op, d_qk)
        data, scale = read_records(cache, slots[rows], data_bytes, self.scale_bytes, self.placement)
        out[rows] = self._decode(data, scale)
        return out

    def _encode(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        if self.record is not None:
            return encode_kv_record(latent, self.record)
        data = latent.to(torch.bfloat16)
        if latent.dtype != torch.bfloat16:
            # Which NaN a conversion gives depends on the device and on strides.
            data = data.masked_fill(latent.isnan(), float("nan"))
        data = data.contiguous().view(torch.uint8)
        return data, data.new_empty((data.shape[0], 0))

    def _decode(self, data: Tensor, scale: Tensor) -> Tensor:
        if self.record is not None:
            return decode_kv_record(data, scale, self.record)
        return data.view(torch.bfloat16)

    def _data_bytes(self, op: str, d_qk: int | None) -> int:
        if self.d_qk is None or self.data_bytes is None:
            if d_qk not in ELEMENT_D_QK or d_qk is None:
                fail(op, "d_qk", f"be 512 or 576 for {self!r}", d_qk)
            return d_qk * self._element_size
        if d_qk is not None and d_qk != self.d_qk:
            fail(op, "d_qk", f"be {self.d_qk} for {self!r}", d_qk)
        return self.data_bytes

    @property
    def _element_size(self) -> int:
        return 2 if self.element_dtype == torch.bfloat16 else 1

    def _payload(self, op: str, page_size: int, d_qk: int | None) -> int:
        check_type(op, "page_size", page_size, INTS, "an int")
        if page_size < 1:
            fail(op, "page_size", "be at least 1", page_size)
        return page_size * (self._data_bytes(op, d_qk) + self.scale_bytes)

    def _expected_bytes(self) -> tuple[int, ...]:
        if self.d_qk is None:
            return tuple(d_qk * self._element_size for d_qk in ELEMENT_D_QK)
        return (self.bytes_per_token(),)

    def _check_width(self, op: str, argument: str, cache: Tensor) -> None:
        """Check dtype and bytes per token; messages name format, expected and received bytes."""
        expected = self._expected_bytes()
        received = cache.shape[-1] * cache.element_size()
        dtypes = (torch.bfloat16,) if self.element_dtype == torch.bfloat16 else BYTE_DTYPES
        if cache.dtype in dtypes and received in expected:
            return
        wanted = " or ".join(str(count) for count in expected)
        if cache.dtype not in dtypes:
            names = " or ".join(dtype_name(dtype) for dtype in dtypes)
            requirement = f"have dtype {names} for {self!r} ({wanted} bytes per token)"
            fail(
                op, argument, requirement, f"{dtype_name(cache.dtype)} ({received} bytes per token)"
            )
        actual = f"{received} in shape {list(cache.shape)}"
        remedy = _formats_of(received, cache.dtype)
        fail(op, argument, f"have {wanted} bytes per token for {self!r}", actual, remedy)

    def _check_strides(self, op: str, argument: str, cache: Tensor) -> None:
        num_pages, page_size, width = cache.shape[0], cache.shape[1], cache.shape[-1]
        strides = f"strides {list(cache.stride())} for shape {list(cache.shape)}"
        packed = cache.stride(-1) == 1 and (page_size == 1 or cache.stride(1) == width)
        if not packed:
            requirement = f"have the tokens of a page packed, {width} elements apart, for {self!r}"
            fail(op, argument, requirement, strides)
        if num_pages > 1 and cache.stride(0) < page_size * width:
            payload = page_size * width * cache.element_size()
            received = cache.stride(0) * cache.element_size()
            requirement = f"have pages at least {payload} bytes apart for {self!r}"
            fail(op, argument, requirement, f"{received} bytes, {strides}")


def _valid_rows(slots: Tensor, num_slots: int) -> Tensor:
    """Return the rows whose slot is inside the cache, ascending."""
    # A cache can have more slots than int32 counts, and comparing int32 with such a number fails.
    wide = slots.to(torch.int64)
    return ((wide >= 0) & (wide < num_slots)).nonzero().squeeze(1)


def _rows_to_write(slots: Tensor, num_slots: int) -> Tensor:
    """Return the rows with a valid slot that no lower row names, ascending."""
    valid = _valid_rows(slots, num_slots)
    if valid.numel() == 0:
        return valid
    # A stable sort keeps equal slots in row order, so the first of each run is the lowest row.
    ordered, order = slots[valid].sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return valid[order[first]].sort().values


def _formats_of(received: int, dtype: torch.dtype) -> str:
    """Say which formats have this many bytes per token, for the end of a message."""
    if dtype == torch.bfloat16:
        return ""
    fits = [known for known in ALL_KV_FORMATS if known.element_dtype != torch.bfloat16]
    names = [repr(known) for known in fits if received in known._expected_bytes()]
    return f"{received} bytes per token is {' or '.join(names)}" if names else ""


def _byte_format(
    name: str,
    record: str,
    d_qk: int,
    placement: str,
    page_align: int,
    *byte_map: ByteField,
) -> KvFormat:
    sizes = {"data": 0, "scale": 0}
    for part in byte_map:
        sizes[part.plane] = max(sizes[part.plane], part.stop)
    return KvFormat(
        name=name,
        d_qk=d_qk,
        data_bytes=sizes["data"],
        scale_bytes=sizes["scale"],
        placement=placement,
        page_align=page_align,
        byte_map=byte_map,
        element_dtype=None,
        record=record,
    )


def _element_format(name: str, record: str | None, dtype: torch.dtype) -> KvFormat:
    size, code = (2, "bfloat16") if dtype == torch.bfloat16 else (1, "e4m3")
    byte_map = (
        ByteField("latent", 0, 512 * size, code, note="dims 0..511"),
        ByteField("rope", 512 * size, 576 * size, code, note="dims 512..575, if d_qk is 576"),
    )
    return KvFormat(
        name=name,
        d_qk=None,
        data_bytes=None,
        scale_bytes=0,
        placement="inline",
        page_align=1,
        byte_map=byte_map,
        element_dtype=dtype,
        record=record,
    )


_V41_FIELDS = (
    ByteField("codes", 0, 512, "e4m3", note="dims 0..511, RoPE included"),
    ByteField("scales", 0, 16, "ue8m0", "scale", "one per 32 dims"),
)
_V41_FP4_FIELDS = (
    ByteField("codes", 0, 256, "e2m1", note="dims 0..511, even dim in the low nibble"),
    ByteField("scales", 0, 32, "e4m3", "scale", "one per 16 dims"),
)

KvFormat.BF16 = _element_format("BF16", None, torch.bfloat16)
KvFormat.FP8 = _element_format("FP8", "fp8", torch.float8_e4m3fn)
KvFormat.V32 = _byte_format(
    "V32",
    "v32",
    576,
    "inline",
    1,
    ByteField("codes", 0, 512, "e4m3", note="dims 0..511"),
    ByteField("scales", 512, 528, "float32", note="one per 128 dims"),
    ByteField("rope", 528, 656, "bfloat16", note="dims 512..575"),
)
KvFormat.V4 = _byte_format(
    "V4",
    "v4",
    512,
    "footer",
    576,
    ByteField("codes", 0, 448, "e4m3", note="dims 0..447"),
    ByteField("rope", 448, 576, "bfloat16", note="dims 448..511"),
    ByteField("scales", 0, 7, "ue8m0", "scale", "one per 64 dims"),
    ByteField("pad", 7, 8, "uint8", "scale", "written as 0"),
)
KvFormat.V41 = _byte_format("V41", "v41", 512, "footer", 512, *_V41_FIELDS)
KvFormat.V41_FP4 = _byte_format("V41_FP4", "v41_fp4", 512, "footer", 512, *_V41_FP4_FIELDS)
KvFormat.V41_INLINE = _byte_format("V41_INLINE", "v41", 512, "inline", 1, *_V41_FIELDS)
KvFormat.V41_FP4_INLINE = _byte_format(
    "V41_FP4_INLINE", "v41_fp4", 512, "inline", 1, *_V41_FP4_FIELDS
)
KvFormat.NVFP4_384 = _byte_format(
    "NVFP4_384",
    "nvfp4_384",
    512,
    "footer",
    1,
    ByteField("codes", 0, 224, "e2m1", note="dims 0..447, even dim in the low nibble"),
    ByteField("rope", 224, 352, "bfloat16", note="dims 448..511"),
    ByteField("scales", 0, 28, "e4m3", "scale", "one per 16 dims"),
    ByteField("pad", 28, 32, "uint8", "scale", "written as 0"),
)

ALL_KV_FORMATS = (
    KvFormat.BF16,
    KvFormat.FP8,
    KvFormat.V32,
    KvFormat.V4,
    KvFormat.V41,
    KvFormat.V41_FP4,
    KvFormat.V41_INLINE,
    KvFormat.V41_FP4_INLINE,
    KvFormat.NVFP4_384,
)
