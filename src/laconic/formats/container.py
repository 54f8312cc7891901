"""Zipped safetensors files: the container (docs/zip.md), read and written.

A container is a header, the messages of the tensors in the order of the original file, and a tail: the original's own
safetensors header and an index, under a SHA-256. Where each message is follows from the lengths before it, so that none
can overlap another or leave a hole; every other byte of the file is a zero, and that is checked.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

from laconic.durable import begin_writeback
from laconic.errors import FormatError
from laconic.formats.chunk import Code, decode_chunk, difference, difference_pays, encode_chunk
from laconic.formats.lossless import Checksum, checksum_of
from laconic.formats.mapped import TensorSource, map_file
from laconic.formats.safetensors_header import HEADER_LIMIT_NBYTES, TensorEntry, parse_header
from laconic.json_text import parse_json
from laconic.ops.entropy import MAX_ELEMENTS_PER_BYTE, is_entropy_coded

T = TypeVar("T")

SUFFIX = ".laconic"
"""What the name of a zipped file ends with."""
CHUNK_NBYTES = 1 << 22
"""Bytes of a tensor that make one message."""

_MAGIC = b"LCNZFILE"
_VERSION, _BEST_VERSION = 1, 2
"""Without and with entropy-coded messages."""
_HEAD = struct.Struct("<8sIIQII")  # magic, version, chunk_nbytes, tail_offset, header_nbytes, index_nbytes
_HEAD_NBYTES = 64  # the rest is the SHA-256 of _HEAD and the tail
_ALIGNMENT = 64
_MAX_CHUNK_NBYTES = 1 << 24  # what one message may become in memory; a file cannot ask for more
_KEPT_CHUNKS = 2
_MAX_ELEMENTS_PER_BYTE = {_VERSION: 8, _BEST_VERSION: MAX_ELEMENTS_PER_BYTE}
_PIECE_NBYTES, _NUM_PIECES = 1 << 12, 16  # of a tensor, to see whether its difference to another is shorter

Progress = Callable[[int], None]
"""Called with the number of bytes of tensors that were dealt with since the last call."""


@dataclass(frozen=True)
class Stored:
    """What the index says of one tensor."""

    checksum: str
    """Of the original bytes."""
    base_checksum: str | None
    """Of the base's tensor of the same name, when the difference to it is stored."""
    messages: tuple[tuple[int, int], ...]
    """(offset, nbytes) in the file of each chunk; 0 bytes where a chunk equals the base's."""


