"""`laconic verify`: compare every checksum of what `laconic zip` wrote."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from laconic.cli.arguments import Parser, add_json
from laconic.cli.progress import progress_bar
from laconic.cli.zip import add_jobs, path_of, print_json
from laconic.output_lines import say


def run(args: Sequence[str]) -> int:
    """Run `laconic verify` with `args`."""
    options = make_parser().parse_args(args)
    import torch

    from laconic.formats.archive import tensors_nbytes, verify

    torch.set_num_threads(1)  # the jobs are the threads
    started = time.perf_counter()
    with progress_bar(lambda: tensors_nbytes(options.path), "verify") as progress:
        seen = verify(options.path, base=options.base, num_threads=options.jobs, progress=progress)
    seconds = time.perf_counter() - started
    note_unlisted(seen.unlisted)
    if seen.unchecked is not None:
        say(f"laconic: note: the differences are sound; give --base {seen.unchecked} to verify the tensors too")
    if options.json:
        print_json(seen, seconds)
        return 0
    print(
        f"{seen.path} is sound: {seen.num_tensors} tensors, {seen.num_other_files} other files, "
        f"{seen.original_nbytes:,} bytes in {seen.zipped_nbytes:,}, {seconds:.1f} s"
    )
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic verify",
        description="Decode all that `laconic zip` wrote and compare every checksum; exit code 2 when one differs.",
    )
    add_zipped(parser)
    return parser


def add_zipped(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a zipped file or directory to `parser`: its path, --base and --jobs."""
    parser.add_argument("path", metavar="FILE|DIR", type=path_of, help="what `laconic zip` wrote")
    parser.add_argument(
        "--base", metavar="BASE", type=path_of, help="the checkpoint it was zipped against with --delta"
    )
    add_jobs(parser)
    add_json(parser)


def note_unlisted(names: Sequence[str]) -> None:
    """Note on stderr the files of a zipped directory that its manifest does not list, if there are any."""
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        say(f"laconic: note: left alone, because the manifest does not list them: {shown}")
