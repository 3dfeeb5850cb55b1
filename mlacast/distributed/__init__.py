"""Decode context parallelism: a cache spread over ranks, and what they exchange.

Which rank holds which token is plain arithmetic (`KvShard`); everything that moves goes through the
collectives of torch.distributed.
"""

from mlacast.distributed.exchange import gather_heads, gather_rows, merge_over_ranks
from mlacast.distributed.groups import check_group, check_same_on_all_ranks
from mlacast.distributed.shard import KvShard
from mlacast.distributed.slots import local_indices, local_slots

__all__ = [
    "KvShard",
    "check_group",
    "check_same_on_all_ranks",
    "gather_heads",
    "gather_rows",
    "local_indices",
    "local_slots",
    "merge_over_ranks",
]
