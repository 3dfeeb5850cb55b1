"""Names, order, kinds and defaults of the parameters, as the drop-in contract pins them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mlacast.compat import flash_mla

FUSED = flash_mla.fused_norm_rope_attn_rope_cast
LEAD = (
    "enable_q_norm, rms_norm_eps, token_positions, is_rope_neox_style, rope_dim, cos_sin_cache, "
    "n_wv_group, num_per_channels, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, "
)


@dataclass(frozen=True)
class Pinned:
    """A function and the parameter list it must have, written as in a ``def`` line."""

    id: str
    function: Callable[..., Any]
    parameters: str


PINNED = (
    Pinned("get_mla_metadata", flash_mla.get_mla_metadata, "*args, **kwargs"),
    Pinned(
        "flash_mla_with_kvcache",
        flash_mla.flash_mla_with_kvcache,
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
        "num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, "
        "attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, "
        "extra_topk_length=None, out=None",
    ),
    Pinned(
        "flash_mla_sparse_fwd",
        flash_mla.flash_mla_sparse_fwd,
        "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None",
    ),
    Pinned(
        "prefill",
        FUSED.prefill,
        LEAD + "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None",
    ),
    Pinned(
        "decode",
        FUSED.decode,
        LEAD + "q, k_cache, indices_in_kvcache, sm_scale, d_v=512, attn_sink=None, "
        "topk_length=None, extra_k_cache=None, extra_indices_in_kvcache=None, "
        "extra_topk_length=None, out=None",
    ),
    Pinned("permute_q_b_proj", FUSED.permute_q_b_proj, "weight_and_sf, h_q, d_q"),
    Pinned("permute_wv_proj", FUSED.permute_wv_proj, "weight_and_sf, wv_group_size, d_o"),
    Pinned("set_v41_placement", flash_mla.set_v41_placement, "placement"),
)


def parameters_of(text: str) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each parameter of ``def f(text)``."""
    scope: dict[str, Any] = {}
    exec(f"def f({text}): ...", scope)
    return described(scope["f"])


def described(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("pinned", PINNED, ids=lambda pinned: pinned.id)
def test_parameters_equal_the_pinned_text(pinned: Pinned) -> None:
    assert described(pinned.function) == parameters_of(pinned.parameters)


def test_get_mla_metadata_is_lazy_and_takes_anything() -> None:
    metadata, num_splits = flash_mla.get_mla_metadata(object(), 3, None, topk="whatever")
    assert type(metadata) is flash_mla.FlashMLASchedMeta
    assert num_splits is None
    assert metadata.have_initialized is False
    assert metadata.config is None
    assert metadata.tile_scheduler_metadata is None
    assert metadata.num_splits is None
    assert flash_mla.get_mla_metadata()[0] is not metadata


def test_sched_meta_can_be_made_without_arguments() -> None:
    fresh = flash_mla.FlashMLASchedMeta()
    assert (fresh.have_initialized, fresh.config) == (False, None)
    assert (fresh.tile_scheduler_metadata, fresh.num_splits) == (None, None)
