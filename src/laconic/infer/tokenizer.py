"""Tokenizers of the server: a model's own, or bytes."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from laconic.errors import ConfigError
from laconic.infer.detokenizer import (
    DecodingStage,
    Detokenizer,
    byte_stages,
    decoder_stages,
    keeps_all,
    token_bytes,
    whole_stages,
)
from laconic.infer.transformers_seam import read_config
from laconic.train.data.tokenizer import BytesTokenizer
from laconic.train.model_source import own_tokenizer


class TextTokenizer(Protocol):
    """Turns requests into tokens and tokens into text; on any thread."""

    @property
    def chat_template(self) -> str | None:
        """Text of the template of conversations with tools; None if there is none."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the model begins with."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation by the model's chat template, up to where the assistant answers.

        Tools are as OpenAI's API has them; `variables` are further ones of the template. A ConfigError if there is
        none, or it does not accept these messages.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens; U+FFFD for what is not UTF-8."""

    def token_name(self, token: int) -> str:
        """Return what the vocabulary calls a token; never the same for two."""

    def detokenizer(self) -> Detokenizer:
        """Return what makes one text of its tokens as they come; all pieces together are what `decode` returns."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text that has begun; its name's, if it adds none."""

    def is_special(self, token: int) -> bool:
        """Return whether a token adds nothing to a text."""

    def knows(self, token: int) -> bool:
        """Return whether the vocabulary has a token."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens by what the vocabulary calls them."""

    def vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        """Return the bytes that tokens add to a text that has begun, by id, and the special tokens; or ConfigError."""


