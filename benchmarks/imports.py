"""What importing weightsync costs, against torch alone, which it cannot do without.

    make bench-imports         # or: python benchmarks/imports.py --rounds 21 --json FILE

Every import is made in a fresh process, and the ways take turns. The goal: weightsync and what a
trainer and an engine use of it, torch included, within 1.2 times of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

TORCH = "import torch"
WAYS = {
    TORCH: "import torch",
    "import weightsync, no name used": "import weightsync",
    "weightsync, DoubleBufferScheme, Sender, Receiver": (
        "import weightsync as ws; ws.DoubleBufferScheme, ws.Sender, ws.Receiver"
    ),
    "weightsync, every public name": (
        "import weightsync as ws\nfor name in ws.__all__: getattr(ws, name)"
    ),
}


def seconds(code: str) -> float:
    """Of the import alone, without the start of the interpreter."""
    program = (
        f"import time\nbegan = time.perf_counter()\n{code}\nprint(time.perf_counter() - began)"
    )
    # An installed package is compiled; a checkout is too, once it may write that down.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write all seconds there")
    options = parser.parse_args()

    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds + 1):
        for way, code in WAYS.items():
            measured = seconds(code)
            if number:  # the first round reads the files
                taken[way].append(measured)
    for way, each in taken.items():
        ratio = statistics.median(
            its / torchs for its, torchs in zip(each, taken[TORCH], strict=True)
        )
        median = statistics.median(each)
        print(f"{way:<50} {median * 1000:7.0f} ms   {ratio:5.2f} of torch")
    if options.json:
        options.json.write_text(json.dumps(taken))


if __name__ == "__main__":
    main()
