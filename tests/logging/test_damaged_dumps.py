"""Dumps that are damaged, edited or hostile are refused in plain words, and execute nothing."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlacast.call_log.errors import DumpError
from mlacast.call_log.listing import list_dumps
from mlacast.call_log.replay import replay_dump
from mlacast.call_log.safetensors_file import SafetensorsFile
from tests.logging.calls import prefill_arguments, rope_for
from tests.logging.observed import Log, forge, records_of


@pytest.fixture
def folder(dump_log: Log) -> Path:
    """A sound dump of one call."""
    dump_log.observed("sparse_mla_prefill")(**prefill_arguments(), rope=rope_for(3))
    (folder,) = dump_log.dumps
    assert replay_dump(folder, compare=True).outcome == "same"
    return folder


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.fuse, "boom")


@pytest.mark.parametrize("make", ["torch.save", "pickle", "old torch.save"])
def test_a_pickle_is_refused_and_not_loaded(folder: Path, tmp_path: Path, make: str) -> None:
    fuse = tmp_path / "fuse"
    with open(folder / "inputs.safetensors", "wb") as file:
        if make == "pickle":
            pickle.dump(Bomb(fuse), file)
        else:
            new = make == "torch.save"
            torch.save({"q": Bomb(fuse)}, file, _use_new_zipfile_serialization=new)
    with pytest.raises(DumpError, match="is a pickle or torch.save file, which is never loaded"):
        replay_dump(folder)
    assert not fuse.exists()


def test_missing_parts_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        replay_dump(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no metadata.jsonl: no dump, or one cut off"):
        replay_dump(tmp_path)
    (folder / "inputs.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="inputs.safetensors"):
        replay_dump(folder)


def test_an_edited_record_is_refused(folder: Path) -> None:
    path = folder / "metadata.jsonl"
    text = path.read_text()
    assert '"value":0.05' in text
    path.write_text(text.replace('"value":0.05', '"value":0.06'))
    with pytest.raises(DumpError, match="line 1 does not match its checksum: it is damaged or was"):
        replay_dump(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no complete line"),
        ("{}", "has no complete line"),
        ("{}\n", "line 1 is no record of mlacast; dumps of other libraries are not read"),
        ("[]\n", "line 1 is no record of mlacast"),
        ("nonsense\n", "line 1 is no JSON"),
        ("[" * 100_000 + "\n", "line 1 is no JSON"),
        ('{"execution_status": "completed", "function_name": "f"}\n', "is no record of mlacast"),
        (
            '{"format": "mlacast dump", "format_version": 2}\n',
            "format version 2, this mlacast reads",
        ),
        ('{"format": "mlacast dump", "format_version": 1}\n', "does not match its checksum"),
        ("\x00\xff\n", "line 1 is no JSON"),
    ],
)
def test_a_record_that_is_none(folder: Path, text: str, message: str) -> None:
    (folder / "metadata.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(DumpError, match=message):
        replay_dump(folder)
    (listed,) = list_dumps(folder)
    assert listed.status == "damaged" and not listed.replayable


def test_a_flipped_bit_of_the_data_is_refused(folder: Path) -> None:
    path = folder / "inputs.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    with pytest.raises(DumpError, match=r"inputs.safetensors: .* does not match its checksum"):
        replay_dump(folder)


def test_a_flipped_bit_of_the_results_is_refused(folder: Path) -> None:
    path = folder / "outputs.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    assert replay_dump(folder).outcome == "ran"
    with pytest.raises(DumpError, match=r"outputs.safetensors: .* does not match its checksum"):
        replay_dump(folder, compare=True)


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, shape: list[Any] | None = None, dtype: str = "U8") -> Any:
    return {"dtype": dtype, "shape": shape or [stop - start], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (2**40).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{{",
        safetensors([1]),
        safetensors({"a": 1}),
        safetensors({"a": {"dtype": "U8", "shape": [1]}}),
        safetensors({"a": entry(0, 2, [3])}, b"12"),
        safetensors({"a": entry(0, 2, [-2])}, b"12"),
        safetensors({"a": entry(0, 2, [True, 2])}, b"12"),
        safetensors({"a": entry(0, 2, [2**62, 2**62])}, b"12"),
        safetensors({"a": entry(0, 2, dtype="X9")}, b"12"),
        safetensors({"a": entry(0, 2)}, b"123"),
        safetensors({"a": entry(0, 2)}, b"1"),
        safetensors({"a": entry(1, 2)}, b"12"),
        safetensors({"a": entry(0, 2), "b": entry(1, 3)}, b"123"),
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_safetensors_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DumpError, match=r"x.safetensors is no safetensors file, or damaged: \w"):
        SafetensorsFile(path)


def test_a_tensor_of_a_type_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors({"a": entry(0, 3, [4], "F6_E2M3")}, b"123"))
    with pytest.raises(DumpError, match="x.safetensors: 'a' cannot be read: .*F6_E2M3"):
        SafetensorsFile(path).read("a")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "inputs.safetensors"
    content = path.read_bytes()
    for size in (len(content) - 1, len(content) // 2, 100, 8, 4):
        path.write_bytes(content[:size])
        with pytest.raises(DumpError, match="is no safetensors file, or damaged"):
            replay_dump(folder)


def test_files_are_readable_by_the_safetensors_library(folder: Path) -> None:
    tensors = load_file(folder / "inputs.safetensors")
    by_name = {name.partition("#")[0]: tensor for name, tensor in tensors.items()}
    assert by_name["q"].dtype == torch.bfloat16 and by_name["q"].shape == (3, 4, 512)
    assert by_name["rope.positions"].tolist() == [0, 1, 2]


def test_headers_of_any_length(tmp_path: Path) -> None:
    # A header of 128 bytes begins with the byte that also begins a pickle.
    for count in range(1, 200):
        path = tmp_path / "x.safetensors"
        path.write_bytes(safetensors({"n" * count: entry(0, 1)}, b"7"))
        assert SafetensorsFile(path).read("n" * count).tolist() == [ord("7")]


def argument(record: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(a for a in record["arguments"] if a["name"] == name)
    return found


def tensor_change(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: argument(record, "q")["value"]["$tensor"].update(fields)


def value_change(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: argument(record, "q").update(value=value)


FORGERIES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("function", lambda r: r.update(function="os.system"), "no public function of mlacast"),
    ("private", lambda r: r.update(function="mlacast.ops.run"), "no public function"),
    ("past the end", tensor_change(shape=[4, 4, 512]), "q cannot be rebuilt: .* reaches outside"),
    ("far strides", tensor_change(stride=[2**40, 512, 1]), "reaches outside"),
    ("negative stride", tensor_change(stride=[-2048, 512, 1]), "-2048 is no size"),
    ("negative offset", tensor_change(offset=-2), "-2 is no size"),
    ("odd offset", tensor_change(offset=1, shape=[1, 1, 1]), "between two elements"),
    ("storage", tensor_change(storage=99), "storage 99 of"),
    ("storage type", tensor_change(storage="0"), "'0' is no size"),
    ("no bytes", tensor_change(storage=None), "no bytes for shape"),
    ("dtype", tensor_change(dtype="nn"), "'nn' is no dtype"),
    ("strides missing", tensor_change(stride=[1]), "1 strides for shape"),
    ("kind", value_change({"$code": "print()"}), r"unknown kind '\$code'"),
    ("no kind", value_change({"a": 1}), "no value and no kind"),
    ("two kinds", value_change({"$list": [], "$tuple": []}), "no value and no kind"),
    ("foreign class", value_change({"$dataclass": {}, "name": "os:stat_result"}), "no class of"),
    (
        "function as class",
        value_change({"$dataclass": {}, "name": "mlacast.errors:fail"}),
        "is no object of this mlacast",
    ),
    (
        "imported class",
        value_change({"$dataclass": {}, "name": "mlacast.call_log.dump:Path"}),
        "is no object of this mlacast",
    ),
    (
        "no dataclass",
        value_change({"$dataclass": {}, "name": "mlacast.errors:UnsupportedError"}),
        "is no dataclass",
    ),
    (
        "missing module",
        value_change({"$dataclass": {}, "name": "mlacast.nothing:X"}),
        "no class of this mlacast",
    ),
    (
        "fields",
        value_change({"$dataclass": {"x": 1}, "name": "mlacast.descriptors.rope:Rope"}),
        "q cannot be rebuilt",
    ),
    (
        "field names",
        value_change({"$tuple": [1], "name": "a:B", "fields": ["x; import os"]}),
        "q cannot be rebuilt",
    ),
    ("format name", value_change({"$kv_format": "V5"}), "must be one of"),
    ("opaque", value_change({"$opaque": "a:B"}), "a a:B was not recorded"),
    ("arguments", lambda r: r.update(arguments=[1]), "an argument has no sound 'name'"),
    ("argument kind", lambda r: argument(r, "q").update(kind="star"), "is of kind 'star'"),
    ("storages", lambda r: r.update(storages=[{}] * 5), "storage 0 has no sound 'file'"),
    ("file", lambda r: r["storages"][0].update(file="../../x"), "is no file of a dump"),
    ("name", lambda r: r["storages"][0].update(name="x"), "has no tensor 'x'"),
    ("before", lambda r: r["storages"][0].update(before=-1), "-1 is no size"),
    (
        "variable",
        lambda r: r["state"]["environment"].update(PATH="/x"),
        "PATH is no variable that a replay sets",
    ),
    (
        "logging variable",
        lambda r: r["state"]["environment"].update(MLACAST_DUMP_DIR="/x"),
        "no variable that a replay sets",
    ),
    ("switch", lambda r: r["state"]["switches"].update({"os.chdir": "/"}), "no switch of this"),
    ("state", lambda r: r["state"].pop("environment"), "no sound 'environment'"),
    ("status", lambda r: r.update(execution_status="fine"), "execution_status 'fine'"),
    ("type", lambda r: r.update(storages="x"), "no sound 'storages'"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [pytest.param(change, message, id=name) for name, change, message in FORGERIES],
)
def test_a_forged_record_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    forge(folder, change)
    with pytest.raises(DumpError, match=message):
        replay_dump(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.update(outputs={}),
        lambda r: r["outputs"].update(arguments=3),
        lambda r: r["outputs"].update(storages=[1]),
        lambda r: r["outputs"].update(result={"$tensor": {}}),
        lambda r: r["outputs"].update(result={"$tuple": 3}),
        lambda r: r["outputs"]["result"]["$tuple"][0]["$tensor"].update(shape=[9, 9, 9]),
        lambda r: r["outputs"]["result"]["$tuple"][0]["$tensor"].update(storage=77),
        lambda r: r["outputs"]["arguments"].pop("q"),
        lambda r: r["outputs"]["arguments"].update(q={"$dict": [1]}),
    ],
)
def test_forged_results_are_refused_or_different(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    forge(folder, change)
    try:
        report = replay_dump(folder, compare=True)
    except DumpError:
        return
    assert report.outcome == "different"


def test_checksums_are_sha256_of_the_canonical_record(folder: Path) -> None:
    record = records_of(folder)[-1]
    claimed = record.pop("sha256")
    text = json.dumps(record, separators=(",", ":"), sort_keys=True)
    assert claimed == hashlib.sha256(text.encode()).hexdigest()
