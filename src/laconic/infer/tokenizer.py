"""Tokenizers of the server: a model's own, or bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from laconic.errors import ConfigError
from laconic.infer.transformers_seam import read_config
from laconic.train.data.tokenizer import BytesTokenizer
from laconic.train.model_source import own_tokenizer

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "TextTokenizer", "load_text_tokenizer"]


class TextTokenizer(Protocol):
    """Turns requests into tokens and tokens into text; on any thread."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the model begins with."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation by the model's chat template, up to where the assistant answers.

        Raises:
            ConfigError: there is no template, or it does not accept these messages.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens; U+FFFD for what is not UTF-8."""
        ...

    def token_name(self, token: int) -> str:
        """Return what the vocabulary calls a token; never the same for two."""
        ...


class HuggingFaceTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: of AutoTokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # tokenizers of Rust must not be used by two threads at once

    def encode(self, text: str) -> list[int]:
        """See TextTokenizer."""
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See TextTokenizer."""
        if self._tokenizer.chat_template is None:
            raise ConfigError("the model's tokenizer has no chat template; ask /v1/completions with a prompt")
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # templates are programs and raise what they like
                raise ConfigError(f"the model's chat template does not accept these messages: {error}") from error
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """See TextTokenizer."""
        with self._lock:
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def token_name(self, token: int) -> str:
        """See TextTokenizer."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return f"token_id:{token}" if name is None else str(name)


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 as the end of an answer; it has no chat template."""

    def encode(self, text: str) -> list[int]:
        """See TextTokenizer."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See TextTokenizer."""
        raise ConfigError("the model's tokens are bytes, without a chat template; ask /v1/completions with a prompt")

    def decode(self, tokens: Sequence[int]) -> str:
        """See TextTokenizer."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_name(self, token: int) -> str:
        """See TextTokenizer."""
        return f"<0x{token:02X}>"


def load_text_tokenizer(model_dir: str | os.PathLike[str]) -> TextTokenizer:
    """Load the tokenizer of the model in `model_dir`, or bytes for a model of bytes that has none.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be loaded.
        ModelError: there is no model.
    """
    from transformers import AutoTokenizer

    vocab_size = read_config(Path(model_dir)).get_text_config().vocab_size
    if own_tokenizer(str(model_dir)) == "bytes" and vocab_size == BytesTokenizer.vocab_size:
        return ByteTokenizer()
    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(model_dir, local_files_only=True))
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"the tokenizer in {str(model_dir)!r} cannot be loaded: {error}") from error
