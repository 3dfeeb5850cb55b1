"""Output formats: what an operation writes, as frozen descriptors.

A descriptor holds the static part of a format, which compiled kernels are keyed on, and at most one
scale. A scale may live on the device, is never read on the host and takes no part in equality and
hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlacast.errors import check_choice, check_type, fail

FP8_GROUP_SIZES = (128, 64, 32)
FLOAT32_TINY = torch.finfo(torch.float32).tiny
FLOAT32_MAX = torch.finfo(torch.float32).max
FP8_GROUP_SF = ("float32", "float32_pow2", "ue8m0_packed")
FP8_GROUP_LAYOUTS = ("row_major", "mn_major")
MXFP8_ORDERS = ("head", "chunk32")


# Scales that were given as numbers, on the devices that needed them.
MAX_NUMBERS = 256
_NUMBERS: dict[tuple[float, torch.device], Tensor] = {}


def _check_scale(op: str, argument: str, scale: object) -> None:
    """Accept a positive finite number or a 1-element float32 tensor, whose value is not read."""
    check_type(op, argument, scale, (int, float, Tensor), "a number or a torch.Tensor")
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            fail(op, argument, "have one element", f"shape {list(scale.shape)}")
        if scale.dtype != torch.float32:
            fail(op, argument, "have dtype float32", str(scale.dtype).removeprefix("torch."))
    elif isinstance(scale, (int, float)) and not FLOAT32_TINY <= scale <= FLOAT32_MAX:
        fail(op, argument, "be positive and finite in float32", scale)


def _number_on(number: float, device: torch.device) -> Tensor:
    """Return a number as a [1] float32 tensor that is shared and not to be written.

    Filling a new one is a launch; so it is kept, unless a mode (of fake tensors, say) is active, or
    it belongs to a graph that is being captured.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.full((1,), number, dtype=torch.float32, device=device)
    known = _NUMBERS.get((number, device))
    if known is not None:
        return known
    # Later calls outside of inference mode take it too.
    with torch.inference_mode(False):
        tensor = torch.full((1,), number, dtype=torch.float32, device=device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return tensor
        # Another stream may be the next to read it.
        torch.cuda.current_stream(device).synchronize()
    if len(_NUMBERS) < MAX_NUMBERS:
        _NUMBERS[number, device] = tensor
    return tensor


def _scale_on(op: str, argument: str, scale: float | Tensor, device: torch.device | str) -> Tensor:
    """Return the scale as a [1] float32 tensor on ``device`` without any copy between devices."""
    wanted = torch.device(device)
    if not isinstance(scale, Tensor):
        return _number_on(float(scale), wanted)
    same_index = wanted.index is None or scale.device.index == wanted.index
    if scale.device.type != wanted.type or not same_index:
        fail(op, argument, f"be on {wanted} like the other arguments", scale.device)
    return scale if scale.dim() == 1 else scale.reshape(1)


class OutFormat:
    """Base of the output formats; use one of its subclasses.

    Data has shape [T, g, f] (tokens, groups, features of a group), ``sf`` the scale factors, value
    = code * sf.
    """

    @property
    def key(self) -> str:
        """Static part of the format as one string; `out_format_from_key` is the inverse."""
        raise NotImplementedError

    @property
    def data_dtype(self) -> torch.dtype:
        """Storage dtype of the codes."""
        raise NotImplementedError

    @property
    def sf_kind(self) -> str:
        """``"none"``, ``"float32"``, ``"float32_pow2"``, ``"ue8m0_packed"`` or ``"e4m3"``."""
        return "none"

    @property
    def sf_layout(self) -> str:
        """``"none"``, ``"row_major"``, ``"mn_major"`` or ``"swizzled_128x4"``."""
        return "none"

    @property
    def sf_dtype(self) -> torch.dtype | None:
        """Storage dtype of the scale factors, None without them."""
        dtypes = {
            "float32": torch.float32,
            "float32_pow2": torch.float32,
            "ue8m0_packed": torch.int32,
            "e4m3": torch.float8_e4m3fn,
        }
        return dtypes.get(self.sf_kind)

    @property
    def sf_vec_size(self) -> int:
        """Elements that share one scale factor; 0 without scale factors."""
        return 0

    @property
    def has_sf(self) -> bool:
        """Whether a buffer of scale factors belongs to the data."""
        return self.sf_kind != "none"

    @property
    def order(self) -> str:
        """Element order inside a group: ``"head"`` (natural) or ``"chunk32"``."""
        return "head"

    @property
    def amax_floor(self) -> float:
        """Lower clamp of a group's largest magnitude before its FP8 scale is made."""
        return 1e-10

    def data_features(self, features: int) -> int:
        """Storage elements that hold ``features`` values."""
        return features

    def sf_words(self, features: int) -> int:
        """Scale-factor storage elements per token and group of ``features`` values, maybe 0."""
        if not self.has_sf:
            return 0
        scales = features // self.sf_vec_size
        return (scales + 3) // 4 if self.sf_kind == "ue8m0_packed" else scales

    def check_features(self, op: str, features: int) -> None:
        """Raise ValueError unless a group of ``features`` values divides evenly in this format."""
        unit = 512 if self.order == "chunk32" else max(self.sf_vec_size, 1)
        if features < 1 or features % unit:
            fail(op, "features", f"be a positive multiple of {unit} for {self.key}", features)

    def scale_tensor(self, device: torch.device | str) -> Tensor | None:
        """Return the format's own scale as a [1] float32 tensor on ``device``, None if it has none.

        Raises:
            ValueError: The scale is a tensor on another device.
        """
        return None


@dataclass(frozen=True)
class Bf16(OutFormat):
    """Data [T, g, f] bfloat16, no scale factors."""

    @property
    def key(self) -> str:
        """``"bf16"``."""
        return "bf16"

    @property
    def data_dtype(self) -> torch.dtype:
        """bfloat16."""
        return torch.bfloat16


@dataclass(frozen=True)
class Fp8Tensor(OutFormat):
    """Data [T, g, f] e4m3 under one scale for the tensor: code = x / scale.

    Args:
        scale: Dequantising scale, a positive number or a float32 tensor with one element.
    """

    scale: float | Tensor = field(compare=False)

    def __post_init__(self) -> None:
        _check_scale("Fp8Tensor", "scale", self.scale)

    @property
    def key(self) -> str:
        """``"fp8_tensor"``."""
        return "fp8_tensor"

    @property
    def data_dtype(self) -> torch.dtype:
        """float8_e4m3fn."""
        return torch.float8_e4m3fn

    def scale_tensor(self, device: torch.device | str) -> Tensor:
        """Return ``scale`` as a [1] float32 tensor; see `OutFormat.scale_tensor`."""
        return _scale_on("Fp8Tensor", "scale", self.scale, device)


@dataclass(frozen=True)
class Fp8Group(OutFormat):
    """Data [T, g, f] e4m3 with one dequantising scale per ``group_size`` consecutive features.

    Args:
        group_size: 128, 64 or 32.
        sf: ``"float32"``; ``"float32_pow2"``, rounded up to a power of two; or ``"ue8m0_packed"``,
            the same power of two as a byte, four to an int32 word.
        layout: ``"row_major"`` or ``"mn_major"`` (stride 1 along tokens) of the scale factors.
    """

    group_size: int = 128
    sf: str = "float32"
    layout: str = "row_major"

    def __post_init__(self) -> None:
        check_type("Fp8Group", "group_size", self.group_size, int, "an int")
        check_choice("Fp8Group", "group_size", self.group_size, FP8_GROUP_SIZES)
        check_choice("Fp8Group", "sf", self.sf, FP8_GROUP_SF)
        check_choice("Fp8Group", "layout", self.layout, FP8_GROUP_LAYOUTS)

    @property
    def key(self) -> str:
        """``"fp8_group:<group_size>:<sf>:<layout>"``."""
        return f"fp8_group:{self.sf_vec_size}:{self.sf}:{self.layout}"

    @property
    def data_dtype(self) -> torch.dtype:
        """float8_e4m3fn."""
        return torch.float8_e4m3fn

    @property
    def sf_kind(self) -> str:
        """Same as ``sf``."""
        return self.sf

    @property
    def sf_layout(self) -> str:
        """Same as ``layout``."""
        return self.layout

    @property
    def sf_vec_size(self) -> int:
        """Same as ``group_size``."""
        # A tracer may see the attribute as a symbol; the comparison turns it into a constant.
        return next(size for size in FP8_GROUP_SIZES if size == self.group_size)


@dataclass(frozen=True)
class Mxfp8(OutFormat):
    """Data [T, g, f] e4m3 with a ue8m0 byte per 32 features, packed into MN-major int32 words.

    Args:
        order: ``"head"`` (natural), or ``"chunk32"``: chunk c of 32 features of head h, of the w
            heads of a group, stands at position c*w + h (needs heads of 512 features). Data and
            scale bytes share the order.
        group: Elements per scale; 32 is the only size of this format.
    """

    order: str = "head"
    group: int = 32

    def __post_init__(self) -> None:
        check_choice("Mxfp8", "order", self.order, MXFP8_ORDERS)
        check_type("Mxfp8", "group", self.group, int, "an int")
        check_choice("Mxfp8", "group", self.group, (32,))

    @property
    def key(self) -> str:
        """``"mxfp8:<order>"``."""
        return f"mxfp8:{self.order}"

    @property
    def data_dtype(self) -> torch.dtype:
        """float8_e4m3fn."""
        return torch.float8_e4m3fn

    @property
    def sf_kind(self) -> str:
        """``"ue8m0_packed"``."""
        return "ue8m0_packed"

    @property
    def sf_layout(self) -> str:
        """``"mn_major"``."""
        return "mn_major"

    @property
    def sf_vec_size(self) -> int:
        """32."""
        return 32

    @property
    def amax_floor(self) -> float:
        """1e-4, the floor of the fused sparse step."""
        return 1e-4


@dataclass(frozen=True)
class Nvfp4(OutFormat):
    """Data [T, g, f/2] uint8, two e2m1 codes a byte, an e4m3 scale per 16 features, swizzled.

    The scale factors of a token range are addressed in the whole buffer [ceil128(T),
    ceil4(g*f/16)].

    Args:
        global_scale: Encode-side multiplier (2688 / amax of the tensor), a positive number or a
            float32 tensor with one element. Note the direction, opposite to ``Fp8Tensor.scale``.
    """

    global_scale: float | Tensor = field(compare=False)

    def __post_init__(self) -> None:
        _check_scale("Nvfp4", "global_scale", self.global_scale)

    @property
    def key(self) -> str:
        """``"nvfp4"``."""
        return "nvfp4"

    @property
    def data_dtype(self) -> torch.dtype:
        """uint8, the even element in the low nibble."""
        return torch.uint8

    @property
    def sf_kind(self) -> str:
        """``"e4m3"``."""
        return "e4m3"

    @property
    def sf_layout(self) -> str:
        """``"swizzled_128x4"``."""
        return "swizzled_128x4"

    @property
    def sf_vec_size(self) -> int:
        """16."""
        return 16

    def data_features(self, features: int) -> int:
        """``features / 2`` bytes."""
        return features // 2

    def scale_tensor(self, device: torch.device | str) -> Tensor:
        """Return ``global_scale`` as a [1] float32 tensor; see `OutFormat.scale_tensor`."""
        return _scale_on("Nvfp4", "global_scale", self.global_scale, device)


def out_format_from_key(key: str, scale: float | Tensor | None = None) -> OutFormat:
    """Rebuild a format from its ``key``.

    Args:
        key: What ``OutFormat.key`` returned.
        scale: Scale of "fp8_tensor" and "nvfp4", required there; other formats take none.

    Raises:
        ValueError: Unknown key, or a scale that is missing or not wanted.
    """
    op = "out_format_from_key"
    check_type(op, "key", key, str, "a str")
    kind, *parts = key.split(":")
    if kind in ("fp8_tensor", "nvfp4") and not parts:
        if scale is None:
            fail(op, "scale", f"be given for {key}", None)
        return Fp8Tensor(scale) if kind == "fp8_tensor" else Nvfp4(scale)
    if scale is not None:
        fail(op, "scale", f"be None for {key}", "a scale")
    if key == "bf16":
        return Bf16()
    if kind == "fp8_group" and len(parts) == 3 and parts[0].isdecimal():
        return Fp8Group(int(parts[0]), parts[1], parts[2])
    if kind == "mxfp8" and len(parts) == 1:
        return Mxfp8(parts[0])
    fail(op, "key", "be the key of an OutFormat", repr(key))
