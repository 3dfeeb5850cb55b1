"""Repeats, given buffers and batch mates do not change a bit: a share on the CPU reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import subjects
from tests.fuzz.hypothesis_draw import HypothesisDraw
from tests.fuzz.profile import examples
from tests.fuzz.under import Under

SHARE = 4


@pytest.mark.parametrize("name", subjects.STEADY)
@examples(SHARE)
@given(data=st.data())
def test_bits_stay(name: str, data: Any) -> None:
    subjects.run(name, subjects.STEADY[name], HypothesisDraw(data), Under())
