"""One collective call: its groups, its route (which codec, in how many chunks, why), its chunks, its line in the audit.

Tensors are flat and arguments are taken to be right; `laconic.collectives.api` has the public functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.codec import Auto, Blockwise, Codec, Lossless, Raw, bytes_of, check_codec, is_auto, setting_of
from laconic.collectives.engine import uncoded
from laconic.collectives.engine.chunks import (
    all_gather_chunk,
    all_reduce_chunk,
    all_to_all_chunk,
    broadcast_chunk,
    move_chunk,
    overlap,
    reduce_scatter_chunk,
    ring_all_reduce_chunk,
    ring_reduce_scatter_chunk,
)
from laconic.collectives.engine.handshake import Announcement, Peers, Settings, Splits
from laconic.collectives.engine.layouts import OneRank, TwoLevelExchange
from laconic.collectives.engine.transport import WIRE_VERSION, Outgoing, Wire, has_tags
from laconic.collectives.policy.selector import choose, merge_notes, needs_sync, note, observe, sent_by_one
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.background import Groups, Work, done, run_in_background
from laconic.collectives.runtime.failure_diagnosis import broken_off, losses_named
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.collectives.runtime.late_checks import leave, make_checks
from laconic.collectives.runtime.thread_state import may_write
from laconic.cost.comm.seconds import RAW, AlgorithmChoice
from laconic.errors import CollectiveError

T = TypeVar("T")

REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""What is summed in fp32 in the order of ranks; integers and float64 are left to the backend."""

_ONE_ROUND_NBYTES = 1 << 16
"""An all-reduce in which a rank sends no more than this takes one round instead of two: latency counts, not bytes."""

_SPREAD_NBYTES = 1 << 18
"""A broadcast of more than this leaves its source once; below, the source sends to everybody."""

_CHUNK_NBYTES = 1 << 20
_MAX_CHUNKS = 32
_CUT_NUMEL = 4096
"""Chunks are whole blocks of the lossless format, so that cutting costs no more than headers."""


@dataclass(slots=True)
class CollectiveCall:
    """What the caller asked for; it may be carried out in the background, on copies of the groups."""

    function: str
    groups: Groups
    """Those of the caller."""
    codec: Codec | str
    """"auto": by what the cost model predicts."""
    dtype: torch.dtype
    device: torch.device
    ranks: tuple[tuple[int, ...], ...] = field(init=False)
    """Global ranks of each group, asked for in the call: the groups may be destroyed while it is under way."""

    def __post_init__(self) -> None:
        self.ranks = tuple(map(ranks_of, self.groups))
        check_codec(self.codec)

    def run(self, act: Callable[[Any], object], result: T, async_op: bool) -> Work[T]:
        """Carry the call out, in the background if `async_op`; the work has `result`.

        `act` calls a method of the layout of the ranks (layouts.py), which it is given.
        """
        if all([group.size() == 1 for group in self.groups]):
            with may_write((result,)):
                act(OneRank())
            return done(result)

        def job(groups: Groups) -> T:
            act(self.on(groups))
            return result

        if async_op:
            return run_in_background(job, self.groups, self.device, (result,))
        with may_write((result,)):
            act(self.on(self.groups))
            make_checks(*self.groups)
        return done(result)

    def on(self, groups: Groups) -> Exchange | TwoLevelExchange:
        """The layout of `groups`, which are the caller's or their copies; of two levels the inner one codes nothing."""
        what, ranks = (self.dtype, self.device), self.ranks
        if len(groups) == 1:
            return Exchange(groups[0], ranks[0], self.function, self.codec, *what, is_all=True)
        node, cluster = groups
        return TwoLevelExchange(
            Exchange(node, ranks[0], self.function, Raw(), *what),
            Exchange(cluster, ranks[1], self.function, self.codec, *what),
        )


