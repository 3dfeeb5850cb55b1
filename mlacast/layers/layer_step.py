"""One step of an MLA layer, run: which rows attend how, and what is written where.

What depends on the metadata of a step is here, behind the operator of the layer, where a compiler
does not look.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from mlacast.descriptors.kv_format import KvFormat
from mlacast.distributed.groups import check_same_on_all_ranks, group_named
from mlacast.errors import fail
from mlacast.layers.decode_rows import AbsorbedAttention
from mlacast.layers.metadata import MLAMetadata
from mlacast.layers.prefill_rows import CachedContext, PrefillRows, zero_rows
from mlacast.ops.output import Output
from mlacast.ops.value_checks import validation_requested

OP = "MLAAttention.forward"
Scale = float | Tensor


@dataclass(frozen=True)
class LayerSettings:
    """What does not change from step to step; see ``MLAAttention``.

    Attributes:
        scale: Multiplies q.k.
        kv_b_proj: [N * 256, 512].
        kv_format: Format of the cache.
        q_scale: Of queries over a per-tensor FP8 cache; the number 1.0 leaves them in bfloat16.
        k_scale: Of that cache.
        context_workspace_tokens: Most cached tokens that a prefill up-projects at a time.
        group_name: Of the group whose ranks share the cache, "" for none.
    """

    scale: float
    kv_b_proj: Tensor
    kv_format: KvFormat
    q_scale: Scale
    k_scale: Scale
    context_workspace_tokens: int
    group_name: str


@dataclass(frozen=True)
class LayerStep:
    """Tensors of one step, T tokens with graph padding.

    Attributes:
        q: [T, N, 192].
        kv_c_normed: [T, 512].
        k_pe: [T, 64].
        kv_cache: [pages, page, ...] cache that holds the new tokens already.
        out: T rows of N * 128 features.
        lse: [T, N] float32 to fill, or None.
        indices: [rows, topk] int32 slots, or None for dense attention.
        topk_length: [rows] int32, or None.
    """

    q: Tensor
    kv_c_normed: Tensor
    k_pe: Tensor
    kv_cache: Tensor
    out: Output
    lse: Tensor | None
    indices: Tensor | None
    topk_length: Tensor | None

    def write(self, settings: LayerSettings, metadata: MLAMetadata) -> None:
        """Attend every row and write it; rows behind those of ``metadata`` become zeros.

        Args:
            settings: Of the layer.
            metadata: Requests of the step.

        Raises:
            ValueError: The metadata does not fit the tensors or the layer; nothing is written.
        """
        group = group_named(settings.group_name)
        self._check_metadata(metadata, group)
        absorbed = self._absorbed_rows(metadata)
        if group is not None:
            _check_ranks(settings, metadata, absorbed, group)
        if self.lse is not None:
            self.lse.fill_(-float("inf"))
        if absorbed > 0:
            decoded = self._decode(absorbed, settings, metadata, group)
            if self.lse is not None:
                self.lse[:absorbed] = decoded
        rest = slice(absorbed, self.q.shape[0])
        if absorbed < metadata.num_tokens:
            self._prefill(rest, settings, metadata, group)
        elif rest.start < rest.stop:
            zero_rows(self.q[rest], self.out[rest])

    def _decode(
        self,
        num_rows: int,
        settings: LayerSettings,
        metadata: MLAMetadata,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """Write the rows that attend in absorbed form; return their lse [n, N]."""
        sm_scale: Scale = settings.scale
        v_scale: Scale = 1.0
        q_scale: Scale | None = None
        if settings.kv_format == KvFormat.FP8:
            v_scale = settings.k_scale
            sm_scale = settings.k_scale * settings.scale
            if isinstance(settings.q_scale, Tensor) or settings.q_scale != 1.0:
                q_scale = settings.q_scale
                sm_scale = sm_scale * q_scale
        attention = AbsorbedAttention(
            self.kv_cache,
            settings.kv_format,
            settings.kv_b_proj,
            sm_scale,
            v_scale,
            q_scale,
            group,
        )
        rows = slice(0, num_rows)
        if self.indices is None:
            return attention.write_dense(self.q[rows], metadata, self.out[rows])
        lengths = None if self.topk_length is None else self.topk_length[rows]
        return attention.write_sparse(self.q[rows], self.indices[rows], lengths, self.out[rows])

    def _prefill(
        self,
        rest: slice,
        settings: LayerSettings,
        metadata: MLAMetadata,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write the rows that attend densely, and those behind them."""
        rows = PrefillRows(
            self.q[rest],
            self.kv_c_normed[rest],
            self.k_pe[rest],
            settings.kv_b_proj,
            settings.scale,
            self.out[rest],
            None if self.lse is None else self.lse[rest].T,
        )
        per_tensor = settings.kv_format == KvFormat.FP8
        rows.write(
            metadata.prefill_runs(settings.context_workspace_tokens),
            CachedContext(
                self.kv_cache,
                settings.kv_format,
                settings.k_scale if per_tensor else None,
                group,
            ),
        )

    def _check_metadata(self, metadata: MLAMetadata, group: dist.ProcessGroup | None) -> None:
        """Check that the requests belong to the tensors, before anything is written."""
        shard = metadata.shard
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        if (shard.rank, shard.world_size) != (rank, world_size):
            requirement = (
                f"have dcp_rank={rank} and dcp_world_size={world_size} like the dcp_group of the "
                "layer"
            )
            actual = f"dcp_rank={shard.rank} and dcp_world_size={shard.world_size}"
            fail(OP, "metadata", requirement, actual)
        if metadata.device != self.q.device:
            fail(OP, "metadata", f"be on {self.q.device} like q", metadata.device)
        if self.q.shape[0] < metadata.num_tokens:
            requirement = f"have the {metadata.num_tokens} tokens of metadata, or more"
            fail(OP, "q", requirement, self.q.shape[0])
        page_size = self.kv_cache.shape[1]
        if page_size != metadata.page_size:
            requirement = f"have the {metadata.page_size} tokens per page of metadata"
            fail(OP, "kv_cache", requirement, page_size)

    def _absorbed_rows(self, metadata: MLAMetadata) -> int:
        """Return how many rows attend in absorbed form: those that decode, or all with indices."""
        if self.indices is None:
            return metadata.num_decode_tokens
        rows = self.indices.shape[0]
        if rows == metadata.num_decode_tokens:
            return rows
        if rows in (metadata.num_tokens, self.q.shape[0]):
            return metadata.num_tokens
        requirement = (
            f"have {metadata.num_decode_tokens} rows (those that decode) or "
            f"{metadata.num_tokens} (all)"
        )
        fail(OP, "indices", requirement, rows)


def _check_ranks(
    settings: LayerSettings, metadata: MLAMetadata, absorbed: int, group: dist.ProcessGroup
) -> None:
    """Check on request that all ranks make the same step: others would wait for ever."""
    if not validation_requested(OP, metadata.device):
        return
    lengths = (metadata.query_lens, metadata.context_lens, metadata.num_decodes)
    interleave = metadata.shard.interleave
    step = (*lengths, interleave, absorbed, settings.context_workspace_tokens)
    check_same_on_all_ranks(OP, "metadata", step, group, metadata.device)
