"""Seconds of a collective raw and coded, and which of the two a message should take.

A coded collective encodes, sends and decodes. In one chunk these follow each other; cut into chunks, the coding of one
overlaps the transfer of another (papers: ZipCCL 4, and the pipelining rule of 4.1):

    seconds(K) = alpha + (c + x) + (K - 1) * (max(c, x) + (1 - overlap) * min(c, x) + chunk)

c is the coding of a chunk (encode and decode: one thread or stream does both), x its bytes on the wire, `chunk` the
fixed overhead of a chunk. The first terms are latency and fill, the last is the slowest stage, as far as coding and
transfer do not share a core.

Everything here is arithmetic on numbers that all ranks have, in the same order, without libm: equal inputs give equal
choices on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from laconic.cost.comm.rates import CODES, ITEM_NBYTES, OPERATIONS, RING, SEND, CodecRates, LinkRates, WireRates
from laconic.errors import ConfigError

RAW = "raw"

MIN_GAIN = 0.05
"""Least predicted gain, as a share of the raw time, at which a message is coded; half a latency must be gained besides.
Predictions are a few per cent off, those of short messages by more, and no message may lose."""

_TRIED_WITHIN, _TRIED_RATIO = 1.25, 1.1
"""What coding may be predicted to take, as a share of the raw time, where that is tried and measured: rates of a brief
measurement are off by as much. Data has to shrink by more than the second for that, as far as it was seen."""

MIN_CODED_NBYTES = 1 << 16
"""Smaller messages are never coded: handshake, headers and threads cost more than any code saves at 100 Mbit/s and
more, and looking up rates would cost more than the message."""

MIN_CHUNK_NBYTES = 1 << 18
"""Raw bytes on the wire below which a message is not cut further."""

MAX_CHUNK_NBYTES = 1 << 22
"""Raw bytes on the wire above which a chunk is cut, as long as there are at most `MAX_CHUNKS`: codecs are measured on
no more, and larger chunks fall out of caches and take fresh memory."""

MAX_CHUNKS = 32

_LARGE_NUMEL = 1 << 28

# Why a message was left raw or coded. Without numbers, so that calls can be counted by it.
PAYS = "coding is predicted to pay"
MAY_PAY = "coding may pay, and was not measured to be slower"
ONE_RANK = "one rank"
NO_CODE = "dtype is not coded"
NOT_MEASURED = "codec was not measured"
TOO_SMALL = "message is too small"
FAST_LINK = "link is too fast for the codec"
LOW_RATIO = "data does not shrink enough"
NOT_PREPARED = "group was not prepared for sends"
PROBE = "probing whether the data shrinks again"
MEASURED_SLOWER = "coding was measured to be slower"
PROBE_RAW = "measuring what raw takes"
PROBE_CODED = "measuring what coding takes"


@dataclass(frozen=True)
class GroupShape:
    """Ranks and nodes of a group: the same number of ranks on each node, or 1 node."""

    num_ranks: int
    ranks_per_node: int = 1

    @property
    def num_nodes(self) -> int:
        """Machines of the group."""
        return self.num_ranks // self.ranks_per_node

    @property
    def kind(self) -> str:
        """The kind of links that the group uses: one of `GROUP_KINDS`."""
        return "node" if self.num_nodes == 1 else "across" if self.ranks_per_node == 1 else "all"


@dataclass(frozen=True)
class AlgorithmChoice:
    """The algorithm of one message."""

    codec: str
    """raw, window or tiered."""
    num_chunks: int
    """0: by the size of messages alone."""
    levels: int
    """1: between all ranks at once; 2: raw inside nodes, `codec` between them."""
    predicted_seconds: float
    raw_seconds: float
    """Predicted for the best raw algorithm."""
    reason: str
    ring: bool = False
    """Whether coded messages go around a ring instead of between every two ranks."""

    @property
    def saved_seconds(self) -> float:
        """Predicted gain over the best raw algorithm; 0 if none is."""
        return max(0.0, self.raw_seconds - self.predicted_seconds)


class AlgorithmCandidate(NamedTuple):
    """One algorithm for a message and its predicted time."""

    codec: str
    num_chunks: int
    levels: int
    seconds: float
    ring: bool = False


def left_raw(reason: str) -> AlgorithmChoice:
    """The choice of a message that is sent uncoded."""
    return AlgorithmChoice(RAW, 1, 1, 0.0, 0.0, reason)


def sent_nbytes(operation: str, nbytes: float, num_ranks: int) -> float:
    """Bytes a process sends for an operation whose input has `nbytes`, by the bandwidth-optimal algorithm.

    For broadcast, gather and scatter, those of the process that sends or receives most.
    """
    if operation in ("all_gather", "gather"):
        return nbytes * (num_ranks - 1)
    if operation == "all_reduce":
        return 2 * nbytes * (num_ranks - 1) / num_ranks
    if operation in ("reduce_scatter", "all_to_all", "scatter"):
        return nbytes * (num_ranks - 1) / num_ranks
    return nbytes


def decide(
    operation: str,
    numel: int,
    dtype: str,
    group: GroupShape,
    rates: WireRates,
    ratio: Mapping[str, float] | None = None,
    levels: tuple[int, ...] = (1,),
    tries: bool = False,
) -> AlgorithmChoice:
    """Choose the algorithm of one message.

    Args:
        operation: one of `OPERATIONS`.
        numel: elements of the input of one rank: the shard of all_gather, all chunks of reduce_scatter, all_to_all and
            scatter, the whole of the others.
        ratio: original over message bytes by code, where it has been observed; else that of Gaussian data.
        levels: numbers of levels that the caller can carry out.
        tries: whether the caller measures what calls take and leaves off: then what may gain is worth a try.
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"operation is {operation!r}, but it must be one of {', '.join(OPERATIONS)}")
    if group.num_ranks == 1:
        return left_raw(ONE_RANK)
    call = _Call(operation, numel, dtype, group, rates, ratio, levels)
    raw, chosen = _choose(call, tries)
    reason = _why_raw(call, tries) if chosen is raw else PAYS if chosen.seconds < raw.seconds else MAY_PAY
    return AlgorithmChoice(
        chosen.codec, chosen.num_chunks, chosen.levels, chosen.seconds, raw.seconds, reason, chosen.ring
    )


