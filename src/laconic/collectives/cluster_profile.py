"""Cluster measurement: every collective on every kind of group, every code on every dtype, and the model's residuals.

All ranks call `profile` together and get the same rates. Sizes grow until one takes half a second, so that slow links
take no longer than fast ones: some ten seconds per kind of group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.engine import uncoded
from laconic.collectives.engine.call import CodecRoute
from laconic.collectives.policy.microbench import Ranks, codec_rates, gaussian, group_shape_of, host_name, pass_around
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.background import Work
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.cost.comm.rates import (
    ITEM_NBYTES,
    OPERATIONS,
    RING,
    SEND,
    CodecRates,
    Line,
    LinkRates,
    WireRates,
    fit_line,
)
from laconic.cost.comm.seconds import GroupShape, coded_seconds, sent_nbytes

_SIZES = tuple(1 << power for power in range(12, 25, 2))
"""Bytes that a process sends: 4 KB to 16 MB."""
_CODEC_SIZES = (1 << 14, 1 << 18, 1 << 22)
_QUICK_SIZES, _QUICK_CODEC_SIZES = (1 << 12, 1 << 18), (1 << 14, 1 << 17)
_CODED_SIZES = (1 << 17, 1 << 22)
_OVERLAP_NBYTES = 1 << 21
_DTYPE = torch.bfloat16

_LONGEST_SECONDS = 0.5
_SECONDS_PER_CASE = 0.1
_MIN_REPEATS, _MAX_REPEATS = 3, 9


def profile(device: torch.device, report: Callable[[str], None] = lambda text: None, quick: bool = False) -> WireRates:
    """Measure the cluster of the default process group; every rank gets the same rates.

    Tensors are sent from `device`; `quick` takes small sizes only, as a smoke test.
    """
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, device)
    hosts = ranks.texts(host_name())
    group_shape = group_shape_of(hosts)
    groups = _groups(group_shape, ranks.group.rank())
    links = {}
    for kind, group in groups.items():
        report(f"links, {kind}: {group.size()} ranks")
        links[kind] = _measure_both(ranks, group, _QUICK_SIZES if quick else _SIZES)
    codecs, codec_sizes = {}, _QUICK_CODEC_SIZES if quick else _CODEC_SIZES
    for dtype in ITEM_NBYTES:
        report(f"codecs, {dtype}")
        codecs[dtype] = codec_rates(ranks, getattr(torch, dtype), codec_sizes)
    for kind, group in groups.items():
        report(f"coded, {kind}")
        links[kind] = replace(links[kind], extra=_extra(ranks, group, links[kind], codecs))
    nodes = f"{group_shape.num_nodes} node{'s' * (group_shape.num_nodes > 1)}"
    source = f"laconic profile, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {nodes}, {device.type}"
    (source,) = dict.fromkeys(ranks.texts(source)[:1])  # clocks differ
    layout = group_shape.num_nodes, group_shape.ranks_per_node
    return WireRates(links, codecs, device.type, layout, tuple(dict.fromkeys(hosts)), source)


def _groups(group_shape: GroupShape, rank: int) -> dict[str, dist.ProcessGroup]:
    """Make this rank's group of each kind; every rank takes part in making all of them."""
    assert dist.group.WORLD is not None
    if group_shape.kind != "all":
        return {group_shape.kind: dist.group.WORLD}
    size, per_node = group_shape.num_ranks, group_shape.ranks_per_node
    members = {
        "node": [list(range(first, first + per_node)) for first in range(0, size, per_node)],
        "across": [list(range(local_rank, size, per_node)) for local_rank in range(per_node)],
    }
    groups = {"all": dist.group.WORLD}
    for kind, lists in members.items():
        for one in lists:
            group = dist.new_group(one)
            if rank in one:
                assert isinstance(group, dist.ProcessGroup)
                groups[kind] = group
    return groups


# --- links ---


def _measure_both(ranks: Ranks, group: dist.ProcessGroup, sizes: Sequence[int]) -> LinkRates:
    """Measure the backend's own operations, and as `travels` the exchanges that carry coded messages."""
    exchanges = measure_link(ranks, group, sizes)
    travels = dict(exchanges.operations)
    if group.size() > 2:
        travels[RING] = _line(ranks, sizes, _LONGEST_SECONDS, lambda size: _around(size, group, ranks.device))
    operations = {
        name: _line(ranks, sizes, _LONGEST_SECONDS, partial(_case, name, group, ranks.device, None))
        for name in OPERATIONS
    }
    return replace(exchanges, operations=operations, travels=travels)


