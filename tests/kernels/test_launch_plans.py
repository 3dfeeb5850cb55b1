"""What launchers pass on, by hand: tiles, programs and numbers, chosen by pure functions."""

from __future__ import annotations

import math

import pytest
import torch

from mlacast.descriptors.out_format import Bf16
from mlacast.descriptors.quantized_tensor import QuantizedTensor
from mlacast.kernels.config import sparse_attention
from mlacast.kernels.config.attention import PoolConfig, rows_config
from mlacast.kernels.config.caches import RopeConfig, RopePlan, rope_quantize_plan
from mlacast.kernels.config.decode_metadata import metadata_config
from mlacast.kernels.config.dense_prefill import PrefillConfig, prefill_plan, score_scale
from mlacast.kernels.config.dense_prefill_sections import Sections, hopper_prefill_plan
from mlacast.kernels.config.grouped_out_project import plan_product
from mlacast.kernels.config.hopper_grouped_out_project import (
    TWO_LOADERS,
    VARIANTS,
    ProductConfig,
    ProductPlan,
    choose_product,
    product_plan,
)
from mlacast.kernels.config.hopper_grouped_out_project_few import FewPlan
from mlacast.kernels.config.merge_attention_states import (
    MergeConfig,
    MergePlan,
    merge_plan,
    merge_rounds,
)
from mlacast.kernels.config.output import OutputConfig, float32_config, output_config
from mlacast.kernels.config.sparse_attention import (
    HopperDecodePlan,
    PortableDecodePlan,
    PrefillPlan,
    PrefillWork,
    TileConfig,
    WorkConfig,
    few_heads_tile,
    few_heads_work,
    has_few_heads,
    hopper_decode_plan,
    plan_portable_decode,
    portable_decode_plan,
    prefill_576_plan,
    tile_config,
)
from mlacast.kernels.config.v_up_project import v_up_config

LARGE, SMALL = 227 << 10, 99 << 10
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("batch", "program"),
    [(0, (64, 1)), (64, (64, 1)), (65, (1024, 4)), (1025, (8192, 16)), (8192, (8192, 16))],
)
def test_the_program_of_decode_metadata_holds_the_batch(
    batch: int, program: tuple[int, int]
) -> None:
    assert metadata_config(batch) == program


def test_no_program_of_decode_metadata_holds_more() -> None:
    with pytest.raises(AssertionError, match="larger batches"):
        metadata_config(8193)


@pytest.mark.parametrize(
    ("num_splits", "plan"),
    [
        # 132 multiprocessors have 32 programs of an un-split launch four times, and a bit.
        (None, PortableDecodePlan(TileConfig(32, 32, 4, 2), 4, 32)),
        (7, PortableDecodePlan(TileConfig(32, 32, 4, 2), 7, 32)),
        # 640 columns are 20 blocks.
        (64, PortableDecodePlan(TileConfig(32, 32, 4, 2), 20, 32)),
    ],
)
def test_a_portable_decode_has_no_more_splits_than_blocks(
    num_splits: int | None, plan: PortableDecodePlan
) -> None:
    assert portable_decode_plan(32, 24, 640, 132, LARGE, num_splits, False) == plan


@pytest.mark.parametrize(
    ("num_tokens", "num_splits", "plan"),
    [
        # 16 tiles of 64 heads leave eight programs to each; ten blocks of 64 keys go by two.
        (8, None, HopperDecodePlan(WorkConfig(2, False, True), 5, 80, 80)),
        # Twice 70 items are more than run at a time.
        (1, 70, HopperDecodePlan(WorkConfig(2, False, True), 70, 140, 132)),
        (1, 1, HopperDecodePlan(WorkConfig(2, False, False), 1, 2, 2)),
    ],
)
def test_a_hopper_decode_has_no_more_programs_than_multiprocessors(
    num_tokens: int, num_splits: int | None, plan: HopperDecodePlan
) -> None:
    assert hopper_decode_plan(num_tokens, 65, 640, 132, num_splits, False) == plan


_V4, _V41, _FP4 = (PoolConfig(name) for name in ("v4", "v41", "v41_fp4"))
_PACKED = OutputConfig(4, 32, 4096, False, 1e-4, 0)


