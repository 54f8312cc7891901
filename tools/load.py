"""Load held: many collectives, steps, saves and requests, and whether memory, descriptors or threads grow meanwhile.

    python tools/load.py --short                      # every row for some seconds, as the slow tests do
    python tools/load.py L1 L6 --report load.md       # 100,000 collectives, 10,000 requests
    python tools/load.py L4                           # 30 minutes of saves and resumes
    python tools/load.py L2 L3 --minutes 2            # other times

Rows are those of docs/reliability.md. A line is fitted through the samples of each process by least squares; a slope
above its bound by more than three standard errors is a leak, and ends the tool with 1, as a wrong result does.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.trust.loads import ROWS, Load


def report(loads: list[Load], seconds: dict[str, float]) -> str:
    """What the rows did, in Markdown."""
    load = os.getloadavg()[1]
    lines = [
        "# Load held",
        "",
        f"    python tools/load.py {shlex.join(sys.argv[1:])}",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), load average {load:.1f} over five "
        f"minutes, Python {platform.python_version()}, torch {torch.__version__}. Slopes are per minute, with their "
        "standard errors; memory is in MB.",
        "",
        "| row | what | seconds | done |",
        "|---|---|---|---|",
    ]
    for one in loads:
        facts = "; ".join(f"{name}: {fact}" for name, fact in one.facts.items())
        lines.append(f"| {one.row} | {one.what} | {seconds[one.row]:.0f} | {facts} |")
    lines += [
        "",
        "| row | watched | what | slope | standard error | bound | samples |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in loads:
        for name, slopes in one.slopes.items():
            for slope in slopes:
                verdict = " (leak)" if slope.leaks else ""
                lines.append(
                    f"| {one.row} | {name} | {slope.kind} | {slope.per_minute:+.3f}{verdict} | {slope.error:.3f} | "
                    f"{slope.bound:g} | {slope.num_samples} |"
                )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the rows; 1 if one of them leaks or fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"some of {', '.join(ROWS)}; all without any")
    parser.add_argument("--short", action="store_true", help="some seconds of each")
    parser.add_argument("--minutes", type=float, help="of each row, in place of its own")
    parser.add_argument("--count", type=int, help="collectives or requests of each row, in place of its own")
    parser.add_argument("--report", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"there is no row {unknown[0]}; choose from {', '.join(ROWS)}")
    loads: list[Load] = []
    seconds: dict[str, float] = {}
    failed = False
    for row in options.rows or ROWS:
        do, sizes = ROWS[row]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="laconic-load-") as folder:
            try:
                size = sizes.short if options.short else sizes.long
                if options.minutes is not None:
                    size = size.lasting(60 * options.minutes)
                if options.count is not None:
                    size = replace(size, count=options.count)
                load = do(Path(folder), size)
            except Exception:
                traceback.print_exc()
                print(f"{row} failed", file=sys.stderr)
                failed = True
                continue
        seconds[row] = time.monotonic() - began
        loads.append(load)
        failed |= bool(load.leaks)
        print(f"{row} {seconds[row]:5.0f} s  {load.what}", flush=True)
        for name, fact in load.facts.items():
            print(f"     {name}: {fact}", flush=True)
        for name, slopes in load.slopes.items():
            print(f"     {name}: {', '.join(map(str, slopes))}", flush=True)
        for leak in load.leaks:
            print(f"     LEAK {leak}", flush=True)
    if options.report is not None:
        options.report.write_text(report(loads, seconds))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
