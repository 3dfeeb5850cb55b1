"""The registry: names, peers, and that the operations take every case's inputs."""

from __future__ import annotations

import dataclasses

import pytest

from mlacast.bench.cases import CASES, Case, select_cases
from tests.bench.small import run_small


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_a_peer_comes_before_what_is_measured_against_it() -> None:
    names = [case.name for case in CASES]
    for case in CASES:
        if case.target.peer is not None:
            assert names.index(case.target.peer) < names.index(case.name)


def test_every_case_has_a_target_or_is_there_to_be_compared() -> None:
    plain = [case for case in CASES if not case.batch_invariant]
    for case in CASES:
        if case.batch_invariant:
            name = case.name.removesuffix("-invariant")
            (other,) = (other for other in plain if other.name == name)
            assert case == dataclasses.replace(
                other, name=case.name, batch_invariant=True, target=case.target
            )
            continue
        target = case.target
        given = [target.first_us, target.floor_factor, target.peer]
        assert len([value for value in given if value is not None]) == 1, case.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_passes_the_gate_of_every_case(case: Case) -> None:
    result = run_small(case)
    assert result.error is None
    assert result.backend == "reference"
    assert result.gates["op"].passed
    assert result.times["op"].median_us == 10.0


def test_selection_by_name_brings_the_peer() -> None:
    chosen = select_cases("v41+fp4-h64-128+512-b64")
    assert [case.name for case in chosen] == [
        "decode-v41-h64-128+512-b64",
        "decode-v41+fp4-h64-128+512-b64",
    ]
    assert select_cases("") == CASES


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no case contains 'nothing'"):
        select_cases("nothing")
