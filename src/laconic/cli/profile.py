"""`laconic profile`: measure the links and codecs of this cluster, for the cost model that chooses collectives."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.arguments import Parser, add_json
from laconic.cli.layer_flags import LAYER_FLAGS, add_layer, layer_shape
from laconic.cli.output import json_only, print_json
from laconic.cli.progress import working
from laconic.cost.comm.explain import rates_text
from laconic.cost.comm.rates import WireRates, default_path
from laconic.cost.infer.rates import InferenceRates, default_infer_path
from laconic.cost.moe.rates import MoERates, default_moe_path
from laconic.errors import ConfigError
from laconic.installation import module_command
from laconic.interrupts import interrupts_wait

if TYPE_CHECKING:
    from laconic.collectives.codec import Codec
    from laconic.train.distributed.world import World

_SECONDS_TO_END = 5.0


def run(args: Sequence[str]) -> int:
    """Run `laconic profile` with `args`, as one of torchrun's processes or in local ones that it starts itself."""
    parser = make_parser()
    options = parser.parse_args(args)
    _refuse_unused(parser, options)
    from laconic.train.distributed.world import join_world, read_environment

    info = read_environment(os.environ)
    if info is None:
        if options.infer:
            _is_beside_host(options.nproc, options.nproc, "nproc")
        return start_processes("profile", options.nproc, args)
    if info.world_size < 2:
        raise ConfigError("WORLD_SIZE is 1, but links need two processes; start more with torchrun, or use --nproc")
    beside_host = options.infer and _is_beside_host(info.world_size, info.local_world_size, "WORLD_SIZE")
    world = join_world(info, timeout_seconds=120.0, on_cpu=beside_host)
    if options.infer:
        return _measure_infer(world, Path(options.infer_out), options, beside_host)
    if options.moe:
        return _measure_moe(world, Path(options.moe_out), options)
    return _measure(world, Path(options.out), options)


def _refuse_unused(parser: Parser, options: argparse.Namespace) -> None:
    if options.infer and options.moe:
        raise ConfigError("--infer and --moe are both given, but a call measures one of both; make two calls")
    files = {"--out": not (options.infer or options.moe), "--infer-out": options.infer, "--moe-out": options.moe}
    what = "with --infer" if options.infer else "with --moe" if options.moe else "without --moe or --infer"
    written = next(flag for flag, is_written in files.items() if is_written)
    parser.refuse([flag for flag in files if flag != written], f"{what}, whose file is {written}")
    of_layers = {"--levels", "--codec", "--dtype", *LAYER_FLAGS}
    read = of_layers if options.moe else {"--dtype", "--model-dim", "--hidden-dim"} if options.infer else set()
    parser.refuse(of_layers - read, what)


def _measure(world: World, path: Path, options: argparse.Namespace) -> int:
    from laconic.collectives.cluster_profile import profile

    with json_only(options.json), _shown(world, "measuring links and codecs") as say:
        rates = profile(world.device, lambda text: say(f"measuring {text}"), options.quick)
    return _finish(world, rates, rates_text(rates), path, "laconic explain", options.json)


def _measure_moe(world: World, path: Path, options: argparse.Namespace) -> int:
    import torch

    from laconic.cost.moe.rates_text import moe_rates_text
    from laconic.moe.parallel.grid import Grid
    from laconic.moe.tuning.measure_cluster import measure_moe

    shape = layer_shape(options)
    levels = tuple(options.levels)
    if not levels and options.mp == options.esp == 1 and options.ep in (None, world.size):
        nodes = world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        levels = (nodes,) if 1 < nodes < world.size else ()
    grid = Grid(options.mp, options.ep, options.esp, levels=levels, device_type=world.device.type)
    dtype = getattr(torch, options.dtype)
    codecs = _lossy(options.codec)
    with json_only(options.json), _shown(world, f"measuring {grid!r}"):
        rates = measure_moe(grid, shape, dtype=dtype, device=world.device, codecs=codecs, quick=options.quick)
    return _finish(
        world, rates, moe_rates_text(rates), path, "laconic explain --moe, and laconic.moe.autotune", options.json
    )


