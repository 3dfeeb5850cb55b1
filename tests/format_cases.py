"""The output formats under test, each with its independent quantiser and helpers to look at the
bytes of a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import mlacast
from tests import quantizers
from tests.quantizers import Quantized


@dataclass(frozen=True)
class FormatCase:
    """One quantised output format.

    Attributes:
        kind: Class name of the descriptor.
        group: Elements per scale where the descriptor has that choice.
        sf: Kind of scale of Fp8Group.
        layout: Layout of the Fp8Group scales.
        order: Element order of Mxfp8.
        scale: Fp8Tensor scale or Nvfp4 global scale.
    """

    kind: str
    group: int = 128
    sf: str = "float32"
    layout: str = "row_major"
    order: str = "head"
    scale: float = 0.0

    @property
    def id(self) -> str:
        if self.kind == "Fp8Group":
            return f"fp8_group{self.group}_{self.sf}_{self.layout}"
        return f"mxfp8_{self.order}" if self.kind == "Mxfp8" else self.kind.lower()

    @property
    def mn_major(self) -> bool:
        return self.kind == "Mxfp8" or (self.kind == "Fp8Group" and self.layout == "mn_major")

    def build(self) -> mlacast.OutFormat:
        """The descriptor."""
        if self.kind == "Fp8Tensor":
            return mlacast.Fp8Tensor(self.scale)
        if self.kind == "Fp8Group":
            return mlacast.Fp8Group(self.group, self.sf, self.layout)
        if self.kind == "Mxfp8":
            return mlacast.Mxfp8(order=self.order)
        if self.kind == "Nvfp4":
            return mlacast.Nvfp4(self.scale)
        return mlacast.Bf16()

    def expect(self, x: Tensor) -> Quantized:
        """Expected bytes of float32 ``x`` [T, g, f] in natural head order."""
        if self.kind == "Fp8Tensor":
            return quantizers.quantize_fp8_tensor(x, self.scale)
        if self.kind == "Fp8Group":
            return quantizers.quantize_fp8_group(x, self.group, self.sf)
        if self.kind == "Mxfp8":
            chunk32 = self.order == "chunk32"
            return quantizers.quantize_fp8_group(x, 32, "ue8m0_packed", chunk32=chunk32, floor=1e-4)
        return quantizers.quantize_nvfp4(x, self.scale)


FP8_TENSOR = FormatCase("Fp8Tensor", scale=0.03)
MXFP8_HEAD = FormatCase("Mxfp8")
MXFP8_CHUNK32 = FormatCase("Mxfp8", order="chunk32")
NVFP4 = FormatCase("Nvfp4", scale=2688.0 / 4.0)
FP8_GROUPS = tuple(
    FormatCase("Fp8Group", group, sf, layout)
    for group in (128, 64, 32)
    for sf in ("float32", "float32_pow2", "ue8m0_packed")
    for layout in ("row_major", "mn_major")
)
QUANTISED = (FP8_TENSOR, *FP8_GROUPS, MXFP8_HEAD, MXFP8_CHUNK32, NVFP4)
FAMILIES = (
    FP8_TENSOR,
    FormatCase("Fp8Group", 128, "float32", "row_major"),
    FormatCase("Fp8Group", 64, "float32_pow2", "mn_major"),
    FormatCase("Fp8Group", 128, "ue8m0_packed", "row_major"),
    MXFP8_HEAD,
    MXFP8_CHUNK32,
    NVFP4,
)
"""One or two of each family, where the whole list would only repeat the same code path."""


def case_id(case: FormatCase) -> str:
    """Readable parametrisation id."""
    return case.id


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor as uint8, shared with it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def fill_storage(tensor: Tensor, byte: int = 0x5A) -> None:
    """Overwrite every byte of the storage behind a tensor, padding included."""
    storage_bytes(tensor).fill_(byte)


def poisoned_buffer(
    case: FormatCase, num_tokens: int, num_groups: int, features: int, byte: int = 0x5A
) -> mlacast.QuantizedTensor:
    """A fresh buffer whose data, scales and padding all hold ``byte``."""
    buffer = mlacast.QuantizedTensor.empty(num_tokens, num_groups, features, case.build())
    fill_storage(buffer.data, byte)
    if buffer.sf is not None:
        fill_storage(buffer.sf, byte)
    return buffer


def buffer_bytes(buffer: mlacast.QuantizedTensor) -> tuple[Tensor, Tensor | None]:
    """Copies of the bytes behind data and sf."""
    sf = None if buffer.sf is None else storage_bytes(buffer.sf).clone()
    return storage_bytes(buffer.data).clone(), sf


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of the elements of a tensor (not of its storage), flat."""
    # Flattened first: a stride of an axis of size one may stand in the way of a view as bytes.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_buffer_holds(
    buffer: mlacast.QuantizedTensor, expected: Quantized, case: FormatCase
) -> None:
    """A whole buffer must hold exactly the expected codes and scales, in its layout, and zero
    padding.
    """
    tokens, groups = buffer.data.shape[:2]
    assert torch.equal(buffer.data.view(torch.uint8), expected.data)
    if expected.sf is None:
        assert buffer.sf is None
        return
    assert buffer.sf is not None
    if case.kind == "Nvfp4":
        assert buffer.sf.dtype == torch.float8_e4m3fn
        assert buffer.sf.is_contiguous()
        assert torch.equal(buffer.sf.view(torch.uint8), quantizers.swizzled_buffer(expected.sf))
        return
    words = expected.sf.shape[-1]
    assert buffer.sf.shape == (tokens, groups, words)
    assert buffer.sf.dtype == expected.sf.dtype
    assert torch.equal(bytes_of(buffer.sf), bytes_of(expected.sf))
    if case.mn_major:
        padded = (tokens + 3) // 4 * 4
        assert buffer.sf.stride() == (1, words * padded, padded)
        raw = storage_bytes(buffer.sf).view(torch.int32)
        assert raw.numel() >= groups * words * padded
        tail = raw[: groups * words * padded].view(groups, words, padded)[:, :, tokens:]
        assert not tail.any(), "MN-major padding must be zero"
    else:
        assert buffer.sf.is_contiguous()
