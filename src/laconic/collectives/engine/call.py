"""Collectives of flat tensors on one group: agreement, chunks, pieces, audit. Arguments are taken to be right.

`laconic.collectives.api` has the public functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import audit
from laconic.collectives.codec import Codec, Raw, bytes_of, setting_of
from laconic.collectives.engine import uncoded
from laconic.collectives.engine.agreement import Settings
from laconic.collectives.engine.chunks import (
    all_reduce_piece,
    broadcast_piece,
    gather_everywhere,
    move_piece,
    reduce_scatter_piece,
)
from laconic.collectives.engine.handshake import Peers
from laconic.collectives.engine.overlap import overlap
from laconic.collectives.engine.ring import ring_all_reduce_piece, ring_reduce_scatter_piece
from laconic.collectives.engine.route import Route, agree, find_route, finish, route_of, slices
from laconic.collectives.engine.transport import WIRE_VERSION, Outgoing, Wire
from laconic.collectives.policy.selector import choose, note, observe, sent_by_one, would_talk
from laconic.collectives.runtime import torch_compat
from laconic.cost.comm.seconds import RAW, Choice
from laconic.errors import CollectiveError, ConfigError

__all__ = ["REDUCIBLE", "Exchange"]

REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""What is summed in fp32 in the order of ranks; integers and float64 are left to the backend."""

_ONE_ROUND_NBYTES = 1 << 16
"""An all-reduce in which a rank sends no more than this takes one round instead of two: latency counts, not bytes."""

_SPREAD_NBYTES = 1 << 18
"""A broadcast of more than this leaves its source once; below, the source sends to everybody."""


