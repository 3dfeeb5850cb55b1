"""``model.generate`` on a fused model: greedy, sampling, beams, padding, with and without cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlacast
from mlacast.integrations.transformers import fuse
from tests.integrations.v4_models import left_padded, original, tokens

NEW = 8

# test_transformers_model.py bounds the root mean square of the error of the logits by 2**-6 of
# theirs; 4 times that covers the largest of a vocabulary of 259.
LOGIT_TOLERANCE = 4 * 2.0**-6


def generate(model: Any, **inputs: Any) -> Any:
    """Greedy unless told otherwise; never stops early, keeps the logits of each step."""
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    return model.generate(**{**options, **inputs})


def assert_same_tokens_where_margins_allow(fused: Any, eager: Any, prompt: int) -> int:
    """Compare greedy runs token by token and return how many steps were compared.

    Until a row differs, both runs saw the same tokens, so its logits may differ by rounding only. A
    token may differ only where eager's best two logits are closer than rounding can move them.
    """
    compared = 0
    for row in range(eager.sequences.shape[0]):
        for step in range(NEW):
            ours, theirs = fused.logits[step][row], eager.logits[step][row]
            allowed = LOGIT_TOLERANCE * float(theirs.std())
            assert float((ours - theirs).abs().max()) <= allowed, (row, step)
            compared += 1
            if fused.sequences[row, prompt + step] != eager.sequences[row, prompt + step]:
                best = theirs.topk(2).values
                assert float(best[0] - best[1]) <= 2 * allowed, (row, step)
                break
    return compared


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no_cache"])
def test_greedy_tokens_equal_eager_where_margins_allow(use_cache: bool) -> None:
    model = original(continuous=True)
    inputs = {"input_ids": tokens(21, batch=2), "use_cache": use_cache}
    eager = generate(model, **inputs)
    fused = generate(fuse(model, out_format=mlacast.Bf16()), **inputs)
    assert fused.sequences.shape == eager.sequences.shape == (2, 21 + NEW)
    compared = assert_same_tokens_where_margins_allow(fused, eager, 21)
    assert compared > NEW


def test_greedy_with_left_padding() -> None:
    ids, mask = left_padded([19, 5, 11])
    model = original(continuous=True)
    inputs = {"input_ids": ids, "attention_mask": mask}
    eager = generate(model, **inputs)
    fused = generate(fuse(model, out_format=mlacast.Bf16()), **inputs)
    compared = assert_same_tokens_where_margins_allow(fused, eager, 19)
    assert compared > NEW


def test_greedy_with_fp8_output_and_default_model() -> None:
    model = fuse(original())
    output = generate(model, input_ids=tokens(17))
    assert output.sequences.shape == (1, 17 + NEW)
    assert all(torch.isfinite(step).all() for step in output.logits)


def test_sampling_is_reproducible() -> None:
    model = fuse(original())
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(generate(model, input_ids=tokens(17, batch=2), do_sample=True, top_k=20))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].sequences.shape == (2, 17 + NEW)


def test_beam_search_finds_what_eager_finds() -> None:
    # Beams reorder the cache between steps, so this also shows that nothing of it is kept aside.
    model = original(continuous=True)
    inputs = {"input_ids": tokens(21, batch=2), "num_beams": 3, "output_scores": True}
    eager = generate(model, **inputs)
    fused = generate(fuse(model, out_format=mlacast.Bf16()), **inputs)
    assert fused.sequences.shape == eager.sequences.shape
    # A score is a mean of log-probabilities. One moves by at most twice what a logit moves by, and
    # the logits of this model have a standard deviation below 1.
    difference = (fused.sequences_scores - eager.sequences_scores).abs().max()
    assert float(difference) <= 2 * LOGIT_TOLERANCE
