"""Two kinds of process: the interpreted files need TRITON_INTERPRET=1 before triton is imported.

A plain pytest run leaves them to ``test_interpreted.py``, which starts a process for each file.
With the variable set they are collected directly: ``TRITON_INTERPRET=1 pytest tests/kernels``.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hurries, hurry

    collect_ignore_glob = ["test_interpreted.py", "test_*_compile.py"]
    if hurries():
        hurry()
    else:
        collect_ignore_glob.append("test_interpreter_interpreted.py")
else:
    collect_ignore_glob = ["test_*_interpreted.py"]
