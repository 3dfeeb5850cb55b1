"""Draw very many calls on the CPU: ``make fuzz``.

Starts pytest on ``tests/fuzz`` in several processes, each with a seed of its own, prints the seeds,
and says how many calls were drawn in all. What fails is shrunk and printed by its process, with the
seed that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = re.compile(r"^fuzz: (\d+) cases$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One process of a run: calls of each subject, seed, and whether kernels are interpreted."""

    examples: int
    seed: int
    interpreted: bool

    @property
    def command(self) -> list[str]:
        """Command that repeats the part."""
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
        seed = f"--hypothesis-seed={self.seed}"
        return [sys.executable, "-m", "pytest", "tests/fuzz", *options, seed]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that it needs."""
        more = {"MLACAST_FUZZ_EXAMPLES": str(self.examples), "OMP_NUM_THREADS": "1"}
        return more | ({"TRITON_INTERPRET": "1"} if self.interpreted else {})

    def run(self) -> tuple[int, int]:
        """Exit status and calls drawn; prints what failed."""
        environment = {**os.environ, **self.variables}
        done = subprocess.run(
            self.command, cwd=ROOT, env=environment, capture_output=True, text=True
        )
        count = sum(int(number) for number in CASES.findall(done.stdout))
        words = "interpreted" if self.interpreted else "reference"
        print(f"seed {self.seed} ({words}): {count} cases, exit status {done.returncode}")
        if done.returncode:
            variables = " ".join(f"{name}={value}" for name, value in self.variables.items())
            print(f"{done.stdout}\n{done.stderr}\nrepeat: {variables} {' '.join(self.command)}")
        sys.stdout.flush()
        return done.returncode, count


def parts_of(examples: int, processes: int, seed: int) -> list[Part]:
    """Processes that together draw ``examples`` calls of each subject, and interpreted ones.

    Interpreted kernels are slow, so their parts come first.
    """
    share = -(-examples // processes)
    interpreted = [Part(share, seed + processes + at, True) for at in range(processes)]
    return interpreted + [Part(share, seed + at, False) for at in range(processes)]


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 1 if any failed or too few calls were drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="calls to draw in all")
    parser.add_argument("--subjects", type=int, default=16, help="subjects that share them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=None, help="first seed; random if not given")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    examples = -(-options.cases // options.subjects)
    parts = parts_of(examples, options.processes, seed)
    print(f"seeds {seed} to {seed + len(parts) - 1}, {examples} cases of each subject", flush=True)
    with ThreadPoolExecutor(options.jobs) as workers:
        results = list(workers.map(Part.run, parts))
    total = sum(count for _, count in results)
    failed = sum(status != 0 for status, _ in results)
    print(f"{total} cases in all; {failed} of {len(parts)} processes failed")
    return int(failed > 0 or total < options.cases)


if __name__ == "__main__":
    sys.exit(main())
