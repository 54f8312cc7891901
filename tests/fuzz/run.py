"""Fuzz the parsers without any engine: mutations of good inputs, the same ones for the same seed.

    python -m tests.fuzz.run                              # all targets, ten seconds each
    python -m tests.fuzz.run decode --seconds 3600 --seed 7
    python -m tests.fuzz.run compare --input crash.bin    # once more what was found

A finding is written to a file, and its name is printed with what it raised.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, try_once


@dataclass
class Run:
    """What a run of one target did."""

    num_inputs: int = 0
    num_deep: int = 0
    """Inputs that were taken, or refused only behind the outermost checks."""
    finding: bytes | None = None


def fuzz(name: str, seed: int, seconds: float, max_inputs: int | None = None) -> Run:
    """Give mutations to a target until it raises what it must not, the time is over or they are enough."""
    target = TARGETS[name]
    dice, seeds, run = random.Random(f"{name} {seed}"), target.seeds(), Run()
    for data in seeds:
        assert try_once(target, data) or name != "decode" or data[6] == 255, "a seed is refused"
    stop = time.monotonic() + seconds
    while time.monotonic() < stop and (max_inputs is None or run.num_inputs < max_inputs):
        if target.change is not None and dice.random() < 0.8:
            data = target.change(dice.choice(seeds), dice)
        else:
            data = mutated(seeds, dice)
        if dice.random() < 0.7:
            data = target.reseal(data)
        run.num_inputs += 1
        try:
            run.num_deep += try_once(target, data)
        except Exception:
            traceback.print_exc()
            run.finding = data
            break
    return run


def main(arguments: Sequence[str]) -> int:
    """Returns the number of targets with a finding."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="*", choices=[*TARGETS, []], default=[])
    parser.add_argument("--seconds", type=float, default=10, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--input", type=Path, help="run this file only")
    chosen = parser.parse_args(arguments)
    num_findings = 0
    for name in chosen.target or TARGETS:
        if chosen.input is not None:
            try_once(TARGETS[name], chosen.input.read_bytes())
            continue
        run = fuzz(name, chosen.seed, chosen.seconds)
        print(f"{name}: {run.num_inputs:,} inputs, {run.num_deep:,} got deep", end="")
        if run.finding is not None:
            num_findings += 1
            path = Path(f"{name}_{hashlib.sha256(run.finding).hexdigest()[:12]}.bin")
            path.write_bytes(run.finding)
            print(f", finding in {path}", end="")
        print(flush=True)
    return num_findings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
