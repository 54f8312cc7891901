"""Transport of one collective: bytes out, bytes in, and errors that name the rank they are due to.

Every two ranks shake hands in every call: each announces the settings of its call to the other (handshake.py). No rank
waits for that at once: values are encoded and offered meanwhile. Through gloo that is safe because it moves no byte
before a receive with the same tag stands, and tags carry a fingerprint of the call, so that messages of different calls
never meet. They do meet through NCCL, which has no tags; there ranks wait for announcements that may differ
(device_handshake.py), and a group whose ranks differ nevertheless is ended.

Where gloo carries a GPU's tensors, their messages are copied to the host and back, and are coded on the GPU.

Lengths of messages are not exchanged on the CPU: gloo delivers a short message into a longer buffer, and its header has
the length. NCCL has to know them: 8 bytes in front of each message whose length depends on the values.

When a peer's connection breaks, gloo fails the receives that have not begun to arrive, but not those that have a part:
they would wait for the group's timeout. So behind each longer message follows its *end*, one byte with a tag of its
own, for which the receiver waits first. gloo keeps the order between two ranks.

A message that did not fit the capacity of its codec is marked in its header, and the same values follow at once in the
codec's fallback: the sender knows it from the message that it made, the receiver from the one that it got. Through
NCCL they follow behind the whole call, which need not wait for the device to know it (runtime/late_checks.py).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec, Lossless, Raw, bytes_of, is_unread
from laconic.collectives.engine.device_handshake import DeviceHandshake, all_wait, poll, remember, watch
from laconic.collectives.engine.handshake import GROUP_ENDED, MAX_INSIDE_NBYTES, Announcement, Handshake, Peers
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.failure_diagnosis import broke_off
from laconic.collectives.runtime.group_facts import fail, goes_through_host, raise_if_failed, timeout_of
from laconic.collectives.runtime.late_checks import LateCheck, make_checks
from laconic.errors import CollectiveError, ConfigError, FormatError

WIRE_VERSION = 5
"""Changes with anything here that ranks of different releases would understand differently."""

_MESSAGE_TAG = 1 << 30
"""And above (see `Wire.tag`); announcements, torch_compat.py and programs stay below."""

_END = 1 << 15
"""Of the tag of a message's end."""

_NO_TIMEOUT = timedelta()

_MIN_ENDED_NBYTES = 1 << 17
"""Messages that can be as long have an end: a few per cent of what they take in a fast network, at most."""


class Outgoing(NamedTuple):
    """Values for some ranks, with their message if it exists."""

    peers: Sequence[int]
    """Group ranks that they go to."""
    values: Tensor
    """Contiguous, [n]."""
    message: Tensor | None = None
    """Their message, if it has been made already."""


class Incoming(NamedTuple):
    """Values from one rank."""

    peer: int
    """Group rank that they come from."""
    numel: int
    """How many they are."""
    out: Tensor | None = None
    """Where they may be received if they travel raw: contiguous, [numel]."""


