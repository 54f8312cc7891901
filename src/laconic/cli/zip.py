"""`laconic zip`: safetensors files and checkpoint directories in fewer bytes, losslessly."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli import output
from laconic.cli.arguments import Parser, add_json, at_least
from laconic.cli.progress import progress_bar
from laconic.output_lines import say

if TYPE_CHECKING:
    from laconic.formats.archive import Summary


def run(args: Sequence[str]) -> int:
    """Run `laconic zip` with `args`."""
    parser = make_parser()
    options = parser.parse_args(args)
    if options.best and options.code:
        parser.error(f"--best is a code of its own; leave out --code {options.code}")
    import torch

    from laconic.formats.archive import tensors_nbytes, zip_path

    torch.set_num_threads(1)  # the jobs are the threads
    started = time.perf_counter()
    with progress_bar(lambda: tensors_nbytes(options.path), "zip") as progress:
        made = zip_path(
            options.path,
            options.out,
            base=options.delta,
            code="best" if options.best else options.code or "auto",
            num_threads=options.jobs,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    if not made.num_tensors:
        of_runs = "checkpoint.zip shortens a run's checkpoints, `laconic export RUN DIR --zip` its model"
        remedy = f"; {of_runs}" if (Path(options.path) / "checkpoints").is_dir() else ""
        say(f"laconic: note: {options.path} holds no safetensors with tensors, so nothing was shortened{remedy}")
    if options.json:
        print_json(made, seconds)
        return 0
    share = f" ({made.zipped_nbytes / made.original_nbytes:.1%})" if made.num_tensors else ""
    print(
        f"wrote {made.path}: {made.original_nbytes:,} -> {made.zipped_nbytes:,} bytes{share}, "
        f"{made.num_tensors} tensors, {seconds:.1f} s"
    )
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic zip",
        description="Shrink a safetensors file, or a directory with such files, losslessly: bfloat16 weights by about "
        "a third. `laconic unzip` restores every byte; laconic.load_zipped loads the tensors as they lie.",
    )
    parser.add_argument("path", metavar="FILE|DIR", type=path_of, help="a .safetensors file, or a directory")
    parser.add_argument("--out", metavar="PATH", type=path_of, help="what to write (default: FILE|DIR with .laconic)")
    parser.add_argument("--delta", metavar="BASE", type=path_of,
        help="store the difference to this checkpoint, zipped or plain; it is needed to unzip")  # fmt: skip
    parser.add_argument("--code", choices=("auto", "tiered", "window", "raw"),
        help="exponent code (default: auto, the smallest of these)")  # fmt: skip
    parser.add_argument("--best", action="store_true",
        help="entropy-code every byte that gets shorter, except in chunks whose sample is shorter with --code auto: "
        "the smallest files, which take longer to make")  # fmt: skip
    add_jobs(parser)
    add_json(parser)
    return parser


def path_of(text: str) -> Path:
    """Parse a path, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    path = Path(text)
    if path.name not in ("", ".."):
        return path
    path = path.resolve()  # what is made is named after it
    if not path.name:
        raise argparse.ArgumentTypeError(f"{text!r} is the root of the file system, which cannot be named after")
    return path


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add the flag --jobs to `parser`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--jobs", metavar="N", type=at_least(1), default=cores, help=f"threads (default: {cores})")


def print_json(made: Summary, seconds: float) -> None:
    """Print a result and the seconds it took as JSON."""
    output.print_json({**dataclasses.asdict(made), "path": made.path, "seconds": seconds})
