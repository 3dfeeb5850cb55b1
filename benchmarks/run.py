"""Run the registered benchmarks of this checkout: the options are those of ``mlacast bench``.

    python benchmarks/run.py --json build/bench.json
    python benchmarks/run.py --case decode-v4 --quick

The cases are in ``mlacast/bench/cases.py``, the protocols in ``mlacast/bench/protocols.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlacast.cli.app import app  # noqa: E402

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]], prog_name="benchmarks/run.py")
