"""A soak: tiny runs of `laconic train` whose processes are killed, stopped, made to fail or to hang at random moments.

    python tools/soak.py --kills 200 --seed 1 --minutes 40
    python tools/soak.py --kills 10 --kinds ddp ep --report soak.md
    python tools/soak.py --kills 20 --actions raise memory --moments shards

DDP, FSDP2, pipelines and experts take turns, two processes each, with up to six faults a run. Each run has to end by
itself with the bits of an undisturbed run, name the culprit of every fault, and leave no process, port, file or shared
memory behind; the first that does not ends the soak with its output. A table of what happened and how long it took to
be seen is printed and, with --report, written as Markdown.

The processes are forked from one that has imported torch. A seed gives the same faults each time; where in a step a
process is when it is killed from a timer is up to the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.trust.faults import SAVING, Fault
from tests.trust.trial import EVERY, KINDS, STEPS, Trial, trial_config, undisturbed

_ACTIONS = {"kill": 8, "stop": 3, "exit": 2, "raise": 2, "memory": 1, "spin": 1, "launcher": 3}
"""Relative frequencies."""
_MOMENTS = {
    "between": 6,
    "forward": 1,
    "reduce": 1,
    "update": 1,
    "shards": 2,
    "manifest": 1,
    "written": 1,
    "renamed": 1,
}
_OUTSIDE = ("kill", "stop", "launcher")
"""What can happen at any time; the others are things that a program does."""


@dataclass(frozen=True)
class Seen:
    """A fault that happened, and how long it took to be seen."""

    kind: str
    fault: Fault
    seconds: float | None


def faults(rng: random.Random, number: int, actions: Sequence[str], moments: Sequence[str]) -> list[Fault]:
    """Up to `number` faults of one run, in the order of their steps."""
    chosen = []
    for step in sorted(rng.sample(range(1, STEPS + 1), number)):
        action = rng.choices(actions, [_ACTIONS[name] for name in actions])[0]
        moment = rng.choices(moments, [_MOMENTS[name] for name in moments])[0]
        if moment == "between" and action not in (*_OUTSIDE, "exit"):
            moment = "forward"
        if rng.random() < 0.1 and action in _OUTSIDE:
            moment = "start"
        if moment in (*SAVING, "shards"):  # the first save at or after the step
            step = -(-step // EVERY) * EVERY
        rank = 0 if moment in SAVING else rng.randrange(2)
        chosen.append(Fault(moment, action, rank, step, round(rng.uniform(0, 0.2), 3)))
    return ordered(chosen)


def ordered(chosen: Sequence[Fault]) -> list[Fault]:
    """Without those that could not come after the one before: an exception may not come twice in a place."""
    kept: list[Fault] = []
    for fault in chosen:
        if not kept or fault.step > kept[-1].step or fault.moment == "start":
            kept.append(fault)
    return kept


def trials(
    seed: int, kinds: Sequence[str], actions: Sequence[str], moments: Sequence[str]
) -> Iterator[tuple[int, str, list[Fault]]]:
    """The number of each run, its kind and its faults, without end."""
    rng = random.Random(seed)
    number = 0
    while True:
        for kind in kinds:
            yield number, kind, faults(rng, rng.randint(3, 6), actions, moments)
            number += 1


def report(seen: Sequence[Seen], num_runs: int, seed: int, minutes: float) -> str:
    """The table, in Markdown."""
    lines = [
        f"{len(seen)} faults in {num_runs} runs (seed {seed}, {minutes:.0f} minutes, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}); every run ended with the bits of an undisturbed one.",
        "",
        "| what | moments | times | seconds until seen: median | most |",
        "|---|---|---|---|---|",
    ]
    for action in _ACTIONS:
        rows = [one for one in seen if one.fault.action == action]
        if rows:
            moments = sorted({one.fault.moment for one in rows})
            seconds = [one.seconds for one in rows if one.seconds is not None] or [float("nan")]
            lines.append(
                f"| {action} | {', '.join(moments)} | {len(rows)} | {statistics.median(seconds):.2f} | "
                f"{max(seconds):.2f} |"
            )
    lines += ["", "| run | faults |", "|---|---|"]
    lines += [f"| {kind} | {sum(one.kind == kind for one in seen)} |" for kind in KINDS]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run it; 1 if a run was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="faults after which to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=40.0, help="time after which to stop")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--actions", nargs="+", choices=list(_ACTIONS), default=list(_ACTIONS))
    parser.add_argument("--moments", nargs="+", choices=list(_MOMENTS), default=list(_MOMENTS))
    parser.add_argument("--report", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    seen: list[Seen] = []
    began = time.monotonic()
    num_runs = 0
    with tempfile.TemporaryDirectory(prefix="laconic-soak-") as name:
        folder = Path(name)
        for number, kind, given in trials(options.seed, options.kinds, options.actions, options.moments):
            if len(seen) >= options.kills or time.monotonic() - began > 60 * options.minutes:
                break
            trial = Trial(folder, trial_config(folder, f"run-{number}", kind), given)
            try:
                expected = undisturbed(folder, kind)
                trial.run()
                trial.check_same(expected)
            except AssertionError:
                traceback.print_exc()
                print(f"run {number}, {kind}, {given}", file=sys.stderr)
                for ending in trial.endings:
                    print(f"exit code {ending.code}\n{ending.out}\n{ending.err}", file=sys.stderr)
                return 1
            num_runs += 1
            outcome = trial.outcome
            seen += [Seen(kind, f, s) for f, s in zip(outcome.faults, outcome.seconds, strict=True)]
            happened = ", ".join(f"{f.action} at {f.moment}" for f in outcome.faults)
            print(f"{time.monotonic() - began:6.0f} s  {len(seen):3} faults  {kind}: {happened}", flush=True)
    text = report(seen, num_runs, options.seed, (time.monotonic() - began) / 60)
    print(text)
    if options.report is not None:
        options.report.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
