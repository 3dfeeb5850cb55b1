"""Time the Hopper decode of V4 and V4.1 by heads and tokens: no dispatch, no checks.

    python benchmarks/time_decode_heads.py            everything fused, 128 + 512 keys
    python benchmarks/time_decode_heads.py --only V4+V4
    python benchmarks/time_decode_heads.py --once     every call once: fills Triton's cache

The protocol of ``time_sm90.py``.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.time_sm90 import TIME_LIMIT_S, V4, V41, decode_calls, graph_us  # noqa: E402

HEADS = (8, 16, 24, 32, 64)
TOKENS = (32, 64, 96, 128, 256)


def main() -> None:
    """Print a line for each number of heads."""
    parser = argparse.ArgumentParser(description="Time the Hopper decode by heads.")
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--once", action="store_true", help="time nothing, call everything once")
    options = parser.parse_args()
    # A kernel whose warp groups wait for each other would never return.
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
    for kv_format in (V4, V41):
        for heads in HEADS:
            name = f"{kv_format.name}+{kv_format.name} h{heads} 128+512"
            if options.only not in name:
                continue
            times = []
            for tokens in TOKENS:
                calls = decode_calls((kv_format, kv_format), heads, 128, 512, tokens)
                if options.once:
                    calls[0]()
                else:
                    times.append(f"{tokens}: {graph_us(calls):.1f}")
            print(name, "us by tokens:", ", ".join(times), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
