"""Output buffers of a drawn call.

A buffer is whole or a range of a longer one, made by the library or out of the caller's own strided
tensors. All its bytes are poison before the call, so stray writes show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mlacast
from tests.fuzz.draw import Draw
from tests.fuzz.tensors import POISON, raw
from tests.fuzz.under import Under

FORMATS: tuple[mlacast.OutFormat, ...] = (
    mlacast.Bf16(),
    mlacast.Mxfp8("head"),
    mlacast.Mxfp8("chunk32"),
    mlacast.Fp8Tensor(0.02),
    mlacast.Nvfp4(80.0),
    *(
        mlacast.Fp8Group(size, sf, layout)
        for size in (128, 64, 32)
        for sf in ("float32", "float32_pow2", "ue8m0_packed")
        for layout in ("row_major", "mn_major")
    ),
)


@dataclass(frozen=True)
class Target:
    """Where a call writes.

    Attributes:
        arguments: ``out``, ``out_format`` and ``num_groups`` as the call takes them.
        format: Format of the output.
        groups: Its groups.
        features: Features of a group.
        buffer: The given buffer, None for an allocated one.
        plain: The given bfloat16 tensor.
        whole: Tokens of the whole buffer, None if nobody says.
    """

    arguments: dict[str, Any]
    format: mlacast.OutFormat
    groups: int
    features: int
    buffer: mlacast.QuantizedTensor | None = None
    plain: Tensor | None = None
    whole: int | None = None

    @property
    def parts(self) -> list[Tensor]:
        """Tensors of the caller that the call may write to."""
        if self.buffer is None:
            return [] if self.plain is None else [self.plain]
        return [self.buffer.data] if self.buffer.sf is None else [self.buffer.data, self.buffer.sf]


def draw_format(draw: Draw) -> mlacast.OutFormat:
    """Any format; a scale that a descriptor holds is a number of any size, and no static part."""
    fmt = draw.fixed.choice(FORMATS)
    if isinstance(fmt, mlacast.Fp8Tensor):
        return mlacast.Fp8Tensor(draw.choice((0.02, 1.0, 0.3, 1e-4, 50.0)))
    if isinstance(fmt, mlacast.Nvfp4):
        return mlacast.Nvfp4(draw.choice((80.0, 1.0, 3000.0, 1e-3, 1e6)))
    return fmt


def on_device(fmt: mlacast.OutFormat, device: torch.device) -> mlacast.OutFormat:
    """The format with its scale as a tensor."""
    if isinstance(fmt, mlacast.Fp8Tensor):
        return mlacast.Fp8Tensor(torch.tensor([fmt.scale], device=device))
    if isinstance(fmt, mlacast.Nvfp4):
        return mlacast.Nvfp4(torch.tensor(fmt.global_scale, device=device))
    return fmt


def fitting_groups(fmt: mlacast.OutFormat, total: int) -> list[int]:
    """Numbers of groups that the features of a token can be cut into."""
    unit = 512 if fmt.order == "chunk32" else max(fmt.sf_vec_size, 2)
    return [g for g in (1, 2, 3, 4, 8, 16) if total % g == 0 and total // g % unit == 0]


def draw_target(
    draw: Draw, under: Under, tokens: int, shape: tuple[int, ...], groups: int | None = None
) -> Target:
    """A place for a result of ``shape`` [..., h, d], whose leading dimensions are ``tokens``.

    ``groups`` are those of the output, None for any that fit the format. A format that does not fit
    gives way to another.
    """
    device, unit = under.device, under.unit(draw)
    fmt = draw_format(draw)
    total = shape[-1] * shape[-2]
    fitting = fitting_groups(fmt, total)
    if not fitting or groups not in (None, *fitting):
        fmt = mlacast.Mxfp8("head")
        fitting = fitting_groups(fmt, total)
    if groups is None:
        groups = draw.fixed.choice(fitting)
    features = total // groups
    given = fmt if not draw.chance(30) else on_device(fmt, device)
    kind = draw.fixed.choice(("allocated", "range", "strided"))
    if fmt.key == "bf16" and under.interpreted:
        kind = "allocated"
    if kind == "allocated":
        arguments: dict[str, Any] = {"out_format": given, "num_groups": groups}
        if fmt.key == "bf16" and groups == 1 and draw.chance():
            arguments = {}
        return Target(arguments, fmt, groups, features)
    if fmt.key == "bf16" and groups == 1 and draw.fixed.chance():
        given_plain = _plain(draw, tokens, shape, device, unit)
        return Target({"out": given_plain}, fmt, 1, total, plain=given_plain)
    # Whether the rows end their buffer decides who writes padding, in the kernel's code.
    before = draw.integer(0, 5)
    after = 0 if draw.fixed.chance() else draw.integer(1, 5)
    rows = before + tokens + after
    if kind == "range":
        buffer = mlacast.QuantizedTensor.empty(rows, groups, features, given, device)
        for tensor in (buffer.data, buffer.sf):
            if tensor is not None:
                raw(tensor).fill_(POISON)
        part = buffer[before : before + tokens]
        if draw.chance(30):
            # A range of a range.
            first = draw.integer(0, before)
            part = buffer[first:][before - first : before - first + tokens]
        whole: int | None = rows
    else:
        part, whole = _strided(draw, given, before, tokens, rows, groups, features, device, unit)
    arguments = {"out": part}
    if draw.chance(20):
        arguments |= {"out_format": fmt, "num_groups": groups}
    return Target(arguments, fmt, groups, features, buffer=part, whole=whole)


def _poisoned(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.full((size,), POISON, dtype=torch.uint8, device=device).view(dtype)


def _plain(
    draw: Draw, tokens: int, shape: tuple[int, ...], device: torch.device, unit: int
) -> Tensor:
    """A bfloat16 tensor whose tokens, and heads, lie apart."""
    heads, width = shape[-2:]
    head_step = width + unit * draw.fixed.choice((0, 0, 2, 5))
    step = heads * head_step + unit * draw.fixed.choice((0, 0, 1, 7))
    start = unit * draw.fixed.integer(0, 2)
    flat = _poisoned(start + tokens * step + unit, torch.bfloat16, device)
    strides = [step, head_step, 1]
    if len(shape) == 4:
        strides = [shape[1] * step, *strides]
    return flat.as_strided(shape, strides, start)


def _strided(
    draw: Draw,
    fmt: mlacast.OutFormat,
    before: int,
    tokens: int,
    rows: int,
    groups: int,
    features: int,
    device: torch.device,
    unit: int,
) -> tuple[mlacast.QuantizedTensor, int | None]:
    """A range built by hand: rows further apart than their width, scales likewise."""
    width = fmt.data_features(features)
    inner = width + unit * draw.fixed.choice((0, 1, 4))
    if draw.fixed.chance(30):
        # Group after group.
        strides = (inner, rows * inner + unit * draw.fixed.integer(0, 2), 1)
        count = groups * strides[1]
    else:
        strides = (groups * inner + unit * draw.fixed.choice((0, 2)), inner, 1)
        count = rows * strides[0]
    start = unit * draw.fixed.integer(0, 2)
    flat = _poisoned(start + count + unit, fmt.data_dtype, device)
    data = flat.as_strided((tokens, groups, width), strides, start + before * strides[0])
    known = draw.fixed.chance(70)
    sf = None
    if fmt.sf_dtype is not None:
        words = fmt.sf_words(features)
        if fmt.sf_layout == "swizzled_128x4":
            shape = (-(-rows // 128) * 128, -(-groups * words // 4) * 4)
            sf = _poisoned(shape[0] * shape[1], fmt.sf_dtype, device).view(shape)
        elif fmt.sf_layout == "mn_major":
            column = -(-rows // 4) * 4 + draw.fixed.choice((0, 4, 1))
            group = words * column + draw.fixed.choice((0, 8, 3))
            flat = _poisoned(groups * group + 8, fmt.sf_dtype, device)
            sf = flat.as_strided((tokens, groups, words), (1, group, column), before)
        else:
            row = groups * words + draw.fixed.choice((0, 3))
            flat = _poisoned(rows * row + 1, fmt.sf_dtype, device)
            sf = flat.as_strided((tokens, groups, words), (row, words, 1), before * row)
    total = rows if known else None
    part = mlacast.QuantizedTensor(data, sf, fmt, before, total_tokens=total)
    return part, part.total_tokens
