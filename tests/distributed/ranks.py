"""Processes that form a group, and what each of them finds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

# How long a rank waits for the others; on a GPU they may be compiling kernels.
PATIENCE = {
    "gloo": datetime.timedelta(seconds=60),
    "nccl": datetime.timedelta(seconds=300),
}
# What one rank found, by subject.
Found = dict[str, Any]
Work = Callable[[], Found]


def found_by_ranks(work: Work, world: int, folder: Path, backend: str = "gloo") -> list[Found]:
    """Run ``work``, a function of a module, in ``world`` processes; return what each returned."""
    spawn(_run, (work, world, folder, backend), nprocs=world)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _run(rank: int, work: Work, world: int, folder: Path, backend: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=PATIENCE[backend],
    )
    try:
        torch.save(work(), folder / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
