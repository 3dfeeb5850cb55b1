"""The V4.1 placement is a setting of the process: every test starts and ends with the default."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlacast.compat import flash_mla


@pytest.fixture(autouse=True)
def default_v41_placement() -> Iterator[None]:
    flash_mla.set_v41_placement("footer")
    yield
    flash_mla.set_v41_placement("footer")
