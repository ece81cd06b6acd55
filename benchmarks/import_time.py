"""Milliseconds that ``import moe_typed`` takes beyond ``import torch``, each run in a fresh interpreter.

python benchmarks/import_time.py [--runs N]
"""

import argparse
import os
import subprocess
import sys
from statistics import median

PROGRAM = """
import time
import torch
start = time.thread_time_ns()
import moe_typed
print((time.thread_time_ns() - start) / 1e6)
"""


def milliseconds() -> float:
    """Return the time of one fresh import."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # byte code is what users import
    result = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=environment)
    return float(result.stdout)


def main() -> None:
    """Print the median."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    milliseconds()  # the first run may write byte code
    times = sorted(milliseconds() for _ in range(arguments.runs))
    print(f"import moe_typed: {median(times):.1f} ms beyond torch ({times[0]:.1f} to {times[-1]:.1f}, {len(times)} runs)")


if __name__ == "__main__":
    main()
