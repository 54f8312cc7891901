"""Token files: a corpus as ids on disk, mapped into memory, checked by digest.

Two files share a stem. `<stem>.bin` holds the ids of all documents, one after another, uint16 or uint32 little-endian.
`<stem>.idx` holds, little-endian:

    offset  size  field
         0     8  magic "LACTOKEN"
         8     4  version, 1
        12     4  bytes per token, 2 or 4
        16     8  number of documents D
        24     8  number of tokens N
        32     8  largest token id in the file
        40     8  vocabulary size of the tokenizer
        48     8  id that ends a document
        56    32  SHA-256 of the .bin file
        88    32  fingerprint of the tokenizer
       120    32  fingerprint of the sources
       152  8D+8  start of each document in tokens, and N
    152+8D+8  32  SHA-256 of everything before it in the .idx file

The .idx is renamed into place last, so a pair with an .idx is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from laconic.durable import fsync_directory, fsync_file, sha256_of
from laconic.errors import DataError
from laconic.train.data.tokenizer import TokenArray, Tokenizer

_HEADER = struct.Struct("<8sIIQQQQQ32s32s32s")
_MAGIC = b"LACTOKEN"
_VERSION = 1
_DIGEST_NBYTES = 32


@dataclass(frozen=True)
class TokenFile:
    """An open token file."""

    tokens: TokenArray
    """All ids, memory-mapped, [num_tokens]."""
    offsets: npt.NDArray[np.int64]
    """Start of each document in `tokens`, and their end, [num_documents + 1]."""
    max_token: int
    vocab_size: int
    end_of_document: int
    digest: bytes
    """SHA-256 of the .bin file: equal digests mean equal tokens."""
    source: bytes
    """Fingerprint of what was tokenized, as given to the writer."""

    @classmethod
    def open(cls, stem: Path, *, verify: bool = True) -> TokenFile:
        """Open `<stem>.bin` and `<stem>.idx`.

        Sizes and the index are always checked; `verify` also reads the whole .bin (about 1 GB/s).
        """
        bin_path, idx_path = _paths(stem)
        try:
            index = idx_path.read_bytes()
            bin_nbytes = bin_path.stat().st_size
        except OSError as error:
            raise DataError(f"cannot read the token file {error.filename}: {error.strerror}; {_remedy(stem)}") from None
        if len(index) < _HEADER.size or not index.startswith(_MAGIC):
            raise DataError(f"{idx_path} is not a laconic token index; {_remedy(stem)}")
        header = _HEADER.unpack_from(index)
        _, version, token_nbytes, documents, num_tokens, max_token, vocab_size, end, digest, _, source = header
        if version != _VERSION:
            raise DataError(f"{idx_path} has version {version}, but this laconic reads {_VERSION}; {_remedy(stem)}")
        if len(index) != _HEADER.size + 8 * (documents + 1) + _DIGEST_NBYTES:
            raise DataError(
                f"{idx_path} is damaged: {len(index)} bytes do not fit {documents} documents; {_remedy(stem)}"
            )
        if hashlib.sha256(index[:-_DIGEST_NBYTES]).digest() != index[-_DIGEST_NBYTES:]:
            raise DataError(f"{idx_path} is damaged: its checksum does not match; {_remedy(stem)}")
        offsets = np.frombuffer(index, "<u8", documents + 1, _HEADER.size).astype(np.int64)
        in_order = offsets[0] == 0 and offsets[-1] == num_tokens and bool((np.diff(offsets) > 0).all())
        if token_nbytes not in (2, 4) or not documents or not in_order:
            raise DataError(f"{idx_path} is damaged: its documents do not add up; {_remedy(stem)}")
        if bin_nbytes != num_tokens * token_nbytes:
            expected = num_tokens * token_nbytes
            raise DataError(f"{bin_path} is damaged: it has {bin_nbytes} bytes instead of {expected}; {_remedy(stem)}")
        if verify and sha256_of(bin_path) != digest:
            raise DataError(f"{bin_path} is damaged: its checksum does not match; {_remedy(stem)}")
        tokens = np.memmap(bin_path, f"<u{token_nbytes}", mode="r", shape=(num_tokens,))
        return cls(tokens, offsets, max_token, vocab_size, end, digest, source)


class TokenFileWriter:
    """Writes a token file piece by piece; a context manager that leaves either the whole pair or nothing.

    ``with TokenFileWriter(stem, tokenizer, source) as writer: writer.add(ids, ends_document=True)``. `source` is the
    32-byte fingerprint of the text. Leaving the block without an error makes the pair durable and visible.

    Raises:
        DataError: a file cannot be written.
    """

    def __init__(self, stem: Path, tokenizer: Tokenizer, source: bytes) -> None:
        self._stem = stem
        self._tokenizer = tokenizer
        self._source = source
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._end = np.array([tokenizer.end_of_document], self._dtype)
        self._offsets = array("Q", [0])
        self._num_tokens = 0
        self._max_token = 0
        self._sha = hashlib.sha256()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TokenFileWriter:
        # The caller holds the lock of this stem, so temporary files here belong to processes that died.
        for stale in self._stem.parent.glob(f".{self._stem.name}.*.tmp"):
            stale.unlink(missing_ok=True)
        self._file = open(self._temporary("bin"), "wb")
        return self

    def add(self, ids: TokenArray, *, ends_document: bool) -> None:
        """Append `ids` [tokens] to the current document; with `ends_document`, end it. Documents without ids vanish."""
        self._write(ids.astype(self._dtype, copy=False))
        if ends_document and self._num_tokens > self._offsets[-1]:
            self._write(self._end)
            self._offsets.append(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._commit()
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            for suffix in ("bin", "idx"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _write(self, ids: TokenArray) -> None:
        assert self._file is not None
        if ids.size:
            content = ids.tobytes()
            self._file.write(content)
            self._sha.update(content)
            self._num_tokens += ids.size
            self._max_token = max(self._max_token, int(ids.max()))

    def _commit(self) -> None:
        assert self._file is not None
        bin_path, idx_path = _paths(self._stem)
        fsync_file(self._file)
        self._file.close()
        index = bytearray(
            _HEADER.pack(
                _MAGIC,
                _VERSION,
                self._dtype.itemsize,
                len(self._offsets) - 1,
                self._num_tokens,
                self._max_token,
                self._tokenizer.vocab_size,
                self._tokenizer.end_of_document,
                self._sha.digest(),
                self._tokenizer.fingerprint,
                self._source,
            )
        )
        index += np.array(self._offsets, "<u8").tobytes()
        index += hashlib.sha256(index).digest()
        with open(self._temporary("idx"), "wb") as file:
            file.write(index)
            fsync_file(file)
        os.replace(self._temporary("bin"), bin_path)
        os.replace(self._temporary("idx"), idx_path)
        fsync_directory(self._stem.parent)

    def _temporary(self, suffix: str) -> Path:
        return self._stem.with_name(f".{self._stem.name}.{suffix}.tmp")


def _paths(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def _remedy(stem: Path) -> str:
    return f"delete {stem}.* to tokenize again"
