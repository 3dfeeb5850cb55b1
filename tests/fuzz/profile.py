"""How many calls are drawn of each subject, and by which seed.

MLACAST_FUZZ_EXAMPLES asks for so many calls, of new seeds; without it a small number is drawn,
always the same ones, as part of the whole suite.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

GATE_EXAMPLES = 150
EXAMPLES = os.environ.get("MLACAST_FUZZ_EXAMPLES")


def examples(share: int = 1) -> settings:
    """Settings of a test that draws one in ``share`` of the calls."""
    return settings(
        max_examples=max(int(EXAMPLES or GATE_EXAMPLES) // share, 1),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
