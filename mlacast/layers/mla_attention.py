"""``MLAAttention``: one step of an MLA layer, from queries and latents to the quantised output."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlacast.descriptors.kv_format import KvFormat
from mlacast.distributed.groups import check_group, check_same_on_all_ranks
from mlacast.errors import (
    FLOAT32_MAX,
    UnsupportedError,
    check_count,
    check_finite,
    check_tensor,
    check_type,
    fail,
)
from mlacast.layers.decode_rows import AbsorbedAttention
from mlacast.layers.metadata import MLAMetadata
from mlacast.layers.output_buffer import GroupLayout, output_buffer
from mlacast.layers.prefill_rows import CachedContext, PrefillRows, zero_rows
from mlacast.ops.output import Output
from mlacast.ops.value_checks import validation_requested

OP = "MLAAttention"
FORWARD = "MLAAttention.forward"
KV_FORMATS = (KvFormat.BF16, KvFormat.FP8, KvFormat.V32)
MAX_HEADS = 128
# What the operations are built for.
DIMS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
D_QK = 192
Scale = float | Tensor


class MLAAttention(nn.Module):
    """Attention of an MLA layer over mixed batches, quantised by whatever kernel is last for a row.

    Decode rows attend in absorbed form to the paged cache, and the product with W_UV quantises.
    Prefill rows attend densely to the new tokens; with cached context that is merged with chunks of
    it, and the last merge quantises. Both write their rows of one buffer.

    With a ``dcp_group`` the cached tokens are spread over its ranks. Decode rows attend the heads
    of all ranks to the tokens of each and are merged before W_UV; for prefill rows the context is
    gathered. Every rank calls the layer for the same requests, and so in the same order.

    Args:
        num_heads: Query heads N of this rank, 1 to 128; N times the ranks of ``dcp_group`` is at
            most 128.
        qk_nope_head_dim: 128.
        qk_rope_head_dim: 64.
        v_head_dim: 128.
        kv_lora_rank: 512.
        scale: Multiplies q.k; required. A model with YaRN has its own factor in here.
        kv_b_proj: [N * (128 + 128), 512] bfloat16, contiguous: weight of the up-projection in the
            layout of ``nn.Linear``, keys and values of a head one behind the other. Kept, not
            copied.
        kv_format: ``KvFormat.BF16``, ``FP8`` (per-tensor) or ``V32``.
        q_scale: For ``FP8`` caches: decode queries are cast to FP8, value = code * q_scale. The
            number 1.0 leaves them in bfloat16, which is more exact; a tensor always casts.
        k_scale: For ``FP8`` caches: cached value = code * k_scale. A number or a float32 tensor of
            one element, like ``q_scale``.
        context_workspace_tokens: Most cached tokens that a prefill up-projects at a time.
        dcp_group: Group of torch.distributed whose ranks share the cache of a request and have
            different heads, or None. The transport needs all_gather and all_to_all (NCCL on GPUs,
            Gloo on the CPU); scales are the same on all ranks.

    Raises:
        TypeError: An argument is not of the Python type above.
        ValueError: A shape, dtype or value breaks the contract.
        UnsupportedError: Dimensions or a cache format that no operation has.
    """

    kv_b_proj: Tensor

    def __init__(
        self,
        num_heads: int,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        kv_lora_rank: int = 512,
        *,
        scale: float,
        kv_b_proj: Tensor,
        kv_format: KvFormat = KvFormat.BF16,
        q_scale: Scale = 1.0,
        k_scale: Scale = 1.0,
        context_workspace_tokens: int = 65536,
        dcp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_type(OP, "num_heads", num_heads, int, "an int")
        if not 1 <= num_heads <= MAX_HEADS:
            fail(OP, "num_heads", f"be 1 to {MAX_HEADS}", num_heads)
        dims = (qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank)
        _check_supported(dims, kv_format)
        check_type(OP, "scale", scale, (int, float), "a number")
        check_finite(OP, "scale", scale)
        rows = num_heads * (qk_nope_head_dim + v_head_dim)
        check_tensor(
            OP,
            "kv_b_proj",
            kv_b_proj,
            f"{rows} {kv_lora_rank}",
            {},
            dtype=torch.bfloat16,
            contiguous=True,
            remedy="N * 256 rows for N heads",
        )
        for name, number in (("q_scale", q_scale), ("k_scale", k_scale)):
            _check_scale(name, number, kv_format)
        check_type(OP, "context_workspace_tokens", context_workspace_tokens, int, "an int")
        check_count(OP, "context_workspace_tokens", context_workspace_tokens, least=1)
        rank, world_size = (0, 1) if dcp_group is None else check_group(OP, "dcp_group", dcp_group)
        if num_heads * world_size > MAX_HEADS:
            most = MAX_HEADS // world_size
            requirement = f"be at most {most}, as the {world_size} ranks attend the heads of all"
            fail(OP, "num_heads", requirement, num_heads)
        self.num_heads = num_heads
        self.scale = float(scale)
        self.kv_format = kv_format
        self.q_scale = q_scale
        self.k_scale = k_scale
        self.context_workspace_tokens = context_workspace_tokens
        self.dcp_group: dist.ProcessGroup | None = dcp_group
        self.dcp_rank = rank
        self.dcp_world_size = world_size
        # The model that owns the weight saves it.
        self.register_buffer("kv_b_proj", kv_b_proj.detach(), persistent=False)

    # The operations are for inference; what comes before them keeps no graph either.
    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata,
        output: Output,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        quant_group_size: int | None = None,
        quant_scale_ue8m0: bool | None = None,
        quant_col_major: bool | None = None,
        quant_tma_aligned: bool | None = None,
        *,
        indices: Tensor | None = None,
        topk_length: Tensor | None = None,
        return_lse: bool = False,
    ) -> Output | tuple[Output, Tensor]:
        """Attend the tokens of a step and write every row of ``output``.

        Args:
            q: [T, N, 192] bfloat16, rotated; T may exceed the tokens of ``metadata``, whose rows
                come first (graph padding).
            kv_c_normed: [T, 512] bfloat16, the normed latents of the same tokens.
            k_pe: [T, 1, 64] or [T, 64] bfloat16, their rotated keys.
            kv_cache: [pages, page, 576] bfloat16 or FP8, or 656 bytes for ``V32``; holds the new
                tokens already.
            metadata: From `MLAMetadata.build`.
            output: QuantizedTensor with T tokens of N * 128 features, any format and range, or a
                bfloat16 tensor [T, N * 128] or [T, N, 128]. Together with the arguments below: FP8
                or NVFP4 codes [T, N * 128] or [T, N * 64], contiguous rows.
            output_scale: [1] float32. With FP8 codes, value = code * scale. With NVFP4, the
                multiplier 2688 / amax before encoding.
            output_block_scale: FP8: [T, N * 128 / group] float32. NVFP4: [ceil128(T), N * 8] e4m3,
                swizzled, those of the whole step.
            quant_group_size: 128 or 64, or None to take it from ``output_block_scale``.
            quant_scale_ue8m0: FP8 scales of groups are powers of two (in float32).
            quant_col_major: FP8 scales of groups have stride 1 along tokens; None: as they have.
            quant_tma_aligned: Their columns are ceil4(T) apart; None: as they are.
            indices: None to attend to everything, or int32 slots: [decode tokens, topk] for the
                decode rows, or [T or tokens of ``metadata``, topk] for every row, prefill included.
                With a ``dcp_group``, slots of this rank, from
                ``mlacast.distributed.local_indices``; topk may differ between ranks.
            topk_length: [rows of indices] int32 or None: entries of each row that count.
            return_lse: Return the natural-log sums as well.

        Returns:
            ``output``, or (output, lse [T, N] float32). Rows behind the tokens of ``metadata`` are
            zeros, their lse -inf, and scale padding of a whole buffer is zeroed.

        Raises:
            TypeError: An argument is not of the Python type above.
            ValueError: A shape, dtype, stride, device or value breaks the contract.
            UnsupportedError: No backend covers the call.
        """
        layout = GroupLayout(
            quant_group_size, quant_scale_ue8m0, quant_col_major, quant_tma_aligned
        )
        self._check_inputs(q, kv_c_normed, k_pe, kv_cache, metadata)
        buffer = output_buffer(
            output,
            output_scale,
            output_block_scale,
            layout,
            q.shape[0],
            self.num_heads,
            q.device,
        )
        num_absorbed = self._absorbed_tokens(q, metadata, indices, topk_length)
        self._check_ranks(metadata, num_absorbed)
        lse = None
        if return_lse:
            shape = (q.shape[0], self.num_heads)
            lse = torch.full(shape, -float("inf"), dtype=torch.float32, device=q.device)
        if num_absorbed > 0:
            decoded = self._decode(
                q[:num_absorbed], kv_cache, metadata, buffer[:num_absorbed], indices, topk_length
            )
            if lse is not None:
                lse[:num_absorbed] = decoded
        rest = slice(num_absorbed, q.shape[0])
        if num_absorbed == metadata.num_tokens:
            if rest.start < rest.stop:
                zero_rows(q[rest], buffer[rest])
        else:
            per_tensor = self.kv_format == KvFormat.FP8
            rows = PrefillRows(
                q[rest],
                kv_c_normed[rest],
                k_pe.flatten(1)[rest],
                self.kv_b_proj,
                self.scale,
                buffer[rest],
                None if lse is None else lse[rest].T,
            )
            rows.write(
                metadata.prefill_runs(self.context_workspace_tokens),
                CachedContext(
                    kv_cache,
                    self.kv_format,
                    self.k_scale if per_tensor else None,
                    self._sharing_group,
                ),
            )
        return output if lse is None else (output, lse)

    def _decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata,
        out: Output,
        indices: Tensor | None,
        topk_length: Tensor | None,
    ) -> Tensor:
        """Write the rows that attend in absorbed form; return their lse [n, N]."""
        sm_scale: Scale = self.scale
        v_scale: Scale = 1.0
        q_scale: Scale | None = None
        if self.kv_format == KvFormat.FP8:
            v_scale = self.k_scale
            sm_scale = self.k_scale * self.scale
            if isinstance(self.q_scale, Tensor) or self.q_scale != 1.0:
                q_scale = self.q_scale
                sm_scale = sm_scale * q_scale
        attention = AbsorbedAttention(
            kv_cache,
            self.kv_format,
            self.kv_b_proj,
            sm_scale,
            v_scale,
            q_scale,
            self._sharing_group,
        )
        if indices is None:
            return attention.write_dense(q, metadata, out)
        rows = slice(0, q.shape[0])
        lengths = None if topk_length is None else topk_length[rows]
        return attention.write_sparse(q, indices[rows], lengths, out)

    def _check_inputs(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: MLAMetadata
    ) -> None:
        """Check what is read, before anything is written."""
        check_type(FORWARD, "metadata", metadata, MLAMetadata, "an MLAMetadata")
        sizes: dict[str, Any] = {}
        device = metadata.device
        for name, tensor, dims in (
            ("q", q, f"T {self.num_heads} {D_QK}"),
            ("kv_c_normed", kv_c_normed, "T 512"),
            ("k_pe", k_pe, ("T 1 64", "T 64")),
        ):
            check_tensor(
                FORWARD,
                name,
                tensor,
                dims,
                sizes,
                dtype=torch.bfloat16,
                device=device,
                last_dim_contiguous=True,
            )
        shard = metadata.shard
        if (shard.rank, shard.world_size) != (self.dcp_rank, self.dcp_world_size):
            requirement = (
                f"have dcp_rank={self.dcp_rank} and dcp_world_size={self.dcp_world_size} like the "
                "dcp_group of the layer"
            )
            actual = f"dcp_rank={shard.rank} and dcp_world_size={shard.world_size}"
            fail(FORWARD, "metadata", requirement, actual)
        if q.shape[0] < metadata.num_tokens:
            requirement = f"have the {metadata.num_tokens} tokens of metadata, or more"
            fail(FORWARD, "q", requirement, q.shape[0])
        if self.kv_b_proj.device != device:
            fail(FORWARD, "kv_b_proj", f"be on {device} like metadata", self.kv_b_proj.device)
        _, page_size, d_qk = self.kv_format.check_cache(FORWARD, "kv_cache", kv_cache)
        if kv_cache.device != device:
            fail(FORWARD, "kv_cache", f"be on {device} like the other arguments", kv_cache.device)
        if d_qk != 576:
            fail(FORWARD, "kv_cache", "hold rows of 576 values", d_qk)
        if page_size != metadata.page_size:
            requirement = f"have the {metadata.page_size} tokens per page of metadata"
            fail(FORWARD, "kv_cache", requirement, page_size)

    @property
    def _sharing_group(self) -> dist.ProcessGroup | None:
        """The group, if there is another rank in it."""
        return self.dcp_group if self.dcp_world_size > 1 else None

    def _check_ranks(self, metadata: MLAMetadata, num_absorbed: int) -> None:
        """Check on request that all ranks make the same step: others would wait for ever."""
        group = self._sharing_group
        if group is None or not validation_requested(FORWARD, metadata.device):
            return
        lengths = (metadata.query_lens, metadata.context_lens, metadata.num_decodes)
        step = (*lengths, metadata.shard.interleave, num_absorbed, self.context_workspace_tokens)
        check_same_on_all_ranks(FORWARD, "metadata", step, group, metadata.device)

    def _absorbed_tokens(
        self,
        q: Tensor,
        metadata: MLAMetadata,
        indices: Tensor | None,
        topk_length: Tensor | None,
    ) -> int:
        """Return how many rows attend in absorbed form: those that decode, or all with indices."""
        if indices is None:
            if topk_length is not None:
                fail(FORWARD, "topk_length", "be None without indices", "a tensor")
            return metadata.num_decode_tokens
        sizes: dict[str, Any] = {}
        check_tensor(
            FORWARD,
            "indices",
            indices,
            "rows topk",
            sizes,
            dtype=torch.int32,
            device=q.device,
            last_dim_contiguous=True,
        )
        if topk_length is not None:
            check_tensor(
                FORWARD,
                "topk_length",
                topk_length,
                "rows",
                sizes,
                dtype=torch.int32,
                device=q.device,
            )
        rows = indices.shape[0]
        if rows == metadata.num_decode_tokens:
            return rows
        if rows in (metadata.num_tokens, q.shape[0]):
            return metadata.num_tokens
        requirement = (
            f"have {metadata.num_decode_tokens} rows (those that decode) or "
            f"{metadata.num_tokens} (all)"
        )
        fail(FORWARD, "indices", requirement, rows)


def _check_supported(dims: tuple[int, ...], kv_format: KvFormat) -> None:
    """Raise UnsupportedError for a layer that no operation can compute."""
    for (name, built), wanted in zip(DIMS.items(), dims, strict=True):
        check_type(OP, name, wanted, int, "an int")
        if wanted != built:
            raise UnsupportedError(
                f"{OP}: {name}={wanted}: only {built} is built", op=OP, missing=(name,)
            )
    check_type(OP, "kv_format", kv_format, KvFormat, "a mlacast.KvFormat such as KvFormat.BF16")
    if kv_format not in KV_FORMATS:
        names = ", ".join(repr(known) for known in KV_FORMATS)
        raise UnsupportedError(
            f"{OP}: kv_format={kv_format!r}: latents of 512 values and a rotated key of 64 are in "
            f"{names}",
            op=OP,
            missing=(f"kv:{kv_format.name}",),
        )


def _check_scale(name: str, scale: Scale, kv_format: KvFormat) -> None:
    """Check a scale of FP8 caches and queries."""
    check_type(OP, name, scale, (int, float, Tensor), "a number or a torch.Tensor")
    if isinstance(scale, Tensor):
        check_tensor(OP, name, scale.reshape(-1), "1", {}, dtype=torch.float32)
    elif not 0.0 < scale <= FLOAT32_MAX:
        fail(OP, name, "be positive and finite in float32", scale)
    if kv_format != KvFormat.FP8 and (isinstance(scale, Tensor) or scale != 1.0):
        fail(OP, name, f"be 1.0 for {kv_format!r}, which carries its own scales", "a scale")
