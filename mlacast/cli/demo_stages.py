"""Prefill and decode of the demo: the same tokens through the original and the fused model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlacast.cli.demo_layers import LayerCall, record_calls
from mlacast.cli.demo_metrics import Stage, cosine, relative_error, stored_bytes, timed
from mlacast.descriptors.out_format import Bf16, Mxfp8


@dataclass(frozen=True)
class Models:
    """The same weights three times.

    Attributes:
        eager: transformers' own attention; the truth of every comparison.
        fp8: Fused, attention output in Mxfp8.
        bf16: Fused, attention output in bf16: shows what the FP8 cast alone adds.
    """

    eager: Any
    fp8: Any
    bf16: Any

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.eager.model.layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.eager.device)


@dataclass(frozen=True)
class LayerErrors:
    """Relative error of each attention layer on the input that the eager model gave it."""

    fp8: list[float]
    bf16: list[float]
    fp8_cosine: list[float]


@dataclass(frozen=True)
class StageRun:
    """A stage, the errors of its layers and of the logits at each of its positions."""

    stage: Stage
    layers: LayerErrors
    positions: list[float]


def warm_up(models: Models, ids: torch.Tensor) -> None:
    """Run a prefill of ``ids`` [1, n] and a decode step, so that no timing pays for first calls."""
    for model in (models.eager, models.fp8):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).cache
            model(input_ids=ids[:, :1], cache=cache, use_cache=True)


def run_prefill(models: Models, ids: torch.Tensor) -> StageRun:
    """Run all of ``ids`` [1, n] in one forward."""

    def forward(model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids, use_cache=True).logits
        return logits

    eager, seconds_eager = timed(lambda: forward(models.eager), models.device)
    fused, seconds_fused = timed(lambda: forward(models.fp8), models.device)
    calls = record_calls(models.eager, input_ids=ids, use_cache=False)
    return _stage_run("prefill", models, calls, (eager, fused), 1, (seconds_eager, seconds_fused))


def run_decode(models: Models, prompt: torch.Tensor, following: torch.Tensor) -> StageRun:
    """Prefill ``prompt`` [1, n] untimed, then feed ``following`` [1, m] token by token.

    The tokens are those of the stream, not the models' choices, so both see the same ones.
    """

    def prefill(model: Any) -> Any:
        with torch.no_grad():
            return model(input_ids=prompt, use_cache=True).cache

    def steps(model: Any, cache: Any) -> torch.Tensor:
        parts = []
        with torch.no_grad():
            for token in torch.split(following, 1, dim=1):
                parts.append(model(input_ids=token, cache=cache, use_cache=True).logits)
        return torch.cat(parts, dim=1)

    eager_cache, fused_cache = prefill(models.eager), prefill(models.fp8)
    eager, seconds_eager = timed(lambda: steps(models.eager, eager_cache), models.device)
    fused, seconds_fused = timed(lambda: steps(models.fp8, fused_cache), models.device)
    # One step further, on the eager model's cache, to look at the layers one by one.
    calls = record_calls(
        models.eager, input_ids=following[:, :1], cache=eager_cache, use_cache=True
    )
    forwards = following.shape[1]
    return _stage_run(
        "decode", models, calls, (eager, fused), forwards, (seconds_eager, seconds_fused)
    )


def _stage_run(
    name: str,
    models: Models,
    calls: list[LayerCall],
    logits: tuple[torch.Tensor, torch.Tensor],
    forwards: int,
    seconds: tuple[float, float],
) -> StageRun:
    eager, fused = logits
    layers = layer_errors(models, calls)
    config = models.eager.config
    features = config.num_attention_heads * config.head_dim // config.o_groups
    tokens = eager.shape[1]

    def stored(out_format: Bf16 | Mxfp8) -> int:
        return models.num_layers * stored_bytes(tokens, config.o_groups, features, out_format)

    stage = Stage(
        name=name,
        tokens=tokens,
        launches=models.num_layers * forwards,
        logit_cosine=cosine(fused, eager),
        logit_error=relative_error(fused, eager),
        out_cosine=min(layers.fp8_cosine),
        out_error=sum(layers.fp8) / len(layers.fp8),
        out_error_bf16=sum(layers.bf16) / len(layers.bf16),
        bytes_bf16=stored(Bf16()),
        bytes_fp8=stored(Mxfp8()),
        seconds_eager=seconds[0],
        seconds_mlacast=seconds[1],
    )
    positions = [relative_error(fused[:, i], eager[:, i]) for i in range(tokens)]
    return StageRun(stage, layers, positions)


def layer_errors(models: Models, calls: list[LayerCall]) -> LayerErrors:
    """Run each layer of the three models on the recorded call and compare with the eager one."""
    fp8, bf16, fp8_cosine = [], [], []
    for index, call in enumerate(calls):
        eager, in_fp8, in_bf16 = (
            call.run(model.model.layers[index].self_attn)
            for model in (models.eager, models.fp8, models.bf16)
        )
        fp8.append(relative_error(in_fp8, eager))
        bf16.append(relative_error(in_bf16, eager))
        fp8_cosine.append(cosine(in_fp8, eager))
    return LayerErrors(fp8, bf16, fp8_cosine)
