"""Functions of the drop-in modules, against the same float64 results in their conventions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import subjects
from tests.fuzz.hypothesis_draw import HypothesisDraw
from tests.fuzz.profile import examples
from tests.fuzz.under import Under

# What they call is drawn apart from them, in test_operations.py.
SHARE = 3


@pytest.mark.parametrize("name", subjects.DROP_INS)
@examples(SHARE)
@given(data=st.data())
def test_drawn_calls(name: str, data: Any) -> None:
    subjects.run(name, subjects.DROP_INS[name], HypothesisDraw(data), Under())
