"""`laconic compare`: two or more runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cli.arguments import Parser, add_json


def run(args: Sequence[str]) -> int:
    """Run `laconic compare` with `args`."""
    options = make_parser().parse_args(args)
    from laconic.train.report.compare import compare

    print(compare(options.run_dirs, options.out, as_json=options.json))
    if not options.json:
        print(f"\nwrote {options.out}")
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic compare",
        description="Print a table of runs with differences to the first one, and write a self-contained HTML report: "
        "loss curves, what backward keeps by kind of tensor, throughput, and how the configurations differ.",
    )
    parser.add_argument("run_dirs", metavar="RUN", nargs="+", help="run directory; the first one is the reference")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the report (default: %(default)s)")
    add_json(parser, "print the table as one JSON document: numbers in bytes and seconds")
    return parser
