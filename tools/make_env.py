"""Create the virtual environment that the Makefile works in. Standard library only.

``python tools/make_env.py .venv`` is run by the interpreter the environment shall be based on. If
that interpreter already has torch 2.11 or newer, the environment sees its packages and keeps its
torch (a CUDA or ROCm build that somebody chose on purpose); otherwise the torch of constraints.txt
is installed, as pip serves it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
EXTRAS = "cli,transformers,dev"
KERNEL_TRITON = "3.6.0"


def host_torch() -> str | None:
    """Return the version of a working, new enough torch of this interpreter, else None."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        return None
    # In a process of its own: a torch whose libraries are missing may end its process.
    imports = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True)
    return version if imports.returncode == 0 else None


def canonical(name: str) -> str:
    """Spell a distribution name the way constraints.txt does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str) -> set[str]:
    """Names of ``name`` and everything it needs, directly or not, among the installed packages."""
    found: set[str] = set()
    todo = [name]
    while todo:
        current = canonical(todo.pop())
        if current in found:
            continue
        try:
            requirements = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(current)
        for requirement in requirements:
            needed = re.match(r"[A-Za-z0-9._-]+", requirement)
            if needed is not None and "extra ==" not in requirement:
                todo.append(needed[0])
    return found


def write_constraints(target: Path, torch_version: str | None) -> None:
    """Copy constraints.txt; around a host's torch, the versions that came with it replace ours."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if torch_version is not None:
        of_host = closure("torch")
        lines = [line for line in lines if canonical(line.split("==")[0]) not in of_host]
        lines.append(f"torch=={torch_version}")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def create(environment: Path, torch_version: str | None) -> Path:
    """Create the environment and return its interpreter."""
    command = [sys.executable, "-m", "venv", "--clear", str(environment)]
    if torch_version is not None:
        command.insert(3, "--system-site-packages")
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            "make_env: this Python cannot create virtual environments; "
            "on Debian and Ubuntu install python3-venv"
        )
    python = environment / "bin" / "python"
    if torch_version is not None and sys.prefix != sys.base_prefix:
        # --system-site-packages shows the base installation; here torch lives in a venv of its own.
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        host_paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        Path(site.strip(), "_host_packages.pth").write_text("\n".join(sorted(host_paths)) + "\n")
    return python


def run_pip(command: list[str]) -> None:
    """Run pip, or end with a pointer to its message."""
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SystemExit("make_env: pip failed; its message is above")


def has_triton(python: Path) -> bool:
    """Whether triton can be found by the environment's interpreter."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('triton') is None)"
    return subprocess.run([str(python), "-c", probe]).returncode == 0


def main() -> None:
    """Create the environment named by the first argument and install the project into it."""
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit(
            f"make_env: Python 3.10 or newer is needed, this is {sys.version.split()[0]}"
        )
    environment = Path(sys.argv[1]).resolve()
    torch_version = host_torch()
    if torch_version is None:
        print(
            "make_env: no torch >= 2.11 found, installing the pinned one; the CUDA build is 3 GB "
            "to download, so this takes minutes, and pip prints nothing meanwhile"
        )
    else:
        print(f"make_env: using the installed torch {torch_version}")
    if sys.version_info < (3, 11):
        print("make_env: on Python 3.10 the Hugging Face parts stay out, transformers needs 3.11")
    sys.stdout.flush()
    python = create(environment, torch_version)
    constraints = environment / "constraints.txt"
    write_constraints(constraints, torch_version)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--constraint", str(constraints)]
    # The project is built with the environment's setuptools: pinned, and nothing is fetched twice.
    for arguments in (["setuptools>=77"], ["--no-build-isolation", "-e", f"{ROOT}[{EXTRAS}]"]):
        run_pip([*install, *arguments])
    if not has_triton(python):
        # A CPU build of torch brings none. Kernels are then tested in triton's interpreter and
        # compiled, not run, so the version is free: the one the GPU results were recorded with.
        run_pip([*install[: install.index("--constraint")], f"triton=={KERNEL_TRITON}"])


if __name__ == "__main__":
    main()
