"""Limits of size and number, and where dumps go."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tests.logging.observed import Log, records_of

MakeLog = Callable[..., Log]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_no_more_dumps_than_allowed(make_log: MakeLog) -> None:
    log = make_log(10, max_count=2)
    call = log.observe(double, "mlacast.double")
    results = [call(torch.ones(4)).sum().item() for _ in range(4)]
    assert results == [8.0] * 4
    assert len(log.dumps) == 2
    assert log.text.count("not dumped: 2 dumps were made (MLACAST_DUMP_MAX_COUNT)") == 2
    skipped = [event for event in log.events if event["execution_status"] == "skipped"]
    assert [event["call"] for event in skipped] == [3, 4]


def test_the_count_is_that_of_all_functions(make_log: MakeLog) -> None:
    log = make_log(10, max_count=3)
    for name in ("a", "b", "c", "d"):
        log.observe(double, f"mlacast.{name}")(torch.ones(1))
    assert len(log.dumps) == 3


def test_no_more_bytes_than_allowed(make_log: MakeLog) -> None:
    # A call saves 400 bytes of input and 400 of output.
    log = make_log(10, max_bytes=1700)
    call = log.observe(double, "mlacast.double")
    for _ in range(3):
        call(torch.ones(100))
    assert len(log.dumps) == 2
    assert "not dumped: 400 bytes on top of 1600 would pass 1700 bytes" in log.text
    # Something smaller still fits.
    call(torch.ones(10))
    assert len(log.dumps) == 3


def test_an_output_beyond_the_limit_leaves_the_inputs(make_log: MakeLog) -> None:
    log = make_log(10, max_bytes=500)
    log.observe(double, "mlacast.double")(torch.ones(100))
    record = records_of(log.dumps[0])[-1]
    assert record["execution_status"] == "completed"
    assert record["outputs"] is None
    assert "MLACAST_DUMP_MAX_SIZE_GB" in record["outputs_missing"]


def test_a_limit_of_nothing(make_log: MakeLog) -> None:
    log = make_log(10, max_count=0)
    log.observe(double, "mlacast.double")(torch.ones(1))
    assert log.dumps == []
    # Shared and unchanged inputs cost nothing twice.
    log = make_log(10, max_bytes=400)
    log.observe(lambda x, y: None, "mlacast.look")(*[torch.ones(100)] * 2)
    assert records_of(log.dumps[0])[-1]["outputs"] is not None


def test_names_of_folders_and_the_session(make_log: MakeLog) -> None:
    log = make_log(10)
    call = log.observe(double, "mlacast.compat.x.double")
    call(torch.ones(1))
    call(torch.ones(1))
    names = [folder.name for folder in log.dumps]
    for number, name in enumerate(names, start=1):
        assert re.fullmatch(
            rf"\d{{8}}_\d{{6}}_\d{{3}}_pid\d+_compat.x.double_call000{number}", name
        )
    assert [(event["dump_dir"], event["execution_status"]) for event in log.events] == [
        (name, status) for name in names for status in ("inputs_saved", "completed")
    ]
