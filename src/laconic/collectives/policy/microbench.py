"""Timing of links and codecs on all ranks of a group at once.

Every number is agreed on: ranks time the same thing at the same moment, exchange the times, and all keep the slowest
rank's. So all of them end with the same numbers and choose alike without communication.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime import torch_compat
from laconic.cost.comm.rates import CODES, OPERATIONS, RING, CodecRates, Line, LinkRates, fit_line
from laconic.cost.comm.seconds import MIN_CODED_NBYTES, GroupShape, sent_nbytes
from laconic.formats import lossless

_BRIEF_NBYTES = (1 << 16, 1 << 19, 1 << 22)
_LONG_SECONDS = 0.004
"""The brief measurement ends with the first message that takes longer than this."""

_CODING_SECONDS = 0.002
"""Time spent on each case of a codec, three runs at least."""

_BRIEF_CODEC_NBYTES = (MIN_CODED_NBYTES, 1 << 19)
_BRIEF_REPEATS = 3
_BRIEF_OVERLAP = 0.5
_BRIEF_EXTRA = Line(5e-4, 0.0)
"""What the brief measurement does not measure is assumed, on the careful side."""


class Ranks:
    """The ranks of a group, as far as measuring needs them."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, exchange_device: torch.device | None = None
    ) -> None:
        """Take a group, this rank's device, and where tensors are that the group exchanges, if elsewhere."""
        self.group = group
        self.device = device
        self.world = group.size()
        self._exchange_device = exchange_device or device

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """What every rank passed, in rank order; equal lengths."""
        mine = torch.tensor(list(values), dtype=torch.int64, device=self._exchange_device)
        gathered = torch.empty(self.world, len(values), dtype=torch.int64, device=self._exchange_device)
        torch_compat.all_gather(gathered, mine, self.group).wait()
        found: list[list[int]] = gathered.tolist()
        return found

    def texts(self, text: str) -> list[str]:
        """The text that every rank passed, in rank order."""
        content = text.encode()
        longest = max(length for (length,) in self.exchange([len(content)]))
        if longest == 0:
            return [""] * self.world
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else 0
        gathered = torch.empty(self.world, longest, dtype=torch.uint8, device=self._exchange_device)
        torch_compat.all_gather(gathered, mine.to(self._exchange_device), self.group).wait()
        return [row.cpu().numpy().tobytes().rstrip(b"\0").decode() for row in gathered]

    def seconds(self, case: Callable[[], object], repeats: int) -> list[float]:
        """The slowest rank's seconds of each repeat; a first one is not counted. The same numbers on every rank."""
        return [seconds for (seconds,) in self.in_turn([case], repeats)]

    def seconds_alone(self, case: Callable[[], object] | None) -> float:
        """Time a function without communication while all ranks run it, or wait for the others with None.

        Return the slowest rank's median on every rank. Runs are timed one by one without asking the others between
        them, as coding 16 KB takes a few microseconds, and waking up for an answer takes longer.
        """
        if case is not None:
            case()
        self.exchange([0])
        taken: list[float] = [0.0] * 3 if case is None else []
        while case is not None and (len(taken) < 3 or sum(taken) < _CODING_SECONDS):
            taken.append(self._own_seconds(case))
        return max(nanoseconds for (nanoseconds,) in self.exchange([round(median(taken) * 1e9)])) * 1e-9

    def in_turn(self, cases: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
        """The same for several cases that take turns: [repeat][case]."""
        found = []
        for _ in range(repeats + 1):
            taken = []
            for case in cases:
                self.exchange([0])
                taken.append(self._own_seconds(case))
            gathered = self.exchange([round(seconds * 1e9) for seconds in taken])
            found.append([max(column) * 1e-9 for column in zip(*gathered, strict=True)])
        return found[1:]

    def _own_seconds(self, case: Callable[[], object]) -> float:
        started = time.perf_counter()
        case()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


def host_name() -> str:
    """Name of this machine; network namespaces of one machine count as different ones."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def group_shape_of(hosts: Sequence[str]) -> GroupShape:
    """Ranks and nodes of a group, from the host of each rank.

    Where nodes differ in their number of ranks, or ranks of a node do not follow each other, it counts as one rank per
    node: two levels are not possible there.
    """
    nodes = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(nodes)
    regular = list(hosts) == [node for node in nodes for _ in range(per_node)]
    return GroupShape(len(hosts), per_node if regular else 1)


def codec_rates(ranks: Ranks, dtype: torch.dtype, sizes: Sequence[int]) -> dict[str, CodecRates]:
    """Lines of both codes on Gaussian data of these sizes, timed while all ranks code."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    ratios = {}
    for nbytes in sizes:
        x = gaussian(nbytes // dtype.itemsize, dtype, ranks.device)
        out, total = torch.empty_like(x), torch.zeros(x.numel(), device=x.device, dtype=torch.float32)
        for code in CODES:
            message = lossless.encode(x, code)
            longest = max(length for (length,) in ranks.exchange([lossless.read_header(message).nbytes]))
            ratios[code] = x.nbytes / longest
            cases: dict[str, Callable[[], object]] = {
                "encode": partial(lossless.encode, x, code),
                "decode": partial(lossless.decode_into, message, out),
                "decode_add": partial(lossless.decode_add, message, total),
            }
            for name, case in cases.items():
                points.setdefault((code, name), []).append((x.nbytes, ranks.seconds_alone(case)))

    def rates(code: str) -> CodecRates:
        encode, decode, add = (fit_line(points[code, name]) for name in ("encode", "decode", "decode_add"))
        return CodecRates(encode, decode, add, ratios[code])

    return {code: rates(code) for code in CODES}


def gaussian(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed values, [numel]; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    # fp8 tensors in training are scaled to their range, the others look like weights.
    return (values if dtype.itemsize == 1 else values * 0.02).to(dtype).to(device)


def brief_codecs(ranks: Ranks, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, dict[str, CodecRates]]:
    """Measure `codec_rates` of several dtypes in a few hundredths of a second.

    Two sizes, three runs of each; ranks, which all code at about the same time, exchange results once.
    """
    found: list[int] = []
    sizes = [nbytes for nbytes in _BRIEF_CODEC_NBYTES for dtype in dtypes for code in CODES]
    for nbytes in _BRIEF_CODEC_NBYTES:
        values = gaussian(nbytes, torch.float32, ranks.device)
        for dtype in dtypes:
            x = values[: nbytes // dtype.itemsize].to(dtype)
            out, total = torch.empty_like(x), torch.zeros(x.numel(), device=x.device, dtype=torch.float32)
            for code in CODES:
                message = lossless.encode(x, code)
                cases: list[Callable[[], object]] = [
                    partial(lossless.encode, x, code),
                    partial(lossless.decode_into, message, out),
                    partial(lossless.decode_add, message, total),
                ]
                found += [lossless.read_header(message).nbytes, *(_nanoseconds(case, ranks.device) for case in cases)]
    slowest = [max(column) for column in zip(*ranks.exchange(found), strict=True)]
    rows = [slowest[i : i + 4] for i in range(0, len(slowest), 4)]
    step = len(dtypes) * len(CODES)
    rates: dict[torch.dtype, dict[str, CodecRates]] = {dtype: {} for dtype in dtypes}
    for i, (dtype, code) in enumerate((dtype, code) for dtype in dtypes for code in CODES):
        own = list(zip(sizes[i::step], rows[i::step], strict=True))
        encode, decode, add = (fit_line((n, max(1, row[column]) * 1e-9) for n, row in own) for column in (1, 2, 3))
        rates[dtype][code] = CodecRates(encode, decode, add, own[-1][0] / own[-1][1][0])
    return rates


def _nanoseconds(case: Callable[[], object], device: torch.device) -> int:
    """Of the median of a few runs after a first one."""
    taken = []
    for _ in range(_BRIEF_REPEATS + 1):
        started = time.perf_counter_ns()
        case()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter_ns() - started)
    return int(median(taken[1:]))


def brief_link(ranks: Ranks) -> LinkRates:
    """A group's link in a few hundredths of a second: rounds of a few bytes and up to three sizes of one all-to-all.

    The best of the repeats counts: on a link that seems faster than it is, messages are left raw, which loses nothing.
    """
    world = ranks.world
    round_seconds = min(ranks.seconds(partial(ranks.exchange, [0]), 4))
    for nbytes in _BRIEF_NBYTES:
        sent = torch.zeros(world, -(-nbytes // (world - 1)), dtype=torch.uint8, device=ranks.device)
        taken = min(ranks.seconds(partial(_all_to_all, torch.empty_like(sent), sent, ranks.group), 2))
        if taken > _LONG_SECONDS:
            break
    # Shorter ones do not count: after a pause switches let some through at once, in a training step they do not.
    line = fit_line([(0, round_seconds), (sent_nbytes("all_to_all", sent.nbytes, world), taken)])
    # An all-reduce has two phases; a send has one peer.
    factors = {"all_reduce": 2.0, "send": 1 / (world - 1)}
    lines = {
        name: Line(line.alpha_seconds * factors.get(name, 1.0), line.seconds_per_byte, line.error)
        for name in OPERATIONS
    }
    extra = {name: _BRIEF_EXTRA for name in OPERATIONS}
    return LinkRates(world, lines, round_seconds, _BRIEF_OVERLAP, extra, _brief_ring(ranks, sent.nbytes))


def _brief_ring(ranks: Ranks, nbytes: int) -> dict[str, Line]:
    """One message to the next rank and one from the rank before; between two ranks that is any exchange."""
    if ranks.world == 2:
        return {}
    points = []
    for size in (1, nbytes):
        sent = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        points.append((size, min(ranks.seconds(partial(pass_around, torch.empty_like(sent), sent, ranks.group), 2))))
    return {RING: fit_line(points)}


def pass_around(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """`sent` goes to the next rank, `received` comes from the one before; done when both are."""
    torch_compat.pass_around(received, sent, group).wait()


def _all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    torch_compat.all_to_all(received, sent, group).wait()
