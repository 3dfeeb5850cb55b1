"""Files of saved memory: what is written comes back, and appears only when it is complete."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlacast.call_log.safetensors_file import (
    DTYPES,
    Entry,
    SafetensorsFile,
    digest_of,
    write_safetensors,
)


def bytes_of(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)


def plain(name: str, content: torch.Tensor) -> Entry:
    return Entry(name, content, torch.uint8, (content.shape[0],))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_type_keeps_its_bytes_and_its_name(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "x.safetensors"
    content = torch.tensor([1, 0] * 24, dtype=torch.uint8)
    count = 48 // torch.empty(0, dtype=dtype).element_size()
    # Of a type with elements of 8 bytes after one byte: nothing in the file is misaligned.
    entries = [plain("byte", bytes_of(1)), Entry("x", content, dtype, (2, count // 2))]
    write_safetensors(path, entries)
    tensor = load_file(path)["x"]
    assert tensor.dtype == dtype and tensor.shape == (2, count // 2)
    assert SafetensorsFile(path).read("x").tolist() == [1, 0] * 24
    assert SafetensorsFile(path).read("byte").tolist() == [0]


def test_digests_are_sha256_of_each_entry_in_the_order_given(tmp_path: Path) -> None:
    contents = [bytes_of(count) for count in (5, 0, 4096, 1)]
    # The library orders a file by its own rules.
    names = ["z", "m", "a#1", 'é["k"]']
    entries = [plain(name, content) for name, content in zip(names, contents, strict=True)]
    digests = write_safetensors(tmp_path / "x", entries)
    assert digests == [hashlib.sha256(bytes(c.tolist())).hexdigest() for c in contents]
    file = SafetensorsFile(tmp_path / "x")
    assert [file.read(name).tolist() for name in names] == [c.tolist() for c in contents]


def test_digests_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes_of(1000)
    expected = hashlib.sha256(bytes(content.tolist())).hexdigest()
    for size in (1, 7, 500, 1000, 1001):
        monkeypatch.setattr("mlacast.call_log.safetensors_file._CHUNK", size)
        assert digest_of(content) == expected


def test_nothing_at_all_is_a_file(tmp_path: Path) -> None:
    assert write_safetensors(tmp_path / "x", []) == []
    assert load_file(tmp_path / "x") == {}
    SafetensorsFile(tmp_path / "x")


def test_tensors_without_elements_and_without_dimensions(tmp_path: Path) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    entries = [
        Entry("none", empty, torch.float32, (0, 4)),
        Entry("one", torch.tensor([0, 0, 64, 64], dtype=torch.uint8), torch.float32, ()),
    ]
    write_safetensors(tmp_path / "x", entries)
    tensors = load_file(tmp_path / "x")
    assert tensors["none"].shape == (0, 4) and tensors["one"].item() == 3.0
    assert SafetensorsFile(tmp_path / "x").read("none").shape == (0,)
    assert SafetensorsFile(tmp_path / "x").read("one").tolist() == [0, 0, 64, 64]


def test_entries_may_overlap_in_memory(tmp_path: Path) -> None:
    # A result may reach beyond the argument whose memory it has.
    content = bytes_of(64)
    write_safetensors(tmp_path / "x", [plain("part", content[8:24]), plain("all", content)])
    file = SafetensorsFile(tmp_path / "x")
    assert file.read("part").tolist() == content[8:24].tolist()
    assert file.read("all").tolist() == content.tolist()


def test_files_are_for_whom_other_files_are(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_safetensors(tmp_path / "x", [plain("a", bytes_of(3))])
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("x", "other")]
    assert modes[0] == modes[1]


def test_a_file_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_safetensors(tmp_path / "nowhere" / "x", [])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="x.safetensors cannot be written: .*File too large"):
            write_safetensors(tmp_path / "x.safetensors", [plain("a", bytes_of(1 << 16))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [plain("a", bytes_of(9))])
    old = SafetensorsFile(path)
    write_safetensors(path, [plain("b", bytes_of(3))])
    assert old.read("a").tolist() == bytes_of(9).tolist()
    assert SafetensorsFile(path).read("b").tolist() == bytes_of(3).tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