def candidates(
    operation: str,
    numel: int,
    dtype: str,
    group: GroupShape,
    rates: WireRates,
    ratio: Mapping[str, float] | None = None,
    levels: tuple[int, ...] = (1,),
) -> Iterator[AlgorithmCandidate]:
    """The algorithms that `decide` compares, the simplest one first: raw, on the fewest levels."""
    allowed = _possible(levels, operation, group, rates)
    nbytes = numel * ITEM_NBYTES.get(dtype, 1)
    for level in allowed:
        yield AlgorithmCandidate(RAW, 1, level, _seconds_of(operation, nbytes, group, rates, None, 1.0, 1, level))
    if dtype not in ITEM_NBYTES or nbytes < MIN_CODED_NBYTES:
        return
    codes = rates.codecs.get(dtype, {})
    for level in allowed:
        for code in CODES:
            if code not in codes:
                continue
            shrinks = (ratio or {}).get(code, codes[code].ratio)
            sent = sent_nbytes(operation, nbytes, group.num_ranks if level == 1 else group.num_nodes)
            for num_chunks in chunk_numbers(sent):
                seconds = _seconds_of(operation, nbytes, group, rates, codes[code], shrinks, num_chunks, level)
                yield AlgorithmCandidate(code, num_chunks, level, seconds)
                if level == 1 and operation in _RINGS and group.num_ranks > 2:
                    link = rates.link(group.kind).at(group.num_ranks)
                    if RING in link.travels:
                        args = (operation, nbytes, group.num_ranks, link, codes[code], shrinks, num_chunks)
                        yield AlgorithmCandidate(code, num_chunks, level, ring_seconds(*args), ring=True)


def pays(coded_seconds: float, raw_seconds: float, latency_seconds: float) -> bool:
    """Whether coding gains enough; `latency_seconds` is the raw operation's alpha. See `MIN_GAIN`."""
    return coded_seconds < (1 - MIN_GAIN) * raw_seconds - latency_seconds / 2


