"""`laconic doctor`: reports the machine and the installation, and tests both, or shows where a running job is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only, print_json


def run(args: Sequence[str]) -> int:
    """Run `laconic doctor` with `args`; return 1 if a required part is broken, else 0."""
    options = make_parser().parse_args(args)
    if options.pid is not None:
        from laconic.cli.stacks import read_stacks, render_stacks

        stacks = read_stacks(options.pid)
        if options.json:
            print_json({"processes": stacks})
        else:
            print(render_stacks(stacks))
        return 0
    from laconic.cli.diagnosis import diagnose, render

    with json_only(options.json):
        diagnosis = diagnose()
    if options.json:
        print_json(asdict(diagnosis))
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
    parser.add_argument("--pid", type=int, metavar="PID",
        help="only show where a running or hung job is: the stacks of this process and its children")  # fmt: skip
    add_json(parser, "print one JSON document instead of text")
    return parser
