"""The launch of the Hopper dense prefill: sections whose keys and values fit into L2 together."""

from __future__ import annotations

from dataclasses import dataclass

# Of the 50 MB of L2 that every GPU of this architecture has, or nearly.
_SECTION_BYTES = 45_000_000
_KEY_BYTES = (192 + 128) * 2
# Rows of a tile, as in ``dense_mla_prefill_tiles``.
_TILE_M = 128
# A section's sequences are counted in the registers of one warp.
MAX_SECTION_SEQUENCES = 128


@dataclass(frozen=True)
class Sections:
    """A batch as a grid of sections: some sequences by some heads.

    Attributes:
        total: Number of sections.
        head_sections: How many share the same sequences.
        sequences: Sequences of a section.
        heads: Heads of a section.
    """

    total: int
    head_sections: int
    sequences: int
    heads: int


@dataclass(frozen=True)
class HopperPrefillPlan:
    """How the Hopper dense prefill is launched.

    Attributes:
        sections: The order of its tiles.
        sequences_at_once: Sequences that a warp counts at once.
        num_programs: Programs that take tiles in turn.
        heads_per_key_head: Heads of the query that share one of the keys.
        group_heads: Heads of 128 in a group of the output.
    """

    sections: Sections
    sequences_at_once: int
    num_programs: int
    heads_per_key_head: int
    group_heads: int


def hopper_prefill_plan(
    num_rows: int,
    num_keys: int,
    batch: int,
    heads: int,
    kv_heads: int,
    features: int,
    multiprocessors: int,
) -> HopperPrefillPlan:
    """Plan a launch; pure.

    Args:
        num_rows: Rows of the query.
        num_keys: Keys of all sequences.
        batch: Sequences.
        heads: Heads of the query.
        kv_heads: Heads of the keys, a divisor of those.
        features: Elements of a token in a group of the output.
        multiprocessors: Programs that run at a time.
    """
    sections = choose_sections(batch, num_keys, heads, kv_heads)
    return HopperPrefillPlan(
        sections,
        sequences_at_once(sections),
        count_programs(num_rows, batch, heads, _TILE_M, multiprocessors),
        heads // kv_heads,
        features // 128,
    )


def count_programs(num_rows: int, batch: int, heads: int, tile_m: int, limit: int) -> int:
    """Programs that take tiles of ``tile_m`` rows of a head, at most ``limit``.

    Every sequence, and the rows of none, may have one incomplete tile.
    """
    return min((num_rows // tile_m + batch + 1) * heads, limit)


def sequences_at_once(sections: Sections) -> int:
    """Sequences that a warp counts at once: 32 where a section has no more, else 128."""
    return 32 if sections.sequences <= 32 else MAX_SECTION_SEQUENCES


def choose_sections(batch: int, num_keys: int, heads: int, kv_heads: int) -> Sections:
    """Cut a batch by its average length, which is all the host knows.

    Rows of no sequence count as one more sequence.

    Args:
        batch: Sequences.
        num_keys: Keys of all sequences.
        heads: Heads of the query.
        kv_heads: Heads of the keys.
    """
    sequence_bytes = max(num_keys * kv_heads * _KEY_BYTES // max(batch, 1), 1)
    if sequence_bytes > _SECTION_BYTES:
        parts = min(-(-sequence_bytes // _SECTION_BYTES), kv_heads)
        # Equal parts if there are: a small last one would end with long tiles for few programs.
        equal = (count for count in range(parts, 2 * parts) if kv_heads % count == 0)
        parts = next(equal, parts)
        section_heads = -(-kv_heads // parts) * (heads // kv_heads)
        head_sections = -(-heads // section_heads)
        return Sections((batch + 1) * head_sections, head_sections, 1, section_heads)
    fitting = min(_SECTION_BYTES // sequence_bytes, MAX_SECTION_SEQUENCES)
    sequences = -(-batch // -(-batch // fitting)) if batch else 1
    return Sections(-(-(batch + 1) // sequences), 1, sequences, heads)
