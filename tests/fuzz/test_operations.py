"""Every public operation, on the CPU reference, against float64 or bytes found by search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import subjects
from tests.fuzz.hypothesis_draw import HypothesisDraw
from tests.fuzz.profile import examples
from tests.fuzz.under import Under


@pytest.mark.parametrize("name", subjects.OPERATIONS)
@examples()
@given(data=st.data())
def test_drawn_calls(name: str, data: Any) -> None:
    subjects.run(name, subjects.OPERATIONS[name], HypothesisDraw(data), Under())
