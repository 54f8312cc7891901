"""`laconic cluster-test`: versions, clocks, links and coded collectives of a launch's processes."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only, print_json
from laconic.cli.profile import start_processes
from laconic.cost.sizes import format_nbytes
from laconic.errors import ConfigError, LaconicError
from laconic.text_columns import columns

if TYPE_CHECKING:
    from torch import Tensor

    from laconic.train.distributed.world import World

_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter")
_CLOCK_SECONDS = 0.1
"""From which difference on logs of two machines are hard to read side by side."""
_MESSAGE_NBYTES = 1 << 22
_NUM_ELEMENTS = 1 << 18
"""Of each rank's tensor in a collective: a megabyte of float32."""


def run(args: Sequence[str]) -> int:
    """Run `laconic cluster-test` with `args`, as one of torchrun's processes or in local ones that it starts itself.

    Returns 1 if versions differ or a collective does not give what it must.
    """
    options = make_parser().parse_args(args)
    if not options.timeout > 0:
        raise ConfigError(f"--timeout is {options.timeout}, but it must be a number of seconds above 0")
    from laconic.train.distributed.world import join_world, read_environment

    info = read_environment(os.environ)
    if info is None:
        return start_processes("cluster-test", options.nproc, args)
    if info.world_size < 2:
        raise ConfigError("WORLD_SIZE is 1, but links need two processes; start more with torchrun, or use --nproc")
    world = join_world(info, timeout_seconds=options.timeout)
    with json_only(options.json):
        found = _tested(world)
    if world.is_main and options.json:
        print_json(found)
    elif world.is_main:
        print(_text(found))
    sys.stdout.flush()
    world.leave()
    return 1 if found["problems"] else 0


def _tested(world: World) -> dict[str, Any]:
    ranks = world.gather(_facts())
    problems = [
        f"{name} differs: " + ", ".join(f"{version} on rank {rank}" for rank, version in _first_of_each(ranks, name))
        for name in ranks[0]["versions"]
        if len({one["versions"][name] for one in ranks}) > 1
    ]
    links = world.gather(list(_links(world)))[0]
    collectives = []
    for name in _COLLECTIVES:
        said = world.gather(_tried(world, name))
        problems += [f"{name} on rank {rank}: {one['problem']}" for rank, one in enumerate(said) if one["problem"]]
        collectives.append(
            {
                "name": name,
                "seconds": max(one["seconds"] for one in said),
                "sent_nbytes": sum(one["sent_nbytes"] for one in said),
                "raw_nbytes": sum(one["raw_nbytes"] for one in said),
            }
        )
    notes = [
        f"the clock of rank {one['rank']} is {one['clock_seconds']:+.2f} s off rank 0's; synchronize them (NTP)"
        for one in links
        if abs(one["clock_seconds"]) > _CLOCK_SECONDS
    ]
    return {"ranks": ranks, "links": links, "collectives": collectives, "notes": notes, "problems": problems}


