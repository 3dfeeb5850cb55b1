"""Where the warps of a kernel's roles wait, by the samples of Nsight Compute.

    python -m tools.role_stalls decode-v4-h16-128+512-b128 --json FILE

Runs one call of a case of ``mlacast bench`` under ``ncu`` and adds up its samples of waiting warps
by role. A role is what lies between two changes of the number of registers, which is how a Hopper
kernel splits its warps; it is told from the others by the instructions that it has. All roles have
as many warps, so that a share is one of the kernel's time. Clocks are left as they are.

Needs a GPU whose counters may be read. ``ncu`` names the reasons: ``long_sb`` is a wait for global
memory, copies or mbarriers (whose polling loops stand behind the last role, as a section of their
own), ``short_sb`` for shared memory, ``barrier`` for other warps or matrix
instructions.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

# What tells roles apart.
TELLING = ("HGMMA", "QGMMA", "LDGSTS", "UTMALDG", "MUFU", "PRMT", "STG")
_STALL = "stall_"
_NOT_ISSUED = "(Not Issued)"
# Sections with fewer samples are beginnings and ends.
_FEWEST = 0.02


@dataclass(frozen=True)
class Role:
    """A role's instructions, samples, and the reasons of its waiting as shares of its samples."""

    instructions: int
    samples: int
    kinds: dict[str, int]
    reasons: dict[str, float]


def roles(lines: Iterable[str]) -> list[Role]:
    """Add up the rows of ``ncu --page source --csv`` by role, leaving out small sections."""
    rows = list(csv.reader(lines))
    at = next(i for i, row in enumerate(rows) if "Source" in row and "Address" in row)
    header = rows[at]
    stalls = {
        i: name.removeprefix(_STALL)
        for i, name in enumerate(header)
        if name.startswith(_STALL) and not name.endswith(_NOT_ISSUED)
    }
    source = header.index("Source")
    sections: list[tuple[int, Counter[str], Counter[str]]] = []
    size, kinds, reasons = 0, Counter[str](), Counter[str]()
    for row in rows[at + 1 :]:
        operation = next((word for word in row[source].split() if word[0] != "@"), "")
        if operation.startswith("USETMAXREG"):
            sections.append((size, kinds, reasons))
            size, kinds, reasons = 0, Counter(), Counter()
        size += 1
        kinds[operation.split(".")[0]] += 1
        for i, name in stalls.items():
            reasons[name] += int(row[i] or 0)
    sections.append((size, kinds, reasons))
    total = sum(reasons.total() for _, _, reasons in sections)
    return [
        Role(
            size,
            reasons.total(),
            {kind: kinds[kind] for kind in TELLING if kinds[kind]},
            {name: count / reasons.total() for name, count in reasons.most_common() if count},
        )
        for size, kinds, reasons in sections
        if reasons.total() >= _FEWEST * max(total, 1)
    ]


def call(case_name: str) -> None:
    """Call a case three times, the last one where the profiler looks."""
    import torch

    from mlacast.bench.cases import CASES
    from mlacast.bench.inputs import Pools, prepare

    (case,) = (case for case in CASES if case.name == case_name)
    device = torch.device("cuda")
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    workload = prepare(case, Pools(device), 1, l2_bytes)
    run = workload.call(workload.sets[0])
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]


def profile(case_name: str, kernel: str) -> list[str]:
    """Lines of the source page of one call's kernel."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder, "report.ncu-rep"))
        # Sections by name: the sets of ncu differ by release.
        collect = ["--section", "SourceCounters", "--section", "WarpStateStats"]
        look = ["--clock-control", "none", "--profile-from-start", "off", "--launch-count", "1"]
        look += ["--kernel-name", f"regex:{kernel}", "--import-source", "no"]
        this = [sys.executable, "-m", "tools.role_stalls", "--call", case_name]
        subprocess.run([ncu, *look, *collect, "-o", report, *this], check=True)
        page = [ncu, "-i", report, "--page", "source", "--csv"]
        return subprocess.run(page, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    """Profile cases and print their roles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("case", nargs="+", help="names of cases, see mlacast bench --list")
    parser.add_argument("--kernel", default="sparse_mla_.*_kernel", help="pattern of its name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        call(options.case[0])
        return 0
    results = {}
    for name in options.case:
        results[name] = roles(profile(name, options.kernel))
        print(name)
        for role in results[name]:
            print(f"  {role.instructions} instructions, {role.samples} samples, {role.kinds}")
            shares = [f"{reason} {share:.0%}" for reason, share in role.reasons.items()]
            print("   ", ", ".join(shares[:7]))
    if options.json is not None:
        import torch

        from mlacast.bench.machine import describe

        document = {
            "machine": describe(torch.device("cuda")),
            "cases": {name: [asdict(role) for role in found] for name, found in results.items()},
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
