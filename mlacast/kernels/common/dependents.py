"""Start a kernel while the one before it on its stream ends: programmatic dependent launch.

A launch with ``launch_pdl=True`` puts programs on multiprocessors as soon as every program of the
kernel before has said that dependents may start, or has ended. Nothing may be read or written
before `wait_for_previous_kernel`, which waits for the end of that kernel. It lets the next kernel
start only behind this wait: so whatever a kernel sees before its own wait was complete when the
kernel before it started. Devices before sm_90, and those of other makers, start kernels in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_THAT_OVERLAPS = (9, 0)


def overlaps_launches(device: torch.device) -> bool:
    """Whether kernels on ``device`` may be launched with ``launch_pdl`` and compiled with PDL."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_THAT_OVERLAPS


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Wait for the end of the kernel before this one, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_line(address, exists):
    """Send for the 128 bytes around each ``address``, int64, that ``exists``, into the L2 cache.

    Allowed before `wait_for_previous_kernel`: nothing is read, and the L2 cache sees every write.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [address, exists.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