def has_tags(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether messages of a device have tags (gloo), or meet in their order alone (NCCL)."""
    return device.type == "cpu" or goes_through_host(group, device)


_num_calls: WeakKeyDictionary[dist.ProcessGroup, dict[Any, int]] = WeakKeyDictionary()


class Wire:
    """One call on one group, as this rank sees it: the peers it exchanges messages with, and what it says of the call.

    A ConfigError says that ranks disagreed in an earlier call while messages were under way, which has ended the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        announcement: Announcement,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.started = time.perf_counter()
        self.group, self.peers, self.dtype, self.device = group, peers, dtype, device
        self.announcement, self.settings = announcement, announcement.settings
        self.raw_nbytes = 0
        """Bytes of the values sent so far."""
        self.sent_nbytes = 0
        """Bytes sent so far, announcements and lengths included."""
        self.message_nbytes = 0
        """Those of the values' messages."""
        self.coding_seconds = 0.0
        """Spent in encoding and decoding so far; on CUDA in starting it."""
        self.is_checked_late = False
        """Whether the caller makes `late_check`."""
        self._num_started = 0
        self.has_tags = has_tags(group, device)
        """If so, messages are on the host, wherever the values are."""
        self.timeout = timeout_of(group) if self.has_tags else _NO_TIMEOUT
        """Of waits for sends and receives."""
        kind = None if peers.sends is None else (peers.sends, *peers.group_ranks)
        calls = _num_calls.setdefault(group, {})
        self._call = calls[kind] = calls.get(kind, 0) + 1
        self._handshake: Handshake | None = None
        self._device_handshake: DeviceHandshake | None = None
        self._fronts: dict[int, bytes] = {}
        """What all ranks have announced, by group rank, once it was read."""
        self._has_notes = bool(announcement.note)
        self._early: list[InFlightMessages] = []
        self._unread: list[UnreadMessages] = []
        if not self.has_tags:
            make_checks(group)  # what an earlier call has to send again comes before this call, on every rank
        if self.has_tags:
            self._handshake = Handshake(group, peers, announcement, self.receive)
        elif kind is None:
            poll(group)
            self._device_handshake = DeviceHandshake(group, peers, announcement, device)
            self.count(self._device_handshake.sent_nbytes)
        self._agreed = self._handshake is None and self._device_handshake is None

    # --- handshake ---

    def agree(self, must_wait: bool = False) -> None:
        """Wait until all ranks are known to do the same; if they do not, each of them raises ConfigError.

        Through a backend without tags not, unless it must, if this rank has seen them agree on such calls before. Where
        one of them has, values may be under way when they disagree, and the group ends.
        """
        if not self._agreed:
            self._agreed = True
            if self._device_handshake is None:
                self._agree_by_tags()
            else:
                self._agree_in_order(self._device_handshake, must_wait)
        elif must_wait and not self._fronts and self._device_handshake is not None:
            self._read(self._device_handshake)

    def _agree_by_tags(self) -> None:
        assert self._handshake is not None
        early, self._early = self._early, []
        me, mine = self.group.rank(), self.announcement
        self._fronts = self._handshake.read(self.send, self.wait)
        try:
            mine.check(self._fronts, self.peers.ranks)
        except ConfigError:
            # Ranks that mean the same do exchange their first messages: gloo has to be done with those buffers.
            sent_to, received_from = mine.peers_that_agree(self._fronts, me)
            for messages in early:
                messages.drain(sent_to, received_from)
            raise

    def _agree_in_order(self, handshake: DeviceHandshake, must_wait: bool) -> None:
        with self._unless_failed():
            handshake.collect()
        if must_wait or not handshake.is_known or handshake.are_here:
            self._read(handshake)
        else:
            watch(self.group, handshake, self.announcement, self.peers.ranks)

    def _read(self, handshake: DeviceHandshake) -> None:
        self._fronts = handshake.read()
        raise_if_failed(self.group)  # what an aborted group has copied means nothing
        if all_wait(self._fronts):
            self.announcement.check(self._fronts, self.peers.ranks)
        else:
            try:
                self.announcement.check(self._fronts, self.peers.ranks, GROUP_ENDED)
            except ConfigError as error:
                fail(self.group, error)
                raise
        remember(self.announcement, self.group)

    def table(self) -> list[tuple[int, ...]]:
        """Elements that each rank sends to each, [from][to], as they are announced. Waits; see `agree`."""
        self.agree(must_wait=True)
        return [splits.sent for splits in self.announcement.splits_of(self._fronts)]

    def take_notes(self) -> list[bytes]:
        """The notes of all ranks, in the group's order; [] if they were taken or are empty. Call `agree` before."""
        has_notes, self._has_notes = self._has_notes, False
        return self.announcement.notes_of(self._fronts) if has_notes else []

    # --- messages ---

    def start(self, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> InFlightMessages:
        """Encode and send values and receive others; returns before they have arrived. Empty ones do not travel."""
        number, self._num_started = self._num_started, self._num_started + 1
        sends = [out for out in outgoing if out.values.numel()]
        receives = [entry for entry in incoming if entry.numel]
        if not self.has_tags:
            return _BatchedMessages(self, codec, sends, receives)
        numels = {*[out.values.numel() for out in sends], *[entry.numel for entry in receives]}
        nbytes = {numel: _buffer_nbytes(codec, numel, self.dtype) for numel in numels}
        handshake = self._handshake if number == 0 and not self._agreed else None
        if handshake is not None:
            short = [out.peers for out in sends if nbytes[out.values.numel()] <= MAX_INSIDE_NBYTES]
            for peer in handshake.unannounced([*chain(*short)]):
                handshake.announce(self.send, peer)
        messages = InFlightMessages(self, codec, number, sends, receives, nbytes, handshake)
        if not self._agreed:
            self._early.append(messages)
        return messages

    def reads_late(self, codec: Codec) -> TypeGuard[Lossless]:
        """Whether messages go through `start_unread`."""
        return self.is_checked_late and not self.has_tags and is_unread(codec)

    def start_unread(
        self, codec: Lossless, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]
    ) -> UnreadMessages:
        """As `start`, through a backend without tags and of codecs that allow it, without reading what has arrived.

        The caller decodes with `decode_unread` and `add_unread`, tells `UnreadMessages.check` what they return, and
        leaves `late_check` to be made before the values are used.
        """
        sends = [out for out in outgoing if out.values.numel()]
        messages = UnreadMessages(self, codec, sends, [entry for entry in incoming if entry.numel])
        self._unread.append(messages)
        return messages

    def late_check(self, finish: Callable[[], None]) -> LateCheck | None:
        """What the host has to look at in the unread messages of the call, and then `finish`; None without any."""
        unread, self._unread = self._unread, []
        found = [number for messages in unread for number in messages.found]
        if not found:
            return None

        def check(numbers: list[int]) -> bool:
            raise_if_failed(self.group)  # what an aborted group has copied means nothing
            has_repeated = False
            for messages in unread:
                ours, numbers = numbers[: len(messages.found)], numbers[len(messages.found) :]
                has_repeated |= messages.repeat(ours)
            finish()
            return has_repeated

        return LateCheck(found, check, self.device)

    def encode(self, codec: Codec, x: Tensor) -> Tensor:
        """The message of `x`."""
        started = time.perf_counter()
        message = codec.encode(x)
        self.coding_seconds += time.perf_counter() - started
        return message

    def decode_into(self, peer: int, codec: Codec, message: Tensor, out: Tensor) -> None:
        """Write the values of a message of the rank `peer` of the group into `out`."""
        if message.data_ptr() == out.data_ptr():
            return  # it was received there
        started = time.perf_counter()
        try:
            codec.decode_into(message, out)
        except FormatError as error:
            raise self.damaged(peer, error) from error
        self.coding_seconds += time.perf_counter() - started

    def decode_add(self, peer: int, codec: Codec, message: Tensor, total: Tensor) -> None:
        """Add the values of a message of the rank `peer` of the group to `total`, fp32."""
        started = time.perf_counter()
        try:
            codec.decode_add(message, total, self.dtype)
        except FormatError as error:
            raise self.damaged(peer, error) from error
        self.coding_seconds += time.perf_counter() - started

    def decode_unread(self, codec: Lossless, message: Tensor, out: Tensor) -> Tensor:
        """As `decode_into`; returns the status, which is on the device."""
        started = time.perf_counter()
        status = codec.decode_unread(message, out)
        self.coding_seconds += time.perf_counter() - started
        return status

    def add_unread(self, codec: Lossless, message: Tensor, total: Tensor) -> Tensor:
        """As `decode_add`; returns the status, which is on the device."""
        started = time.perf_counter()
        status = codec.add_unread(message, total, self.dtype)
        self.coding_seconds += time.perf_counter() - started
        return status

    def send(self, peer: int, message: Tensor, tag: int) -> dist.Work:
        """Start sending."""
        self.count(message.nbytes)
        try:
            work = self.group.send([message], peer, tag)
        except RuntimeError as error:
            raise self.lost(peer, error) from error
        assert work is not None
        return work

    def receive(self, peer: int, buffer: Tensor, tag: int) -> dist.Work:
        """Start receiving."""
        try:
            work = self.group.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise self.lost(peer, error) from error
        assert work is not None
        return work

    def wait(self, moving: Iterable[tuple[int, dist.Work]]) -> None:
        """Wait for what is sent to or comes from ranks of the group."""
        for peer, work in moving:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise self.lost(peer, error) from error

    def count(self, nbytes: int) -> None:
        """Count bytes that leave."""
        self.sent_nbytes += nbytes
        torch_compat.count_sent(nbytes)

    def tag(self, number: int, numel: int, again: bool = False) -> int:
        """Of message `number` of this call, of `numel` elements; `again`: the fallback's. An end's has `_END` in it."""
        fingerprint = zlib.crc32(self.announcement.line + numel.to_bytes(8, "little")) & 0x7FFF
        return _MESSAGE_TAG | (self._call % 64) << 24 | (number % 128) << 17 | again << 16 | fingerprint

    def lost(self, peer: int, error: RuntimeError) -> CollectiveError:
        """The error of the network as one that names the rank `peer` of the group and what was going on.

        One that is this rank's own is raised as it is: it must not end the group in the name of another.
        """
        if isinstance(error, CollectiveError):
            raise error
        # A group with a dead rank is of no use to a collective; two ranks may still have things to say.
        wake = self.peers.sends is None and self.has_tags
        return broke_off(self._what(), self.group, self.peers.ranks, peer, error, wake=wake)

    def damaged(self, peer: int, error: FormatError) -> FormatError:
        """The error of a message that cannot be decoded as one that names the rank `peer` of the group.

        If the ranks disagree, and it is another call's message, the ConfigError of that is raised.
        """
        self.agree(must_wait=True)
        return FormatError(f"in {self._what()}, the message from rank {self.peers.ranks[peer]}: {error}")

    @contextmanager
    def _unless_failed(self) -> Iterator[None]:
        """An error of the backend inside of the block is that of the disagreement for which the group was ended."""
        try:
            yield
        except RuntimeError:
            raise_if_failed(self.group)
            raise

    def wait_all(self, works: Sequence[dist.Work]) -> None:
        """Wait for works of a backend without tags."""
        with self._unless_failed():
            for work in reversed(works):
                work.wait()

    def _what(self) -> str:
        names = ("function", "numel", "dtype")
        function, numel, dtype = (self.settings.get(name) for name in names)
        return f"{function} of {dtype}" if numel is None else f"{function} of {numel} {dtype}"


class InFlightMessages:
    """A message to and from each of some ranks, under way through gloo.

    Short ones go along with the announcements of `handshake`; `nbytes` has the longest message by number of elements.
    """

    def __init__(
        self,
        wire: Wire,
        codec: Codec,
        number: int,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        nbytes: Mapping[int, int],
        handshake: Handshake | None,
    ) -> None:
        self._wire, self._codec, self._number = wire, codec, number
        self._nbytes, self._handshake = nbytes, handshake
        self._sent: list[tuple[int, dist.Work]] = []
        self._sent_again: list[tuple[int, dist.Work]] = []
        self._receipts: dict[int, tuple[int, Tensor, list[tuple[int, dist.Work]]]] = {}
        self._inside: dict[int, int] = {}
        # Receives first: what the others have ready can flow while this rank encodes.
        for peer, numel, out in incoming:
            if handshake is not None and self._is_short(numel):
                self._inside[peer] = numel
                continue
            buffer = _buffer(codec, self._nbytes[numel], out, wire)
            self._receipts[peer] = (numel, buffer, self._receive(peer, codec, buffer, numel))
        for peers, values, made in outgoing:
            wire.raw_nbytes += values.nbytes * len(peers)
            message = (wire.encode(codec, values) if made is None else made).cpu()
            if handshake is not None and self._is_short(values.numel()):
                wire.message_nbytes += message.nbytes * len(peers)
                for peer in peers:
                    handshake.announce(wire.send, peer, message)
            else:
                self._send(peers, codec, message, values.numel())
            if not codec.fits(message):
                message = wire.encode(codec.fallback, values).cpu()
                self._send(peers, codec.fallback, message, values.numel(), again=True)

    def take(self, peer: int) -> tuple[Codec, Tensor]:
        """Wait for the message from `peer`: it, and the codec to decode it with. Call `Wire.agree` before."""
        wire = self._wire
        if peer in self._inside:
            assert self._handshake is not None
            numel = self._inside.pop(peer)
            buffer = self._handshake.inside(peer, self._nbytes[numel])
        else:
            numel, buffer, moving = self._receipts.pop(peer)
            wire.wait(moving)
        message = self._cut(peer, self._codec, buffer)
        if self._codec.fits(message):
            return self._codec, message.to(wire.device)
        fallback = self._codec.fallback
        buffer = _buffer(fallback, _buffer_nbytes(fallback, numel, wire.dtype), None, wire)
        wire.wait(self._receive(peer, fallback, buffer, numel, again=True))
        return fallback, self._cut(peer, fallback, buffer).to(wire.device)

    def wait_sent(self) -> None:
        """Wait until this rank's own messages have left."""
        self._wire.wait([*self._sent, *self._sent_again])
        self._sent.clear()
        self._sent_again.clear()

    def drain(self, sent_to: Collection[int], received_from: Collection[int]) -> None:
        """Wait until nothing moves to and from these ranks any more; nobody has asked for a fallback yet."""
        self._wire.wait((peer, work) for peer, work in self._sent if peer in sent_to)
        for peer, (_, _, moving) in self._receipts.items():
            if peer in received_from:
                self._wire.wait(moving)

    def _cut(self, peer: int, codec: Codec, buffer: Tensor) -> Tensor:
        try:
            return codec.cut(buffer)
        except FormatError as error:
            raise self._wire.damaged(peer, error) from error

    def _is_short(self, numel: int) -> bool:
        return self._nbytes[numel] <= MAX_INSIDE_NBYTES

    def _receive(
        self, peer: int, codec: Codec, buffer: Tensor, numel: int, again: bool = False
    ) -> list[tuple[int, dist.Work]]:
        """Start receiving a message. Its end, if any, is waited for first: a broken connection fails it first."""
        parts = self._with_end(codec, buffer, numel, again)
        return [(peer, self._wire.receive(peer, part, tag)) for part, tag in parts][::-1]

    def _send(self, peers: Sequence[int], codec: Codec, message: Tensor, numel: int, again: bool = False) -> None:
        """Start sending a message to each of `peers`."""
        wire, sent = self._wire, self._sent_again if again else self._sent
        wire.message_nbytes += message.nbytes * len(peers)
        parts = self._with_end(codec, message, numel, again)
        for peer in peers:
            sent += [(peer, wire.send(peer, part, tag)) for part, tag in parts]

    def _with_end(self, codec: Codec, message: Tensor, numel: int, again: bool) -> list[tuple[Tensor, int]]:
        """A message, or where it is received, and its end if messages of this length have one; each with its tag."""
        wire = self._wire
        tag = wire.tag(self._number, numel, again)
        parts = [(message, tag)]
        nbytes = _buffer_nbytes(codec, numel, wire.dtype) if again else self._nbytes[numel]
        if nbytes >= _MIN_ENDED_NBYTES:
            parts.append((torch.zeros(1, dtype=torch.uint8, device="cpu"), tag | _END))
        return parts


class _BatchedMessages(InFlightMessages):
    """The same through a backend whose sends and receives must be of equal length and started together (NCCL).

    Where lengths depend on the values, or a message may not fit, the host waits for the device once or twice.
    """

    _works: list[dist.Work]
    _taken: dict[int, tuple[Codec, Tensor]]

    def __init__(self, wire: Wire, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> None:
        messages = self._begin(wire, codec, outgoing, incoming)
        if codec.fallback == codec:
            return
        self.wait_sent()
        cut_off = [entry for entry in incoming if not codec.fits(self._taken[entry.peer][1])]
        again = [out for out, message in zip(outgoing, messages, strict=True) if not codec.fits(message)]
        if cut_off or again:
            repeated = [wire.encode(codec.fallback, out.values) for out in again]
            self._works, taken = self._exchange(codec.fallback, again, repeated, cut_off)
            self._taken |= taken

    def _begin(
        self, wire: Wire, codec: Codec, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]
    ) -> list[Tensor]:
        """Start the exchange and return the messages that leave."""
        self._wire, self._codec = wire, codec
        wire.raw_nbytes += sum(out.values.nbytes * len(out.peers) for out in outgoing)
        messages = [wire.encode(codec, out.values) if out.message is None else out.message for out in outgoing]
        # No message leaves before this rank knows its settings. Where it waits for lengths anyway, it waits for all.
        numels = [*(out.values.numel() for out in outgoing), *(entry.numel for entry in incoming)]
        wire.agree(must_wait=any(codec.capacity_nbytes(numel, wire.dtype) is None for numel in numels))
        self._works, self._taken = self._exchange(codec, outgoing, messages, incoming)
        return messages

    def _exchange(
        self, codec: Codec, outgoing: Sequence[Outgoing], messages: Sequence[Tensor], incoming: Sequence[Incoming]
    ) -> tuple[list[dist.Work], dict[int, tuple[Codec, Tensor]]]:
        wire = self._wire
        sends = [(peer, message) for out, message in zip(outgoing, messages, strict=True) for peer in out.peers]
        buffers = {
            entry.peer: _buffer(codec, _buffer_nbytes(codec, entry.numel, wire.dtype), entry.out, wire)
            for entry in incoming
        }
        sized = [entry.peer for entry in incoming if codec.capacity_nbytes(entry.numel, wire.dtype) is None]
        sizes = {peer: torch.empty(1, dtype=torch.int64, device=wire.device) for peer in sized}
        announced = [
            (peer, torch.tensor([message.numel()], device=wire.device))
            for out, message in zip(outgoing, messages, strict=True)
            if codec.capacity_nbytes(out.values.numel(), wire.dtype) is None
            for peer in out.peers
        ]
        wire.wait_all(self._start(announced, sizes))
        for peer, size in sizes.items():
            nbytes = int(size)
            if not 0 <= nbytes <= buffers[peer].numel():
                error = f"is said to have {nbytes} bytes, but at most {buffers[peer].numel()} can be; it was damaged"
                raise wire.damaged(peer, FormatError(error))
            buffers[peer] = buffers[peer][:nbytes]
        wire.message_nbytes += sum(message.nbytes for _, message in sends)
        return self._start(sends, buffers), {peer: (codec, buffer) for peer, buffer in buffers.items()}

    def _start(self, sends: Sequence[tuple[int, Tensor]], receives: dict[int, Tensor]) -> list[dist.Work]:
        wire = self._wire
        operations = [dist.P2POp(dist.irecv, buffer, group=wire.group, group_peer=p) for p, buffer in receives.items()]
        operations += [dist.P2POp(dist.isend, message, group=wire.group, group_peer=p) for p, message in sends]
        wire.count(sum(message.nbytes for _, message in sends))
        return torch_compat.batch_isend_irecv(operations) if operations else []

    def take(self, peer: int) -> tuple[Codec, Tensor]:
        self.wait_sent()
        return self._taken.pop(peer)

    def wait_sent(self) -> None:
        works, self._works = self._works, []
        self._wire.wait_all(works)  # the stream waits


class UnreadMessages(_BatchedMessages):
    """The same where the host finds out at the end of the call what did not fit.

    `found` are 0-d tensors on the device: of each message sent whether it is too long, of each received its status.
    """

    def __init__(self, wire: Wire, codec: Lossless, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> None:
        self._lossless, self._outgoing, self._incoming = codec, outgoing, incoming
        self.found = [codec.too_long(message) for message in self._begin(wire, codec, outgoing, incoming)]
        self._peers: list[int] = []
        self._again: Callable[[Mapping[int, tuple[Codec, Tensor]]], None] = lambda _: None

    def check(
        self, statuses: Mapping[int, Tensor], again: Callable[[Mapping[int, tuple[Codec, Tensor]]], None]
    ) -> None:
        """Have the messages from some group ranks, whose statuses these are, checked at the end of the call.

        If some were too long, `again` decodes those that take their places, with their codecs, by rank.
        """
        self._peers, self._again = [*statuses], again
        self.found += statuses.values()

    def repeat(self, found: Sequence[int]) -> bool:
        """Send and receive again what did not fit, by the numbers of `found`; returns whether there was any.

        A message that is damaged is a FormatError, which names its rank.
        """
        wire, num_sent = self._wire, len(self._outgoing)
        sends = [out for out, is_long in zip(self._outgoing, found[:num_sent], strict=True) if is_long]
        # All of them before an error is raised: the other ranks wait for theirs.
        fits: dict[int, bool] = {}
        damaged: list[tuple[int, FormatError]] = []
        for peer, status in zip(self._peers, found[num_sent:], strict=True):
            try:
                fits[peer] = self._lossless.status_fits(status)
            except FormatError as error:
                damaged.append((peer, error))
        cut_off = [entry for entry in self._incoming if not fits.get(entry.peer, True)]
        if sends or cut_off:
            fallback = self._lossless.fallback
            messages = [wire.encode(fallback, out.values) for out in sends]
            self._works, taken = self._exchange(fallback, sends, messages, cut_off)
            self.wait_sent()
            if not damaged:
                self._again(taken)
        for peer, cause in damaged:
            raise wire.damaged(peer, cause) from cause
        return bool(sends or cut_off)


def _buffer(codec: Codec, nbytes: int, out: Tensor | None, wire: Wire) -> Tensor:
    """Where a message of at most `nbytes` can be received."""
    if out is not None and isinstance(codec, Raw) and (out.is_cpu or not wire.has_tags):
        return bytes_of(out)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu" if wire.has_tags else wire.device)


def _buffer_nbytes(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    capacity = codec.capacity_nbytes(numel, dtype)
    return codec.max_nbytes(numel, dtype) if capacity is None else capacity
