"""The portable kernels through Triton's interpreter, a share of the calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import subjects
from tests.fuzz.hypothesis_draw import HypothesisDraw
from tests.fuzz.profile import examples
from tests.fuzz.under import INTERPRETED

# An interpreted call takes as long as dozens of others.
SHARE = 50


@pytest.mark.parametrize("name", subjects.INTERPRETED)
@examples(SHARE)
@given(data=st.data())
def test_drawn_calls(name: str, data: Any) -> None:
    subjects.run(name, subjects.INTERPRETED[name], HypothesisDraw(data), INTERPRETED)
