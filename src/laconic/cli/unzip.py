"""`laconic unzip`: restore byte for byte what `laconic zip` wrote."""

from __future__ import annotations

import time
from collections.abc import Sequence

from laconic.cli.arguments import Parser
from laconic.cli.progress import progress_bar
from laconic.cli.verify import add_zipped, note_unlisted
from laconic.cli.zip import path_of, print_json


def run(args: Sequence[str]) -> int:
    """Run `laconic unzip` with `args`."""
    options = make_parser().parse_args(args)
    import torch

    from laconic.formats.archive import tensors_nbytes, unzip

    torch.set_num_threads(1)  # the jobs are the threads
    started = time.perf_counter()
    with progress_bar(lambda: tensors_nbytes(options.path), "unzip") as progress:
        made = unzip(options.path, options.out, base=options.base, num_threads=options.jobs, progress=progress)
    seconds = time.perf_counter() - started
    note_unlisted(made.unlisted)
    if options.json:
        print_json(made, seconds)
        return 0
    print(f"wrote {made.path}: {made.original_nbytes:,} bytes, {made.num_tensors} tensors, {seconds:.1f} s")
    return 0


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic unzip", description="Restore a file or directory that `laconic zip` wrote, byte for byte."
    )
    parser.add_argument(
        "--out", metavar="PATH", type=path_of, help="what to write (default: FILE|DIR without .laconic)"
    )
    add_zipped(parser)
    return parser
