"""From text on disk to batches of tokens.

`prepare` tokenizes once into a token file in the cache and opens it; `TokenCorpus` holds its training and validation
streams; `TokenDataset` cuts a stream into windows; `batch` picks the windows of one step by the counter-based sampler.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from laconic.cache_folder import cache_folder, is_homeless
from laconic.errors import DataError
from laconic.train.config.schema import DataConfig
from laconic.train.data.sampler import sample_id
from laconic.train.data.sources import begin, find_files, is_jsonl, read_documents
from laconic.train.data.token_file import TokenFile, TokenFileWriter
from laconic.train.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from laconic.train.data.instructions import Examples

logger = logging.getLogger(__name__)

# The unit of the train/validation split: a document, or this many tokens of a long one, so that a corpus that is one
# big file can be split too.
_SECTION_TOKENS = 1 << 16
# How much text is given to the tokenizer at once: enough to keep its threads busy, little enough to stay small.
_BATCH_CHARACTERS = 1 << 20
_CACHE_FORMAT = 1
_REPORT_SECONDS = 10.0


class TokenStream:
    """A sequence of tokens made of ranges of a token file; reads never touch more than they return."""

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger], starts: npt.ArrayLike, stops: npt.ArrayLike) -> None:
        """`tokens` [N] is the file; the stream is tokens[starts[0]:stops[0]], tokens[starts[1]:stops[1]], ..."""
        self._tokens = tokens
        self._starts = np.asarray(starts, np.int64)
        self._ends = np.cumsum(np.asarray(stops, np.int64) - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + count) of the stream, int64 [count]."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens [{start}, {start + count}) are outside the stream of {len(self)}")
        out = np.empty(count, np.int64)
        done = 0
        part = int(np.searchsorted(self._ends, start, side="right"))
        while done < count:
            begin = int(self._ends[part - 1]) if part else 0
            at = int(self._starts[part]) + start + done - begin
            take = min(count - done, int(self._ends[part]) - start - done)
            out[done : done + take] = self._tokens[at : at + take]
            done += take
            part += 1
        return out


@dataclass(frozen=True)
class TokenCorpus:
    """A tokenized corpus and its split."""

    train: TokenStream
    validation: TokenStream
    """Held-out tokens; empty when data.validation_fraction is 0."""
    num_tokens: int
    vocab_size: int
    """Vocabulary of the tokenizer: a model with at least this many embeddings fits."""
    max_token: int
    """Largest id that occurs."""
    end_of_document: int
    tokenizer_name: str
    fingerprint: str
    """Hex digest of the tokens and their split: equal fingerprints mean equal data at every step."""


class TokenDataset:
    """Windows of a stream: window i holds tokens [i * T, i * T + T], so inputs and targets are its first and last T."""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        """`sequence_length` is T."""
        self._stream = stream
        self._sequence_length = sequence_length
        self._num_samples = (len(stream) - 1) // sequence_length
        if self._num_samples < 1:
            raise DataError(
                f"sequence_length is {sequence_length}, which needs {sequence_length + 1} tokens, but this part of the "
                f"data has {len(stream)}; shorten the sequence, add data, or change data.validation_fraction "
                "(0: no validation)"
            )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: int) -> torch.Tensor:
        """Window `sample`, int64 [sequence_length + 1]."""
        if not 0 <= sample < self._num_samples:
            raise IndexError(f"sample {sample} is outside [0, {self._num_samples})")
        start = sample * self._sequence_length
        return torch.from_numpy(self._stream.read(start, self._sequence_length + 1))

    def drawn(self, seed: int, indices: Iterable[int]) -> torch.Tensor:
        """The windows at `indices` of the order that `seed` gives, int64 [number of indices, sequence_length + 1]."""
        return torch.stack([self[sample_id(seed, index, len(self))] for index in indices])


def check_vocab(corpus: TokenCorpus | Examples, vocab_size: int) -> None:
    """Check that a model with `vocab_size` embeddings has every id of the corpus."""
    if corpus.max_token >= vocab_size:
        raise DataError(
            f"the data holds token id {corpus.max_token}, but the model's vocabulary ends at {vocab_size - 1}; "
            f"give the model a vocab_size of at least {corpus.vocab_size} (tokenizer {corpus.tokenizer_name}) "
            "or use the model's own tokenizer.json"
        )


def prepare(config: DataConfig, *, verify: bool = True) -> TokenCorpus:
    """Tokenize the files of `config`, unless the cache already holds them, and open the result.

    The cache key covers tokenizer, text_key and the path, size and modification time of each file. Any number of
    processes may call this at once: one tokenizes, the others wait and read. `verify` checks the whole token file
    against its checksum.

    Raises:
        DataError: the data is missing, empty, not text or damaged, or the cache cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer or "bytes", config.end_of_document)
    files = find_files(config.paths)
    if config.text_key != DataConfig().text_key and not any(map(is_jsonl, files)):
        raise DataError(
            f"data.text_key is {config.text_key!r}, but data.paths names no .jsonl file, whose lines it is for; "
            "leave it out, or name such files"
        )
    source = _source_fingerprint(files, tokenizer, config.text_key)
    folder = _cache_dir(config)
    stem = folder / source.hex()[:32]
    index = stem.with_name(stem.name + ".idx")
    if not index.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(stem.with_name(stem.name + ".lock")):
                if not index.exists():
                    _tokenize(files, tokenizer, config.text_key, stem, source)
        except OSError as error:
            raise DataError(
                f"cannot write the token file under {folder}: {error.strerror}; "
                "set data.cache_dir to a directory with room"
            ) from None
    file = TokenFile.open(stem, verify=verify)
    if file.source != source:
        raise DataError(f"{stem}.idx belongs to other data than its name says; delete {stem}.* to tokenize again")
    return _open_corpus(file, config.validation_fraction, tokenizer.name)


