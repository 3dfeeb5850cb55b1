"""Host side of the storing epilogue: a QuantizedTensor as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlacast.descriptors.out_format import Bf16, Nvfp4
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.config.output import OutputConfig, output_config


@dataclass(frozen=True)
class StoreTarget:
    """Arguments of a kernel that stores, split into tensors, numbers and compile-time values.

    ``bases`` names, for each tensor, the part of the buffer in which it lies.
    """

    tensors: dict[str, torch.Tensor]
    bases: dict[str, torch.Tensor]
    numbers: dict[str, int]
    config: OutputConfig

    @property
    def hopper_numbers(self) -> list[int]:
        """The numbers without the range's first row, which kernels for sm90 find elsewhere."""
        return [value for name, value in self.numbers.items() if name != "row_start"]

    @property
    def hopper_config(self) -> OutputConfig:
        """The compile-time values without the width of swizzled scales, which those do not read."""
        return self.config._replace(sf_column_tiles=0)

    @property
    def token_config(self) -> OutputConfig:
        """The compile-time values without widths, which kernels of rows of tokens take as numbers.

        One variant stores all numbers of heads.
        """
        return self.config._replace(features=0, sf_column_tiles=0)


def _word_stride(out: QuantizedTensor) -> int:
    """Distance of scale words, which swizzled ones do not have.

    Kernels for sm90 find the range's first row in its place: every argument of theirs takes shared
    memory.
    """
    if isinstance(out.format, Nvfp4):
        return out.row_start
    return 0 if out.sf is None else out.sf.stride(2)


def store_target(out: QuantizedTensor) -> StoreTarget:
    """Describe where and how a kernel stores into ``out``.

    Absent tensors are replaced by ``out.data``, which the kernel then does not touch.
    """
    data, sf, fmt = out.data, out.sf, out.format
    swizzled = isinstance(fmt, Nvfp4)
    owned = out.sf_rows_with_padding()
    padding_rows = 0
    if owned is not None and out.ends_buffer and out.num_tokens:
        padding_rows = owned.shape[0] - (out.total_tokens if swizzled else out.num_tokens)
    scale = fmt.scale_tensor(data.device)
    return StoreTarget(
        tensors={
            "data_ptr": data if isinstance(fmt, Bf16) else data.view(torch.uint8),
            "sf_ptr": data if sf is None else sf.view(torch.uint8) if swizzled else sf,
            "scale_ptr": data if scale is None else scale,
        },
        bases={
            "data_ptr": data,
            "sf_ptr": data if owned is None else owned,
            "scale_ptr": data if scale is None else scale,
        },
        numbers={
            "stride_data_token": data.stride(0),
            "stride_data_group": data.stride(1),
            "stride_sf_token": 0 if sf is None or swizzled else sf.stride(0),
            "stride_sf_group": 0 if sf is None or swizzled else sf.stride(1),
            "stride_sf_word": _word_stride(out),
            "row_start": out.row_start,
            "padding_rows": padding_rows,
        },
        config=output_config(out),
    )
