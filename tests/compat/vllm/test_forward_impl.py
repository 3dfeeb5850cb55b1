"""vLLM's call of an attention layer: raw tensors in every scheme and layout, and the same bytes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mlacast.compat import vllm
from tests.layers.float32_rows import float32_rows
from tests.layers.steps import Inputs, Step, draw, picking_weight
from tests.quantizers import (
    quantize_fp8_group,
    quantize_fp8_tensor,
    quantize_nvfp4,
    swizzled_buffer,
)

HEADS = 4
K = HEADS * 128
MIXED = Step("mixed", (1, 1, 3, 4, 5), (7, 3, 9, 0, 0), padding=3, workspace=4)
TOKENS = sum(MIXED.query_lens) + MIXED.padding


def call(inputs: Inputs, output: Tensor, *arguments: Any, **named: Any) -> None:
    q, kv_c, k_pe, kv_cache, metadata = inputs.tensors
    tensors = (inputs.layer, q, kv_c, k_pe, kv_cache, metadata, output)
    assert vllm.forward_impl(*tensors, *arguments, **named) is output


def codes(columns: int = K) -> Tensor:
    return torch.full((TOKENS, columns), 0x5A, dtype=torch.uint8)


def inputs_and_rows() -> tuple[Inputs, Tensor]:
    inputs = draw(MIXED, HEADS, picking_weight(HEADS))
    return inputs, float32_rows(inputs).view(TOKENS, 1, K)


def test_signatures() -> None:
    pinned = {
        "detect_output_quant_key": "output, output_scale, output_block_scale, output_dim",
        "supports_quant_output": "quant_key",
        "forward_impl": "layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, "
        "output_scale=None, output_block_scale=None, quant_group_size=None, "
        "quant_scale_ue8m0=None, quant_col_major=None, quant_tma_aligned=None",
    }
    for name, parameters in pinned.items():
        signature = inspect.signature(getattr(vllm, name))
        plain = [
            value.replace(annotation=inspect.Parameter.empty)
            for value in signature.parameters.values()
        ]
        assert str(inspect.Signature(plain)) == f"({parameters})"


def test_not_quantised() -> None:
    inputs, rows = inputs_and_rows()
    output = torch.full((TOKENS, K), float("nan"), dtype=torch.bfloat16)
    call(inputs, output)
    assert torch.equal(output, rows.view(TOKENS, K).bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_static_scale_divides(shape: tuple[int, ...]) -> None:
    inputs, rows = inputs_and_rows()
    output = codes()
    call(inputs, output.view(torch.float8_e4m3fn), torch.full(shape, 0.03))
    assert torch.equal(output.view(TOKENS, 1, K), quantize_fp8_tensor(rows, 0.03).data)
    # The direction, without a quantiser: a value comes back when its code is multiplied.
    values = output.view(torch.float8_e4m3fn).double() * 0.03
    exact = rows.view(TOKENS, K).double()
    # Half a step of e4m3: 2**-4 of a number, 2**-10 of the scale where codes are subnormal. The
    # quotient and the scale were rounded to float32 before.
    half_step = (exact.abs() * 2.0**-4).clamp_min(0.03 * 2.0**-10) * (1 + 2.0**-20)
    assert bool(((values - exact).abs() <= half_step).all())


@pytest.mark.parametrize(
    ("col_major", "tma_aligned"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("group", [128, 64])
def test_groups_in_every_layout(
    group: int, ue8m0: bool, col_major: bool, tma_aligned: bool
) -> None:
    inputs, rows = inputs_and_rows()
    groups = K // group
    column = (TOKENS + 3) // 4 * 4 if tma_aligned else TOKENS
    storage = torch.full((groups * column,), float("nan"))
    strides = (1, column) if col_major else (groups, 1)
    scales = storage.as_strided((TOKENS, groups), strides)
    output = codes()
    call(
        inputs,
        output.view(torch.float8_e4m3fn),
        None,
        scales,
        quant_group_size=group,
        quant_scale_ue8m0=ue8m0,
        quant_col_major=col_major,
        quant_tma_aligned=tma_aligned,
    )
    wanted = quantize_fp8_group(rows, group, "float32_pow2" if ue8m0 else "float32")
    assert torch.equal(output.view(TOKENS, 1, K), wanted.data)
    assert wanted.sf is not None
    assert torch.equal(scales, wanted.sf.view(TOKENS, groups))


@pytest.mark.parametrize("layout", [(4, 1), (1, TOKENS)])
def test_without_words_about_the_layout_strides_decide_it(layout: tuple[int, int]) -> None:
    inputs, rows = inputs_and_rows()
    scales = torch.full((4 * TOKENS,), float("nan")).as_strided((TOKENS, 4), layout)
    output = codes()
    call(inputs, output.view(torch.float8_e4m3fn), None, scales)
    wanted = quantize_fp8_group(rows, 128, "float32")
    assert torch.equal(output.view(TOKENS, 1, K), wanted.data)
    assert wanted.sf is not None
    assert torch.equal(scales, wanted.sf.view(TOKENS, 4))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2])
def test_nvfp4_with_its_global_scale_multiplies(dtype: torch.dtype) -> None:
    """Decodes and prefills share the first tile of 128 rows; its padding becomes zero."""
    inputs, rows = inputs_and_rows()
    scales = torch.full((128, K // 16), 0x7F, dtype=torch.uint8)
    # An engine may keep more rows of codes than a step has; the scales are those of the step.
    output = torch.full((TOKENS + 5, K // 2), 0x5A, dtype=torch.uint8)[:TOKENS]
    multiplier = torch.tensor([2688.0 / 4.0])
    call(inputs, output.view(dtype), multiplier, scales.view(torch.float8_e4m3fn))
    wanted = quantize_nvfp4(rows, 2688.0 / 4.0)
    assert torch.equal(output.view(TOKENS, 1, K // 2), wanted.data)
    assert wanted.sf is not None
    assert torch.equal(scales, swizzled_buffer(wanted.sf))


@pytest.mark.parametrize("kv_format", ["BF16", "FP8", "V32"])
def test_a_profiling_run_gives_zeros(kv_format: str) -> None:
    step = {**vars(MIXED), "kv_format": kv_format}
    inputs = draw(Step(**step), HEADS)
    output = codes()
    scales = torch.full((TOKENS, 4), float("nan"))
    q, kv_c, k_pe, _, _ = inputs.tensors
    nothing = torch.empty(0)
    result = output.view(torch.float8_e4m3fn)
    vllm.forward_impl(inputs.layer, q, kv_c, k_pe, nothing, None, result, None, scales)
    assert not output.any()
    assert bool(scales.isfinite().all())


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"quant_group_size": 64}, "quant_group_size must be 128"),
        ({"quant_tma_aligned": True}, "quant_tma_aligned must be false unless quant_col_major"),
        ({"quant_col_major": True}, "output_block_scale must have stride 1 along tokens"),
        (
            {"output_block_scale": torch.ones(4, TOKENS).T, "quant_col_major": False},
            "output_block_scale must have stride 1 along groups",
        ),
        ({"output_scale": torch.ones(1)}, "output_scale must be None beside block scales"),
        (
            {
                "output_block_scale": None,
                "output_scale": torch.ones(1),
                "quant_scale_ue8m0": True,
            },
            "quant_. must be None or False for fp8_static",
        ),
        (
            {"output_block_scale": torch.ones(TOKENS - 1, 4)},
            r"output_block_scale must have shape \[T, G\]",
        ),
        (
            {"output_block_scale": torch.ones(TOKENS, 4).half()},
            "output_block_scale must have dtype float32",
        ),
    ],
)
def test_bad_scales_are_refused_before_anything_is_written(
    named: dict[str, Any], message: str
) -> None:
    inputs, _ = inputs_and_rows()
    output = codes()
    scales = torch.full((TOKENS, 4), 7.0)
    arguments = {"output_block_scale": scales, **named}
    with pytest.raises(ValueError, match=message):
        call(inputs, output.view(torch.float8_e4m3fn), **arguments)
    assert bool((output == 0x5A).all())
    assert bool((scales == 7.0).all())


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.zeros(128, 32).to(torch.uint8), "dtype float8_e4m3fn, got uint8; .*view bytes"),
        (torch.zeros(128, 8).to(torch.int32), r"shape \[128, 32\], got \[128, 8\]; .*view bytes"),
        (torch.zeros(TOKENS, 32).to(torch.float8_e4m3fn), r"shape \[128, 32\], got"),
        (torch.zeros(32, 128).to(torch.float8_e4m3fn).T, "be contiguous"),
    ],
)
def test_bad_scales_of_nvfp4_are_refused_by_name(scales: torch.Tensor, message: str) -> None:
    inputs, _ = inputs_and_rows()
    output = torch.full((TOKENS, K // 2), 0x5A, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"output_block_scale must (have )?{message}"):
        call(inputs, output, torch.ones(1), scales)
    assert bool((output == 0x5A).all())


@pytest.mark.parametrize(
    ("output", "scale", "message"),
    [
        (codes().view(torch.float8_e4m3fn), None, "bfloat16, got float8_e4m3fn; codes come with"),
        (codes()[:, : K // 2], torch.ones(1), "got uint8; NVFP4 codes come with output_block_sc"),
    ],
)
def test_codes_without_their_scales_are_told_what_is_missing(
    output: torch.Tensor, scale: torch.Tensor | None, message: str
) -> None:
    inputs, _ = inputs_and_rows()
    with pytest.raises(ValueError, match=message):
        call(inputs, output, scale)


def test_columns_said_to_be_aligned_have_to_be() -> None:
    inputs, _ = inputs_and_rows()
    scales = torch.ones(4, TOKENS).T
    assert TOKENS % 4
    with pytest.raises(ValueError, match=r"have stride\(1\) = "):
        call(
            inputs,
            codes().view(torch.float8_e4m3fn),
            None,
            scales,
            quant_col_major=True,
            quant_tma_aligned=True,
        )


def test_only_our_layer_and_metadata() -> None:
    inputs, _ = inputs_and_rows()
    q, kv_c, k_pe, kv_cache, metadata = inputs.tensors
    output = torch.empty(TOKENS, K, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="layer must be a mlacast.layers.MLAAttention, got object"):
        vllm.forward_impl(object(), q, kv_c, k_pe, kv_cache, metadata, output)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="attn_metadata must be a mlacast.layers.MLAMetadata"):
        vllm.forward_impl(inputs.layer, q, kv_c, k_pe, kv_cache, object(), output)  # type: ignore[arg-type]


def test_a_compiled_step_has_no_break_and_the_same_bytes() -> None:
    inputs, _ = inputs_and_rows()
    q, kv_c, k_pe, kv_cache, metadata = inputs.tensors

    def step(output: Tensor, scales: Tensor) -> None:
        tensors = (inputs.layer, q, kv_c, k_pe, kv_cache, metadata)
        fp8 = output.view(torch.float8_e4m3fn)
        vllm.forward_impl(*tensors, fp8, None, scales, 128, True, False, False)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        output, scales = codes(), torch.full((TOKENS, 4), float("nan"))
        run(output, scales)
        results.append((output, scales))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
