"""Tokenizers: bytes built in, or any tokenizer.json on disk. Nothing is looked up on a network."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laconic.errors import DataError, first_line
from laconic.json_text import parse_json

TokenArray = npt.NDArray[np.unsignedinteger]
IdArray = npt.NDArray[np.uint32]
StartArray = npt.NDArray[np.int64]

# Names under which published tokenizers end a document, in the order they are tried.
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


class BytesTokenizer:
    """UTF-8 bytes as ids 0-255, and 256 as the end of a document."""

    name = "bytes"
    """What the configuration calls it."""
    vocab_size = 257
    """One more than the largest id it can give."""
    end_of_document = 256
    """The id written after each document."""
    fingerprint = hashlib.sha256(b"laconic bytes tokenizer, version 1").digest()
    """32 bytes that change when any token id could."""

    def encode(self, text: str) -> TokenArray:
        """The UTF-8 bytes of `text`, uint16 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_with_starts(self, texts: Sequence[str], special: bool) -> list[tuple[IdArray, StartArray]]:
        """Ids of each text, uint32 [tokens], and the characters that tokens begin at, int64 [tokens].

        `special`: add the tokens that a tokenizer puts around a text, at -1; here there are none.
        """
        return [
            (
                self.encode(text).astype(np.uint32),
                np.array([at for at, character in enumerate(text) for _ in character.encode()], np.int64),
            )
            for text in texts
        ]

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of `ids`; end-of-document ids are left out, bytes that are not UTF-8 become U+FFFD."""
        values = np.asarray(ids)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library (what Hugging Face models ship).

    Args:
        path: a tokenizer.json, or a directory with a tokenizer in one of transformers' other forms (vocab.json and
            merges.txt, a SentencePiece model, ...), which is converted.
        end_of_document: the token that ends a document; None looks for the eos_token of the tokenizer_config.json
            beside the file, then for well-known names.
    """

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError("a tokenizer.json needs the tokenizers library: pip install 'laconic[hf]'") from None
        try:
            content = _converted(path) if path.is_dir() else path.read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from None
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception and ValueError for files it cannot parse
            raise DataError(f"data.tokenizer is {str(path)!r}, which is not a tokenizer.json: {error}") from None
        # Both are settings for inference that some files carry; here they would cut or fill documents silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"the tokenizer {path} has an empty vocabulary")
        self.content = content
        """Bytes of the tokenizer.json."""
        self.folder = path if path.is_dir() else path.parent
        """Where the files beside it are, such as tokenizer_config.json."""
        self.name = str(path)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = _find_end_of_document(self.folder, vocabulary, end_of_document)
        self.fingerprint = hashlib.sha256(content + b"%d" % self.end_of_document).digest()

    def encode(self, text: str) -> TokenArray:
        """Ids of `text`, uint16 where the vocabulary fits, else uint32 [tokens]; no special tokens are added."""
        return self.encode_batch([text])[0]

    def decode(self, ids: npt.ArrayLike) -> str | None:
        """The text of `ids`, special tokens left out; None if the file does not say how tokens make a text."""
        if self._tokenizer.decoder is None:
            return None
        text: str = self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[TokenArray]:
        """`encode` of each text, in the library's own threads."""
        dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        return [
            np.array(item.ids, dtype) for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def encode_with_starts(self, texts: Sequence[str], special: bool) -> list[tuple[IdArray, StartArray]]:
        """As of `BytesTokenizer`; special tokens begin at -1."""
        found = []
        for item in self._tokenizer.encode_batch(list(texts), add_special_tokens=special):
            starts = np.array([start for start, _ in item.offsets], np.int64)
            added = np.array(item.special_tokens_mask, np.bool_)
            found.append((np.array(item.ids, np.uint32), np.where(added, -1, starts) if special else starts))
        return found


Tokenizer = BytesTokenizer | JsonTokenizer
"""Text in, token ids out."""


def bytes_per_token(tokenizer: Tokenizer, ids: npt.ArrayLike) -> float | None:
    """UTF-8 bytes of text per token of `ids` (1-D, not empty); ends of documents are tokens without bytes.

    None for a tokenizer that cannot give its text back.
    """
    values = np.asarray(ids)
    if isinstance(tokenizer, BytesTokenizer):
        return float(np.mean(values < 256))
    text = tokenizer.decode(values)
    return None if text is None else len(text.encode()) / values.size


def load_tokenizer(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a tokenizer.json or a directory that holds one."""
    if spec == "bytes":
        if end_of_document is not None:
            raise DataError("data.end_of_document is set, but the bytes tokenizer has its own (id 256): leave it out")
        return BytesTokenizer()
    path = Path(spec)
    if (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if not (path.is_file() or path.is_dir()):
        raise DataError(f'data.tokenizer is {spec!r}, but it must be "bytes" or the path of a tokenizer.json')
    return JsonTokenizer(path, end_of_document)


def _converted(directory: Path) -> bytes:
    try:
        from transformers import AutoTokenizer

        made: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        text: str = made.backend_tokenizer.to_str()
    except Exception as error:  # whatever transformers and the libraries that it needs for a format raise
        raise DataError(
            f"data.tokenizer is the directory {str(directory)!r}, which holds no tokenizer.json, nor files that "
            f"transformers can make one of: {first_line(error)}"
        ) from error
    return text.encode()


def _find_end_of_document(folder: Path, vocabulary: dict[str, int], wanted: str | None) -> int:
    if wanted is not None:
        if wanted not in vocabulary:
            raise DataError(f"data.end_of_document is {wanted!r}, which the tokenizer in {folder} does not know")
        return vocabulary[wanted]
    candidates = list(_END_OF_DOCUMENT)
    try:
        declared = parse_json((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
        candidates.insert(0, declared["content"] if isinstance(declared, dict) else declared)
    except (OSError, ValueError, AttributeError, KeyError):
        pass  # no such file, or not a usable one: the well-known names remain
    for name in candidates:
        if name in vocabulary:
            return vocabulary[name]
    raise DataError(
        f"the tokenizer in {folder} has no token known to end a document; name one of its tokens in "
        "data.end_of_document"
    )
