"""Compile the kernels of the selected cases in parallel, into the cache that the run then reads."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from mlacast.bench.cases import CASES, DECODE
from mlacast.bench.chain import chain_of, has_chain
from mlacast.bench.inputs import Pools, prepare

# Kernels do not depend on the size of a pool, which every process has for itself.
_SLOTS = 1 << 12


def compile_case(name: str, device_index: int, chain: bool) -> None:
    """Run the calls of a case once on a small pool."""
    (case,) = (case for case in CASES if case.name == name)
    if case.op == DECODE:
        case = dataclasses.replace(case, rows=_SLOTS)
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    # What goes wrong here goes wrong again in the run, which reports it.
    with contextlib.suppress(Exception):
        workload = prepare(case, Pools(device), 1, 0)
        workload.call(workload.sets[0])()
        if chain and has_chain(workload):
            chain_of(workload, workload.sets[0])()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def compile_cases(names: Sequence[str], device: torch.device, *, chain: bool, jobs: int) -> None:
    """Compile for ``names`` in ``jobs`` processes; returns at once for one or none."""
    if jobs < 2 or len(names) < 2:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    # A process that has used CUDA cannot be forked.
    context = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(min(jobs, len(names)), context)
    with workers, contextlib.suppress(BrokenProcessPool):
        list(workers.map(compile_case, names, [index] * len(names), [chain] * len(names)))
