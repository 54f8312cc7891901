"""Fuzz a parser with atheris (libFuzzer), which looks for inputs that take new ways through our Python.

pip install laconic[fuzz]
python -m tests.fuzz.atheris_run decode -max_total_time=3600 [corpus directory] [libFuzzer options]
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["laconic.formats", "laconic.ops.lossless", "laconic.cost", "laconic.train.config", "laconic.infer.server"]
):
    from tests.fuzz.targets import TARGETS, try_once


def main() -> None:
    """Run libFuzzer on the target that the first argument names; ends the process."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"target is {name!r}, but it must be one of {', '.join(TARGETS)}")
    target = TARGETS[name]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        if target.change is not None and seed % 2:
            with contextlib.suppress(ValueError, RecursionError):  # only JSON can be changed as JSON
                return target.reseal(target.change(data, random.Random(seed)))[:max_size]
        return target.reseal(atheris.Mutate(data, max_size))[:max_size]

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds()):
            (Path(corpus) / f"seed{number}").write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], lambda data: int(try_once(target, data)) * 0, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