@dataclass(frozen=True)
class Exchange:
    """One collective call: what all its ranks have in common."""

    group: dist.ProcessGroup
    """Whom it talks to; perhaps a lane's copy of the caller's group."""
    ranks: tuple[int, ...]
    """Global ranks of the group's places."""
    function: str
    """The operation's name."""
    codec: Codec | str
    """As the caller asked for it."""
    dtype: torch.dtype
    device: torch.device

    @property
    def place(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    @property
    def world(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    # --- movements ---

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        """rows[r] of rows [W, n] becomes rank r's `mine` [n]."""
        begun = self._begin(mine.numel(), lambda: uncoded.all_gather(rows, mine, self.group), numel=mine.numel())
        if begun is None:
            return
        wire, route = begun

        def piece(part: slice) -> Iterator[None]:
            return gather_everywhere(wire, route.codec, mine[part], [row[part] for row in rows])

        self._run(wire, route, map(piece, self._slices(route, mine.numel())))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """received[r] of received [W, n] becomes what rank r has in its sent[place]."""
        numel = sent.shape[1]
        begun = self._begin(sent.numel(), lambda: uncoded.all_to_all(received, sent, self.group), numel=numel)
        if begun is not None:
            self._all_to_all(*begun, received, sent, numel)

    def all_to_all_uneven(
        self,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        out: Sequence[int],
        into: Sequence[int],
        table: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """The same with lengths of their own, `out` and `into`.

        table: elements from each rank to each, [from][to], where all know them; None: they tell each other first.
        Raises ConfigError, on every rank, if what one sends is not what another expects.
        """
        if table is not None and isinstance(self.codec, Raw):
            self._all_to_all_unannounced(received, sent)
            return
        if table is not None:
            longest, most = max(map(max, table)), max(map(sum, table))
            nbytes = sum(x.nbytes for place, x in enumerate(sent) if place != self.place)
            begun = self._begin(most, lambda: self._uneven_by_backend(received, sent), nbytes=nbytes, splits=longest)
            if begun is not None:
                self._all_to_all(*begun, received, sent, longest)
            return
        wire = self._wire(splits="uneven")
        wire.agree()
        table = self._splits_of_all(out, into)
        route = self._route(wire, max(map(sum, table)))
        self._all_to_all(wire, route, received, sent, max(map(max, table)))

    def _uneven_by_backend(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> torch_compat.Started:
        return torch_compat.all_to_all_uneven([bytes_of(x) for x in received], [bytes_of(x) for x in sent], self.group)

    def _all_to_all(
        self,
        wire: Wire,
        route: Route,
        received: Sequence[Tensor] | Tensor,
        sent: Sequence[Tensor] | Tensor,
        longest: int,
    ) -> None:
        me = self.place
        others = [(me - distance) % self.world for distance in range(1, self.world)]

        def piece(part: slice) -> Iterator[None]:
            sends = [Outgoing((place,), sent[place][part]) for place in others[::-1]]
            return move_piece(wire, route.codec, sends, [(place, received[place][part]) for place in others])

        self._run(wire, route, map(piece, self._slices(route, longest)))
        received[me].copy_(sent[me])

    def _all_to_all_unannounced(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Bytes as they are, and nothing else: every two ranks know what travels between them."""
        try:
            self._uneven_by_backend(received, sent).wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"one of ranks {list(self.ranks)} ended or stopped during {self.function}; see what it says, and start"
                " again from a checkpoint"
            ) from error
        nbytes = sum(x.nbytes for place, x in enumerate(sent) if place != self.place)
        audit.record(self.function, self.dtype, nbytes, nbytes, Raw().name, "asked for", 0.0)

    def _splits_of_all(self, out: Sequence[int], into: Sequence[int]) -> list[list[int]]:
        """Elements that each rank sends to each, [from][to]."""
        mine = torch.tensor([*into, *out], dtype=torch.int64, device=self.device)
        told = torch.empty(self.world, mine.numel(), dtype=torch.int64, device=self.device)
        torch_compat.all_gather(told.view(torch.uint8), mine.view(torch.uint8), self.group).wait()
        table = told.tolist()
        for source, row in enumerate(table):
            for target, other in enumerate(table):
                sent, expected = row[target], other[self.world + source]
                if sent != expected:
                    raise ConfigError(
                        f"rank {self.ranks[source]} sends {sent} elements to rank {self.ranks[target]} in"
                        f" {self.function}, which expects {expected}; input_split_sizes of the one must be"
                        " output_split_sizes of the other"
                    )
        return [row[: self.world] for row in table]

    def broadcast(self, x: Tensor, src: int) -> None:
        """`x` [n] of the rank at place `src` replaces that of the others."""
        settings = {"numel": x.numel(), "src": self.ranks[src]}
        begun = self._begin(x.numel(), lambda: uncoded.broadcast(x, self.group, src), self.place == src, **settings)
        if begun is None:
            return
        wire, route = begun
        spread = self.world > 2 and x.nbytes > _SPREAD_NBYTES

        def piece(part: slice) -> Iterator[None]:
            return broadcast_piece(wire, route.codec, x[part], src, spread)

        self._run(wire, route, map(piece, self._slices(route, x.numel())))

    def gather(self, rows: Tensor | None, mine: Tensor, dst: int) -> None:
        """rows[r] of rows [W, n] at place `dst` becomes rank r's `mine` [n]."""
        settings = {"numel": mine.numel(), "dst": self.ranks[dst]}
        raw = partial(uncoded.gather, rows, mine, self.group, dst)
        begun = self._begin(mine.numel(), raw, rows is not None, **settings)
        if begun is None:
            return
        wire, route = begun

        def piece(part: slice) -> Iterator[None]:
            sends = [] if rows is not None else [Outgoing((dst,), mine[part])]
            froms = [] if rows is None else [(p, row[part]) for p, row in enumerate(rows) if p != dst]
            return move_piece(wire, route.codec, sends, froms)

        self._run(wire, route, map(piece, self._slices(route, mine.numel())))
        if rows is not None:
            rows[dst].copy_(mine)

    def scatter(self, mine: Tensor, rows: Tensor | None, src: int) -> None:
        """`mine` [n] becomes rows[place] of rows [W, n] of the rank at place `src`."""
        settings = {"numel": mine.numel(), "src": self.ranks[src]}
        raw = partial(uncoded.scatter, mine, rows, self.group, src)
        begun = self._begin(self.world * mine.numel(), raw, rows is not None, **settings)
        if begun is None:
            return
        wire, route = begun

        def piece(part: slice) -> Iterator[None]:
            sends = [] if rows is None else [Outgoing((p,), row[part]) for p, row in enumerate(rows) if p != src]
            return move_piece(wire, route.codec, sends, [] if rows is not None else [(src, mine[part])])

        self._run(wire, route, map(piece, self._slices(route, mine.numel())))
        if rows is not None:
            mine.copy_(rows[src])

    # --- reductions ---

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        """`mine` [n] becomes the sum over ranks of rows[place], rows [W, n], times `factor`."""
        if self.dtype not in REDUCIBLE:
            nbytes = rows.nbytes * (self.world - 1) // self.world
            start = partial(torch_compat.reduce_scatter, mine, rows, self.group)
            self._natively(start, mine, factor, nbytes, rows.numel())
            return
        op = "sum" if factor == 1 else "avg"
        raw = partial(uncoded.reduce_scatter, mine, rows.view(-1), self.group, op)
        begun = self._begin(rows.numel(), raw, numel=rows.numel(), factor=repr(factor))
        if begun is None:
            return
        wire, route = begun

        def piece(part: slice) -> Iterator[None]:
            function = ring_reduce_scatter_piece if route.ring else reduce_scatter_piece
            return function(wire, route.codec, [row[part] for row in rows], mine[part], factor)

        self._run(wire, route, map(piece, self._slices(route, mine.numel())))

    def all_reduce(self, x: Tensor, factor: float) -> None:
        """`x` [n] becomes the sum over ranks, times `factor`."""
        if self.dtype not in REDUCIBLE:
            nbytes = 2 * x.nbytes * (self.world - 1) // self.world
            self._natively(lambda: torch_compat.all_reduce(x, self.group), x, factor, nbytes, x.numel())
            return
        raw = partial(uncoded.all_reduce, x, self.group, "sum" if factor == 1 else "avg")
        begun = self._begin(x.numel(), raw, numel=x.numel(), factor=repr(factor))
        if begun is None:
            return
        wire, route = begun
        one_round = route.codec.lossless and x.nbytes * (self.world - 1) <= _ONE_ROUND_NBYTES

        def piece(part: slice) -> Iterator[None]:
            if route.ring:
                return ring_all_reduce_piece(wire, route.codec, x[part], factor)
            return all_reduce_piece(wire, route.codec, x[part], factor, one_round)

        # A chunk of the call is a message for each rank.
        step = route.step(-(-x.numel() // self.world), self.dtype) * self.world
        self._run(wire, route, map(piece, slices(x.numel(), step)))

    # --- one call ---

    def _begin(
        self,
        length: int,
        raw: Callable[[], torch_compat.Started],
        is_end: bool = False,
        nbytes: int | None = None,
        **settings: int | str,
    ) -> tuple[Wire, Route] | None:
        """The messages of a call of `length` elements, and their route; None if it was left raw and is done: `raw`
        started it.

        Only what is coded is announced to the other ranks, and what has to be measured first.
        """
        wire = None
        if isinstance(self.codec, str):
            if would_talk(self.function, length, self.dtype, self.group, device=self.device):
                wire = self._wire(**settings)
                agree(wire)
            choice = choose(self.function, length, self.dtype, self.group, device=self.device)
            if choice.codec == RAW:
                if nbytes is None:
                    nbytes = sent_by_one(self.function, length * self.dtype.itemsize, self.world, is_end)
                self._leave_raw(raw, length, nbytes, choice)
                return None
            route = route_of(choice, length)
        else:
            route = Route(self.codec, None, "asked for")
        return wire or self._wire(**settings), route

    def _leave_raw(self, raw: Callable[[], torch_compat.Started], length: int, nbytes: int, choice: Choice) -> None:
        began = time.perf_counter()
        started = raw()
        try:
            started.wait()
        except RuntimeError as error:
            raise uncoded.broken_off(f"{self.function} of {self.dtype}", self.group, error) from error
        seconds = time.perf_counter() - began
        observe(self.function, length, self.dtype, self.group, choice, 0, 0, seconds, device=self.device)
        torch_compat.count_sent(nbytes)
        audit.record(self.function, self.dtype, nbytes, nbytes, RAW, choice.reason, 0.0)

    def _wire(self, **more: int | str) -> Wire:
        others = tuple(place for place in range(self.world) if place != self.place)
        settings: Settings = {
            "function": self.function,
            "dtype": str(self.dtype).removeprefix("torch."),
            **more,
            "codec": setting_of(self.codec),
            "version": WIRE_VERSION,
        }
        said = note(self.group, self.device) if isinstance(self.codec, str) and self.device.type == "cpu" else b""
        return Wire(self.group, Peers(self.ranks, others), settings, self.dtype, self.device, said)

    def _route(self, wire: Wire, numel: int) -> Route:
        return find_route(wire, self.function, numel, self.codec)

    def _slices(self, route: Route, numel: int) -> Iterator[slice]:
        return slices(numel, route.step(numel, self.dtype))

    def _run(self, wire: Wire, route: Route, pieces: Iterable[Iterator[None]]) -> None:
        overlap(pieces)
        finish(wire, self.function, route)

    def _natively(
        self, start: Callable[[], torch_compat.Started], result: Tensor, factor: float, nbytes: int, numel: int
    ) -> None:
        wire = self._wire(numel=numel, factor=repr(factor))
        wire.agree()
        start().wait()
        if factor != 1:
            result.mul_(factor)
        wire.raw_nbytes += nbytes
        wire.sent_nbytes += nbytes
        finish(wire, self.function, Route(Raw(), 1, "left to the backend"))