def send_pays(numel: int, dtype: str, code: str, group: GroupShape, rates: WireRates) -> bool:
    """Whether a message from one rank to another gains enough by `code` if it is coded, sent and decoded whole."""
    codec = rates.codecs.get(dtype, {}).get(code)
    nbytes = numel * ITEM_NBYTES.get(dtype, 1)
    if codec is None or nbytes < MIN_CODED_NBYTES:
        return False
    link = rates.link(group.kind).at(group.num_ranks)
    line = link.line(SEND)
    coded = coded_seconds(SEND, nbytes, group.num_ranks, link, codec, codec.ratio, 1)
    return pays(coded, line.seconds(nbytes), line.alpha_seconds)


class _Call(NamedTuple):
    operation: str
    numel: int
    dtype: str
    group: GroupShape
    rates: WireRates
    ratio: Mapping[str, float] | None
    levels: tuple[int, ...]


def _choose(call: _Call, tries: bool) -> tuple[AlgorithmCandidate, AlgorithmCandidate]:
    found = list(candidates(*call))
    simple = found[0]
    raw = min((c for c in found if c.codec == RAW), key=lambda candidate: candidate.seconds)
    raw = raw if raw.seconds < (1 - MIN_GAIN) * simple.seconds else simple
    coded = min((c for c in found if c.codec != RAW), key=lambda candidate: candidate.seconds, default=raw)
    latency = call.rates.link(call.group.kind).at(call.group.num_ranks).line(call.operation).alpha_seconds
    if tries and coded is not raw and (call.ratio is None or call.ratio[coded.codec] > _TRIED_RATIO):
        gains = coded.seconds < _TRIED_WITHIN * raw.seconds
    else:
        gains = pays(coded.seconds, raw.seconds, latency)
    return raw, coded if gains else raw


def _possible(levels: tuple[int, ...], operation: str, group: GroupShape, rates: WireRates) -> tuple[int, ...]:
    nested = group.num_nodes > 1 and group.ranks_per_node > 1 and {"node", "across"} <= set(rates.links)
    possible = {1, 2} if nested and operation in _TWO_LEVEL else {1}
    return tuple(sorted(possible & set(levels))) or (1,)


# --- seconds ---

_RINGS = ("reduce_scatter", "all_reduce")
"""Operations that can go around a ring."""

_TWO_LEVEL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def _inside(operation: str, nbytes: float, group: GroupShape) -> tuple[list[tuple[str, float]], float]:
    """The raw operations inside a node with the bytes of their inputs, and those of the part between nodes."""
    local, nodes = group.ranks_per_node, group.num_nodes
    if operation == "all_gather":
        return [("all_gather", nbytes * nodes)], nbytes
    if operation == "reduce_scatter":
        return [("reduce_scatter", nbytes)], nbytes / local
    if operation == "all_reduce":
        return [("reduce_scatter", nbytes), ("all_gather", nbytes / local)], nbytes / local
    return [("all_to_all", nbytes)], nbytes


def _seconds_of(
    operation: str,
    nbytes: float,
    group: GroupShape,
    rates: WireRates,
    codec: CodecRates | None,
    ratio: float,
    num_chunks: int,
    levels: int,
) -> float:
    def flat(link: LinkRates, nbytes: float, num_ranks: int) -> float:
        if codec is None:
            return link.line(operation).seconds(sent_nbytes(operation, nbytes, num_ranks))
        return coded_seconds(operation, nbytes, num_ranks, link, codec, ratio, num_chunks)

    if levels == 1:
        return flat(rates.link(group.kind).at(group.num_ranks), nbytes, group.num_ranks)
    inside, across_nbytes = _inside(operation, nbytes, group)
    node = rates.link("node").at(group.ranks_per_node)
    seconds = flat(rates.link("across").at(group.num_nodes), across_nbytes, group.num_nodes)
    for name, size in inside:
        seconds += node.line(name).seconds(sent_nbytes(name, size, group.ranks_per_node))
    return seconds


