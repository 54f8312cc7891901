"""The messages of one collective: bytes out, bytes in, and who is to blame.

Before values are used, every two ranks have told each other in *notices* what they are about to do. Nobody waits for
them at once: values are encoded and offered meanwhile. That is safe because gloo moves no byte before a receive with
the same tag stands, and tags carry a fingerprint of the call, so that messages of different calls never meet.

Lengths of messages are not exchanged on the CPU: gloo delivers a short message into a longer buffer, and its header
says how long it is. NCCL has to know them: 8 bytes in front of each message whose length depends on the values.

When a peer's connection breaks, gloo tells those that wait for something that has not begun to arrive, but not those
that have a part of it: they would wait for the group's timeout. So behind each longer message follows its *end*, one
byte with a tag of its own, for which the receiver waits first. gloo keeps the order between two ranks.

A message that did not fit the capacity of its codec says so in its header, and the same values follow at once in the
codec's fallback: the sender knows it from the message that it made, the receiver from the one that it got.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec, Raw, bytes_of
from laconic.collectives.engine.agreement import Settings, disagreement, start_agreement
from laconic.collectives.engine.handshake import MAX_INSIDE_NBYTES, Notices, Peers, line_of
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.failure_diagnosis import follow, reason_of
from laconic.errors import CollectiveError, FormatError

__all__ = ["WIRE_VERSION", "Flight", "Incoming", "Outgoing", "Wire"]

WIRE_VERSION = 3
"""Changes with anything here that ranks of different releases would understand differently."""

_MESSAGE_TAG = 1 << 30
"""And above (see `Wire.tag`); notices, torch_compat.py and programs stay below."""

_MIN_ENDED_NBYTES = 1 << 17
"""Messages that can be as long have an end: a few per cent of what they take in a fast network, at most."""


class Outgoing(NamedTuple):
    """Values for some ranks."""

    places: Sequence[int]
    """Whom they go to, as places in the group."""
    values: Tensor
    """Contiguous, [n]."""
    message: Tensor | None = None
    """Their message, if it has been made already."""


class Incoming(NamedTuple):
    """Values from one rank."""

    place: int
    """Whom they come from."""
    numel: int
    """How many they are."""
    out: Tensor | None = None
    """Where they may be received if they travel raw: contiguous, [numel]."""


_num_calls: WeakKeyDictionary[dist.ProcessGroup, dict[Any, int]] = WeakKeyDictionary()


class Wire:
    """One call on one group, as this rank sees it.

    `settings` are what all ranks must have in common; `dtype` is that of values; `note` is what this rank has to say
    besides.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        settings: Settings,
        dtype: torch.dtype,
        device: torch.device,
        note: bytes = b"",
    ) -> None:
        self.started = time.perf_counter()
        self.group, self.peers, self.settings, self.dtype, self.device = group, peers, settings, dtype, device
        self.raw_nbytes = 0
        """Bytes of the values sent so far."""
        self.sent_nbytes = 0
        """Bytes sent so far, notices and lengths included."""
        self.message_nbytes = 0
        """Those of the values' messages."""
        self.coding_seconds = 0.0
        """Spent in encoding and decoding so far; on CUDA in starting it."""
        self._note = note
        self._num_flights = 0
        self._line = line_of(settings)
        kind = None if peers.sends is None else (peers.sends, *peers.places)
        calls = _num_calls.setdefault(group, {})
        self._call = calls[kind] = calls.get(kind, 0) + 1
        self._notices: Notices | None = None
        self._agreed = device.type != "cpu"
        self._early: list[Flight] = []
        if device.type == "cpu":
            self._notices = Notices(group, peers, self._line, note, self.send, self.blame)
        elif kind is None:
            # The host would wait for the device to read what others say: only once for the same settings.
            start_agreement(settings, group, device)()

    # --- agreement ---

    def agree(self) -> None:
        """Wait until all ranks are known to do the same. Raises ConfigError, on each of them, if they do not."""
        if self._agreed or self._notices is None:
            return
        self._agreed = True
        early, self._early = self._early, []
        lines = self._notices.read()
        if any(line != self._line for line in lines.values()):
            # Ranks that mean the same do exchange their first messages: gloo has to be done with those buffers.
            for flight in early:
                flight.drain([place for place, line in lines.items() if line == self._line])
            lines[self.group.rank()] = self._line
            raise disagreement({self.peers.ranks[place]: json.loads(lines[place]) for place in sorted(lines)})

    def take_notes(self) -> list[bytes]:
        """What all ranks had to say besides, in the order of places; [] if it was taken or nothing. `agree` first."""
        note, self._note = self._note, b""
        if not note or self._notices is None:
            return []
        notes = self._notices.notes() | {self.group.rank(): note}
        return [notes[place] for place in sorted(notes)]

    # --- messages ---

    def fly(self, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> Flight:
        """Encode and send values and receive others; returns before they have arrived. Empty ones do not travel."""
        number, self._num_flights = self._num_flights, self._num_flights + 1
        sends = [out for out in outgoing if out.values.numel()]
        receives = [entry for entry in incoming if entry.numel]
        if self.device.type != "cpu":
            return _BatchedFlight(self, codec, sends, receives)
        notices = self._notices if number == 0 and not self._agreed else None
        flight = Flight(self, codec, number, sends, receives, notices)
        if not self._agreed:
            self._early.append(flight)
        return flight

    def encode(self, codec: Codec, x: Tensor) -> Tensor:
        """The message of `x`."""
        started = time.perf_counter()
        message = codec.encode(x)
        self.coding_seconds += time.perf_counter() - started
        return message

    def decode_into(self, place: int, codec: Codec, message: Tensor, out: Tensor) -> None:
        """Write the values of a message of the rank at `place` into `out`."""
        if message.data_ptr() == out.data_ptr():
            return  # it was received there
        started = time.perf_counter()
        with self.blame(place):
            codec.decode_into(message, out)
        self.coding_seconds += time.perf_counter() - started

    def decode_add(self, place: int, codec: Codec, message: Tensor, total: Tensor) -> None:
        """Add the values of a message of the rank at `place` to `total`, fp32."""
        started = time.perf_counter()
        with self.blame(place):
            codec.decode_add(message, total, self.dtype)
        self.coding_seconds += time.perf_counter() - started

    def send(self, place: int, message: Tensor, tag: int) -> dist.Work:
        """Start sending."""
        self.count(message.nbytes)
        with self.blame(place):
            work = self.group.send([message], place, tag)
        assert work is not None
        return work

    def count(self, nbytes: int) -> None:
        """Count bytes that leave."""
        self.sent_nbytes += nbytes
        torch_compat.count_sent(nbytes)

    def tag(self, number: int, numel: int, again: bool = False, end: bool = False) -> int:
        """Of message `number` of this call, with `numel` elements; `again`: the fallback's; `end`: that of its end."""
        fingerprint = zlib.crc32(self._line + numel.to_bytes(8, "little")) & 0x7FFF
        return _MESSAGE_TAG | (self._call % 64) << 24 | (number % 128) << 17 | again << 16 | end << 15 | fingerprint

    @contextmanager
    def blame(self, place: int) -> Iterator[None]:
        """Errors inside of the block name the rank at `place` and what was going on."""
        try:
            yield
        except FormatError as error:
            raise FormatError(f"in {self._what()}, the message from rank {self.peers.ranks[place]}: {error}") from error
        except CollectiveError:
            raise
        except RuntimeError as error:
            reason = reason_of(error)
            # A group with a dead rank is of no use to a collective; two ranks may still have things to say.
            wake = self.peers.sends is None and self.device.type == "cpu"
            waits = [f"rank {self.peers.ranks[other]}" for other in follow(self.group, place, wake)]
            raise CollectiveError(
                f"{self._what()} broke off on rank {self.peers.ranks[self.group.rank()]}, which waited for"
                f" {', which waited for '.join(waits)}: {reason}; {waits[-1]} ended, stopped, raised an error or took"
                " longer than the group's timeout, see its own output"
            ) from error

    def _what(self) -> str:
        names = ("function", "numel", "dtype")
        function, numel, dtype = (self.settings.get(name) for name in names)
        return f"{function} of {dtype}" if numel is None else f"{function} of {numel} {dtype}"


class Flight:
    """A message to and from each of some ranks, under way through gloo."""

    def __init__(
        self,
        wire: Wire,
        codec: Codec,
        number: int,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        notices: Notices | None,
    ) -> None:
        self._wire, self._codec, self._number, self._notices = wire, codec, number, notices
        self._sent: list[tuple[int, dist.Work]] = []
        self._sent_again: list[tuple[int, dist.Work]] = []
        self._receipts: dict[int, tuple[int, Tensor, list[dist.Work]]] = {}
        self._inside: dict[int, int] = {}
        if notices is not None:
            notices.tell_all_but(
                {place for out in outgoing if self._is_short(out.values.numel()) for place in out.places}
            )
        # Receives first: what the others have ready can flow while this rank encodes.
        for place, numel, out in incoming:
            if notices is not None and self._is_short(numel):
                self._inside[place] = numel
                continue
            buffer = _buffer(codec, numel, out, wire)
            self._receipts[place] = (numel, buffer, self._receive(place, codec, buffer, numel))
        for places, values, made in outgoing:
            wire.raw_nbytes += values.nbytes * len(places)
            message = wire.encode(codec, values) if made is None else made
            if notices is not None and self._is_short(values.numel()):
                wire.message_nbytes += message.nbytes * len(places)
                for place in places:
                    notices.tell(place, message)
            else:
                self._send(places, codec, message, values.numel())
            if not codec.fits(message):
                message = wire.encode(codec.fallback, values)
                self._send(places, codec.fallback, message, values.numel(), again=True)

    def take(self, place: int) -> tuple[Codec, Tensor]:
        """Wait for the message from `place`: it, and the codec to decode it with. Call `Wire.agree` before."""
        wire = self._wire
        with wire.blame(place):
            if place in self._inside:
                assert self._notices is not None
                numel = self._inside.pop(place)
                buffer = self._notices.inside(place, _buffer_nbytes(self._codec, numel, wire.dtype))
            else:
                numel, buffer, works = self._receipts.pop(place)
                _wait_all(works)
            message = self._codec.cut(buffer)
        if self._codec.fits(message):
            return self._codec, message
        fallback = self._codec.fallback
        buffer = _buffer(fallback, numel, None, wire)
        works = self._receive(place, fallback, buffer, numel, again=True)
        with wire.blame(place):
            _wait_all(works)
            return fallback, fallback.cut(buffer)

    def wait_sent(self) -> None:
        """Wait until this rank's own messages have left."""
        for place, work in [*self._sent, *self._sent_again]:
            with self._wire.blame(place):
                work.wait()
        self._sent.clear()
        self._sent_again.clear()

    def drain(self, places: Sequence[int]) -> None:
        """Wait until nothing moves between this rank and these any more; nobody has asked for a fallback yet."""
        received = [(place, work) for place, (_, _, works) in self._receipts.items() for work in works]
        for place, work in [*self._sent, *received]:
            if place in places:
                with self._wire.blame(place):
                    work.wait()

    def _is_short(self, numel: int) -> bool:
        return _buffer_nbytes(self._codec, numel, self._wire.dtype) <= MAX_INSIDE_NBYTES

    def _receive(self, place: int, codec: Codec, buffer: Tensor, numel: int, again: bool = False) -> list[dist.Work]:
        """Start receiving a message."""
        parts = self._with_end(codec, buffer, numel, again)
        with self._wire.blame(place):
            works = [self._wire.group.recv([part], place, tag) for part, tag in parts]
        return [work for work in works if work is not None]

    def _send(self, places: Sequence[int], codec: Codec, message: Tensor, numel: int, again: bool = False) -> None:
        """Start sending a message to each of `places`."""
        wire, sent = self._wire, self._sent_again if again else self._sent
        wire.message_nbytes += message.nbytes * len(places)
        parts = self._with_end(codec, message, numel, again)
        for place in places:
            sent += [(place, wire.send(place, part, tag)) for part, tag in parts]

    def _with_end(self, codec: Codec, message: Tensor, numel: int, again: bool) -> list[tuple[Tensor, int]]:
        """A message, or where it is received, and its end if messages of this length have one; each with its tag."""
        wire = self._wire
        parts = [(message, wire.tag(self._number, numel, again))]
        if _buffer_nbytes(codec, numel, wire.dtype) >= _MIN_ENDED_NBYTES:
            parts.append((torch.zeros(1, dtype=torch.uint8), wire.tag(self._number, numel, again, end=True)))
        return parts


def _wait_all(works: Sequence[dist.Work]) -> None:
    """The last first: it is the one that is told of a broken connection."""
    for work in reversed(works):
        work.wait()


class _BatchedFlight(Flight):
    """The same through a backend whose sends and receives must be of equal length and started together (NCCL).

    Where lengths depend on the values, or a message may not fit, the host waits for the device once or twice.
    """

    def __init__(
        self,
        wire: Wire,
        codec: Codec,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
    ) -> None:
        self._wire, self._codec = wire, codec
        wire.raw_nbytes += sum(out.values.nbytes * len(out.places) for out in outgoing)
        messages = [wire.encode(codec, out.values) if out.message is None else out.message for out in outgoing]
        self._taken = self._exchange(codec, outgoing, messages, incoming)
        cut_off = [entry for entry in incoming if not codec.fits(self._taken[entry.place][1])]
        again = [out for out, message in zip(outgoing, messages, strict=True) if not codec.fits(message)]
        if cut_off or again:
            repeated = [wire.encode(codec.fallback, out.values) for out in again]
            self._taken |= self._exchange(codec.fallback, again, repeated, cut_off)

    def _exchange(
        self, codec: Codec, outgoing: Sequence[Outgoing], messages: Sequence[Tensor], incoming: Sequence[Incoming]
    ) -> dict[int, tuple[Codec, Tensor]]:
        wire = self._wire
        sends = [(place, message) for out, message in zip(outgoing, messages, strict=True) for place in out.places]
        buffers = {entry.place: _buffer(codec, entry.numel, entry.out, wire) for entry in incoming}
        sized = [entry.place for entry in incoming if codec.capacity_nbytes(entry.numel, wire.dtype) is None]
        sizes = {place: torch.empty(1, dtype=torch.int64, device=wire.device) for place in sized}
        told = [
            (place, torch.tensor([message.numel()], device=wire.device))
            for out, message in zip(outgoing, messages, strict=True)
            if codec.capacity_nbytes(out.values.numel(), wire.dtype) is None
            for place in out.places
        ]
        self._run(told, sizes)
        for place, size in sizes.items():
            nbytes = int(size)
            if not 0 <= nbytes <= buffers[place].numel():
                with wire.blame(place):
                    raise FormatError(
                        f"is said to have {nbytes} bytes, but at most {buffers[place].numel()} can be; it was damaged"
                    )
            buffers[place] = buffers[place][:nbytes]
        self._run(sends, buffers)
        wire.message_nbytes += sum(message.nbytes for _, message in sends)
        return {place: (codec, buffer) for place, buffer in buffers.items()}

    def _run(self, sends: Sequence[tuple[int, Tensor]], receives: dict[int, Tensor]) -> None:
        wire = self._wire
        operations = [dist.P2POp(dist.irecv, buffer, group=wire.group, group_peer=p) for p, buffer in receives.items()]
        operations += [dist.P2POp(dist.isend, message, group=wire.group, group_peer=p) for p, message in sends]
        wire.count(sum(message.nbytes for _, message in sends))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()  # on CUDA the stream waits

    def take(self, place: int) -> tuple[Codec, Tensor]:
        return self._taken.pop(place)

    def wait_sent(self) -> None:
        pass


def _buffer(codec: Codec, numel: int, out: Tensor | None, wire: Wire) -> Tensor:
    """Where a message can be received."""
    if out is not None and isinstance(codec, Raw):
        return bytes_of(out)
    return torch.empty(_buffer_nbytes(codec, numel, wire.dtype), dtype=torch.uint8, device=wire.device)


def _buffer_nbytes(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    capacity = codec.capacity_nbytes(numel, dtype)
    return codec.max_nbytes(numel, dtype) if capacity is None else capacity