def _tokenize(files: Sequence[Path], tokenizer: Tokenizer, text_key: str, stem: Path, source: bytes) -> None:
    started = reported = time.monotonic()
    logger.info("tokenizing %d files into %s.bin", len(files), stem)
    with TokenFileWriter(stem, tokenizer, source) as writer:
        for texts, ends in _batched(piece for file in files for piece in read_documents(file, text_key)):
            for ids, ends_document in zip(tokenizer.encode_batch(texts), ends, strict=True):
                writer.add(ids, ends_document=ends_document)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                # A warning, for Python shows those even without logging set up, and a long silence looks like a hang.
                logger.warning("still tokenizing: %.1f million tokens so far", writer.num_tokens / 1e6)
        if not writer.num_tokens:
            raise DataError(f"the data is empty: no text in {len(files)} file(s), the first of them {files[0]}")
        if _source_fingerprint(files, tokenizer, text_key) != source:
            raise DataError("files of data.paths changed while they were tokenized; try again when they are complete")
    logger.info("tokenized %d tokens in %.1f s", writer.num_tokens, time.monotonic() - started)


def _batched(pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of text, and whether each ends a document, in lists of about _BATCH_CHARACTERS."""
    texts: list[str] = []
    ends: list[bool] = []
    waiting = 0
    for text, ends_document in pieces:
        texts.append(text)
        ends.append(ends_document)
        waiting += len(text)
        if waiting >= _BATCH_CHARACTERS:
            yield texts, ends
            texts, ends, waiting = [], [], 0
    yield texts, ends


def _open_corpus(file: TokenFile, validation_fraction: float, tokenizer_name: str) -> TokenCorpus:
    starts, stops, held = _split(file.offsets, validation_fraction)
    identity = hashlib.sha256(file.digest + file.offsets.tobytes() + repr(validation_fraction).encode())
    return TokenCorpus(
        train=TokenStream(file.tokens, *_joined(starts[~held], stops[~held])),
        validation=TokenStream(file.tokens, *_joined(starts[held], stops[held])),
        num_tokens=int(file.offsets[-1]),
        vocab_size=file.vocab_size,
        max_token=file.max_token,
        end_of_document=file.end_of_document,
        tokenizer_name=tokenizer_name,
        fingerprint=identity.hexdigest(),
    )


_Ranges = npt.NDArray[np.int64]


def _split(offsets: _Ranges, fraction: float) -> tuple[_Ranges, _Ranges, npt.NDArray[np.bool_]]:
    """Sections of a corpus (starts, stops in tokens) and which are held out; `offsets` are the documents' [D + 1].

    A section is held out when the hash of its index falls below `fraction`: nothing depends on a seed or on what comes
    later in the corpus. With any fraction above 0 both sides get at least one section; a lone section is cut in two.
    """
    lengths = np.diff(offsets)
    counts = -(-lengths // _SECTION_TOKENS)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    index = np.arange(int(counts.sum()))
    starts = np.repeat(offsets[:-1], counts) + _SECTION_TOKENS * (index - first)
    stops = np.minimum(starts + _SECTION_TOKENS, np.repeat(offsets[1:], counts))
    if len(index) == 1 and fraction > 0.0:
        end = int(stops[0])  # at least 2: a token and the end of the document
        cut = min(max(1, round((1.0 - fraction) * end)), end - 1)
        return np.array([0, cut]), np.array([cut, end]), np.array([False, True])
    return starts, stops, held_out(len(index), fraction)


def held_out(count: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Which of `count` things are held out for validation, by a hash of their number, bool [count].

    With any fraction above 0 both sides get at least one, if there are two.
    """
    if fraction == 0.0 or count < 2:
        return np.zeros(count, np.bool_)
    keys = _hashed(np.arange(count))
    held = keys < fraction
    held[np.argmin(keys)] = True
    held[np.argmax(keys)] = False
    return held


def _hashed(index: _Ranges) -> npt.NDArray[np.float64]:
    value = index.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53


def _joined(starts: _Ranges, stops: _Ranges) -> tuple[_Ranges, _Ranges]:
    """The same ranges with adjacent ones joined, so that reads are few."""
    if not len(starts):
        return starts, stops
    gap = np.flatnonzero(starts[1:] != stops[:-1])
    return starts[np.r_[0, gap + 1]], stops[np.r_[gap, len(stops) - 1]]


def _source_fingerprint(files: Sequence[Path], tokenizer: Tokenizer, text_key: str) -> bytes:
    sha = hashlib.sha256(json.dumps([_CACHE_FORMAT, tokenizer.fingerprint.hex(), text_key]).encode())
    for file in files:
        try:
            with open(file, "rb") as opened:
                status, skipped = os.fstat(opened.fileno()), begin(opened)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None
        key = [os.fspath(file), status.st_size, status.st_mtime_ns]
        sha.update(json.dumps([*key, skipped] if skipped else key).encode())  # releases before read a mark as text
    return sha.digest()


def _cache_dir(config: DataConfig) -> Path:
    if config.cache_dir is not None:
        return Path(config.cache_dir)
    folder = cache_folder()
    if is_homeless(folder):
        raise DataError("no place for the token file: this user has no home directory; set data.cache_dir, or HOME")
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel lets go of it when its holder dies."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
