"""What CI leaves out, part by part: python tools/nightly.py --shard 1/4 (make nightly SHARD=1/4).

Each part writes build/nightly/PART.log and gets a closing line. Shards together run everything once: the slow tests are
shared out by file, every other part belongs to one shard. Generated inputs, faults and mutants are others each day;
of transformers' families one is drawn, and a third of the examples. docs/reliability.md has longer runs of a part.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = "tests/activations/test_families.py"
SUITE = ("bert", "gpt2", "llama", "mixtral", "qwen3", "t5")
"""On which transformers' own suite runs, one a day: each takes six minutes."""


def parts(seed: int) -> dict[str, list[str]]:
    """The command of each part, those that take longest first."""
    slow = [sys.executable, "-m", "pytest", "-m", "slow", "-v", "-n", "3", "--dist", "loadgroup"]
    slow.append("--no-loadscope-reorder")
    return {
        "slow": [*slow, "--left-out", f"--ignore={FAMILIES}", "--ignore=tests/netlab"],
        "hosts": ["make", "hosts", f"ARGS=-k 'not transformers_suite or {SUITE[seed % len(SUITE)]}'"],
        "examples": [sys.executable, "tools/stranger.py", "--examples", f"{seed % 3 + 1}/3"],
        "mutants": ["make", "mutants", f"ARGS=--seed {seed} --mutants 1"],
        "soak": ["make", "soak", f"ARGS=--seed {seed} --kills 25 --minutes 8"],
        "load": ["make", "load", "ARGS=--minutes 1"],
        "families": [*slow, FAMILIES],
        "netlab": [*slow, "tests/netlab"],
        "fuzz": [sys.executable, "-m", "tests.fuzz.run", "--seed", str(seed), "--seconds", "8"],
    }


def of_shard(commands: Mapping[str, Sequence[str]], shard: int, num_shards: int) -> dict[str, list[str]]:
    """The parts of the `shard`-th of `num_shards`, from 1; the slow tests are in each, with what is its own."""
    others = [name for name in commands if name != "slow"]
    mine = {"slow": [*commands["slow"], f"--shard={shard}/{num_shards}"]}
    return mine | {name: list(commands[name]) for name in others[shard - 1 :: num_shards]}


def closing_line(name: str, code: int, output: str, seconds: float) -> str:
    """What became of a part: its last line that says a number, and its log where it failed."""
    said = [line.strip(" =") for line in output.splitlines() if re.search(r"\d", line) and not line.startswith("make")]
    verdict = "green" if code == 0 else f"RED, exit code {code}, build/nightly/{name}.log"
    return f"{name}: {verdict}, {seconds / 60:.1f} min: {said[-1] if said else 'it said nothing'}"


def main(arguments: Sequence[str]) -> int:
    """Returns the number of parts that failed."""
    parser = argparse.ArgumentParser(prog="python tools/nightly.py", description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="1/1", help="K/N: the K-th of N shards")
    parser.add_argument("--parts", nargs="+", choices=parts(0), default=list(parts(0)))
    parser.add_argument(
        "--seed", type=int, default=datetime.date.today().toordinal(), help="the day's number without it"
    )
    chosen = parser.parse_args(arguments)
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", chosen.shard)
    if found is None or int(found[1]) > int(found[2]):
        parser.error(f"--shard is {chosen.shard!r}, not K/N with K from 1 to N; say 1/4 for the first of four")
    logs = ROOT / "build" / "nightly"
    logs.mkdir(parents=True, exist_ok=True)
    lines, failed = [], 0
    print(f"seed {chosen.seed}, shard {chosen.shard}", flush=True)
    for name, command in of_shard(parts(chosen.seed), int(found[1]), int(found[2])).items():
        if name not in chosen.parts:
            continue
        begin = time.monotonic()
        with (logs / f"{name}.log").open("w") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        failed += code != 0
        output = (logs / f"{name}.log").read_text(errors="replace")
        lines.append(closing_line(name, code, output, time.monotonic() - begin))
        print(lines[-1], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
