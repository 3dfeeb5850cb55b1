"""Bytes of memory in safetensors files, with digests.

The format is the ``safetensors`` library's business. It is imported on first use, so that nobody
who saves and replays nothing pays for it. No code is part of the format, and none is executed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlacast.call_log.errors import DumpError
from mlacast.call_log.regions import host_memory

_CHUNK = 1 << 26
# First bytes of a zip archive, which torch.save writes, and of a pickle.
_PICKLES = (b"PK\x03\x04", b"\x80")
# What every supported version of the library can hold; any other dtype is stored as bytes.
DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)


@dataclass(frozen=True)
class Entry:
    """One tensor to write.

    Attributes:
        name: Its name, unique in the file.
        content: [size] uint8 on any device.
        dtype: What the file says of its elements, one of ``DTYPES``.
        shape: Shape whose elements fill ``content``.
    """

    name: str
    content: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]


def digest_of(content: Tensor) -> str:
    """SHA-256 of a [size] uint8 tensor, in hexadecimal; copied from its device piece by piece."""
    digest = hashlib.sha256()
    for start in range(0, content.shape[0], _CHUNK):
        piece = content[start : start + _CHUNK].to("cpu")
        digest.update(host_memory(piece))
    return digest.hexdigest()


def write_safetensors(path: Path, entries: Sequence[Entry]) -> list[str]:
    """Write a file, which appears under its name when it is complete.

    Returns:
        SHA-256 of the bytes of each entry as they were written.

    Raises:
        OSError: It cannot be written; there is no file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    digests = []
    for entry in entries:
        # A copy also of what is on the host: the digest is that of the bytes written, whatever
        # other threads do, and the library refuses tensors that share memory.
        content = entry.content.to("cpu", copy=True)
        digests.append(digest_of(content))
        tensors[entry.name] = content.view(entry.dtype).view(entry.shape)
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode
    try:
        save_file(tensors, partial)
    except SafetensorError as error:
        partial.unlink()
        raise OSError(f"{path} cannot be written: {error}") from None
    # The library's files are for their owner only; these are for whom the process's files are.
    partial.chmod(mode)
    os.replace(partial, path)
    return digests


class SafetensorsFile:
    """A file whose header has been read and found sound.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        DumpError: It is no safetensors file, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            with open(path, "rb") as file:
                start = file.read(4)
            if start.startswith(_PICKLES):
                reason = "is a pickle or torch.save file, which is never loaded"
                raise DumpError(f"{path} {reason}") from None
            raise DumpError(f"{path} is no safetensors file, or damaged: {error}") from None

    def read(self, name: str) -> Tensor:
        """Return the bytes of a tensor, [size] uint8 on the CPU.

        Raises:
            DumpError: The file has no tensor of this name, or one of a type that torch lacks.
        """
        from safetensors import SafetensorError

        if name not in self._file.keys():  # noqa: SIM118 - no mapping
            raise DumpError(f"{self._path} has no tensor {name!r}")
        try:
            content: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise DumpError(f"{self._path}: {name!r} cannot be read: {error}") from None
        return content.reshape(-1).view(torch.uint8)