class HuggingFaceTokenizer(TextTokenizer):
    """A tokenizer of transformers.

    Args:
        tokenizer: of AutoTokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # tokenizers of Rust must not be used by two threads at once
        self._names: dict[int, str] = {token: name for name, token in tokenizer.get_vocab().items()}
        self._bytes: dict[int, bytes] = {}
        self._decoder = _known_decoder(tokenizer)
        if self._decoder is not None:  # of ids with the same name the vocabulary has one alone
            for token in set(range(max(self._names, default=0))) - self._names.keys():
                if (name := tokenizer.convert_ids_to_tokens(token)) is not None:
                    self._names[token] = name
        added = tokenizer.added_tokens_decoder
        special = {entry.content for entry in added.values() if entry.special}
        self._skipped = {token for token, name in self._names.items() if name in special}
        self._special = {self._names[token]: token for token in self._skipped if self._names[token]}
        if keeps_all(self._stages()):
            logging.getLogger("laconic").warning(
                "the text of an answer comes whole, at its end, also in a stream: what a later token can change of an"
                " earlier one's text is not known of the decoder of %s (%s)",
                type(tokenizer).__name__,
                "its own" if self._decoder is None else json.dumps(self._decoder[0], ensure_ascii=False),
            )

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    @property
    def chat_template(self) -> str | None:
        try:
            return str(self._tokenizer.get_chat_template(tools=[{}]))  # that for tools, where there are several
        except Exception:  # there is none
            return None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ConfigError("the model's tokenizer has no chat template; ask /v1/completions with a prompt")
        self._check_variables(variables or {}, bool(tools))
        with self._lock:
            text = self._shown(list(messages), tools, variables or {})
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _shown(
        self, messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the text of a conversation, with contents as lists of one part where the template shows only those."""
        try:
            text = self._render(messages, tools, variables)
        except Exception as error:  # templates are programs and raise what they like
            messages = [_in_parts(message) for message in messages]
            try:
                text, lost = self._render(messages, tools, variables), self._passed_over(messages, tools, variables)
            except Exception:
                raise ConfigError(f"the model's chat template does not accept these messages: {error}") from error
        else:
            try:
                lost = self._passed_over(messages, tools, variables)
            except Exception:  # it asks for certain values, so it reads them
                return text
        if lost:
            messages = [_in_parts(message) if place in lost else message for place, message in enumerate(messages)]
            try:
                in_parts = self._render(messages, tools, variables)
                still_lost = self._passed_over(messages, tools, variables)
            except Exception:  # it takes no lists
                still_lost = lost
            if len(still_lost) < len(lost):
                text, lost = in_parts, still_lost
        if refused := [what for what in lost.values() if what is not None]:
            raise ConfigError(f"the model's chat template has no place for {refused[0]}")
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        )

    def _passed_over(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> dict[int | str, str | None]:
        """Return what a template leaves out without a word, as many do with roles that they do not know.

        The conversation is rendered once more with marks in the place of what may be left out. Keys are places of
        messages, or marks; values are how to refuse it. That is None for what an assistant says beside its calls, which
        many templates leave out.
        """
        marks: dict[str, tuple[int | str, str | None]] = {}
        marked_messages, marked_tools = [], []
        for place, message in enumerate(messages):
            marked = dict(message)
            calls = message.get("tool_calls")
            if content := message.get("content"):
                remedy = "give it another role, or leave it out"
                if message["role"] in ("user", "assistant"):
                    remedy = "leave it out, or ask /v1/completions with a prompt"
                what = f"messages.{place}, whose role is {message['role']}; {remedy}"
                marks[mark := f"laconicmessage{place}mark"] = (place, None if calls else what)
                marked["content"] = mark
                if not isinstance(content, str):
                    marked = _in_parts(marked)
            if calls:
                mark = f"laconiccall{place}mark"
                marks[mark] = (mark, f"tool_calls of messages.{place}; leave them out")
                marked["tool_calls"] = [{**call, "function": _marked(call["function"], mark)} for call in calls]
            marked_messages.append(marked)
        for place, tool in enumerate(tools):
            marks[mark := f"laconictool{place}mark"] = (mark, f"tools.{place}; leave it out")
            marked_tools.append({**tool, "function": {**tool.get("function", {}), "name": mark}})
        if not marks:
            return {}
        text = self._render(marked_messages, marked_tools, variables)
        # A list that is printed whole, as Python or JSON writes it, is none of the template's.
        return {
            place: what
            for mark, (place, what) in marks.items()
            if mark not in text or f"'text': '{mark}" in text or f'"text": "{mark}' in text
        }

    def _check_variables(self, variables: Mapping[str, Any], with_tools: bool) -> None:
        """Refuse variables that the template does not have, or that are not the client's to set."""
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters
        template = str(self._tokenizer.get_chat_template(tools=[{}] if with_tools else None)) if variables else ""
        read = _variables_of(template)
        for name in variables:
            if name in taken or name == "messages" or name not in read:
                raise ConfigError(
                    f"the model's chat template has no variable {name!r} that a request can set; leave it out"
                )

    def decode(self, tokens: Sequence[int]) -> str:
        with self._lock:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_name(self, token: int) -> str:
        return self._names.get(token, f"token_id:{token}")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(str if self._decoder is None else self._shown_name, self._stages())

    def token_bytes(self, token: int) -> bytes:
        if (known := self._bytes.get(token)) is None:
            known = self._bytes[token] = self._make_bytes(token)
        return known

    def is_special(self, token: int) -> bool:
        return token in self._skipped

    def knows(self, token: int) -> bool:
        return token in self._names

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._special

    def vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        if self._decoder is None:
            raise ConfigError(
                f"the bytes of {type(self._tokenizer).__name__}'s tokens are not known: it decodes in a way of its own"
            )
        found = [b""] * (max(self._names, default=-1) + 1)
        for token, name in self._names.items():
            found[token] = name.encode() if token in self._skipped else token_bytes(name, self._stages())
        return found, frozenset(self._skipped)

    def _make_bytes(self, token: int) -> bytes:
        if self._decoder is None or (name := self._shown_name(token)) is None:
            return self.token_name(token).encode()
        return token_bytes(name, self._stages()) or name.encode()

    def _shown_name(self, token: int) -> str | None:
        return None if token in self._skipped else self._names.get(token)

    def _stages(self) -> list[DecodingStage]:
        return whole_stages(self.decode) if self._decoder is None else decoder_stages(*self._decoder)


class ByteTokenizer(TextTokenizer):
    """UTF-8 bytes as tokens 0 to 255, and 256 as the end of an answer; it has no chat template."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    chat_template = None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        raise ConfigError("the model's tokens are bytes, without a chat template; ask /v1/completions with a prompt")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_name(self, token: int) -> str:
        return f"<0x{token:02X}>"

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(lambda token: chr(token) if token < 256 else None, byte_stages())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.token_name(token).encode()

    def is_special(self, token: int) -> bool:
        return token >= 256

    def knows(self, token: int) -> bool:
        return 0 <= token <= 256

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {}

    def vocabulary(self) -> tuple[list[bytes], frozenset[int]]:
        return [self.token_bytes(token) for token in range(257)], frozenset({256})


def begun_text(tokenizer: Any, prompt: Sequence[int]) -> tuple[Sequence[int], str]:
    """Return tokens to decode before those that continue a prompt, and their text; none if the prompt has no text.

    The tokenizer is a TextTokenizer.

    At the start of a text many tokenizers (of Llama 2, BERT) leave out a space or show a part of a word otherwise.
    """
    return ((), "") if all(map(tokenizer.is_special, prompt)) else _begun_text(tokenizer)


@lru_cache(maxsize=8)
def _begun_text(tokenizer: Any) -> tuple[Sequence[int], str]:
    tokens = [token for token in tokenizer.encode("a") if not tokenizer.is_special(token)]
    if any(tokenizer.token_name(token).startswith("<0x") for token in tokens):  # would be of one run with other bytes
        return (), ""
    return tokens, tokenizer.decode(tokens)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of one part, as templates of models that see images may want it."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _marked(function: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return a call's function with a mark in its name and arguments: some templates show one of both."""
    arguments: Any = {mark: mark}
    if isinstance(function.get("arguments"), str):
        arguments = json.dumps(arguments)
    return {**function, "name": mark, "arguments": arguments}


@lru_cache(maxsize=8)
def _variables_of(template: str) -> Set[str]:
    """Return the variables that a chat template reads and does not set before."""
    from jinja2 import Environment, TemplateError, meta

    text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers'
    try:
        return meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text))
    except TemplateError:  # another tag or filter that jinja does not know
        return set(re.findall(r"\w+", template))


