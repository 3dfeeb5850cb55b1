"""Batches and layouts for which vLLM's layer casts in a kernel of its own: here none of them does.

A row for each condition of vLLM's choice that a batch or a layout can break, by its words there.
``dcp_world_size <= 1`` is in tests/distributed/test_layer.py
(``test_rows_have_the_bytes_of_one_cast``), devices are in tests/gpu/test_layer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mlacast
from mlacast.compat import vllm
from tests.layers.float32_rows import float32_rows
from tests.layers.operations import operations_of
from tests.layers.steps import Step, draw, expected, picking_weight, slots_of
from tests.quantizers import (
    Quantized,
    quantize_fp8_group,
    quantize_fp8_tensor,
    quantize_nvfp4,
    swizzled_buffer,
)

HEADS = 4
K = HEADS * 128
STATIC_SCALE = 0.03
MULTIPLIER = 2688.0 / 4.0

PROMPTS = Step("prompts", (5, 3), (0, 0))
DECODES = Step("decodes", (1, 1, 1), (5, 0, 9))
MIXED = Step("mixed", (1, 1, 4, 5), (7, 3, 0, 0))
CONTEXT = Step("context", (3, 4), (9, 6))
CHUNKS = Step("chunks", (1, 3, 4), (8, 9, 6), workspace=4)


@dataclass(frozen=True)
class Gate:
    """A condition of vLLM, and a call that breaks it.

    Attributes:
        condition: The condition.
        step: The batch.
        scheme: "static", "group128", "group64" or "nvfp4".
        words: What the engine says of the layout of FP8 scales.
    """

    condition: str
    step: Step
    scheme: str
    words: dict[str, bool] = field(default_factory=dict)

    @property
    def id(self) -> str:
        said = "-".join(f"{word.removeprefix('quant_')}_{on}" for word, on in self.words.items())
        return "-".join(filter(None, (self.condition, self.step.id, self.scheme, said)))


def layouts_that_differ() -> list[dict[str, bool]]:
    """Layouts of scales but those in which all three words are the same."""
    names = ("quant_col_major", "quant_scale_ue8m0", "quant_tma_aligned")
    values = [
        (col, ue8m0, tma)
        for col in (False, True)
        for ue8m0 in (False, True)
        for tma in (False, True)
        # Alignment is one of columns.
        if (col or not tma) and not col == ue8m0 == tma
    ]
    return [dict(zip(names, value, strict=True)) for value in values]


SCHEMES = ("static", "group128", "group64", "nvfp4")
GATES = (
    *(Gate("a backend supports the key", PROMPTS, scheme) for scheme in SCHEMES),
    *(Gate("prefill metadata present", DECODES, scheme) for scheme in SCHEMES),
    *(
        Gate("chunked_context is None", step, scheme)
        for step in (CONTEXT, CHUNKS)
        for scheme in SCHEMES
    ),
    *(
        Gate("col_major == ue8m0 == tma_aligned", CHUNKS, scheme, words)
        for scheme in ("group128", "group64")
        for words in layouts_that_differ()
    ),
    *(Gate("key != NVFP4 or num_mqa_tokens == 0", step, "nvfp4") for step in (MIXED, CHUNKS)),
)


@dataclass(frozen=True)
class Engine:
    """Tensors as an engine has them; ``buffer`` is over them, ``holds`` compares them."""

    output: Tensor
    arguments: dict[str, Any]
    buffer: mlacast.QuantizedTensor
    holds: Callable[[Tensor], bool]


def engine(scheme: str, tokens: int, words: dict[str, bool]) -> Engine:
    """Allocate the output of a step."""
    columns = K // 2 if scheme == "nvfp4" else K
    codes = torch.full((tokens, columns), 0x5A, dtype=torch.uint8)

    def same_codes(wanted: Quantized) -> bool:
        return torch.equal(codes, wanted.data.view(tokens, columns))

    if scheme == "static":
        arguments: dict[str, Any] = {"output_scale": torch.tensor([STATIC_SCALE])}
        output = codes.view(torch.float8_e4m3fn)
        return Engine(
            output,
            arguments,
            mlacast.QuantizedTensor(output[:, None], None, mlacast.Fp8Tensor(STATIC_SCALE)),
            lambda rows: same_codes(quantize_fp8_tensor(rows, STATIC_SCALE)),
        )
    if scheme == "nvfp4":
        swizzled = torch.full((128, K // 16), 0x7F, dtype=torch.uint8)
        sf = swizzled.view(torch.float8_e4m3fn)
        arguments = {"output_scale": torch.tensor([MULTIPLIER]), "output_block_scale": sf}
        fmt: mlacast.OutFormat = mlacast.Nvfp4(MULTIPLIER)
        buffer = mlacast.QuantizedTensor(codes[:, None], sf, fmt, total_tokens=tokens)

        def holds_nvfp4(rows: Tensor) -> bool:
            wanted = quantize_nvfp4(rows, MULTIPLIER)
            assert wanted.sf is not None
            return same_codes(wanted) and torch.equal(swizzled, swizzled_buffer(wanted.sf))

        return Engine(codes, arguments, buffer, holds_nvfp4)
    group = int(scheme.removeprefix("group"))
    groups = K // group
    column = -(-tokens // 4) * 4 if words.get("quant_tma_aligned") else tokens
    strides = (1, column) if words.get("quant_col_major") else (groups, 1)
    scales = torch.full((groups * column,), float("nan")).as_strided((tokens, groups), strides)
    arguments = {"output_block_scale": scales, "quant_group_size": group, **words}
    kind = "float32_pow2" if words.get("quant_scale_ue8m0") else "float32"

    def holds_groups(rows: Tensor) -> bool:
        wanted = quantize_fp8_group(rows, group, kind)
        assert wanted.sf is not None
        return same_codes(wanted) and torch.equal(scales, wanted.sf.view(tokens, groups))

    output = codes.view(torch.float8_e4m3fn)
    fmt = mlacast.Fp8Group(group, kind, "mn_major" if words.get("quant_col_major") else "row_major")
    buffer = mlacast.QuantizedTensor(output[:, None], scales[:, None], fmt)
    return Engine(output, arguments, buffer, holds_groups)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.id)
def test_the_last_kernel_of_a_row_casts(gate: Gate) -> None:
    """Codes and scales are those of one cast of float32 rows, and no operation makes it alone."""
    inputs = draw(gate.step, HEADS, picking_weight(HEADS))
    tokens = inputs.q.shape[0]
    made = engine(gate.scheme, tokens, gate.words)

    def call() -> None:
        tensors = (inputs.layer, *inputs.tensors, made.output)
        vllm.forward_impl(*tensors, **made.arguments)

    operations = operations_of(call)
    assert operations
    assert "mlacast::quantize_output" not in operations
    assert made.holds(float32_rows(inputs).view(tokens, 1, K))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefill_max_seq_len_above_topk_tokens(scheme: str) -> None:
    """Prompts longer than their selections attend to these alone, and are cast all the same."""
    inputs = draw(PROMPTS, HEADS)
    picked = [[0, own] if own else [0] for new in PROMPTS.query_lens for own in range(new)]
    owners = [request for request, new in enumerate(PROMPTS.query_lens) for _ in range(new)]
    indices = torch.full((len(picked), 2), -1, dtype=torch.int32)
    for token, positions in enumerate(picked):
        slots = slots_of(inputs.metadata.block_table, owners[token], torch.tensor(positions))
        indices[token, : len(positions)] = slots.to(torch.int32)
    made = engine(scheme, len(picked), {})

    def call() -> None:
        inputs.layer(*inputs.tensors, made.output, **made.arguments, indices=indices)

    assert "mlacast::quantize_output" not in operations_of(call)
    wanted = expected(inputs, picked)[0].view(len(picked), K)
    error = (made.buffer.dequantize().view(len(picked), K).double() - wanted).norm(dim=-1)
    share = 0.2 if scheme == "nvfp4" else 0.06
    assert bool((error <= share * wanted.norm(dim=-1)).all())