@pytest.mark.parametrize(
    ("num_heads", "is_split", "pool", "extra", "kind", "chosen"),
    [
        (16, False, _V4, _V4._replace(has_length=True), 4, True),
        (1, False, _V41._replace(is_inline=True), None, 0, True),
        (8, False, _V41, _V41._replace(is_inline=True), 5, True),
        (32, False, _V4, _V4, 4, True),
        (17, False, _V41, None, 3, True),
        (33, False, _V4, _V4, 4, False),
        (16, True, _V4, _V4, 4, False),
        (16, False, _V41, _FP4, 4, False),
        (16, False, PoolConfig("v32"), None, 4, False),
        (16, False, PoolConfig("fp8_512"), None, 4, False),
        (16, False, _V4, _V4, 2, False),
    ],
    ids=[
        "two pools",
        "one",
        "both placements",
        "32 heads",
        "17 heads",
        "heads",
        "splits",
        "fp4",
        "v32",
        "fp8",
        "float32 scales",
    ],
)
def test_few_heads_have_a_kernel_of_their_own(
    num_heads: int,
    is_split: bool,
    pool: PoolConfig,
    extra: PoolConfig | None,
    kind: int,
    chosen: bool,
) -> None:
    output = _PACKED._replace(kind=kind)
    assert has_few_heads(num_heads, is_split, pool, extra, output) is chosen


@pytest.mark.parametrize(
    ("num_heads", "tile", "is_full"),
    [
        (1, 16, False),
        (15, 16, False),
        (16, 16, True),
        (17, 32, False),
        (24, 32, False),
        (32, 32, True),
    ],
)
def test_a_token_of_few_heads_is_one_tile(num_heads: int, tile: int, is_full: bool) -> None:
    assert few_heads_tile(num_heads) == tile
    assert few_heads_work(num_heads) == WorkConfig(1, is_full, False)


@pytest.mark.parametrize(
    ("num_heads", "large", "small"),
    [(1, 16, 16), (16, 16, 16), (17, 32, 16), (32, 32, 16), (33, 64, 16), (128, 64, 16)],
)
def test_portable_tiles_are_the_smallest_that_hold_the_heads(
    num_heads: int, large: int, small: int
) -> None:
    assert tile_config(num_heads, LARGE).block_h == large
    assert tile_config(num_heads, SMALL).block_h == small


