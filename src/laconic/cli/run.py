"""`laconic run`: runs an unmodified training script with the savings switched on."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

__all__ = ["run"]


def run(args: Sequence[str]) -> int:
    """Run `laconic run` with `args`; return the script's exit code, 2 if what was asked for cannot be done."""
    parser = argparse.ArgumentParser(
        prog="laconic run",
        description="Run a training script as `python SCRIPT ARGUMENTS` does, with compressed activations. A summary "
        "on stderr says what was saved. What a flag asks for and cannot be done ends the run, with exit code 2; all "
        "other exit codes are the script's.",
        allow_abbrev=False,
    )
    parser.add_argument("--activations", type=int, choices=(4, 5, 6, 8, 16), help="bits (4 where possible; 16: exact)")
    parser.add_argument("--attention", help="how query, key and value are kept: exact, recompute or a code (int8)")
    parser.add_argument("--loss", choices=("exact", "chunked"), help="chunked: never hold the logits (exact)")
    parser.add_argument("--optimizer", choices=("adamw8bit",), help="what torch.optim.AdamW becomes (itself)")
    parser.add_argument("--zip", choices=("auto", "on", "off"), default="off", help="code losslessly what process "
        "groups of torch.distributed send: where it is faster, all that can be, or nothing (off)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(args)
    from laconic.run.savings import Refusal, Savings, Wishes
    from laconic.run.script import Script
    from laconic.run.spawned import Spawned
    from laconic.run.summary import render, summarize
    from laconic.run.zipped_groups import ZippedGroups

    script = Script(options.script, options.arguments, is_module=options.is_module)
    savings = Savings(Wishes(options.activations, options.attention, options.loss, options.optimizer))
    groups = None if options.zip == "off" else ZippedGroups(options.zip)
    spawned = Spawned(savings.wishes, options.zip)
    with savings, groups or nullcontext(), spawned:
        code = script.run(passed=Refusal)
    if not savings.is_forked and os.environ.get("RANK", "0") == "0":
        children = spawned.summaries()
        trains_in_children = bool(children) and not savings.models and not savings.optimizers
        summary = children[0] if trains_in_children else summarize(savings, groups)
        summary |= {"spawned": len(children), "own": not trains_in_children}
        print(json.dumps(summary) if options.json else render(summary), file=sys.stderr)
    return code
