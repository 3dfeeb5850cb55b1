"""Compile and interpret the kernels with the newest triton. Standard library only.

``.venv/bin/python tools/triton_latest.py build/triton-latest`` makes an environment on top of the
one it is run by, installs the newest triton that pip serves into it, and runs ``tests/kernels``
there. What breaks is listed at the end; tests that hold for one version only say so when skipped.
No GPU is used, and nothing of the environment underneath changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/kernels"
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSION = "from importlib.metadata import version; print(version('triton'))"


def install(environment: Path) -> Path:
    """Create the environment and return its interpreter; its triton hides the one underneath."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    python = environment / "bin" / "python"
    site = subprocess.check_output([str(python), "-c", _SITE], text=True).strip()
    # Every folder of packages seen here, after the environment's own. A .pth file does not follow
    # those of the folders it names, and the environment underneath may stand on a third.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    Path(site, "_packages_underneath.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    # Nothing but triton: its requirements, if any, are those of the environment underneath.
    command = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    command += ["--ignore-installed", "--disable-pip-version-check", "triton"]
    if subprocess.run(command).returncode != 0:
        raise SystemExit("triton_latest: pip could not install triton; its message is above")
    return python


def run_tests(python: Path, arguments: Sequence[str]) -> int:
    """Run the kernel tests and return pytest's exit status."""
    version = subprocess.check_output([str(python), "-c", _VERSION], text=True).strip()
    print(f"triton_latest: {TESTS} with triton {version}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "pytest", TESTS, "-q", "-p", "no:cacheprovider", *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    verdict = "nothing breaks" if status == 0 else "see the failures above"
    print(f"triton_latest: triton {version}: {verdict}")
    return status


def main(arguments: Sequence[str]) -> int:
    """Make the environment named by the first argument; the rest goes to pytest."""
    if not arguments:
        raise SystemExit("triton_latest: name the folder of the environment")
    return run_tests(install(Path(arguments[0]).resolve()), arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
