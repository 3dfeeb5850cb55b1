"""Fused DeepSeek-V3 and V3.2 models on the device: logits, cached steps, generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", "5.24", reason="the models are those of transformers 5.24")

import mlacast  # noqa: E402
from mlacast.integrations.transformers import fuse  # noqa: E402
from tests.integrations.mla_models import MODELS, original  # noqa: E402
from tests.integrations.test_transformers_generate import NEW, generate  # noqa: E402
from tests.integrations.v4_models import left_padded, relative_error  # noqa: E402

CUDA = torch.device("cuda")


def on_device(model_type: str) -> Any:
    model = original(model_type, continuous=True, implementation="sdpa", dtype=torch.bfloat16)
    return model.to(CUDA)


def logits(model: Any, ids: Tensor, mask: Tensor | None, prompt: int) -> Tensor:
    """Logits of a prompt and of one cached step for each token behind it."""
    parts, past = [], None
    bounds = [0, *range(prompt, ids.shape[1] + 1)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        inputs: dict[str, Any] = {"input_ids": ids[:, start:stop], "use_cache": True}
        if past is not None:
            inputs["cache"] = past
        if mask is not None:
            inputs["attention_mask"] = mask[:, :stop]
        with torch.no_grad():
            output = model(**inputs)
        past = output.cache
        parts.append(output.logits)
    return torch.cat(parts, dim=1).float().cpu()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_output_is_as_close_to_float32_as_the_original(
    model_type: str, padded: bool
) -> None:
    lengths = [90, 40, 66] if padded else [90, 90, 90]
    ids, mask = left_padded(lengths)
    rows = [slice(-length, None) for length in lengths]
    truth = logits(original(model_type, continuous=True), ids, mask, 80)
    model = on_device(model_type)
    ids, given = ids.to(CUDA), mask.to(CUDA) if padded else None
    eager = logits(model, ids, given, 80)
    fused = logits(fuse(model, out_format=mlacast.Bf16()), ids, given, 80)
    for row, kept in enumerate(rows):
        # The errors of both are random and of one size, hence the quarter.
        allowed = 1.25 * relative_error(eager[row, kept], truth[row, kept])
        assert relative_error(fused[row, kept], truth[row, kept]) <= allowed, row


@pytest.mark.parametrize(
    "out_format", [None, mlacast.Mxfp8(), mlacast.Nvfp4(2688 / 16)], ids=["default", "mx", "nvfp4"]
)
@pytest.mark.parametrize("model_type", MODELS)
def test_quantised_outputs_agree_with_those_of_the_cpu(
    model_type: str, out_format: mlacast.OutFormat | None
) -> None:
    ids, _ = left_padded([80, 80])
    model = original(model_type, continuous=True, implementation="sdpa", dtype=torch.bfloat16)
    exact = logits(fuse(model, out_format=mlacast.Bf16()), ids, None, 76)
    on_cpu = logits(fuse(model, out_format=out_format), ids, None, 76)
    fused = logits(fuse(model.to(CUDA), out_format=out_format), ids.to(CUDA), None, 76)
    # Codes of values beside a boundary differ, so both are one rounding away from `exact`.
    assert relative_error(fused, exact) <= 1.25 * relative_error(on_cpu, exact)


@pytest.mark.parametrize("model_type", MODELS)
def test_generate(model_type: str) -> None:
    ids, mask = left_padded([40, 17])
    model = fuse(on_device(model_type))
    inputs = {"input_ids": ids.to(CUDA), "attention_mask": mask.to(CUDA)}
    first, again = (generate(model, **inputs) for _ in range(2))
    assert first.sequences.shape == (2, 40 + NEW)
    assert torch.equal(first.sequences, again.sequences)
