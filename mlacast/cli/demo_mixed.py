"""The demo's mixed step: decode rows and prefill rows of one layer in one shared FP8 buffer.

This is what an engine does in a step with old and new requests. The requests in decode read
V4-format FP8 pages that ``kv_cache_append`` filled with the model's own latents; the new request
reads its latents as they are. Two launches write one buffer, one projection reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import mlacast
from mlacast.cli.demo_layers import LayerCall, record_calls
from mlacast.cli.demo_metrics import Stage, cosine, relative_error, stored_bytes, timed
from mlacast.cli.demo_model import passage_tokens
from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Bf16, Mxfp8
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.descriptors.rope import Rope
from mlacast.integrations.transformers.attend import attend
from mlacast.integrations.transformers.inputs import AttentionInputs

PAGE_SIZE = 8
DECODE_CONTEXTS = (45, 70, 23)
PREFILL_TOKENS = 39

UNTOUCHED, DECODE, PREFILL, PADDING = range(4)
_SENTINEL_BYTE = 0x7F
_SENTINEL_WORD = -1


@dataclass(frozen=True)
class MixedRun:
    """Result of the mixed step.

    Attributes:
        stage: Figures for the table.
        layer: Index of the layer.
        num_decode: Rows of the decode launch; they come first.
        row_errors: Relative error of each row's layer output.
        data_writers: [T, g * f / 32], who wrote each block of 32 codes.
        sf_writers: [g * n, ceil4(T)], who wrote each scale word; a row is contiguous in memory.
        num_groups: g.
    """

    stage: Stage
    layer: int
    num_decode: int
    row_errors: list[float]
    data_writers: torch.Tensor
    sf_writers: torch.Tensor
    num_groups: int


@dataclass(frozen=True)
class PagedPool:
    """Latents of several requests in shuffled pages of one cache, and the index rows into them."""

    cache: torch.Tensor
    indices: torch.Tensor


def run_mixed_step(model: Any, layer: int, seed: int) -> MixedRun:
    """Run one layer's attention for three requests in decode and a new one in prefill.

    Args:
        model: The eager model; its layer gives the latents, the weights and the truth.
        layer: Index of a layer with a compressor.
        seed: Decides the order of the pages.
    """
    module, device = model.model.layers[layer].self_attn, torch.device(model.device)
    calls = [decode_call(model, layer, length, device) for length in DECODE_CONTEXTS]
    calls.append(
        record_calls(model, input_ids=passage_tokens(PREFILL_TOKENS, device), use_cache=False)[
            layer
        ]
    )
    # Unobserved and untimed once, so that neither side pays for first calls.
    _fused(module, calls, seed)
    calls[0].run(module)
    eager, seconds_eager = timed(lambda: [call.run(module) for call in calls], device)
    truth = torch.cat([output.flatten(0, 1) for output in eager])
    (output, buffer), seconds = timed(lambda: _fused(module, calls, seed), device)
    writers = _Writers()
    _fused(module, calls, seed, writers)

    num_decode, groups, features = len(DECODE_CONTEXTS), buffer.num_groups, buffer.features
    stage = Stage(
        name="mixed step",
        tokens=len(buffer),
        launches=2,
        logit_cosine=None,
        logit_error=None,
        out_cosine=cosine(output, truth),
        out_error=relative_error(output, truth),
        out_error_bf16=None,
        bytes_bf16=stored_bytes(len(buffer), groups, features, Bf16()),
        bytes_fp8=stored_bytes(len(buffer), groups, features, Mxfp8()),
        seconds_eager=seconds_eager,
        seconds_mlacast=seconds,
    )
    errors = [relative_error(output[row], truth[row]) for row in range(len(buffer))]
    assert writers.data is not None and writers.sf is not None, "both launches were observed"
    return MixedRun(stage, layer, num_decode, errors, writers.data, writers.sf, groups)


def decode_call(model: Any, layer: int, context: int, device: torch.device) -> LayerCall:
    """Prefill ``context`` tokens, then record what ``layer`` is given for the next one."""
    ids = passage_tokens(context + 1, device)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1], use_cache=True).cache
    return record_calls(model, input_ids=ids[:, -1:], cache=cache, use_cache=True)[layer]


def _fused(
    module: Any, calls: list[LayerCall], seed: int, writers: _Writers | None = None
) -> tuple[torch.Tensor, QuantizedTensor]:
    steps = [call.inputs(module) for call in calls]
    decode, prefill = steps[:-1], steps[-1]
    num_decode, total = len(decode), len(decode) + prefill.q.shape[0]
    groups = module.config.o_groups
    features = module.num_heads * module.head_dim // groups
    buffer = QuantizedTensor.empty(total, groups, features, Mxfp8(), prefill.q.device)

    if writers is not None:
        writers.start(buffer)
    _launch_decode(decode, buffer[:num_decode], seed)
    if writers is not None:
        writers.observe(buffer, DECODE)
    attend(prefill, buffer[num_decode:])
    if writers is not None:
        writers.observe(buffer, PREFILL)

    weight = module.o_a_proj.weight.detach().view(groups, -1, features)
    grouped = mlacast.grouped_out_project(buffer, weight)
    with torch.no_grad():
        return module.o_b_proj(grouped.flatten(1)), buffer


def _launch_decode(steps: list[AttentionInputs], out: QuantizedTensor, seed: int) -> None:
    window = fill_pool(
        [s.window_kv[0] for s in steps], [s.window_columns[0, 0] for s in steps], seed
    )
    entries = fill_pool(
        [s.compressed_kv[0] for s in steps], [s.compressed_columns[0, 0] for s in steps], seed + 1
    )
    table = torch.cat([s.rope.cos_sin_cache for s in steps])
    positions = torch.arange(len(steps), dtype=torch.int32, device=table.device)
    mlacast.sparse_mla_decode(
        torch.cat([s.q for s in steps]),
        window.cache,
        window.indices,
        kv_format=KvFormat.V4,
        sm_scale=steps[0].sm_scale,
        extra_k_cache=entries.cache,
        extra_indices=entries.indices,
        extra_kv_format=KvFormat.V4,
        attn_sink=steps[0].attn_sink,
        q_norm_eps=steps[0].q_norm_eps,
        rope=Rope(table, positions),
        out=out,
    )


def fill_pool(latents: list[torch.Tensor], columns: list[torch.Tensor], seed: int) -> PagedPool:
    """Append the latents of each request to pages of its own, in a shuffled order of pages.

    Args:
        latents: [n_i, 512] bfloat16 per request.
        columns: [w_i] int32 per request, columns of its latents or -1.
        seed: Decides which pages a request gets.

    Returns:
        The pool; indices are [requests, max w_i] int32 slots, -1 where there is no key.
    """
    device = latents[0].device
    pages_of = [-(-rows.shape[0] // PAGE_SIZE) for rows in latents]
    num_pages = sum(pages_of)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).to(device)
    cache = KvFormat.V4.allocate(max(num_pages, 1), PAGE_SIZE, device=device)
    width = max(row.shape[0] for row in columns)
    indices = torch.full((len(columns), width), -1, dtype=torch.int32, device=device)
    slots = []
    for request, (rows, wanted) in enumerate(zip(latents, columns, strict=True)):
        pages = order[sum(pages_of[:request]) :][: pages_of[request]]
        token = torch.arange(rows.shape[0], device=device)
        slot = pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE
        slots.append(slot)
        if rows.shape[0]:
            found = slot[wanted.long().clamp_min(0)].to(torch.int32)
            indices[request, : wanted.shape[0]] = torch.where(wanted >= 0, found, -1)
    mlacast.kv_cache_append(torch.cat(latents), torch.cat(slots), cache, KvFormat.V4)
    return PagedPool(cache, indices)


class _Writers:
    """Finds out who wrote what by looking at the bytes before and after each launch."""

    def __init__(self) -> None:
        self.data: torch.Tensor | None = None
        self.sf: torch.Tensor | None = None

    def start(self, buffer: QuantizedTensor) -> None:
        """Fill the buffer, padding included, with bytes that no finite result contains."""
        buffer.data.view(torch.uint8).fill_(_SENTINEL_BYTE)
        self._words(buffer).fill_(_SENTINEL_WORD)
        blocks = buffer.num_groups * buffer.features // 32
        self.data = torch.full((len(buffer), blocks), UNTOUCHED)
        self.sf = torch.full(tuple(self._memory(buffer).shape), UNTOUCHED)

    def observe(self, buffer: QuantizedTensor, writer: int) -> None:
        """Attribute everything that changed since the start and has no writer yet."""
        assert self.data is not None and self.sf is not None, "start comes first"
        codes = buffer.data.view(torch.uint8).reshape(len(buffer), -1, 32)
        changed = (codes != _SENTINEL_BYTE).any(-1).cpu()
        self.data[changed & (self.data == UNTOUCHED)] = writer
        words = self._memory(buffer).cpu()
        changed = (words != _SENTINEL_WORD) & (self.sf == UNTOUCHED)
        self.sf[changed] = writer
        padding = changed & (torch.arange(words.shape[1]) >= len(buffer)) & (words == 0)
        self.sf[padding] = PADDING

    @staticmethod
    def _words(buffer: QuantizedTensor) -> torch.Tensor:
        words = buffer.sf_rows_with_padding()
        assert words is not None, "Mxfp8 has scale words"
        return words

    def _memory(self, buffer: QuantizedTensor) -> torch.Tensor:
        """Scale words as they lie in memory: [g * n, ceil4(T)]."""
        return self._words(buffer).permute(1, 2, 0).flatten(0, 1)
