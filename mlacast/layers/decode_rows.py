"""Decode rows of an MLA layer: absorbed attention over the paged cache, W_UV, and the cast.

The output projection reads values behind W_UV, so the product with it is what quantises. Where a
cache is spread over ranks, each attends the heads of all to the tokens that it keeps, and the parts
are merged before W_UV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mlacast.descriptors.kv_format import KvFormat
from mlacast.descriptors.out_format import Fp8Tensor
from mlacast.distributed.exchange import gather_heads, merge_over_ranks
from mlacast.layers.metadata import MLAMetadata
from mlacast.ops.dense_mla_decode import dense_mla_decode
from mlacast.ops.output import Output
from mlacast.ops.quantize_output import quantize_output
from mlacast.ops.sparse_mla_decode import sparse_mla_decode
from mlacast.ops.v_up_project import v_up_project

NOPE = 128


@dataclass(frozen=True)
class AbsorbedAttention:
    """Attention of absorbed queries over a cache.

    Attributes:
        kv_cache: Cache in ``kv_format``.
        kv_format: Its format.
        kv_b_proj: [N * 256, 512].
        sm_scale: Multiplies q.k, the scales of FP8 queries and caches included.
        v_scale: Multiplies the latent output: the scale of a per-tensor FP8 cache.
        q_scale: Scale of queries that are cast to FP8, None to leave them as they are.
        group: Ranks that share the cache, or None.
    """

    kv_cache: Tensor
    kv_format: KvFormat
    kv_b_proj: Tensor
    sm_scale: float | Tensor
    v_scale: float | Tensor
    q_scale: float | Tensor | None
    group: dist.ProcessGroup | None

    def write_dense(self, q: Tensor, metadata: MLAMetadata, out: Output) -> Tensor:
        """Attend the decode rows to all tokens of their requests; write them, return lse [n, N]."""
        absorbed = self._absorbed(q)
        per_row = metadata.decode_query_len
        latent, lse = dense_mla_decode(
            absorbed.view(-1, per_row, *absorbed.shape[1:]),
            self.kv_cache,
            metadata.decode_table,
            metadata.decode_seq_lens,
            kv_format=self.kv_format,
            sm_scale=self.sm_scale,
            v_scale=self.v_scale,
        )
        assert isinstance(latent, Tensor), "an output without a format is a tensor"
        return self._write(latent.flatten(0, 1), lse.flatten(0, 1), out)

    def write_sparse(
        self, q: Tensor, indices: Tensor, topk_length: Tensor | None, out: Output
    ) -> Tensor:
        """Attend rows to the slots in ``indices``; write them, return lse [n, N]."""
        latent, lse = sparse_mla_decode(
            self._absorbed(q),
            self.kv_cache,
            indices,
            kv_format=self.kv_format,
            sm_scale=self.sm_scale,
            v_scale=self.v_scale,
            topk_length=topk_length,
        )
        assert isinstance(latent, Tensor), "an output without a format is a tensor"
        return self._write(latent, lse, out)

    def _absorbed(self, q: Tensor) -> Tensor:
        """Return queries [n, N, 576] that can be compared with latents, N those of all ranks."""
        w_uk = self._weights(q.shape[1])[:, :NOPE]
        nope = torch.bmm(q[..., :NOPE].transpose(0, 1), w_uk)
        if self.group is None:
            return self._cast(torch.cat((nope.transpose(0, 1), q[..., NOPE:]), dim=-1))
        # Head-major, so that the heads of all ranks are one tensor as they arrive.
        absorbed = torch.cat((nope, q[..., NOPE:].transpose(0, 1)), dim=-1)
        return gather_heads(self._cast(absorbed).transpose(0, 1), self.group)

    def _cast(self, absorbed: Tensor) -> Tensor:
        """Return contiguous queries as FP8 codes if they have a scale."""
        if self.q_scale is None:
            return absorbed
        codes = quantize_output(absorbed.flatten(1), Fp8Tensor(self.q_scale))
        return codes.data.view(absorbed.shape)

    def _write(self, latent: Tensor, lse: Tensor, out: Output) -> Tensor:
        """Merge over ranks, project and cast; return the lse [n, N] of this rank's heads."""
        if self.group is not None:
            latent, lse = merge_over_ranks(latent, lse, self.group)
        w_uv = self._weights(latent.shape[1])[:, NOPE:].transpose(1, 2)
        v_up_project(latent, w_uv, out=out)
        return lse

    def _weights(self, heads: int) -> Tensor:
        """Return W_UK and W_UV, transposed, of each head: [N, 128 + 128, 512]."""
        return self.kv_b_proj.view(heads, -1, self.kv_b_proj.shape[1])
