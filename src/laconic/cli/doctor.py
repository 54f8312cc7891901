"""`laconic doctor`: reports the machine and the installation, and tests both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

__all__ = ["run"]


def run(args: Sequence[str]) -> int:
    """Run `laconic doctor` with `args`; return 1 if a required part is broken, else 0."""
    parser = argparse.ArgumentParser(
        prog="laconic doctor",
        description="Show versions, kernels, devices and distributed backends, and run a short self test. "
        "Exit code 1 if something that is needed is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(args)
    from laconic.cli.diagnosis import diagnose, render

    diagnosis = diagnose()
    print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else render(diagnosis))
    return 1 if diagnosis.problems else 0
