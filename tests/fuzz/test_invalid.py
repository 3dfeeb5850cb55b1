"""Calls with a wrong argument raise one of our own errors and write nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import subjects
from tests.fuzz.hypothesis_draw import HypothesisDraw
from tests.fuzz.invalid import check_invalid
from tests.fuzz.profile import examples
from tests.fuzz.under import Under


@examples()
@given(data=st.data())
def test_one_wrong_argument(data: Any) -> None:
    subjects.run("invalid", check_invalid, HypothesisDraw(data), Under())
