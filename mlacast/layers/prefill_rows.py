"""Prefill rows of an MLA layer: dense attention to new tokens and to cached context, and the cast.

Keys and values are up-projected for each head. Whatever is last for a row writes the output in its
format: the attention itself where there is no context, else the merge with the last of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from mlacast.descriptors.kv_format import KvFormat
from mlacast.distributed.exchange import gather_rows
from mlacast.layers.context_plan import ContextChunk, Run
from mlacast.ops.dense_mla_prefill import dense_mla_prefill
from mlacast.ops.kv_cache_gather import kv_cache_gather
from mlacast.ops.merge_attention_states import merge_attention_states
from mlacast.ops.output import Output

LATENT = 512
NOPE = 128
D_V = 128
# A merge of up to four parts is one launch.
MAX_PARTS = 4

# Attention output [n, N, 128] and lse [N, n] of some rows over some of their keys.
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class CachedContext:
    """Where the context of prefill rows is read.

    Attributes:
        kv_cache: Cache whose slots the chunks name.
        kv_format: Its format.
        k_scale: Multiplies the values of a per-tensor FP8 cache; None for the others.
        group: Ranks that share the cache, or None.
    """

    kv_cache: Tensor
    kv_format: KvFormat
    k_scale: float | Tensor | None
    group: dist.ProcessGroup | None

    def read(self, chunk: ContextChunk) -> Tensor:
        """Return the rows [n, 576] bfloat16 of a chunk, whichever ranks keep them."""
        rows = kv_cache_gather(self.kv_cache, chunk.slots, self.kv_format)
        if self.group is not None:
            assert chunk.order is not None, "the plan is that of the group"
            rows = gather_rows(rows, self.group).index_select(0, chunk.order)
        # Codes are exact in bfloat16, so this rounds once.
        return rows if self.k_scale is None else rows.mul_(self.k_scale)


@dataclass(frozen=True)
class PrefillRows:
    """The rows of one step that prefill, n with graph padding.

    Attributes:
        q: [n, N, 192].
        latent: [n, 512], the normed latents of the new tokens.
        k_pe: [n, 64], their rotated keys.
        kv_b_proj: [N * 256, 512].
        scale: Multiplies q.k.
        out: The n rows of the output.
        lse: [N, n] to fill, or None.
    """

    q: Tensor
    latent: Tensor
    k_pe: Tensor
    kv_b_proj: Tensor
    scale: float
    out: Output
    lse: Tensor | None

    def write(self, runs: tuple[Run, ...], context: CachedContext) -> None:
        """Attend all rows; those behind the requests of the runs become zeros."""
        num_rows = self.q.shape[0]
        written = 0
        for run in runs:
            if run.chunks:
                self._write_with_context(run, context)
                written = run.stop
                continue
            # Rows of no request become zeros in the same launch.
            written = num_rows if run is runs[-1] else run.stop
            _, lse = self._attend_new(run, written, self.out[run.start : written])
            self._keep(run.start, written, lse)
        if written < num_rows:
            zero_rows(self.q[written:], self.out[written:])

    def _write_with_context(self, run: Run, context: CachedContext) -> None:
        """Attend new tokens and context, and write each row when the last of its keys are in."""
        new, new_lse = self._attend_new(run, run.stop, None)
        assert isinstance(new, Tensor), "an output without a format is a tensor"

        def new_part(start: int, stop: int) -> State:
            rows = slice(start - run.start, stop - run.start)
            return new[rows], new_lse[:, rows]

        # Parts of a request with more context than the chunks so far held.
        begun: list[State] = []
        for chunk in run.chunks:
            part, lse = self._attend_context(chunk, context)
            if not chunk.is_last:
                begun = begun or [new_part(chunk.start, chunk.stop)]
                begun.append((part, lse))
                if len(begun) == MAX_PARTS:
                    begun = [_merged(begun)]
                continue
            rows = chunk.begun_stop - chunk.start
            if rows > 0:
                begun.append((part[:rows], lse[:, :rows]))
                self._write_merged(chunk.start, chunk.begun_stop, begun)
                begun = []
            if chunk.begun_stop < chunk.stop:
                parts = [new_part(chunk.begun_stop, chunk.stop), (part[rows:], lse[:, rows:])]
                self._write_merged(chunk.begun_stop, chunk.stop, parts)

    def _attend_new(self, run: Run, stop: int, out: Output | None) -> tuple[Output, Tensor]:
        """Attend the new tokens of consecutive requests to themselves, in rows up to ``stop``."""
        tokens = slice(run.start, run.stop)
        k, v = self._keys_and_values(self.latent[tokens], self.k_pe[tokens])
        return dense_mla_prefill(
            self.q[run.start : stop],
            k,
            v,
            cu_seqlens_q=run.cu_seqlens,
            cu_seqlens_k=run.cu_seqlens,
            max_seqlen_q=run.max_seqlen,
            max_seqlen_k=run.max_seqlen,
            softmax_scale=self.scale,
            out=out,
        )

    def _attend_context(self, chunk: ContextChunk, context: CachedContext) -> State:
        """Attend rows to a chunk of their context, all of which they see."""
        rows = context.read(chunk)
        k, v = self._keys_and_values(rows[:, :LATENT], rows[:, LATENT:])
        out, lse = dense_mla_prefill(
            self.q[chunk.start : chunk.stop],
            k,
            v,
            cu_seqlens_q=chunk.cu_seqlens_q,
            cu_seqlens_k=chunk.cu_seqlens_k,
            max_seqlen_q=chunk.max_seqlen_q,
            max_seqlen_k=chunk.max_seqlen_k,
            softmax_scale=self.scale,
            causal=False,
        )
        assert isinstance(out, Tensor), "an output without a format is a tensor"
        return out, lse

    def _keys_and_values(self, latent: Tensor, k_pe: Tensor) -> State:
        """Up-project latents to keys [n, N, 192] and values [n, N, 128], a view of wider rows."""
        heads = self.q.shape[1]
        up = linear(latent, self.kv_b_proj).view(latent.shape[0], heads, NOPE + D_V)
        rotary = k_pe.unsqueeze(1).expand(-1, heads, -1)
        return torch.cat((up[..., :NOPE], rotary), dim=-1), up[..., NOPE:]

    def _write_merged(self, start: int, stop: int, parts: list[State]) -> None:
        """Merge all there is of some rows, and write them."""
        outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
        _, lse = merge_attention_states(outs, lses, out=self.out[start:stop])
        self._keep(start, stop, lse)

    def _keep(self, start: int, stop: int, lse: Tensor) -> None:
        if self.lse is not None:
            self.lse[:, start:stop] = lse


def _merged(parts: list[State]) -> State:
    """Merge parts to one, rounded to bfloat16 like each of them."""
    merged, lse = merge_attention_states([out for out, _ in parts], [lse for _, lse in parts])
    assert isinstance(merged, Tensor), "an output without a format is a tensor"
    return merged, lse


def zero_rows(q: Tensor, out: Output) -> None:
    """Write zeros to rows of no request, in the format of ``out``: a launch without sequences.

    Args:
        q: [n, N, 192], n at least 1; not read.
        out: n rows of an output.
    """
    no_sequence = torch.zeros(1, dtype=torch.int32, device=q.device)
    # Keys past the last sequence are not read either.
    dense_mla_prefill(
        q,
        q[:1],
        q[:1, :, :D_V],
        cu_seqlens_q=no_sequence,
        cu_seqlens_k=no_sequence,
        max_seqlen_q=0,
        max_seqlen_k=0,
        out=out,
    )