def coded_seconds(
    operation: str, nbytes: float, num_ranks: int, link: LinkRates, codec: CodecRates, ratio: float, num_chunks: int
) -> float:
    """Predicted time of one coded operation on one level, whose input on each of `num_ranks` ranks has `nbytes`."""
    alpha, coding, wire = 0.0, 0.0, 0.0
    for phase in _phases(operation, nbytes, num_ranks):
        decode = codec.decode_add if phase.sums else codec.decode
        coding += codec.encode.seconds(phase.encoded / num_chunks) + decode.seconds(phase.decoded / num_chunks)
        line = link.travel(phase.travels)
        alpha += line.alpha_seconds
        wire += line.seconds_per_byte * phase.sent / num_chunks / ratio
    slot = max(coding, wire) + (1 - link.overlap) * min(coding, wire) + link.chunk_seconds
    extra = link.extra.get(operation)
    unexplained = 0.0 if extra is None else extra.seconds(sent_nbytes(operation, nbytes, num_ranks))
    return alpha + coding + wire + (num_chunks - 1) * slot + unexplained


def ring_seconds(
    operation: str, nbytes: float, num_ranks: int, link: LinkRates, codec: CodecRates, ratio: float, num_chunks: int
) -> float:
    """Predicted time of one operation whose coded messages go around a ring.

    In each of W - 1 hops of a reduction a rank decodes a W-th, adds its own and encodes; an all-reduce goes around once
    more with the encoded sums.
    """
    part = nbytes / num_ranks / num_chunks
    hop = codec.encode.seconds(part) + codec.decode_add.seconds(part)
    hops, coding = num_ranks - 1, (num_ranks - 1) * hop
    if operation == "all_reduce":
        hops += num_ranks - 1
        coding += codec.encode.seconds(part) + (num_ranks - 1) * codec.decode.seconds(part)
    line = link.travel(RING)
    # All chunks go around at once: each rank's link and core do the hops of all of them.
    wire = hops * line.seconds_per_byte * part / ratio
    slot = max(coding, wire) + (1 - link.overlap) * min(coding, wire) + hops * link.chunk_seconds / (num_ranks - 1)
    extra = link.extra.get(operation)
    unexplained = 0.0 if extra is None else extra.seconds(sent_nbytes(operation, nbytes, num_ranks))
    return hops * line.alpha_seconds + coding + wire + (num_chunks - 1) * slot + unexplained


class _Phase(NamedTuple):
    """One encode-send-decode phase: original bytes of each step on the busiest rank, and the transport of messages."""

    encoded: float
    sent: float
    decoded: float
    travels: str
    sums: bool = False


def _phases(operation: str, nbytes: float, num_ranks: int) -> tuple[_Phase, ...]:
    others = nbytes * (num_ranks - 1) / num_ranks
    if operation == "all_gather":
        return (_Phase(nbytes, nbytes * (num_ranks - 1), nbytes * (num_ranks - 1), "all_gather"),)
    if operation == "all_to_all":
        return (_Phase(others, others, others, "all_to_all"),)
    if operation == "reduce_scatter":
        return (_Phase(others, others, others, "all_to_all", sums=True),)
    if operation == "all_reduce":
        return (
            _Phase(others, others, others, "all_to_all", sums=True),
            _Phase(nbytes / num_ranks, others, others, "all_gather"),
        )
    if operation == "gather":
        return (_Phase(nbytes, nbytes * (num_ranks - 1), nbytes * (num_ranks - 1), "gather"),)
    if operation == "scatter":
        return (_Phase(others, others, nbytes / num_ranks, "scatter"),)
    return (_Phase(nbytes, nbytes, nbytes, operation),)


def chunk_numbers(sent_nbytes: float) -> Iterator[int]:
    """Candidate numbers of chunks for a message of which a process sends so many bytes."""
    number = 1
    while number < MAX_CHUNKS and sent_nbytes / number > MAX_CHUNK_NBYTES:
        number *= 2
    yield number
    while 2 * number <= MAX_CHUNKS and sent_nbytes / (2 * number) >= MIN_CHUNK_NBYTES:
        number *= 2
        yield number


def _why_raw(call: _Call, tries: bool) -> str:
    if call.dtype not in ITEM_NBYTES:
        return NO_CODE
    if not call.rates.codecs.get(call.dtype):
        return NOT_MEASURED

    def would_pay(call: _Call) -> bool:
        raw, chosen = _choose(call, tries)
        return chosen is not raw

    gaussian = call._replace(ratio=None)
    if call.ratio and would_pay(gaussian):
        return LOW_RATIO
    return TOO_SMALL if would_pay(gaussian._replace(numel=max(call.numel, _LARGE_NUMEL))) else FAST_LINK