def measure_link(
    ranks: Ranks,
    group: dist.ProcessGroup,
    sizes: Sequence[int],
    names: Sequence[str] = OPERATIONS,
    longest_seconds: float = _LONGEST_SECONDS,
) -> LinkRates:
    """Measure the rates of a group, with lines of the operations `names`.

    All of `ranks` call this together, each with its own group; groups are of one size. Of `sizes`, bytes that a process
    sends, those that would take longer than `longest_seconds`, if each were 4 times the one before, are left out.
    """
    lines = {
        name: _line(ranks, sizes, longest_seconds, partial(_case, name, group, ranks.device, Raw())) for name in names
    }
    return LinkRates(group.size(), lines, _chunk_seconds(ranks, group), _overlap(ranks, group))


def _line(
    ranks: Ranks,
    sizes: Sequence[int],
    longest_seconds: float,
    case_of: Callable[[int], tuple[Callable[[], object], float]],
) -> Line:
    points = []
    for size in sizes:
        case, sent = case_of(size)
        (first,) = ranks.seconds(case, 1)
        repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_SECONDS_PER_CASE / max(first, 1e-9))))
        seconds = median(ranks.seconds(case, repeats))
        points.append((sent, seconds))
        if 4 * seconds > longest_seconds:
            break
    return fit_line(points)


def _around(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Callable[[], object], float]:
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    return partial(pass_around, torch.empty_like(sent), sent, group), size