@dataclass(slots=True)
class Exchange:
    """A call on one group: what all its ranks have in common.

    What is read is not written, but for this rank's own part.
    """

    group: dist.ProcessGroup
    """The group it runs on; perhaps the background executor's copy of the caller's group."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    function: str
    """The operation's name."""
    codec: Codec | str
    """As the caller asked for it."""
    dtype: torch.dtype
    device: torch.device
    is_all: bool = False
    """Whether the call computes nothing with what this exchange gives, so that it can be checked after the call."""

    @property
    def group_rank(self) -> int:
        """This rank in the group."""
        return self.group.rank()

    @property
    def world(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def wire(self, split_sizes: Splits | None = None, /, **settings: int | str) -> Wire:
        """The messages of the call. All ranks must have the same settings, and split sizes that fit."""
        me = self.group_rank
        others = tuple([rank for rank in range(self.world) if rank != me])
        common: Settings = {
            "function": self.function,
            "dtype": str(self.dtype).removeprefix("torch."),
            **settings,
            "codec": setting_of(self.codec),
            "version": WIRE_VERSION,
        }
        said = note(self.group, self.device) if is_auto(self.codec) and has_tags(self.group, self.device) else b""
        announcement = Announcement(common, split_sizes, said)
        return Wire(self.group, Peers(self.ranks, others), announcement, self.dtype, self.device)

    # --- movements ---

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """rows[r] of rows [W, n] becomes rank r's `mine` [n]."""

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            return all_gather_chunk(wire, route.codec, mine[part], [row[part] for row in rows])

        raw = partial(uncoded.all_gather, rows, mine, self.group)
        self._run(chunk, mine.numel(), raw, checks_late=self.is_all, numel=mine.numel())

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """received[r] of received [W, n] becomes what rank r has in its sent[group_rank]."""
        raw = partial(uncoded.all_to_all, received, sent, self.group)
        numel = sent.shape[1]
        self._run(_all_to_all_of(received, sent), numel, raw, asked=sent.numel(), checks_late=self.is_all, numel=numel)

    def all_to_all_uneven(
        self,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        out: Sequence[int],
        into: Sequence[int],
        table: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Exchange tensors of different lengths, `out` and `into`, as `all_to_all` does equal ones.

        `table` has the elements from each rank to each, [from][to], where all know them; None: they are announced, and
        the call waits for that. A rank that sends another number than its peer expects is a ConfigError on every rank.
        """
        chunk = _all_to_all_of(received, sent)
        splits = Splits(tuple(into), tuple(out))
        if table is None:
            wire = self.wire(splits, splits="uneven")
            table = wire.table()
            most, longest = max(map(sum, table)), max(map(max, table))
            self._run(chunk, longest, None, asked=most, checks_late=self.is_all, wire=wire)
            return
        raw = partial(
            torch_compat.all_to_all_uneven, [bytes_of(x) for x in received], [bytes_of(x) for x in sent], self.group
        )
        nbytes = sum([x.nbytes for x in sent]) - sent[self.group_rank].nbytes
        if isinstance(self.codec, Raw):
            # Bytes as they are, and nothing else: every two ranks know what travels between them.
            with losses_named(lambda: self.ranks, f"during {self.function}"):
                raw().wait()
            audit.record(self.function, self.dtype, nbytes, nbytes, RAW, "asked for", 0.0)
        else:
            most, longest = max(map(sum, table)), max(map(max, table))
            late = self.is_all
            self._run(
                chunk, longest, raw, asked=most, nbytes=nbytes, split_sizes=splits, checks_late=late, splits=longest
            )

    def broadcast(self, x: Tensor, src: int) -> None:
        """`x` [n] of group rank `src` replaces that of the others."""
        spread = self.world > 2 and x.nbytes > _SPREAD_NBYTES

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            return broadcast_chunk(wire, route.codec, x[part], src, spread)

        raw = partial(uncoded.broadcast, x, self.group, src)
        is_end = self.group_rank == src
        self._run(chunk, x.numel(), raw, is_end=is_end, numel=x.numel(), src=self.ranks[src])

    def gather(self, rows: Tensor | None, mine: Tensor, dst: int) -> None:
        """rows[r] of rows [W, n] on group rank `dst` becomes rank r's `mine` [n]."""

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            if rows is None:
                return move_chunk(wire, route.codec, [Outgoing((dst,), mine[part])], [])
            return move_chunk(
                wire, route.codec, [], [(peer, row[part]) for peer, row in enumerate(rows) if peer != dst]
            )

        raw = partial(uncoded.gather, rows, mine, self.group, dst)
        is_end = rows is not None
        if (
            self._run(chunk, mine.numel(), raw, is_end=is_end, numel=mine.numel(), dst=self.ranks[dst])
            and rows is not None
        ):
            rows[dst].copy_(mine)

    def scatter(self, mine: Tensor, rows: Tensor | None, src: int) -> None:
        """`mine` [n] becomes rows[group_rank] of rows [W, n] of group rank `src`."""

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            if rows is None:
                return move_chunk(wire, route.codec, [], [(src, mine[part])])
            sends = [Outgoing((peer,), row[part]) for peer, row in enumerate(rows) if peer != src]
            return move_chunk(wire, route.codec, sends, [])

        raw = partial(uncoded.scatter, mine, rows, self.group, src)
        asked, is_end = self.world * mine.numel(), rows is not None
        numel, root = mine.numel(), self.ranks[src]
        if self._run(chunk, numel, raw, asked=asked, is_end=is_end, numel=numel, src=root) and rows is not None:
            mine.copy_(rows[src])

    # --- reductions ---

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        """`mine` [n] becomes the sum over ranks of rows[group_rank], rows [W, n], times `factor`."""
        if self.dtype not in REDUCIBLE:
            nbytes = rows.nbytes * (self.world - 1) // self.world
            start = partial(torch_compat.reduce_scatter, mine, rows, self.group)
            self._run_natively(start, mine, factor, nbytes, rows.numel())
            return

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            function = ring_reduce_scatter_chunk if route.ring else reduce_scatter_chunk
            return function(wire, route.codec, [row[part] for row in rows], mine[part], factor)

        raw = partial(uncoded.reduce_scatter, mine, rows.view(-1), self.group, "sum" if factor == 1 else "avg")
        numel, late = rows.numel(), self.is_all
        self._run(chunk, mine.numel(), raw, asked=numel, checks_late=late, numel=numel, factor=repr(factor))

    def all_reduce(self, x: Tensor, factor: float) -> None:
        """`x` [n] becomes the sum over ranks, times `factor`."""
        if self.dtype not in REDUCIBLE:
            nbytes = 2 * x.nbytes * (self.world - 1) // self.world
            self._run_natively(partial(torch_compat.all_reduce, x, self.group), x, factor, nbytes, x.numel())
            return
        is_short = x.nbytes * (self.world - 1) <= _ONE_ROUND_NBYTES

        def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
            if route.ring:
                return ring_all_reduce_chunk(wire, route.codec, x[part], factor)
            return all_reduce_chunk(wire, route.codec, x[part], factor, is_short and route.codec.lossless)

        raw = partial(uncoded.all_reduce, x, self.group, "sum" if factor == 1 else "avg")
        # A chunk of the call is a message for each rank.
        self._run(chunk, x.numel(), raw, num_parts=self.world, numel=x.numel(), factor=repr(factor))

    def _run_natively(
        self, start: Callable[[], torch_compat.Started], result: Tensor, factor: float, nbytes: int, numel: int
    ) -> None:
        wire = self.wire(numel=numel, factor=repr(factor))
        wire.agree()
        start().wait()
        if factor != 1:
            result.mul_(factor)
        wire.raw_nbytes += nbytes
        wire.sent_nbytes += nbytes
        finish(wire, self.function, CodecRoute(Raw(), 1, "left to the backend"))

    # --- one call ---

    def _run(
        self,
        chunk: _Chunk,
        longest: int,
        raw: Callable[[], torch_compat.Started] | None,
        *,
        asked: int | None = None,
        num_parts: int = 1,
        is_end: bool = False,
        nbytes: int | None = None,
        split_sizes: Splits | None = None,
        wire: Wire | None = None,
        checks_late: bool = False,
        **settings: int | str,
    ) -> bool:
        """Carry a call out in chunks, or raw if that is predicted to be faster; returns whether in chunks.

        Only coded calls are announced to the other ranks, and those before which rates have to be measured.

        Args:
            chunk: the generator of one slice of `longest` elements, those of the longest of its `num_parts` messages.
            raw: starts the backend's own collective; None: raw messages are chunks, too.
            asked: elements for which the cost model is asked; None: `longest`.
            is_end, nbytes: arguments of `sent_by_one`, or its result.
            split_sizes, settings: compared by the ranks.
            wire: the messages of the call, if it was announced.
            checks_late: leave what the host has to look at on the group.
        """
        asked = longest if asked is None else asked
        if is_auto(self.codec) and needs_sync(self.function, asked, self.dtype, self.group, device=self.device):
            wire = wire or self.wire(split_sizes, **settings)
            sync(wire)
        route = find_route(self.codec, self.function, asked, self.dtype, self.group, self.device)
        if raw is not None and route.choice is not None and route.choice.codec == RAW:
            if nbytes is None:
                nbytes = sent_by_one(self.function, asked * self.dtype.itemsize, self.world, is_end)
            self._run_raw(raw, asked, nbytes, route.choice)
            return False
        wire = wire or self.wire(split_sizes, **settings)
        wire.is_checked_late = checks_late
        step = route.step(-(-longest // num_parts), self.dtype) * num_parts
        overlap(chunk(wire, route, part) for part in slices(longest, step))
        check = wire.late_check(partial(finish, wire, self.function, route))
        if check is None:
            finish(wire, self.function, route)
        else:
            leave(self.group, check)
        return True

    def _run_raw(
        self, raw: Callable[[], torch_compat.Started], numel: int, nbytes: int, choice: AlgorithmChoice
    ) -> None:
        make_checks(self.group)  # what an earlier call has to send again comes before this one, on every rank
        began = time.perf_counter()
        try:
            raw().wait()
        except CollectiveError:  # of uncoded.py, which knows the call's name
            raise
        except RuntimeError as error:
            raise broken_off(f"{self.function} of {self.dtype}", self.group, error) from error
        seconds = time.perf_counter() - began
        observe(self.function, numel, self.dtype, self.group, choice, 0, 0, seconds, device=self.device)
        torch_compat.count_sent(nbytes)
        audit.record(self.function, self.dtype, nbytes, nbytes, RAW, choice.reason, 0.0)


def _all_to_all_of(received: Sequence[Tensor] | Tensor, sent: Sequence[Tensor] | Tensor) -> _Chunk:
    def chunk(wire: Wire, route: CodecRoute, part: slice) -> Iterator[None]:
        return all_to_all_chunk(wire, route.codec, [x[part] for x in received], [x[part] for x in sent])

    return chunk


# --- routes ---


@dataclass(frozen=True)
class CodecRoute:
    """Route of one call's values: codec, chunks, direction."""

    codec: Codec
    num_chunks: int | None
    """None: by size."""
    reason: str
    saved_seconds: float = 0.0
    """What the cost model expects to be saved against raw."""
    choice: AlgorithmChoice | None = None
    """The cost model's choice, if it was asked."""
    numel: int = 0
    """Of what it was asked."""
    ring: bool = False
    """Whether messages go around a ring, from rank to rank."""

    def step(self, numel: int, dtype: torch.dtype) -> int:
        """Elements per chunk of a message of `numel` elements, at least 1."""
        num_chunks = self.num_chunks or min(_MAX_CHUNKS, numel * dtype.itemsize // _CHUNK_NBYTES)
        step = -(-numel // max(1, num_chunks))
        return max(1, min(numel, -(-step // _CUT_NUMEL) * _CUT_NUMEL))


_Chunk = Callable[[Wire, CodecRoute, slice], Iterator[None]]


def slices(numel: int, step: int) -> Iterator[slice]:
    """0 ... numel in steps; one empty slice if there is nothing."""
    return (slice(start, min(start + step, numel)) for start in range(0, max(1, numel), step))


def find_route(
    codec: Codec | str, operation: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> CodecRoute:
    """Find the route of a call, the same on all of the group's ranks, which share `numel`, of one rank's input.

    "auto" and an `Auto` take the codec that is predicted to be fastest. A dtype that a codec does not take is a
    FormatError.
    """
    if isinstance(codec, Blockwise):
        codec.check_dtype(dtype)
    if not is_auto(codec):
        return CodecRoute(codec, None, "asked for")
    choice = choose(operation, numel, dtype, group, device=device)
    if choice.codec == RAW:
        return CodecRoute(Raw(), None, choice.reason, 0.0, choice, numel)
    capacity_bits = codec.capacity_bits if isinstance(codec, Auto) else None
    found = Lossless(choice.codec, capacity_bits)
    ring = choice.ring and capacity_bits is None  # each rank of a ring decodes, and so would wait
    return CodecRoute(found, choice.num_chunks, choice.reason, choice.saved_seconds, choice, numel, ring)


def sync(wire: Wire) -> None:
    """Wait until all ranks are known to do the same, and learn their observations."""
    wire.agree()
    notes = wire.take_notes()
    if notes:
        merge_notes(wire.group, notes, wire.device)


def finish(wire: Wire, operation: str, route: CodecRoute) -> None:
    """Record a call in the audit, and its outcome for later choices."""
    # Of sends the two ranks would observe at different times, and could then choose differently.
    if route.choice is not None and wire.peers.sends is None:
        sync(wire)
        seconds, nbytes = time.perf_counter() - wire.started, (wire.raw_nbytes, wire.message_nbytes)
        observe(operation, route.numel, wire.dtype, wire.group, route.choice, *nbytes, seconds, device=wire.device)
    audit.record(
        operation,
        wire.dtype,
        wire.raw_nbytes,
        wire.sent_nbytes,
        route.codec.name,
        route.reason,
        wire.coding_seconds,
        saved_seconds=route.saved_seconds,
    )
