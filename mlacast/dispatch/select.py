"""Selection as a pure function, and its explanation."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from mlacast.dispatch.impls import BACKENDS, IMPLS, Impl
from mlacast.errors import UnsupportedError, check_choice

BACKEND_VARIABLE = "MLACAST_BACKEND"


@dataclass(frozen=True)
class Verdict:
    """Why one implementation does or does not cover a call; ``reason`` is empty where it does."""

    backend: str
    reason: str
    needs_package: bool = False

    @property
    def covers(self) -> bool:
        """Whether the implementation can run the call."""
        return not self.reason


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@functools.cache
def cuda_of_torch() -> tuple[int, int]:
    """Version of CUDA that this torch is built for, (0, 0) for none."""
    major, _, rest = (torch.version.cuda or "0.0").partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def judge(impl: Impl, required: Iterable[str], arch: str) -> Verdict:
    """Compare what a call needs with what an implementation has."""
    if impl.archs is not None and arch not in impl.archs:
        return Verdict(
            impl.backend, f"needs {' or '.join(sorted(impl.archs))}, the call runs on {arch}"
        )
    missing = sorted(set(required) - impl.features) if impl.features is not None else []
    if missing:
        return Verdict(impl.backend, f"missing {', '.join(missing)}")
    absent = [module for module in impl.requires if not is_installed(module)]
    if absent:
        return Verdict(impl.backend, f"needs {', '.join(absent)}, found none", needs_package=True)
    if impl.cuda is not None and cuda_of_torch() < impl.cuda:
        wanted, found = (".".join(map(str, version)) for version in (impl.cuda, cuda_of_torch()))
        return Verdict(impl.backend, f"needs torch built for CUDA {wanted}, found {found}")
    return Verdict(impl.backend, "")


def select(
    op: str,
    required: frozenset[str],
    arch: str,
    backend: str | None = None,
    impls: tuple[Impl, ...] = IMPLS,
) -> Impl:
    """Return the first implementation of the table, in order of preference, that covers the call.

    Reads neither a device nor the environment, only which optional packages are installed and what
    torch is built for. A backend asked for by name never falls back to another.

    Args:
        op: Name of the operation.
        required: Features the call needs.
        arch: Architecture the call runs on.
        backend: Name asked for, or None for the best that covers the call.
        impls: The table.

    Raises:
        ValueError: ``backend`` is no backend's name.
        ImportError: The named backend needs a package that is not installed.
        UnsupportedError: Nothing, or not the named backend, covers the call; lists what each
            candidate lacks.
    """
    if backend is not None:
        check_choice(op, "backend", backend, (None, *BACKENDS))
    rows = [impl for impl in impls if impl.op == op and backend in (None, impl.backend)]
    reasons, missing, wanting = [], [], None
    for impl in rows:
        verdict = judge(impl, required, arch)
        if verdict.covers:
            return impl
        if verdict.needs_package:
            wanting = (impl, verdict)
        reasons.append(f"{impl.backend}: {verdict.reason}")
        missing.append(verdict.reason)
    if backend is not None and wanting is not None:
        impl, verdict = wanting
        module = next(module for module in impl.requires if not is_installed(module))
        extra = module.replace("_", "")
        raise ImportError(
            f"{op}: backend {backend!r} {verdict.reason} (pip install 'mlacast[{extra}]')"
        )
    if not rows:
        have = ", ".join(sorted({impl.backend for impl in impls if impl.op == op})) or "none"
        reasons.append(f"{backend}: has no implementation of it; available: {have}")
    raise UnsupportedError(
        f"{op}: no backend covers this call on {arch} ({'; '.join(dict.fromkeys(reasons))})",
        op=op,
        backend=backend,
        missing=missing,
        arch=arch,
    )


def requested_backend(op: str, backend: str | None) -> str | None:
    """Resolve an explicit name, else MLACAST_BACKEND, else None.

    Raises:
        ValueError: MLACAST_BACKEND is set to no backend's name.
    """
    if backend:
        return backend
    name = os.environ.get(BACKEND_VARIABLE) or None
    if name is not None:
        check_choice(op, BACKEND_VARIABLE, name, BACKENDS)
    return name


@functools.cache
def load(target: str) -> Callable[..., Any]:
    """Import the function that a row of the table names."""
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
