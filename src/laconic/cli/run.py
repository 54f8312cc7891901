"""`laconic run`: runs an unmodified training script with the savings switched on."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from laconic.cli.arguments import Parser
from laconic.cli.output import json_text
from laconic.errors import ConfigError
from laconic.options import ACTIVATION_BITS, ATTENTIONS, LOSSES, OPTIMIZERS
from laconic.output_lines import say


def run(args: Sequence[str]) -> int:
    """Run `laconic run` with `args`; return the script's exit code, 2 if what was asked for cannot be done."""
    parser = make_parser()
    options = parser.parse_args(args)
    _check_json(options.json)
    if os.environ.get("RANK", "0") == "0":
        for behind in _flags_behind(parser, options.arguments):
            rule = "laconic's flags stand before the script"
            say(f"laconic run: the script gets {behind}, which stands behind it; {rule}")
    from laconic.run.models import Refusal, Wishes
    from laconic.run.savings import Savings
    from laconic.run.script import Script
    from laconic.run.spawned import Spawned
    from laconic.run.summary import render, summarize
    from laconic.run.zipped_groups import ZippedGroups

    script = Script(options.script, options.arguments, is_module=options.is_module)
    wishes = Wishes(options.activations, options.attention, options.loss, options.optimizer, not options.no_audit)
    savings = Savings(wishes)
    groups = None if options.zip == "off" else ZippedGroups(options.zip)
    default, interrupt = signal.SIG_DFL, signal.default_int_handler
    for number, fresh in ((signal.SIGHUP, default), (signal.SIGTERM, default), (signal.SIGINT, interrupt)):
        if "laconic.cli" in getattr(signal.getsignal(number), "__module__", ""):
            signal.signal(number, fresh)  # a script finds the signals of a fresh interpreter
    spawned = Spawned(savings.wishes, options.zip)
    with savings, groups or nullcontext(), spawned:
        code = script.run(passed=Refusal)
    if savings.refusal is not None and not savings.is_forked:  # which the script, or a thread of it, has caught
        raise savings.refusal
    if not savings.is_forked and os.environ.get("RANK", "0") == "0":
        children = spawned.summaries
        trains_in_children = bool(children) and not savings.models and not savings.optimizers
        summary = children[0] if trains_in_children else summarize(savings, groups)
        summary |= {"spawned": len(children), "own": not trains_in_children}
        say(render(summary))
        if options.json is not None:
            _write(options.json, summary)
    return code


def _flags_behind(parser: Parser, arguments: Sequence[str]) -> list[str]:
    """What of a script's arguments looks like a flag of laconic's, with a value that it takes."""
    savings = ("activations", "attention", "loss", "optimizer", "zip", "no_audit")
    own = {f"--{name.replace('_', '-')}": action for action in parser._actions if (name := action.dest) in savings}
    words = [word for argument in arguments for word in argument.split("=", 1)]
    found = []
    for flag, value in pairwise([*words, ""]):
        choices = own[flag].choices if flag in own else ()
        if choices is None:
            found.append(flag)
        elif value in map(str, choices):
            found.append(f"{flag} {value}")
    return found


def _check_json(file: str | None) -> None:
    if file is None:
        return
    if not file.endswith(".json"):  # a script's name where the file's is missing must not be written over
        raise ConfigError(f"--json is {file!r}, but it must be a file whose name ends in .json; give --json FILE.json")
    if Path(file).is_dir() or not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"--json is {file!r}, but it must be a file in a directory that exists")


def _write(file: str, summary: dict[str, Any]) -> None:
    try:
        Path(file).write_text(json_text(summary) + "\n", encoding="utf-8")
    except OSError as error:  # the script's exit code says more than this
        say(f"laconic run: cannot write {file}: {error.strerror}")


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic run",
        description="Run a training script as `python SCRIPT ARGUMENTS` does, with compressed activations. A summary "
        "on stderr says what was saved. What a flag asks for and cannot be done ends the run, with exit code 2; all "
        "other exit codes are the script's.",
    )
    parser.add_argument("--activations", type=int, choices=ACTIVATION_BITS, help="bits (4 where possible; 16: exact)")
    parser.add_argument("--attention", choices=ATTENTIONS, metavar="KEPT",
        help="how query, key and value are kept: exact, recompute or a code (int8)")  # fmt: skip
    parser.add_argument("--loss", choices=LOSSES, help="chunked: never hold the logits (exact)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="what torch.optim.AdamW becomes (itself)")
    parser.add_argument("--zip", choices=("auto", "on", "off"), default="off", help="code losslessly what process "
        "groups of torch.distributed send: where it is faster, all that can be, or nothing (off)")  # fmt: skip
    parser.add_argument("--no-audit", action="store_true", help="do not compare the first training call of a model "
        "with the exact computation")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the summary as JSON, too: to a file whose name ends in "
        ".json, as stdout belongs to the script")  # fmt: skip
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser
