"""QuantizedTensor: allocation, token ranges of every format, natural order, padding without NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mlacast.descriptors.out_format import Bf16, Fp8Group, Fp8Tensor, Mxfp8, Nvfp4, OutFormat
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from tests.hand_codes import (
    decode_table,
    e2m1_value,
    e4m3_value,
    f32,
    same_bits,
    ue8m0_value,
)

TOKENS = (0, 1, 2, 3, 4, 5, 127, 128, 129)
GROUPS = 2
FEATURES = 1024
HEADS = FEATURES // 512
SWIZZLE_COLUMNS = GROUPS * FEATURES // 16
E4M3 = decode_table(e4m3_value, 256)
E2M1 = decode_table(e2m1_value, 16)
UE8M0 = decode_table(ue8m0_value, 256)
SCALE = f32(0.3)


@dataclass(frozen=True)
class BufferCase:
    """One output format with the shape of its scale factors.

    Attributes:
        out_format: The descriptor.
        vec: Elements of one scale factor, 0 without any.
        sf: "float32", "words" (four exponents an int32), "swizzled" or "" without any.
        mn_major: Scale factors have stride 1 along tokens.
        chunk32: Elements are in chunk32 order.
    """

    out_format: OutFormat
    vec: int = 0
    sf: str = ""
    mn_major: bool = False
    chunk32: bool = False

    def __str__(self) -> str:
        return self.out_format.key.replace(":", "-")

    @property
    def words(self) -> int:
        """Words of a group."""
        return FEATURES // self.vec // (4 if self.sf == "words" else 1)


BF16 = BufferCase(Bf16())
FP8_TENSOR = BufferCase(Fp8Tensor(SCALE))
NVFP4 = BufferCase(Nvfp4(SCALE), 16, "swizzled")
FP8_GROUPS = [
    BufferCase(
        Fp8Group(size, sf, layout),
        size,
        "words" if sf == "ue8m0_packed" else "float32",
        layout == "mn_major",
    )
    for size in (128, 64, 32)
    for sf in ("float32", "float32_pow2", "ue8m0_packed")
    for layout in ("row_major", "mn_major")
]
MXFP8 = [
    BufferCase(Mxfp8(), 32, "words", mn_major=True),
    BufferCase(Mxfp8("chunk32"), 32, "words", mn_major=True, chunk32=True),
]
CASES = [BF16, FP8_TENSOR, *FP8_GROUPS, *MXFP8, NVFP4]
MN_MAJOR = [case for case in CASES if case.mn_major]
GROUPED = [case for case in CASES if case.sf in ("float32", "words")]


def ceil(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def empty(case: BufferCase, num_tokens: int) -> QuantizedTensor:
    """A fresh buffer of the case."""
    return QuantizedTensor.empty(num_tokens, GROUPS, FEATURES, case.out_format, "cpu")


def sf_of(buffer: QuantizedTensor) -> torch.Tensor:
    """The scale factors of a format that has some."""
    assert buffer.sf is not None
    return buffer.sf


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Content:
    """Codes in buffer order, one scale per vec elements, and the values they stand for.

    codes [T, g, f] uint8 (bf16 values for Bf16); scales [T, g, f/vec], float32 or bytes; values
    float32 [T, g, f] in natural order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def natural_order(values: torch.Tensor) -> torch.Tensor:
    """Undo chunk32: position c * heads + h of a group is 32-chunk c of head h."""
    out = torch.empty_like(values)
    for head in range(HEADS):
        for chunk in range(16):
            target = head * 512 + chunk * 32
            source = (chunk * HEADS + head) * 32
            out[..., target : target + 32] = values[..., source : source + 32]
    return out


