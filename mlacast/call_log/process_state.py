"""What a call depends on besides its arguments: environment variables and process-wide switches."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mlacast.call_log.errors import DumpError
from mlacast.call_log.settings import LOGGING_VARIABLES

# Switches of the drop-in modules: the module, the function that reads, the function that sets.
SWITCHES = (("mlacast.compat.flash_mla.placement", "v41_placement", "set_v41_placement"),)


def read_state() -> dict[str, dict[str, str]]:
    """Return the variables of mlacast and the switches of the modules that are loaded."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("MLACAST_") and name not in LOGGING_VARIABLES
    }
    switches = {
        f"{module}.{setter}": getattr(sys.modules[module], getter)()
        for module, getter, setter in SWITCHES
        if module in sys.modules
    }
    return {"environment": variables, "switches": switches}


@contextlib.contextmanager
def recorded_state(state: dict[str, Any], backend: str | None = None) -> Iterator[None]:
    """Put a recorded state in force, and the present one back afterwards.

    A variable that is set now wins over the recorded one, so a replay can be steered.

    Args:
        state: From ``read_state``.
        backend: Takes the place of ``MLACAST_BACKEND``.

    Raises:
        DumpError: The state has something that ``read_state`` does not write.
    """
    wanted: dict[str, str] = {}
    for name, value in state["environment"].items():
        if not name.startswith("MLACAST_") or name in LOGGING_VARIABLES:
            raise DumpError(f"{name} is no variable that a replay sets")
        wanted.setdefault(name, os.environ.get(name, value))
    if backend is not None:
        wanted["MLACAST_BACKEND"] = backend
    known = {f"{module}.{setter}": (module, getter, setter) for module, getter, setter in SWITCHES}
    with contextlib.ExitStack() as stack:
        for name, value in wanted.items():
            stack.callback(_set_variable, name, os.environ.get(name))
            os.environ[name] = value
        for name, value in state["switches"].items():
            if name not in known:
                raise DumpError(f"{name} is no switch of this mlacast")
            module_name, getter, setter = known[name]
            module = importlib.import_module(module_name)
            stack.callback(getattr(module, setter), getattr(module, getter)())
            getattr(module, setter)(value)
        yield


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def versions(devices: Iterable[torch.device]) -> dict[str, str]:
    """Return the versions in use and the names of the devices.

    Args:
        devices: Devices of the tensors of a call; no other is touched.
    """
    import mlacast

    facts = {
        "mlacast": mlacast.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
    for device in sorted(set(devices), key=str):
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
        facts[str(device)] = name
    return facts
