"""Groups of processes: what may stand for one, and whether its ranks agree."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from mlacast.errors import check_type, fail

# Operators take names of groups. An entry keeps its group, so that no other can get its name.
_NAMED: list[dist.ProcessGroup] = []


def check_group(op: str, argument: str, group: object) -> tuple[int, int]:
    """Check a group of processes.

    Args:
        op: Name that opens a message.
        argument: Name of the argument.
        group: What was given.

    Returns:
        The rank of this process in the group, and the number of its ranks.

    Raises:
        TypeError: Not a group of torch.distributed that this process is in.
        ValueError: The group has been destroyed.
    """
    if not dist.is_available():
        raise TypeError(f"{op}: {argument} must be None: this torch has no torch.distributed")
    wanted = "a torch.distributed.ProcessGroup that this process is in, or None"
    check_type(op, argument, group, dist.ProcessGroup, wanted)
    assert isinstance(group, dist.ProcessGroup), "check_type let something else pass"
    if not dist.is_initialized():
        fail(op, argument, "be a group that still exists", "a destroyed one")
    return group.rank(), group.size()


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """Return a name for a group, the same one every time, "" for None.

    Names of torch.distributed are given again once their groups are destroyed; these are not.
    """
    if group is None:
        return ""
    known = (at for at, other in enumerate(_NAMED) if other is group)
    at = next(known, len(_NAMED))
    if at == len(_NAMED):
        _NAMED.append(group)
    return str(at)


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the group that ``name_of_group`` gave a name."""
    return _NAMED[int(name)] if name else None


def gather_into(received: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``received`` with the messages of all ranks, in order of ranks."""
    # Newer versions of torch have a new name for it, and warn of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, message, group=group)


def check_same_on_all_ranks(
    op: str, argument: str, value: object, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Compare a value, by its ``repr``, with that of every other rank. Synchronises.

    Args:
        op: Name that opens a message.
        argument: Name of what the value describes.
        value: Numbers and tuples of them.
        group: Ranks that all call this.
        device: Where the transport of the group takes tensors.

    Raises:
        ValueError: Ranks differ; all of them raise.
    """
    digest = torch.tensor([zlib.crc32(repr(value).encode())], dtype=torch.int64, device=device)
    digests = digest.new_empty(group.size())
    gather_into(digests, digest, group)
    differing = (digests != digests[0]).nonzero().flatten().tolist()
    if differing:
        actual = f"{value!r} on rank {group.rank()}"
        fail(op, argument, f"be the same on all ranks; {differing} differ from rank 0", actual)
