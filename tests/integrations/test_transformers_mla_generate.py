"""``model.generate`` on fused DeepSeek-V3 and V3.2 models: greedy, beams, padding, assisted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlacast
from mlacast.integrations.transformers import fuse
from tests.integrations.mla_models import MODELS, original
from tests.integrations.test_transformers_generate import (
    LOGIT_TOLERANCE,
    NEW,
    assert_same_tokens_where_margins_allow,
    generate,
)
from tests.integrations.v4_models import left_padded, tokens

pytestmark = pytest.mark.parametrize("model_type", MODELS)


def both_runs(model_type: str, implementation: str = "sdpa", **inputs: Any) -> tuple[Any, Any]:
    model = original(model_type, continuous=True, implementation=implementation)
    eager = generate(model, **inputs)
    return generate(fuse(model, out_format=mlacast.Bf16()), **inputs), eager


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_greedy_tokens_equal_where_margins_allow(
    model_type: str, implementation: str, use_cache: bool
) -> None:
    inputs: dict[str, Any] = {"input_ids": tokens(21, batch=2), "use_cache": use_cache}
    fused, eager = both_runs(model_type, implementation, **inputs)
    assert fused.sequences.shape == eager.sequences.shape == (2, 21 + NEW)
    assert assert_same_tokens_where_margins_allow(fused, eager, 21) > NEW


def test_greedy_with_left_padding(model_type: str) -> None:
    ids, mask = left_padded([19, 5, 11])
    fused, eager = both_runs(model_type, input_ids=ids, attention_mask=mask)
    assert assert_same_tokens_where_margins_allow(fused, eager, 19) > NEW


def test_greedy_with_fp8_output_and_default_model(model_type: str) -> None:
    output = generate(fuse(original(model_type)), input_ids=tokens(17))
    assert output.sequences.shape == (1, 17 + NEW)
    assert all(torch.isfinite(step).all() for step in output.logits)


def test_beam_search_finds_what_eager_finds(model_type: str) -> None:
    # Beams reorder the cache between steps, so this also shows that nothing of it is kept aside.
    inputs: dict[str, Any] = {
        "input_ids": tokens(21, batch=2),
        "num_beams": 3,
        "output_scores": True,
    }
    fused, eager = both_runs(model_type, **inputs)
    assert fused.sequences.shape == eager.sequences.shape
    difference = (fused.sequences_scores - eager.sequences_scores).abs().max()
    assert float(difference) <= 2 * LOGIT_TOLERANCE


def test_prompt_lookup_brings_several_cached_tokens_at_once(model_type: str) -> None:
    # A model may reject what it guessed: then the cache is cut back between steps.
    prompt = torch.cat((tokens(15), tokens(15)), dim=1)
    fused, eager = both_runs(model_type, input_ids=prompt, prompt_lookup_num_tokens=3)
    assert fused.sequences.shape == eager.sequences.shape
    assert assert_same_tokens_where_margins_allow(fused, eager, 30) >= NEW // 2
