"""Which scheme the tensors of an engine mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat.vllm import QuantKey, detect_output_quant_key, supports_quant_output

K = 512
CODES = torch.zeros(3, K, dtype=torch.float8_e4m3fn)
NIBBLES = torch.zeros(3, K // 2, dtype=torch.uint8)
PLAIN = torch.zeros(3, K, dtype=torch.bfloat16)
SCALE = torch.ones(1)


def groups(size: int) -> Tensor:
    return torch.ones(3, K // size)


SWIZZLED = torch.zeros(128, K // 16).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("output", "scale", "block_scale", "key"),
    [
        (PLAIN, None, None, None),
        (CODES, None, None, None),
        (CODES, SCALE, None, QuantKey("fp8_static")),
        (CODES, torch.ones(()), None, QuantKey("fp8_static")),
        (CODES, None, groups(128), QuantKey("fp8_group", 128)),
        (CODES, None, groups(64), QuantKey("fp8_group", 64)),
        (NIBBLES, SCALE, SWIZZLED, QuantKey("nvfp4", 16)),
        (NIBBLES.view(torch.float4_e2m1fn_x2), SCALE, SWIZZLED, QuantKey("nvfp4", 16)),
    ],
)
def test_schemes(
    output: Tensor, scale: Tensor | None, block_scale: Tensor | None, key: QuantKey | None
) -> None:
    assert detect_output_quant_key(output, scale, block_scale, K) == key
    assert supports_quant_output(key) is (key is not None)


def test_other_keys_are_not_supported() -> None:
    for key in (QuantKey("fp8_group", 32), QuantKey("mxfp4", 32), "fp8_static", None):
        assert supports_quant_output(key) is False


@pytest.mark.parametrize(
    ("output", "scale", "block_scale", "message"),
    [
        (CODES, SCALE, groups(128), "output_scale must be None beside block scales of FP8"),
        (CODES, None, groups(32), "must have 512 / 128 or 512 / 64 columns"),
        (CODES, None, groups(256), "must have 512 / 128 or 512 / 64 columns"),
        (CODES, None, torch.ones(3, 3), "must have 512 / 128 or 512 / 64 columns"),
        (CODES, None, torch.ones(()), "must have 512 / 128 or 512 / 64 columns"),
        (PLAIN, SCALE, None, "output must have dtype float8_e4m3fn beside an output_scale"),
        (PLAIN, None, groups(128), "output must have dtype float8_e4m3fn, uint8 or float4"),
        (CODES.to(torch.float8_e5m2), SCALE, None, "got float8_e5m2"),
    ],
)
def test_what_does_not_belong_together(
    output: Tensor, scale: Tensor | None, block_scale: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect_output_quant_key(output, scale, block_scale, K)


def test_four_bit_codes_without_a_scale_of_the_tensor_would_be_mxfp4() -> None:
    with pytest.raises(mlacast.UnsupportedError, match="MXFP4"):
        detect_output_quant_key(NIBBLES, None, groups(32), K)


def test_only_tensors_are_looked_at() -> None:
    with pytest.raises(TypeError, match="output must be a torch.Tensor, got list"):
        detect_output_quant_key([1.0], None, None, K)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="output_scale must be a torch.Tensor or None, got float"):
        detect_output_quant_key(CODES, 1.0, None, K)  # type: ignore[arg-type]