def _is_beside_host(world_size: int, local_world_size: int, name: str) -> bool:
    """Return whether one of two processes measures this machine's only CUDA device, and the other one is the host's."""
    import torch

    if local_world_size == 1 or torch.cuda.device_count() != 1:
        return False
    if world_size > 2:
        raise ConfigError(
            f"{name} is {world_size}, but this machine has one CUDA device, which --infer measures in one process"
            " beside one of the CPU; start 2 processes, or one on each of several such machines"
        )
    return True


def _measure_infer(world: World, path: Path, options: argparse.Namespace, beside_host: bool) -> int:
    import torch

    from laconic.cli.infer_profile import measure_infer
    from laconic.cost.infer.choice_text import infer_rates_text

    shape, dtype = layer_shape(options), getattr(torch, options.dtype)
    device = torch.device("cuda", 0) if beside_host and world.is_main else world.device
    what = f"measuring products of {shape.model_dim} x {shape.hidden_dim} and links"
    with json_only(options.json), _shown(world, what):
        rates = measure_infer(shape, dtype=dtype, device=device, quick=options.quick, beside_host=beside_host)
    return _finish(world, rates, infer_rates_text(rates), path, "laconic infer plan", options.json)


def _finish(
    world: World, rates: WireRates | MoERates | InferenceRates, text: str, path: Path, see: str, as_json: bool
) -> int:
    # Each node may have its own disk.
    if world.local_rank == 0:
        rates.save(path)
    if world.is_main:
        if as_json:
            print_json({"path": path, "rates": rates.to_dict()})
        else:
            print(f"{text}\n\nwrote {path}; see {see}")
        sys.stdout.flush()
    world.leave()
    return 0


def _shown(world: World, what: str) -> AbstractContextManager[Callable[[str], None]]:
    return working(what) if world.is_main else nullcontext(lambda text: None)


def _lossy(names: Sequence[str]) -> list[Codec]:
    from laconic.collectives.codec import Blockwise
    from laconic.formats import BlockFormat

    return [Blockwise(BlockFormat(name)) for name in names]


def start_processes(command: str, num_processes: int, args: Sequence[str]) -> int:
    """Run a subcommand in `num_processes` processes on this machine; return the first exit code that is not 0."""
    if num_processes < 2:
        raise ConfigError(f"nproc is {num_processes}, but links need at least 2 processes")
    from laconic.train.launch.rendezvous import local_rendezvous

    fixed = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    fixed |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch, local_rendezvous(Path(scratch)):
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_processes):
                variables = os.environ | fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with interrupts_wait():
                    processes.append(subprocess.Popen(module_command("laconic", command, *args), env=variables))
            codes = [process.wait() for process in processes]
        except BaseException:
            with interrupts_wait():
                _end(processes)
            raise
    return next((code for code in codes if code), 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End child processes, those that wait in a collective too."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic profile",
        description="Measure links (every collective, inside nodes, between them and over all) and codecs of this "
        "cluster, print the fits and write them to a file that choices are made from, in less than two minutes. Start "
        "it with torchrun on the nodes that will train; alone, it starts processes here and measures this machine.",
    )
    add = parser.add_argument
    add("--nproc", type=int, default=2, metavar="N", help="processes when not under torchrun (default: %(default)s)")
    add("--out", default=str(default_path()), metavar="FILE", help="where to write (default: %(default)s)")
    add("--quick", action="store_true", help="small sizes only; shows that it works")
    add_json(parser, "print the rates as one JSON document")
    infer = parser.add_argument_group("inference of layers of experts")
    infer.add_argument("--infer", action="store_true", help="measure products, attention, reading of weights and links "
        "between two workers instead, for laconic infer plan; sizes as below")  # fmt: skip
    infer.add_argument(
        "--infer-out", default=str(default_infer_path()), metavar="FILE", help="where to write (default: %(default)s)"
    )
    moe = parser.add_argument_group("layers of experts")
    more = moe.add_argument
    more("--moe", action="store_true", help="measure all groups of a grid, experts, and every route of a layer instead")
    more("--moe-out", default=str(default_moe_path()), metavar="FILE", help="where to write (default: %(default)s)")
    more("--levels", type=int, nargs="*", default=(), help="groups of an EP group at each level (default: nodes)")
    more("--codec", nargs="*", default=(), metavar="CODE", help="lossy ones to measure beside lossless, such as int8")
    more("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s")
    add_layer(more)
    return parser