def test_plans_of_calls_are_made_of_the_multiprocessors_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token of 16 heads and 20 blocks of 32 keys, of which a split takes two at least."""
    monkeypatch.setattr(sparse_attention, "num_multiprocessors", {GPU: 132, CPU: 1}.__getitem__)
    monkeypatch.setattr(sparse_attention, "shared_memory_of", {GPU: SMALL, CPU: LARGE}.__getitem__)
    assert plan_portable_decode(1, 16, 640, GPU, False) == 10
    assert plan_portable_decode(1, 16, 640, CPU, False) == 1
    # 64 heads are four tiles where little memory is shared.
    assert plan_portable_decode(4, 64, 640, GPU, False) == 132 // 16


def test_a_portable_decode_that_shares_little_memory() -> None:
    """Whatever its heads, 16 of them a tile."""
    plan = portable_decode_plan(3, 100, 640, 132, SMALL, 5, False)
    assert plan == PortableDecodePlan(TileConfig(16, 32, 4, 2), 5, 21)
    assert portable_decode_plan(3, 100, 640, 132, LARGE, 5, False).tiles.block_h == 64


@pytest.mark.parametrize("has_length", [False, True])
def test_rows_are_a_pool_without_scales(has_length: bool) -> None:
    lengths = torch.ones(3, dtype=torch.int32) if has_length else None
    assert rows_config(lengths) == PoolConfig("rows", is_inline=False, has_length=has_length)


def test_float32_rows_are_stored_as_plain_ones_of_one_group() -> None:
    """As into a bfloat16 buffer whose one group is as wide; no group of either has a floor."""
    plain = output_config(QuantizedTensor.empty(2, 1, 2048, Bf16()))
    assert float32_config(2048) == plain._replace(amax_floor=0.0)


def test_programs_of_the_hopper_prefills() -> None:
    shared = sparse_attention.prefill_plan(20, 128, 132)
    assert shared == PrefillPlan(PrefillWork(2, True, 2), 80)
    assert sparse_attention.prefill_plan(100, 65, 132) == ((2, False, 1), 132)
    assert prefill_576_plan(20, 65, 132) == PrefillPlan(WorkConfig(2, False, False), 40)
    assert prefill_576_plan(100, 128, 132) == ((2, True, False), 132)


@pytest.mark.parametrize(
    ("scale", "sign", "magnitude"), [(0.125, 1.0, 0.125), (-3.0, -1.0, 3.0), (0.0, 0.0, 1.0)]
)
def test_scores_have_a_positive_scale(scale: float, sign: float, magnitude: float) -> None:
    """The product of both is the scale, in powers of two; that of 0 is any, times 0."""
    query_sign, positive = score_scale(scale)
    assert query_sign == sign
    assert positive == magnitude * math.log2(math.e)
    assert query_sign * positive == scale * math.log2(math.e)


def test_a_scale_that_float32_does_not_hold_is_zero() -> None:
    assert score_scale(1e-50) == score_scale(-1e-50) == (0.0, math.log2(math.e))
    assert score_scale(-(2.0**-149)) == (-1.0, 2.0**-149 * math.log2(math.e))


def test_a_plan_of_the_portable_dense_prefill() -> None:
    """Two sequences of 100 tokens together: five tiles of 64 rows with what may lie around."""
    plan = prefill_plan(100, 2, 8, 2, 64, 4096, -0.5, LARGE)
    assert plan.config == PrefillConfig(64, 64, 4, 2)
    assert plan[1:5] == (5, 40, 4, 8)
    assert (plan.query_sign, plan.score_scale) == (-1.0, 0.5 * math.log2(math.e))


def test_a_plan_of_the_hopper_dense_prefill() -> None:
    """8 x 1024 tokens of 16 heads: all of a head fits, 8 tiles of each sequence and some more."""
    plan = hopper_prefill_plan(8192, 8192, 8, 16, 16, 2048, 132)
    assert plan.sections == Sections(total=3, head_sections=1, sequences=4, heads=16)
    assert (plan.sequences_at_once, plan.num_programs) == (32, 132)
    assert (plan.heads_per_key_head, plan.group_heads) == (1, 16)
    few = hopper_prefill_plan(130, 100, 2, 8, 2, 512, 132)
    assert few.num_programs == (130 // 128 + 3) * 8
    assert (few.heads_per_key_head, few.group_heads) == (4, 4)


def test_a_plan_of_the_merge() -> None:
    """Blocks of 128 features: of 3 heads of 96 the third is not full, 8 fill a program."""
    tile = MergeConfig(2, 96, 288, block_t=8, block_b=8, width=128, num_warps=8)
    assert merge_plan(2, 17, 3, 96) == MergePlan(tile, num_blocks=3, num_programs=3)
    full = tile._replace(parts=4, d=512, features=0)
    assert merge_plan(4, 16, 128, 512) == MergePlan(full, num_blocks=512, num_programs=128)


@pytest.mark.parametrize(
    ("parts", "rounds"),
    # Four become one: of five two are left, of seven four, of eight five.
    [(1, (1,)), (4, (4,)), (5, (4, 2)), (7, (4, 4)), (8, (4, 4, 2)), (10, (4, 4, 4))],
)
def test_the_launches_of_a_merge(parts: int, rounds: tuple[int, ...]) -> None:
    assert merge_rounds(parts) == rounds


@pytest.mark.parametrize(
    ("stride_latent", "stride_value", "is_wide"),
    [
        (128, 1, False),
        (1, 512, False),
        # A tile is 64 latent dimensions by 128 values.
        (2**25 - 3, 1, False),
        (2**25 - 2, 1, True),
        (1, 2**24 - 1, False),
        (1, 2**24, True),
    ],
)
def test_tiles_of_far_weights_have_offsets_of_64_bits(
    stride_latent: int, stride_value: int, is_wide: bool
) -> None:
    for tokens, block_m in ((64, 64), (65, 128)):
        config = v_up_config(tokens, stride_latent, stride_value)
        assert config == (block_m, 64, block_m // 16, 4, is_wide)


def test_a_plan_of_rope_and_fp8() -> None:
    """17 rows of queries, 3 of keys; and of values where they have columns."""
    config = RopeConfig(rows=4, num_warps=4, pinned=True, ahead=True)
    assert rope_quantize_plan(1, 17, 3, False) == RopePlan(config, 5, 1, 6)
    assert rope_quantize_plan(1, 17, 3, True) == RopePlan(config, 5, 1, 7)
    wide = RopeConfig(rows=8, num_warps=4)
    assert rope_quantize_plan(100, 128, 1, True) == RopePlan(wide, 1600, 13, 1626)
    assert rope_quantize_plan(1, 17, 3, False, wide) == RopePlan(wide, 3, 1, 4)


def test_a_plan_of_the_hopper_projection() -> None:
    """4 groups of 256 columns: 8 or 16 tiles of 64 rows on 132 multiprocessors."""
    sizes = (64, 256, 4, 4096)
    plan = product_plan(sizes, torch.int32, torch.int32, 132)
    assert plan == ProductPlan(TWO_LOADERS, ProductConfig(32, 4, True, True), 16, 128)
    plan = product_plan(sizes, torch.float32, torch.float32, 6)
    assert plan.product == ProductConfig(32, 1, False, False)
    assert (plan.variant, plan.num_programs, plan.max_registers) == (VARIANTS[1], 6, 168)
    given = product_plan(sizes, torch.float32, torch.int32, 132, VARIANTS[0])
    assert given == (VARIANTS[0], ProductConfig(32, 4, False, True), 8, 168)


def test_the_kernel_of_a_hopper_projection() -> None:
    """For few tokens, and scales per 32 on both sides, that of few tokens; or the one given."""
    words, numbers = torch.int32, torch.float32
    few = FewPlan(block_m=64, block_n=64, stages=8, steps=32, room=16)
    assert choose_product((64, 256, 4, 4096), words, words, 132) == few
    for tokens, sf, weight_sf in ((65, words, words), (64, words, numbers), (64, numbers, words)):
        sizes = (tokens, 256, 4, 4096)
        plan = choose_product(sizes, sf, weight_sf, 132)
        assert plan == product_plan(sizes, sf, weight_sf, 132)
    # One step has no second consumer.
    assert isinstance(choose_product((64, 256, 4, 128), words, words, 132), ProductPlan)
    sizes = (64, 256, 4, 4096)
    given = choose_product(sizes, words, words, 132, TWO_LOADERS)
    assert given == product_plan(sizes, words, words, 132, TWO_LOADERS)
    wide = FewPlan(64, 64, 10, 32, 16)
    assert choose_product(sizes, words, words, 132, wide) == wide
    for other in (wide._replace(block_m=32), wide._replace(steps=31)):
        with pytest.raises(AssertionError):
            choose_product(sizes, words, words, 132, other)


GROUPS_128 = OutputConfig(2, 128, 4096, False, 1e-10, 0)
PACKED_32 = OutputConfig(4, 32, 4096, False, 1e-4, 0)
TO_NVFP4 = OutputConfig(5, 16, 4096, False, 0.0, 64)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("weight", "device", "in_float32"),
    [
        (torch.bfloat16, "meta", False),
        (torch.float8_e4m3fn, "meta", False),
        # bfloat16 would round them.
        (torch.float32, "meta", True),
        (torch.float16, "meta", True),
        (torch.bfloat16, "cpu", True),
    ],
)
def test_numbers_are_multiplied_as_what_holds_them(
    weight: torch.dtype, device: str, in_float32: bool
) -> None:
    weights = torch.empty(1, 1, 1, dtype=weight, device=device)
    _, product = plan_product(TO_NVFP4, weights, None, True, 64, LARGE)
    assert product.in_float32 is in_float32


@pytest.mark.parametrize(
    ("weight", "shared_memory", "stages"),
    # An H200, an A100, an L40S.
    [
        (torch.float32, LARGE, 4),
        (torch.float32, 163 << 10, 2),
        (torch.float16, SMALL, 2),
        (torch.bfloat16, SMALL, 4),
    ],
)
def test_float32_operands_have_fewer_stages_where_they_would_not_fit(
    weight: torch.dtype, shared_memory: int, stages: int
) -> None:
    weights = torch.empty(1, 1, 1, dtype=weight, device=META)
    variant, _ = plan_product(TO_NVFP4, weights, None, True, 4096, shared_memory)
    assert variant.num_stages == stages


@pytest.mark.parametrize(
    ("source", "scales", "native", "multiplies_codes", "block_k"),
    [
        (GROUPS_128, torch.float32, True, True, 128),
        (GROUPS_128, torch.float32, False, False, 64),
        (GROUPS_128, None, True, False, 64),
        (PACKED_32, torch.float32, True, True, 32),
        (PACKED_32, torch.int32, True, False, 64),
        (TO_NVFP4, None, True, False, 64),
    ],
)
def test_codes_are_multiplied_where_scales_are_of_whole_blocks(
    source: OutputConfig,
    scales: torch.dtype | None,
    native: bool,
    multiplies_codes: bool,
    block_k: int,
) -> None:
    weights = torch.empty(1, 1, 1, dtype=torch.float8_e4m3fn, device=META)
    weight_sf = None if scales is None else torch.empty(1, 1, 1, dtype=scales, device=META)
    variant, product = plan_product(source, weights, weight_sf, native, 64, LARGE)
    assert product.multiplies_codes is multiplies_codes
    assert (variant.block_m, variant.block_n, variant.block_k) == (64, 64, block_k)
    assert product.w_factor is (scales == torch.float32)
    assert product.w_operand is (scales == torch.int32)