def _known_decoder(tokenizer: Any) -> tuple[Any, Callable[[str], str] | None] | None:
    """Return the decoder of a tokenizer as its file holds it, and its clean-up; None if it decodes in its own way."""
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    kind = type(tokenizer)
    plain = {"_decode": PreTrainedTokenizerFast, "decode": PreTrainedTokenizerBase}
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(kind, name) is not getattr(owner, name) for name, owner in plain.items()
    ):
        return None
    backend = tokenizer.backend_tokenizer
    cleans = tokenizer.clean_up_tokenization_spaces and (
        type(backend.model).__name__ != "BPE"
        or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    )
    state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return state, tokenizer.clean_up_tokenization if cleans else None


def load_text_tokenizer(model_dir: str | os.PathLike[str]) -> TextTokenizer:
    """Load the tokenizer of the model in `model_dir`, or bytes for a model of bytes that has none.

    A ConfigError if there is none, or it cannot be loaded; a ModelError if there is no model.
    """
    from transformers import AutoTokenizer

    vocab_size = read_config(Path(model_dir)).get_text_config().vocab_size
    try:
        own = own_tokenizer(str(model_dir))
    except ConfigError:  # its remedies are settings of training
        raise ConfigError(
            f"the model in {str(model_dir)!r} has no tokenizer, and its vocabulary of {vocab_size} entries is not that "
            f"of bytes ({BytesTokenizer.vocab_size}); put the tokenizer.json that it was trained with beside "
            "its config.json"
        ) from None
    if own == "bytes" and vocab_size == BytesTokenizer.vocab_size:
        return ByteTokenizer()
    try:
        return HuggingFaceTokenizer(
            AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"the tokenizer in {str(model_dir)!r} cannot be loaded: {error}") from error