class ContainerFile:
    """A zipped safetensors file. The constructor checks all that the tail claims; reading checks each message.

    `base` is the source of the tensors to which differences are stored; it can be set later.
    """

    def __init__(self, path: Path, base: TensorSource | None = None) -> None:
        self.path = path
        self.base = base
        self.content = map_file(path)
        if len(self.content) < _HEAD_NBYTES or self._bytes(0, 8) != _MAGIC:
            raise FormatError(f"{path}: not a file that `laconic zip` wrote (no {_MAGIC.decode()} at its beginning)")
        head = self._bytes(0, _HEAD.size)
        _, self._version, self.chunk_nbytes, self._tail, header_nbytes, index_nbytes = _HEAD.unpack(head)
        if self._version not in _MAX_ELEMENTS_PER_BYTE:
            raise FormatError(
                f"{path}: has format version {self._version}, but this laconic reads versions {_VERSION} and "
                f"{_BEST_VERSION}"
            )
        end = self._tail + header_nbytes + index_nbytes
        if self._tail < _HEAD_NBYTES or header_nbytes > HEADER_LIMIT_NBYTES or end != len(self.content):
            raise FormatError(
                f"{path}: damaged or cut off: it has {len(self.content):,} bytes, but {end:,} are written in it"
            )
        tail = self._bytes(self._tail, end)
        self.digest = self._bytes(_HEAD.size, _HEAD_NBYTES).hex()
        """SHA-256 of all but the messages, whose checksums are in them."""
        if hashlib.sha256(head + tail).hexdigest() != self.digest:
            raise FormatError(f"{path}: damaged: the SHA-256 of its header and index is not the one written in it")
        if not _ALIGNMENT <= self.chunk_nbytes <= _MAX_CHUNK_NBYTES or self.chunk_nbytes % _ALIGNMENT:
            raise FormatError(
                f"{path}: chunk_nbytes is {self.chunk_nbytes:,}, but must be a multiple of {_ALIGNMENT} up to "
                f"{_MAX_CHUNK_NBYTES:,}"
            )
        self.header = tail[:header_nbytes]
        """The safetensors header of the original, without its length."""
        self._read_index(tail[header_nbytes:])
        self._kept: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._keeping = threading.Lock()

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.content)

    @property
    def original_nbytes(self) -> int:
        """Size of the file it was made from."""
        return 8 + len(self.header) + self.data_nbytes

    @property
    def needs_base(self) -> bool:
        """Whether any tensor is stored as the difference to one of a base."""
        return any(stored.base_checksum is not None for stored in self.stored.values())

    def checksum(self, name: str) -> str:
        """Checksum of all bytes of a tensor, from the index."""
        return self.stored[name].checksum

    def require(self, name: str) -> None:
        """Check that `base` has the tensor to which `name` is a difference."""
        if self.stored[name].base_checksum is not None:
            self._base_of(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes `start` to `stop` of a tensor, uint8 [stop - start], decoded on the CPU."""
        out = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        for number in range(start // self.chunk_nbytes, -(-stop // self.chunk_nbytes)):
            begin, chunk = number * self.chunk_nbytes, self._kept_chunk(name, number)
            first, last = max(start, begin), min(stop, begin + len(chunk))
            out[first - start : last - start] = chunk[first - begin : last - begin]
        return out

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """All bytes of a tensor, uint8 [nbytes], decoded on `device`, their checksum compared with the index."""
        self.require(name)
        out = torch.empty(self.entries[name].nbytes, dtype=torch.uint8, device=device)
        total = Checksum()
        for number in range(len(self.stored[name].messages)):
            chunk, sums = self.chunk(name, number, self._part(out, number))
            total.add(*sums, len(chunk))
        self._compare(name, total)
        return out

    def chunks(self, num_threads: int, unknown_base: bool = False) -> Iterator[Tensor]:
        """The bytes of all tensors, chunk by chunk, in the order of the original; every checksum is compared.

        With `unknown_base`, for a file that was made with a base which is not there, differences are decoded and
        checked as such, and an empty tensor stands for their chunks; those without a message are passed over.
        """
        left_out = {name for name, stored in self.stored.items() if unknown_base and stored.base_checksum is not None}
        pairs = [
            (name, number)
            for name, stored in self.stored.items()
            for number, (_, nbytes) in enumerate(stored.messages)
            if nbytes or name not in left_out
        ]
        calls = (partial(self.chunk, name, number, only_difference=name in left_out) for name, number in pairs)
        total = Checksum()
        for (name, number), (chunk, sums) in zip(pairs, _in_order(num_threads, calls), strict=True):
            if name in left_out:
                yield chunk[:0]
                continue
            total.add(*sums, len(chunk))
            if number + 1 == len(self.stored[name].messages):
                self._compare(name, total)
                total = Checksum()
            yield chunk

    def chunk(
        self, name: str, number: int, out: Tensor | None = None, only_difference: bool = False
    ) -> tuple[Tensor, tuple[int, int]]:
        """Chunk `number` of a tensor, uint8 [at most chunk_nbytes], in `out` if given; and its checksum."""
        entry, stored = self.entries[name], self.stored[name]
        where = f"{self.path}: tensor {name!r}"
        offset, nbytes = stored.messages[number]
        start = number * self.chunk_nbytes
        # Before memory is asked for: where the base has no such tensor, nothing vouches for how long this one is.
        base = None if stored.base_checksum is None or only_difference else self._base_of(name)
        if out is None:
            out = torch.empty(min(self.chunk_nbytes, entry.nbytes - start), dtype=torch.uint8, device="cpu")
        padding = self.content[offset + nbytes : offset + _padded(nbytes)]
        if padding.any():
            raise FormatError(f"{where}: damaged: bytes between its messages are not zeros")
        sums = None
        if nbytes:
            try:
                message = self.content[offset : offset + nbytes]
                if self._version == _VERSION and is_entropy_coded(message):
                    raise FormatError(
                        f"its message is entropy-coded, which only a file of version {_BEST_VERSION} may hold, but "
                        f"this one has version {_VERSION}"
                    )
                sums = decode_chunk(message, entry.element, out, where)
            except FormatError as error:
                raise FormatError(f"{where}: damaged, in chunk {number}: {error}") from error
        else:
            out.zero_()
        if base is not None:
            difference(out, base.read(name, start, start + len(out)).to(out.device), out)
            sums = None
        return out, checksum_of(out) if sums is None else sums

    def _kept_chunk(self, name: str, number: int) -> Tensor:
        """`chunk`, read-only, from a cache of the last ones: several reads within one chunk decode it once."""
        with self._keeping:
            if (name, number) in self._kept:
                return self._kept[name, number]
        chunk = self.chunk(name, number)[0]
        with self._keeping:
            self._kept[name, number] = chunk
            while len(self._kept) > _KEPT_CHUNKS:
                self._kept.popitem(last=False)
        return chunk

    def _base_of(self, name: str) -> TensorSource:
        """The base, which has the tensor that `name` is a difference to."""
        stored = self.stored[name]
        where = f"{self.path}: tensor {name!r} is stored as the difference to {self.base_name!r}"
        if self.base is None:
            raise FormatError(f"{where}, which is needed to read it; give it as the base")
        mine = self.entries[name]
        theirs = self.base.entries.get(name)
        if theirs is None or (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape):
            raise FormatError(f"{where}, but the base given, {self.base.name}, has no such tensor")
        self.base.require(name)
        found = self.base.checksum(name)
        if found != stored.base_checksum:
            raise FormatError(
                f"{where} with checksum {stored.base_checksum}, but that of the base given, {self.base.name}, has "
                f"{found}; give the one it was zipped with"
            )
        return self.base

    def _compare(self, name: str, total: Checksum) -> None:
        stored = self.stored[name]
        if str(total) != stored.checksum:
            culprit = f", or its base {self.base_name!r} is" if stored.base_checksum is not None else ""
            raise FormatError(
                f"{self.path}: tensor {name!r}: damaged{culprit}: it has checksum {total}, but {stored.checksum} is "
                "written in the index"
            )

    def _part(self, out: Tensor, number: int) -> Tensor:
        return out[number * self.chunk_nbytes : (number + 1) * self.chunk_nbytes]

    def _bytes(self, start: int, stop: int) -> bytes:
        return self.content[start:stop].numpy().tobytes()

    def _read_index(self, text: bytes) -> None:
        where = str(self.path)
        try:
            index = parse_json(text.decode("utf-8"))
            base_name, records, self.data_nbytes = index["base"], index["tensors"], index["data_nbytes"]
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"{where}: its index is not one of `laconic zip`") from None
        if not isinstance(records, list) or not _is_size(self.data_nbytes) or not isinstance(base_name, str | None):
            raise FormatError(f"{where}: its index must have base, data_nbytes and a list of tensors")
        self.base_name: str | None = base_name
        entries, self.metadata = parse_header(self.header, self.data_nbytes, where)
        if [record.get("name") if isinstance(record, dict) else None for record in records] != [
            e.name for e in entries
        ]:
            raise FormatError(f"{where}: its index does not list the tensors of its safetensors header in their order")
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}
        self.stored: dict[str, Stored] = {}
        offset = _HEAD_NBYTES
        for entry, record in zip(entries, records, strict=True):
            self.stored[entry.name], offset = self._stored(entry, record, offset)
        if offset != self._tail:
            raise FormatError(f"{where}: its messages end at byte {offset:,}, but its index begins at {self._tail:,}")

    def _stored(self, entry: TensorEntry, record: dict[str, Any], offset: int) -> tuple[Stored, int]:
        """What `record` says of `entry` whose messages begin at `offset`, and where they end."""
        where = f"{self.path}: tensor {entry.name!r}"
        checksum, base, sizes = record.get("checksum"), record.get("base_checksum"), record.get("messages")
        if set(record) - {"base_checksum"} != {"name", "checksum", "messages"}:
            raise FormatError(f"{where}: its record must have name, checksum and messages")
        if not isinstance(checksum, str) or not (base is None or isinstance(base, str)):
            raise FormatError(f"{where}: checksums must be strings")
        num_chunks = -(-entry.nbytes // self.chunk_nbytes)
        if not isinstance(sizes, list) or not all(map(_is_size, sizes)) or len(sizes) != num_chunks:
            raise FormatError(f"{where}: must have the sizes of {num_chunks} messages")
        messages = []
        for number, nbytes in enumerate(sizes):
            chunk_nbytes = min(self.chunk_nbytes, entry.nbytes - number * self.chunk_nbytes)
            num_elements = chunk_nbytes // entry.element.itemsize
            most = _MAX_ELEMENTS_PER_BYTE[self._version]
            if num_elements > most * nbytes and not (nbytes == 0 and base is not None):
                raise FormatError(
                    f"{where}: {num_elements:,} elements cannot be in a message of {nbytes:,} bytes; a byte holds at "
                    f"most {most}"
                )
            messages.append((offset, nbytes))
            offset += _padded(nbytes)
            if offset > self._tail:
                raise FormatError(
                    f"{where}: message {number} ends at byte {offset:,}, behind the beginning of the tail"
                )
        return Stored(checksum, base, tuple(messages)), offset


def write_container(
    file: IO[bytes],
    header: bytes,
    tensors: Iterable[Tensor],
    *,
    code: Code = "auto",
    base: TensorSource | None = None,
    num_threads: int = 1,
    progress: Progress | None = None,
    name: str = "",
) -> tuple[int, str]:
    """Write a container to the empty `file`; return its size in bytes and its digest.

    Args:
        file: open for writing; messages of errors begin with `name`.
        header: the safetensors header, without its length.
        tensors: bytes of the header's tensors, uint8, in the order of the data; iterated lazily.
        code: lossless code; with "best" the file has version 2.
        base, num_threads, progress: as of `zip_path`, for tensors of the same dtype and shape.
    """
    entries = _described(header, name)
    file.write(bytes(_HEAD_NBYTES))
    offset = _HEAD_NBYTES
    records: list[dict[str, Any]] = []
    total, base_total = Checksum(), Checksum()
    for entry, theirs, number, (message, sums, base_sums) in _encoded(entries, tensors, code, base, num_threads):
        if number == 0:
            total, base_total = Checksum(), Checksum()
            record: dict[str, Any] = {"name": entry.name, "checksum": "", "messages": []}
            if theirs is not None:
                record["base_checksum"] = theirs.checksum(entry.name)
            records.append(record)
        nbytes = 0
        chunk_nbytes = min(CHUNK_NBYTES, entry.nbytes - number * CHUNK_NBYTES)
        if message is not None:
            nbytes = len(message)
            file.write(message.numpy().data)
            file.write(bytes(_padded(nbytes) - nbytes))
            begin_writeback(file, offset, offset + _padded(nbytes))
            offset += _padded(nbytes)
        if chunk_nbytes:
            total.add(*sums, chunk_nbytes)
            base_total.add(*base_sums, chunk_nbytes)
            records[-1]["messages"].append(nbytes)
        records[-1]["checksum"] = str(total)
        is_last = (number + 1) * CHUNK_NBYTES >= entry.nbytes
        if theirs is not None and is_last and str(base_total) != records[-1]["base_checksum"]:
            raise FormatError(
                f"{theirs.name}: tensor {entry.name!r}: damaged, or changed meanwhile: it has checksum {base_total}, "
                f"but {records[-1]['base_checksum']} is written for it; a difference to it could not be undone"
            )
        if progress is not None:
            progress(chunk_nbytes)
    index = json.dumps(
        {
            "base": None if base is None else base.name,
            "data_nbytes": sum(entry.nbytes for entry in entries),
            "tensors": records,
        },
        separators=(",", ":"),
    ).encode()
    version = _BEST_VERSION if code == "best" else _VERSION
    head = _HEAD.pack(_MAGIC, version, CHUNK_NBYTES, offset, len(header), len(index))
    digest = hashlib.sha256(head + header + index)
    file.write(header + index)
    file.seek(0)
    file.write(head + digest.digest())
    return offset + len(header) + len(index), digest.hexdigest()


def _described(header: bytes, where: str) -> list[TensorEntry]:
    """The entries of `header`, checked to describe its data completely."""
    fields = parse_json(header)
    ends = [entry["data_offsets"][1] for key, entry in fields.items() if key != "__metadata__"]
    return parse_header(header, max(ends, default=0), where)[0]


_Encoded = tuple[Tensor | None, tuple[int, int], tuple[int, int]]
"""A message, the checksum of what it holds, and that of the base's bytes."""


def _encoded(
    entries: Sequence[TensorEntry], tensors: Iterable[Tensor], code: Code, base: TensorSource | None, num_threads: int
) -> Iterator[tuple[TensorEntry, TensorSource | None, int, _Encoded]]:
    """(entry, its base, number of the chunk, what encode_chunk returns), in order; an empty tensor has one chunk."""
    places: deque[tuple[TensorEntry, TensorSource | None, int]] = deque()

    def calls() -> Iterator[Callable[[], _Encoded]]:
        for entry, data in zip(entries, tensors, strict=True):
            if len(data) != entry.nbytes:
                raise FormatError(
                    f"tensor {entry.name!r} has {len(data):,} bytes, but its header says {entry.nbytes:,}"
                )
            theirs = base if base is not None and _pays(base, entry, data, code) else None
            for start in range(0, max(entry.nbytes, 1), CHUNK_NBYTES):
                places.append((entry, theirs, start // CHUNK_NBYTES))
                yield partial(_encoded_chunk, entry, data[start : start + CHUNK_NBYTES], code, theirs, start)

    for result in _in_order(num_threads, calls()):
        yield *places.popleft(), result


def _encoded_chunk(entry: TensorEntry, data: Tensor, code: Code, base: TensorSource | None, start: int) -> _Encoded:
    if not len(data):
        return None, (0, 0), (0, 0)
    theirs = None if base is None else base.read(entry.name, start, start + len(data))
    message, *sums = encode_chunk(data, entry.element, code, theirs)
    return message, (sums[0], sums[1]), (0, 0) if theirs is None else checksum_of(theirs)


def _pays(base: TensorSource, entry: TensorEntry, data: Tensor, code: Code) -> bool:
    """Whether to store the difference to the tensor of `base`, if there is one of this kind."""
    theirs = base.entries.get(entry.name)
    if theirs is None or (theirs.dtype, theirs.shape) != (entry.dtype, entry.shape) or not entry.nbytes:
        return False
    starts = range(0, entry.nbytes, max(_PIECE_NBYTES, entry.nbytes // _NUM_PIECES // _PIECE_NBYTES * _PIECE_NBYTES))
    mine = torch.cat([data[start : start + _PIECE_NBYTES] for start in starts])
    others = [base.read(entry.name, start, min(start + _PIECE_NBYTES, entry.nbytes)) for start in starts]
    return difference_pays(mine, torch.cat(others), entry.element, code)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _in_order(num_threads: int, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Result of each call, in order, while `num_threads` threads work on those that follow.

    At most two calls per thread run ahead of the consumer, so that memory stays bounded. The first exception ends the
    iteration; calls not begun are dropped.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > 2 * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