def _facts() -> dict[str, Any]:
    import torch

    import laconic
    from laconic.ops import kernels_in_use

    versions = {"laconic": laconic.__version__, "torch": torch.__version__, "python": platform.python_version()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = kernels_in_use().get(device, {})
    return {"host": socket.gethostname(), "versions": versions, "kernels": kernels.get("implementation", "?")}


def _first_of_each(ranks: Sequence[dict[str, Any]], name: str) -> list[tuple[int, str]]:
    first = {one["versions"][name]: rank for rank, one in reversed(list(enumerate(ranks)))}
    return sorted((rank, version) for version, rank in first.items())


def _links(world: World) -> Iterator[dict[str, Any]]:
    """On rank 0: its round trip to each other rank, what the way carries, and how far the clocks are apart."""
    import torch
    import torch.distributed as dist

    small = torch.zeros(1, dtype=torch.float64, device=world.device)
    large = torch.zeros(_MESSAGE_NBYTES, dtype=torch.uint8, device=world.device)
    for other in range(1, world.size):
        trips: list[tuple[float, float]] = []
        for attempt in range(9):  # the first makes the connection
            if world.rank == 0:
                began = time.time()
                dist.send(small, other)
                dist.recv(small, other)
                ended = time.time()
                if attempt:
                    trips.append((ended - began, float(small) - (began + ended) / 2))
            elif world.rank == other:
                dist.recv(small, 0)
                dist.send(small.fill_(time.time()), 0)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            if world.rank == 0:
                dist.send(large, other)
                dist.recv(small, other)
            elif world.rank == other:
                dist.recv(large, 0)
                dist.send(small, 0)
            seconds.append(time.perf_counter() - began)
        if world.rank == 0:
            trip, clock = min(trips)  # the shortest trip bounds the clock's error best
            speed = _MESSAGE_NBYTES / min(seconds)
            yield {"rank": other, "trip_seconds": trip, "bytes_per_second": speed, "clock_seconds": clock}


def _tried(world: World, name: str) -> dict[str, Any]:
    """Run a collective with the lossless codec, and compare it with what every rank can compute by itself."""
    import torch

    from laconic.collectives import audit

    generator = torch.Generator()
    inputs = [
        torch.randn(_NUM_ELEMENTS, generator=generator.manual_seed(rank), dtype=torch.float32, device="cpu")
        for rank in range(world.size)
    ]
    before, began = audit.snapshot(), time.perf_counter()
    try:
        got, expected = _called(world, name, [each.to(world.device) for each in inputs])
        wrong = 0 if got is None else int((got != expected).sum())
        problem = f"{wrong} of {got.numel()} values are wrong" if got is not None and wrong else ""
    except LaconicError as error:
        problem = str(error)
    sent = audit.snapshot() - before
    seconds = time.perf_counter() - began
    return {"problem": problem, "seconds": seconds, "sent_nbytes": sent.sent_nbytes, "raw_nbytes": sent.raw_nbytes}


def _called(world: World, name: str, inputs: list[Tensor]) -> tuple[Tensor | None, Tensor]:
    """What a coded collective gives this rank, None where it gives nothing, and what it must give."""
    import torch

    from laconic.collectives import Lossless
    from laconic.collectives import api as collectives

    call, mine = partial(getattr(collectives, name), codec=Lossless()), inputs[world.rank].clone()
    size = _NUM_ELEMENTS // world.size
    cut = [each[: size * world.size].contiguous() for each in inputs]  # in equal parts for all ranks
    own = slice(world.rank * size, (world.rank + 1) * size)
    if name == "all_reduce":
        return call(mine).wait(), _sum(inputs)
    if name == "broadcast":
        return call(mine, 0).wait(), inputs[0]
    if name == "scatter":
        return call(torch.empty_like(mine), torch.cat(inputs) if world.rank == 0 else None, 0).wait(), mine
    if name == "gather":
        whole = torch.cat(inputs)
        return call(torch.empty_like(whole) if world.rank == 0 else None, mine, 0).wait(), whole
    expected = {
        "all_gather": lambda: torch.cat(inputs),
        "reduce_scatter": lambda: _sum(cut)[own],
        "all_to_all": lambda: torch.cat([each[own] for each in cut]),
    }[name]()
    return call(torch.empty_like(expected), mine if name == "all_gather" else cut[world.rank]).wait(), expected


def _sum(inputs: Sequence[Tensor]) -> Tensor:
    """In the order of ranks, as the collectives add."""
    return reduce(add, inputs)


def _text(found: dict[str, Any]) -> str:
    ranks = [
        [str(rank), one["host"], *one["versions"].values(), one["kernels"]] for rank, one in enumerate(found["ranks"])
    ]
    links = [
        [
            f"0 to {one['rank']}",
            f"{one['trip_seconds'] * 1e3:.2f} ms",
            f"{format_nbytes(one['bytes_per_second'])}/s",
            f"{one['clock_seconds'] * 1e3:+.1f} ms",
        ]
        for one in found["links"]
    ]
    collectives = [
        [
            one["name"],
            f"{one['seconds'] * 1e3:.0f} ms",
            format_nbytes(one["sent_nbytes"]),
            format_nbytes(one["raw_nbytes"]),
        ]
        for one in found["collectives"]
    ]
    parts = [columns(["rank", "host", "laconic", "torch", "python", "kernels"], ranks, left=range(6))]
    if links:
        parts.append(columns(["link", "round trip", "carries", "clock"], links))
    parts.append(columns(["coded collective", "slowest rank", "sent", "uncoded"], collectives))
    lines = [f"note: {note}" for note in found["notes"]] + [f"PROBLEM: {problem}" for problem in found["problems"]]
    parts.append("\n".join(lines) if lines else "Versions agree, and every collective gives what it must.")
    return "\n\n".join(parts)


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic cluster-test",
        description="Test the processes of a launch: do their versions agree, how far are their clocks apart, what do "
        "the links from rank 0 carry, and does a coded collective of each kind give what it must? Start it as the "
        "training will be started: torchrun --nproc-per-node 2 -m laconic cluster-test. Exit code 1 if something is "
        "wrong.",
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="without torchrun: processes (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for ranks to meet and to answer (default: 60)"
    )
    add_json(parser, "print the results as one JSON document, on rank 0")
    return parser
