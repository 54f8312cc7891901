"""`laconic doctor`: reports the machine and the installation, and tests both."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only, print_json

__all__ = ["make_parser", "run"]


def run(args: Sequence[str]) -> int:
    """Run `laconic doctor` with `args`; return 1 if a required part is broken, else 0."""
    options = make_parser().parse_args(args)
    from laconic.cli.diagnosis import diagnose, render

    with json_only(options.json):
        diagnosis = diagnose()
    if options.json:
        print_json(diagnosis.as_dict())
    else:
        print(render(diagnosis))
    return 1 if diagnosis.problems else 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic doctor",
        description="Show versions, kernels, devices and distributed backends, and run a short self test. "
        "Exit code 1 if something that is needed is broken.",
    )
    add_json(parser, "print one JSON document instead of text")
    return parser