def _case(
    operation: str, group: dist.ProcessGroup, device: torch.device, codec: Codec | None, size: int
) -> tuple[Callable[[], object], float]:
    """An operation that sends about `size` raw bytes of a process of `group`, and how many; by the backend for None."""
    world = group.size()
    per_byte = sent_nbytes(operation, 1.0, world)
    numel = -(-int(size / per_byte / _DTYPE.itemsize) // world) * world
    x = gaussian(numel, _DTYPE, device)
    first = registered_ranks(group)[0]
    is_first = group.rank() == 0
    large, small = numel * world, numel // world
    natively: dict[str, Callable[[], Work[Any]]] = {
        "all_gather": lambda: uncoded.all_gather(x.new_empty(large), x, group),
        "reduce_scatter": lambda: uncoded.reduce_scatter(x.new_empty(small), x, group),
        "all_reduce": lambda: uncoded.all_reduce(x.clone(), group),
        "all_to_all": lambda: uncoded.all_to_all(torch.empty_like(x), x, group),
        "broadcast": lambda: uncoded.broadcast(x, group, 0),
        "gather": lambda: uncoded.gather(x.new_empty(large) if is_first else None, x, group, 0),
        "scatter": lambda: uncoded.scatter(x.new_empty(small), x if is_first else None, group, 0),
    }
    if codec is None and operation in natively:
        return lambda: natively[operation]().wait(), sent_nbytes(operation, x.nbytes, world)
    codec = codec or Raw()
    cases: dict[str, Callable[[], object]] = {
        "all_gather": lambda: api.all_gather(x.new_empty(large), x, group, codec=codec),
        "reduce_scatter": lambda: api.reduce_scatter(x.new_empty(small), x, group, codec=codec),
        "all_reduce": lambda: api.all_reduce(x.clone(), group, codec=codec),
        "all_to_all": lambda: api.all_to_all(torch.empty_like(x), x, group=group, codec=codec),
        "broadcast": lambda: api.broadcast(x, first, group, codec=codec),
        "gather": lambda: api.gather(x.new_empty(large) if is_first else None, x, first, group, codec=codec),
        "scatter": lambda: api.scatter(x.new_empty(small), x if is_first else None, first, group, codec=codec),
        SEND: partial(_send_to_neighbour, x, group),
    }
    return cases[operation], sent_nbytes(operation, x.nbytes, world)


def _send_to_neighbour(x: Tensor, group: dist.ProcessGroup) -> None:
    """Send from even ranks to the next one; the last one of an odd number is idle."""
    rank = group.rank()
    if rank % 2:
        work = group.recv([torch.empty_like(x)], rank - 1, 0)
    elif rank + 1 < group.size():
        work = group.send([x], rank + 1, 0)
    else:
        return
    assert work is not None
    work.wait()


def _chunk_seconds(ranks: Ranks, group: dist.ProcessGroup) -> float:
    """Measure the cost of one more small message to every rank while others are under way."""
    rows = torch.zeros(group.size(), 64, dtype=torch.uint8, device=ranks.device)

    def several(number: int) -> None:
        for work in [torch_compat.all_to_all(torch.empty_like(rows), rows, group) for _ in range(number)]:
            work.wait()

    one, many = (median(ranks.seconds(partial(several, number), _MAX_REPEATS)) for number in (1, 9))
    return max(0.0, many - one) / 8


def _overlap(ranks: Ranks, group: dist.ProcessGroup) -> float:
    """Measure the share of the shorter of coding and transfer that is hidden when both run at once."""
    world = group.size()
    rows = torch.zeros(world, _OVERLAP_NBYTES // world, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(rows)
    chunk = gaussian(1 << 16, _DTYPE, ranks.device)
    codec = Lossless("tiered")

    def encode(number: int) -> None:
        for _ in range(number):
            codec.encode(chunk)

    def both(number: int) -> None:
        work = torch_compat.all_to_all(received, rows, group)
        encode(number)
        work.wait()

    wire = median(ranks.seconds(partial(both, 0), _MIN_REPEATS))
    number = max(1, min(1000, round(wire / median(ranks.seconds(partial(encode, 1), _MAX_REPEATS)))))
    coding = median(ranks.seconds(partial(encode, number), _MIN_REPEATS))
    together = median(ranks.seconds(partial(both, number), _MIN_REPEATS))
    return min(1.0, max(0.0, (wire + coding - together) / min(wire, coding)))


# --- residuals of the model ---


def _extra(
    ranks: Ranks, group: dist.ProcessGroup, link: LinkRates, codecs: Mapping[str, Mapping[str, CodecRates]]
) -> dict[str, Line]:
    """Measure the residual of coded operations: measured gain or cost of coding against raw, minus the predicted one.

    It contains calls, headers, buffers and caches. Raw and coded alternate, so that a disturbance hits both.
    """
    codec = codecs["bfloat16"]["tiered"]
    world, found = group.size(), {}
    for operation in OPERATIONS:
        if operation == SEND:
            continue  # like a broadcast, below
        missing = []
        for size in _CODED_SIZES:
            raw, sent = _case(operation, group, ranks.device, None, size)
            coded, _ = _case(operation, group, ranks.device, Lossless("tiered"), size)
            ((once, _),) = ranks.in_turn([raw, coded], 1)
            repeats = min(3 * _MAX_REPEATS, max(_MAX_REPEATS, int(_SECONDS_PER_CASE / once)))
            # Lower quartiles: what disturbs a machine only ever makes things slower, and a difference of two medians of
            # disturbed times is mostly disturbance.
            times = zip(*ranks.in_turn([raw, coded], repeats), strict=True)
            without, with_codec = (quantiles(one, n=4)[0] for one in times)
            nbytes = sent / sent_nbytes(operation, 1.0, world)
            num_chunks = _num_chunks(operation, nbytes, world)
            predicted = coded_seconds(operation, nbytes, world, link, codec, codec.ratio, num_chunks)
            missing.append((sent, with_codec - without - (predicted - link.line(operation).seconds(sent))))
        (small, less), (large, more) = missing
        per_byte = max(0.0, (more - less) / (large - small))
        found[operation] = Line(max(0.0, less - per_byte * small), per_byte)
    return found | {SEND: found["broadcast"]}


def _num_chunks(operation: str, nbytes: float, world: int) -> int:
    """Number of chunks of the message from one rank to another, if no choice sets it."""
    parts = world if operation in ("reduce_scatter", "all_reduce", "all_to_all", "scatter") else 1
    numel = int(nbytes / _DTYPE.itemsize / parts)
    return -(-numel // CodecRoute(Raw(), None, "").step(numel, _DTYPE))
