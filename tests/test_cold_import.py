"""``import mlacast`` in a fresh process where every optional package is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

BLOCKED = (
    "triton",
    "transformers",
    "typer",
    "rich",
    "matplotlib",
    "numpy",
    "flash_mla",
    "flashinfer",
    "vllm",
)

# torch itself looks for some of these while it is imported, so the wall goes up behind it.
PREAMBLE = f"""
import json, sys, time
import torch

BLOCKED = {BLOCKED!r}
before = set(sys.modules)

class Wall:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

for name in [name for name in sys.modules if name.partition(".")[0] in BLOCKED]:
    del sys.modules[name]
sys.meta_path.insert(0, Wall())
start = time.perf_counter()
import mlacast
seconds = time.perf_counter() - start
"""


def in_fresh_process(program: str) -> dict[str, Any]:
    """Run a program behind the wall; it prints one JSON object as its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_import_needs_no_optional_package_and_is_quick() -> None:
    answer = in_fresh_process(
        """
        print(json.dumps({
            "seconds": seconds,
            "asked": Wall.asked,
            "new": sorted(name for name in set(sys.modules) - before if "." not in name),
            "cuda": torch.cuda.is_initialized(),
        }))
        """
    )
    assert answer["asked"] == []
    assert "mlacast" in answer["new"]
    assert answer["cuda"] is False
    # Usually some 20 ms on top of torch; ten times that would be somebody's heavy import.
    assert answer["seconds"] < 1.0


def test_public_names_are_imported_on_first_use() -> None:
    answer = in_fresh_process(
        """
        early = [name for name in sys.modules if name.startswith("mlacast.")]
        for name in mlacast.__all__:
            getattr(mlacast, name)
        print(json.dumps({"early": early, "asked": Wall.asked}))
        """
    )
    assert answer["asked"] == []
    assert "mlacast.ops._schemas" in answer["early"]
    late = ("mlacast.reference", "mlacast.compat", "mlacast.integrations", "mlacast.cli")
    assert [name for name in answer["early"] if name.startswith(late)] == []


def test_the_reference_runs_on_the_cpu() -> None:
    # One key, so the softmax weight is 1 and the output is the key itself.
    answer = in_fresh_process(
        """
        q = torch.ones(1, 2, 512, dtype=torch.bfloat16)
        kv = torch.arange(512, dtype=torch.float32).to(torch.bfloat16)[None] / 512
        indices = torch.zeros(1, 1, dtype=torch.int32)
        out, max_logits, lse = mlacast.sparse_mla_prefill(q, kv, indices, sm_scale=0.5)
        logit = 0.5 * kv.double().sum().item()
        print(json.dumps({
            "exact": bool(torch.equal(out[0, 0], kv[0]) and torch.equal(out[0, 1], kv[0])),
            "lse_error": (lse - logit).abs().max().item(),
            "logit_error": (max_logits - logit).abs().max().item(),
            "asked": Wall.asked,
        }))
        """
    )
    assert answer["exact"]
    # float32 sums of 512 products of size 1: 512 * 2**-24 of a logit near 128.
    assert answer["lse_error"] < 1e-2
    assert answer["logit_error"] < 1e-2
    assert answer["asked"] == []
