"""`laconic advise`: measures the ways to keep less for backward on a model and this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only
from laconic.cli.progress import working
from laconic.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from laconic.advice import Advice
    from laconic.auditing.training_call import LossOf

_MADE_UP = ("batch_size", "sequence_length", "image_size")
"""Flags of batches that are made up, and their defaults."""


def run(args: Sequence[str]) -> int:
    """Run `laconic advise` with `args`; return 0.

    Raises:
        ConfigError: the target is no such directory or function, or a flag has no meaning for it.
        ModelError, PlanError: the model cannot be built or measured, or no batch for it can be made up.
    """
    options = make_parser().parse_args(args)
    with json_only(options.json) as emit:
        advice = _advise(options)
        if advice is None:
            return 0
        if options.json:
            emit(advice.to_dict())
        else:
            print(advice)
            if options.plot is not None:
                print(f"\nwrote {options.plot}")
    return 0


def _advise(options: argparse.Namespace) -> Advice | None:
    """Measure, and draw the picture that was asked for; only rank 0 has something to print."""
    for name in ("batch_size", "sequence_length", "image_size", "rounds"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but it must be 1 or more")
    _check_picture(options.plot)  # before minutes of measuring
    import torch

    from laconic.advice import advise
    from laconic.train.distributed.world import join_world, read_environment

    # Under torchrun each process measures, and the link between them is measured too.
    world = join_world(read_environment(os.environ), timeout_seconds=600.0)
    loss_of: LossOf | None = None
    if ":" in options.target and not Path(options.target).is_dir():
        model, batch, loss_of = _from_function(options)
    else:
        model, batch = _from_directory(options, world.device)
    autocast = torch.bfloat16 if options.precision == "bf16" else None
    with working(f"measuring ways to train {options.target}"), _quiet_profiler():
        advice = advise(
            model, batch, loss_of=loss_of, rounds=options.rounds, autocast=autocast, compile=options.compile
        )
    if world.size > 1:
        world.leave()
    if not world.is_main:
        return None
    if options.plot is not None:
        advice.plot(options.plot)
    return advice


def _from_directory(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    if os.path.isfile(options.target):
        raise ConfigError(
            f"target is {options.target}, a file; name its function that returns (model, batch), as in"
            f" {options.target}:build, or give a directory with a config.json"
        )
    import torch

    from laconic.train.memory.directory import load_any, made_up_batches

    model = load_any(options.target, torch.bfloat16 if options.precision == "bf16-pure" else torch.float32)
    torch.nn.Module.to(model, device)
    batches = made_up_batches(model, options.sequence_length, options.image_size, usual_length=128)
    return model, batches(2 if options.batch_size is None else options.batch_size)


def _from_function(options: argparse.Namespace) -> tuple[Any, Any, LossOf | None]:
    for name in _MADE_UP:
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is given beside {options.target}, whose function makes the batch; leave it"
                " out"
            )
    if options.precision == "bf16-pure":
        raise ConfigError(
            f"--precision is bf16-pure, but the function of {options.target} makes the model; convert it there"
        )
    path, _, name = options.target.rpartition(":")
    if not os.path.isfile(path):
        raise ConfigError(
            f"target is {options.target}, but there is no file {path}; give FILE.py:FUNCTION or a directory with a"
            " config.json"
        )
    spec = importlib.util.spec_from_file_location("laconic_advise_target", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"target is {options.target}, but {path} is no Python file")
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"target is {options.target}, but {path} has no function {name!r}")
    returned = function()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ConfigError(
            f"{options.target} returned a {type(returned).__name__}, but it must return (model, batch) or"
            " (model, batch, loss_of)"
        )
    model, batch, *rest = returned
    return model, batch, rest[0] if rest else None


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Without the lines that torch's profiler writes to the file descriptor of errors at each of its starts."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_picture(path: str | None) -> None:
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot is {path!r}, but its directory does not exist; make it first")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'laconic[plots]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--plot is {path!r}, but a picture's name must end in one of {', '.join(sorted(known))}")


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic advise",
        description="Measure the ways to keep less for backward on a model and this machine: exact, 4 and 8 bits, "
        "chunked loss, checkpointing, offload. Prints bytes kept, time, peak memory and gradient error of each, which "
        "of them no other beats, and the lines of Python to add. Under torchrun also what averaging gradients takes on "
        "the link, exact and coded.",
    )
    add = parser.add_argument
    add("target", help="a directory with a config.json of transformers (random weights without a checkpoint), or "
        "FILE.py:FUNCTION, a function that returns (model, batch) or (model, batch, loss_of)")  # fmt: skip
    add("--batch-size", type=int, metavar="N", help="samples, of a directory's model (2)")
    add("--sequence-length", type=int, metavar="N", help="tokens of a sample (128)")
    add("--image-size", type=int, metavar="N", help="pixels of a side (the configuration's, or 224)")
    add("--precision", choices=("fp32", "bf16", "bf16-pure"), default="fp32",
        help="bf16: autocast; bf16-pure: parameters too (%(default)s)")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="of timing (%(default)s)")
    add("--compile", action="store_true", help="also under torch.compile and its memory budget; takes minutes")
    add_json(parser, "print the table as one JSON document")
    add("--plot", metavar="FILE", help="draw bytes against time, for example advice.png")
    return parser