def draw(case: BufferCase, num_tokens: int) -> Content:
    """Random finite codes and scales."""
    shape = (num_tokens, GROUPS, FEATURES)
    none = torch.empty(0)
    if case is BF16:
        bf16 = torch.randn(shape).to(torch.bfloat16)
        return Content(bf16, none, bf16.float())
    if case is NVFP4:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        sf = torch.randint(0, 0x7F, (num_tokens, GROUPS, FEATURES // 16), dtype=torch.uint8)
        scaled = E2M1[codes.long()] * E4M3[sf.long()].repeat_interleave(16, dim=-1)
        return Content(codes, sf, scaled / SCALE)
    codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8)
    codes |= torch.randint(0, 2, shape, dtype=torch.uint8) * 0x80
    if case is FP8_TENSOR:
        return Content(codes, none, E4M3[codes.long()] * SCALE)
    scale_shape = (num_tokens, GROUPS, FEATURES // case.vec)
    if case.sf == "words":
        scales = torch.randint(90, 160, scale_shape, dtype=torch.uint8)
        factors = UE8M0[scales.long()]
    else:
        scales = torch.rand(scale_shape) + 0.01
        factors = scales
    values = E4M3[codes.long()] * factors.repeat_interleave(case.vec, dim=-1)
    return Content(codes, scales, natural_order(values) if case.chunk32 else values)


def swizzled_positions(first: int, count: int) -> torch.Tensor:
    """Byte of every (token, column) of a range in the whole buffer, int64 [count, columns]."""
    row = torch.arange(first, first + count)[:, None]
    column = torch.arange(SWIZZLE_COLUMNS)[None]
    tile = row // 128 * (SWIZZLE_COLUMNS // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def write(part: QuantizedTensor, case: BufferCase, content: Content, first: int) -> None:
    """Put rows first, first + 1, ... of the content into the tensors of a token range."""
    rows = slice(first, first + part.num_tokens)
    codes = content.codes[rows]
    if case is BF16:
        part.data[...] = codes
        return
    if case is NVFP4:
        part.data[...] = codes[..., 0::2] | codes[..., 1::2] << 4
        flat = sf_of(part).view(torch.uint8).view(-1)
        flat[swizzled_positions(part.row_start, part.num_tokens)] = content.scales[rows].flatten(1)
        return
    part.data.view(torch.uint8)[...] = codes
    if case.sf == "float32":
        sf_of(part)[...] = content.scales[rows]
    elif case.sf == "words":
        exponents = content.scales[rows].long()
        words = sum(exponents[..., byte::4] << 8 * byte for byte in range(4))
        assert isinstance(words, torch.Tensor)
        sf_of(part)[...] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_empty_shapes_strides_and_dtypes(case: BufferCase, num_tokens: int) -> None:
    buffer = empty(case, num_tokens)
    width = FEATURES // 2 if case is NVFP4 else FEATURES
    assert buffer.data.shape == (num_tokens, GROUPS, width)
    assert buffer.data.is_contiguous()
    assert buffer.data.dtype == {BF16: torch.bfloat16, NVFP4: torch.uint8}.get(
        case, torch.float8_e4m3fn
    )
    assert (len(buffer), buffer.num_tokens, buffer.total_tokens) == (num_tokens,) * 3
    assert (buffer.num_groups, buffer.features, buffer.row_start) == (GROUPS, FEATURES, 0)
    assert buffer.format is case.out_format
    if not case.sf:
        assert buffer.sf is None
        return
    sf = sf_of(buffer)
    if case is NVFP4:
        assert sf.dtype == torch.float8_e4m3fn
        assert sf.shape == (ceil(num_tokens, 128), SWIZZLE_COLUMNS)
        assert sf.is_contiguous()
        return
    assert sf.dtype == (torch.int32 if case.sf == "words" else torch.float32)
    assert sf.shape == (num_tokens, GROUPS, case.words)
    column = ceil(num_tokens, 4)
    mn_major = (1, case.words * column, column)
    assert sf.stride() == (mn_major if case.mn_major else (GROUPS * case.words, case.words, 1))


def test_the_scale_buffer_that_the_grouped_gemm_takes_without_a_copy() -> None:
    """Both float32 per 128 and packed ue8m0 per 32 are [T, 8, 32] with strides (1, 32*n, n)."""
    for out_format in (Fp8Group(128, "float32", "mn_major"), Mxfp8("chunk32")):
        for num_tokens, column in ((1, 4), (63, 64), (66, 68)):
            sf = sf_of(QuantizedTensor.empty(num_tokens, 8, 4096, out_format))
            assert sf.shape == (num_tokens, 8, 32)
            assert sf.stride() == (1, 32 * column, column)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_scale_padding_is_zero(case: BufferCase, num_tokens: int, poisoned_empty: None) -> None:
    buffer = empty(case, num_tokens)
    if case.sf:
        raw = raw_bytes(sf_of(buffer))
        assert bool((raw == 0).all())
        if case.mn_major:
            assert raw.numel() >= ceil(num_tokens, 4) * GROUPS * case.words * 4


def boundaries(num_tokens: int) -> list[int]:
    """Where to cut: everywhere in short buffers, around 4, 32 and 128 in long ones."""
    if num_tokens <= 5:
        return list(range(num_tokens + 1))
    return [cut for cut in (0, 1, 3, 4, 31, 126, 127, 128, 129) if cut <= num_tokens]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_writing_through_ranges_is_seen_through_the_whole(
    case: BufferCase, num_tokens: int, poisoned_empty: None
) -> None:
    content = draw(case, num_tokens)
    buffer = empty(case, num_tokens)
    cuts = boundaries(num_tokens)
    for start, stop in reversed(list(zip(cuts, cuts[1:], strict=False))):
        write(buffer[start:stop], case, content, start)
    values = buffer.dequantize()
    assert values.dtype == torch.float32
    assert same_bits(values, content.values)
    for start in cuts:
        for stop in cuts:
            part = buffer[start:stop].dequantize()
            assert same_bits(part, content.values[start:stop])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", [5, 129])
def test_a_range_is_the_same_storage_and_nothing_else(case: BufferCase, num_tokens: int) -> None:
    start, stop = 1, num_tokens - 1
    content = draw(case, num_tokens)
    buffer = empty(case, num_tokens)
    part = buffer[start:stop]
    assert (len(part), part.num_tokens) == (stop - start,) * 2
    assert (part.row_start, part.total_tokens) == (start, num_tokens)
    assert (part.num_groups, part.features) == (GROUPS, FEATURES)
    assert part.format is case.out_format
    assert part.data.data_ptr() == buffer.data[start].data_ptr()
    data_before, sf_before = raw_bytes(buffer.data).clone(), None
    if case.sf:
        sf = raw_bytes(sf_of(buffer))
        sf.fill_(0x5A)
        sf_before = sf.clone()
    write(part, case, content, start)
    row = buffer.data[0].numel() * buffer.data.element_size()
    changed = raw_bytes(buffer.data) != data_before
    assert not bool(changed[: start * row].any())
    assert not bool(changed[stop * row :].any())
    if sf_before is None:
        return
    changed_sf = raw_bytes(sf_of(buffer)) != sf_before
    allowed = torch.zeros_like(changed_sf)
    if case is NVFP4:
        assert sf_of(part).data_ptr() == sf_of(buffer).data_ptr()
        assert sf_of(part).shape == sf_of(buffer).shape
        allowed[swizzled_positions(start, stop - start)] = True
    else:
        assert sf_of(part).stride() == sf_of(buffer).stride()
        mask = torch.zeros(allowed.numel() // 4, dtype=torch.bool)
        mask.as_strided(sf_of(buffer).shape, sf_of(buffer).stride())[start:stop] = True
        allowed = mask.repeat_interleave(4)
    assert not bool((changed_sf & ~allowed).any())
    assert bool(changed_sf.any())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_range_of_a_range_keeps_absolute_rows(case: BufferCase) -> None:
    content = draw(case, 129)
    buffer = empty(case, 129)
    inner = buffer[10:129][20:110][5:]
    assert (inner.row_start, inner.num_tokens, inner.total_tokens) == (35, 85, 129)
    write(inner, case, content, 35)
    assert same_bits(buffer[35:120].dequantize(), content.values[35:120])
    assert not inner.ends_buffer
    assert buffer[10:129][20:].ends_buffer


@pytest.mark.parametrize("case", [BF16, FP8_GROUPS[1], MXFP8[1], NVFP4], ids=str)
def test_bounds_as_in_python(case: BufferCase) -> None:
    buffer = empty(case, 7)
    tokens = list(range(7))
    bounds = (None, 0, 2, 7, 9, -1, -3, -7, -20)
    for start in bounds:
        for stop in bounds:
            part = buffer[start:stop]
            expected = tokens[start:stop]
            assert part.num_tokens == len(expected)
            assert part.data.shape[0] == len(expected)
            if expected:
                assert part.row_start == expected[0]
            assert part.dequantize().shape == (len(expected), GROUPS, FEATURES)
    assert len(buffer[1:6:1]) == 5


@pytest.mark.parametrize("step", [2, -1])
def test_other_steps_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"^QuantizedTensor: .*step.*{step}"):
        empty(BF16, 7)[::step]


def test_single_tokens_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^QuantizedTensor: .*slice.*int"):
        empty(BF16, 7)[3]  # type: ignore[index]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_which_ranges_end_the_buffer(case: BufferCase) -> None:
    buffer = empty(case, 6)
    assert buffer.ends_buffer
    assert buffer[:].ends_buffer
    assert buffer[5:].ends_buffer
    assert not buffer[:5].ends_buffer
    assert not buffer[2:5].ends_buffer


@pytest.mark.parametrize("case", MN_MAJOR, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 127, 128, 129])
def test_padding_rows_belong_to_the_range_that_ends_the_buffer(
    case: BufferCase, num_tokens: int
) -> None:
    buffer = empty(case, num_tokens)
    column = ceil(num_tokens, 4)
    for start in boundaries(num_tokens):
        for stop in boundaries(num_tokens):
            if stop <= start:
                continue
            padded = buffer[start:stop].sf_rows_with_padding()
            assert padded is not None
            rows = (column if stop == num_tokens else stop) - start
            assert padded.shape == (rows, GROUPS, case.words)
            assert padded.stride() == (1, case.words * column, column)
            assert padded.data_ptr() == sf_of(buffer)[start:stop].data_ptr()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_writer_view_of_the_other_layouts(case: BufferCase) -> None:
    if case.mn_major:
        return
    buffer = empty(case, 129)
    for part in (buffer, buffer[3:], buffer[3:9]):
        padded = part.sf_rows_with_padding()
        if not case.sf:
            assert padded is None
            continue
        assert padded is not None
        assert padded.data_ptr() == sf_of(part).data_ptr()
        assert padded.shape == sf_of(part).shape
        assert padded.stride() == sf_of(part).stride()


@pytest.mark.parametrize("case", MN_MAJOR, ids=str)
def test_zeroing_the_padding_leaves_all_rows(case: BufferCase) -> None:
    content = draw(case, 6)
    buffer = empty(case, 6)
    raw_bytes(sf_of(buffer)).fill_(0xFF)
    write(buffer, case, content, 0)
    padded = buffer[4:].sf_rows_with_padding()
    assert padded is not None
    padded[2:].zero_()
    assert same_bits(buffer.dequantize(), content.values)
    storage = raw_bytes(sf_of(buffer)).view(torch.int32)
    everything = storage.as_strided((8, GROUPS, case.words), sf_of(buffer).stride())
    assert bool((everything[6:] == 0).all())


def test_dequantize_does_not_read_padding() -> None:
    for case in (*MN_MAJOR, NVFP4):
        content = draw(case, 6)
        buffer = empty(case, 6)
        raw_bytes(sf_of(buffer)).fill_(0xFF)
        write(buffer, case, content, 0)
        assert same_bits(buffer.dequantize(), content.values)
        assert same_bits(buffer[2:5].dequantize(), content.values[2:5])


def test_nan_codes_and_scales_dequantize_to_nan() -> None:
    for case in (*GROUPED, NVFP4):
        content = draw(case, 2)
        buffer = empty(case, 2)
        write(buffer, case, content, 0)
        if case is NVFP4:
            sf_of(buffer).view(torch.uint8).view(-1)[swizzled_positions(1, 1)[0, 0]] = 0x7F
        else:
            buffer.data.view(torch.uint8)[1, 0, :16] = 0x7F
        nan = buffer.dequantize().isnan()
        assert int(nan.sum()) == 16
        assert bool(nan[1, 0, :16].all())


def test_golden_chunk32_values() -> None:
    """Position 256 of 8 heads is head 0, dim 32; its scale is byte 8 of the group, word 2."""
    buffer = QuantizedTensor.empty(1, 1, 4096, Mxfp8("chunk32"))
    buffer.data.view(torch.uint8).zero_()
    buffer.data.view(torch.uint8)[0, 0, 256] = 0x38
    sf_of(buffer)[0, 0, 2] = 130
    values = buffer.dequantize()[0, 0]
    assert values.nonzero().flatten().tolist() == [32]
    assert values[32].item() == 8.0


def test_a_scale_tensor_of_the_format_is_read_at_dequantize() -> None:
    scale = torch.tensor([2.0])
    buffer = QuantizedTensor.empty(1, 1, 512, Fp8Tensor(scale))
    buffer.data.view(torch.uint8).fill_(0x38)
    assert bool((buffer.dequantize() == 2.0).all())
    scale.fill_(0.5)
    assert bool((buffer.dequantize() == 0.5).all())


def test_nvfp4_columns_are_padded_to_four() -> None:
    # 480 features are 30 columns; the two padding columns stay zero.
    buffer = QuantizedTensor.empty(5, 1, 480, Nvfp4(1.0))
    assert sf_of(buffer).shape == (128, 32)
    assert buffer.data.shape == (5, 1, 240)
    assert buffer.features == 480
