"""``MLAAttention``: one step of an MLA layer, from queries and latents to the quantised output."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlacast.descriptors.kv_format import KvFormat
from mlacast.distributed.groups import check_group, name_of_group
from mlacast.errors import (
    FLOAT32_MAX,
    UnsupportedError,
    check_count,
    check_finite,
    check_tensor,
    check_type,
    fail,
)
from mlacast.layers.layer_step import LayerSettings, LayerStep
from mlacast.layers.metadata import MLAMetadata
from mlacast.layers.output_buffer import GroupLayout, output_buffer
from mlacast.layers.step_operator import run_step
from mlacast.ops.output import Output

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
        self._group_name = name_of_group(dcp_group if world_size > 1 else None)
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
        _check_indices(q, indices, topk_length)
        buffer = output_buffer(
            output,
            output_scale,
            output_block_scale,
            layout,
            q.shape[0],
            self.num_heads,
            q.device,
        )
        lse = None
        if return_lse:
            lse = torch.empty((q.shape[0], self.num_heads), dtype=torch.float32, device=q.device)
        step = LayerStep(
            q, kv_c_normed, k_pe.flatten(1), kv_cache, buffer, lse, indices, topk_length
        )
        run_step(self._settings, step, metadata)
        return output if lse is None else (output, lse)

    @property
    def _settings(self) -> LayerSettings:
        return LayerSettings(
            self.scale,
            self.kv_b_proj,
            self.kv_format,
            self.q_scale,
            self.k_scale,
            self.context_workspace_tokens,
            self._group_name,
        )

    def _check_inputs(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: MLAMetadata
    ) -> None:
        """Check what is read, before anything is written."""
        check_type(FORWARD, "metadata", metadata, MLAMetadata, "an MLAMetadata")
        sizes: dict[str, Any] = {}
        device = q.device if isinstance(q, Tensor) else None
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
        if self.kv_b_proj.device != device:
            fail(FORWARD, "kv_b_proj", f"be on {device} like q", self.kv_b_proj.device)
        d_qk = self.kv_format.check_cache(FORWARD, "kv_cache", kv_cache)[2]
        if kv_cache.device != device:
            fail(FORWARD, "kv_cache", f"be on {device} like the other arguments", kv_cache.device)
        if d_qk != 576:
            fail(FORWARD, "kv_cache", "hold rows of 576 values", d_qk)


def _check_indices(q: Tensor, indices: Tensor | None, topk_length: Tensor | None) -> None:
    """Check the lists of slots, their number of rows apart."""
    if indices is None:
        if topk_length is not None:
            fail(FORWARD, "topk_length", "be None without indices", "a tensor")
        return
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
