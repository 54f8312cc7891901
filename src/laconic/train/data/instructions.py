"""Instruction data: JSONL files of conversations, or of prompts with their completions, as tokens and answers.

A line is {"messages": [{"role": ..., "content": ...}, ...]}, perhaps with "tools", which the tokenizer's chat template
makes a text of, or {"prompt": "...", "completion": "..."}, a text and its continuation, after which the document ends.
Tokens of answers are known by where they begin in the text, so the whole of an example is tokenized as one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laconic.errors import DataError, first_line
from laconic.json_text import parse_json
from laconic.train.config.schema import DataConfig
from laconic.train.data.corpus import held_out
from laconic.train.data.sources import find_files, read_records, whole_text
from laconic.train.data.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_LINES_AT_ONCE = 1024
_NOT_SERVED = ("functions", "documents", "chat_template_kwargs", "system")
"""Further keys of a line that other programs make text of."""
_REMEDY = 'an example is {"messages": [...]}, or {"prompt": "...", "completion": "..."}'


@dataclass(frozen=True)
class Examples:
    """Examples one behind the other, each cut to sequence_length + 1 tokens."""

    tokens: npt.NDArray[np.uint32]
    """[N]."""
    answers: npt.NDArray[np.bool_]
    """[N]: whether a token belongs to an answer; the first of an example never does, as nothing predicts it."""
    offsets: npt.NDArray[np.int64]
    """[E + 1]: where examples begin."""
    train: npt.NDArray[np.int64]
    """Numbers of the examples that are trained on."""
    validation: npt.NDArray[np.int64]
    """Numbers of those that are held out."""
    vocab_size: int
    max_token: int
    end_of_document: int
    tokenizer_name: str
    fingerprint: str
    """Hex digest of tokens, answers and split."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[E]: tokens of each example that are input, all but its last."""
        return np.diff(self.offsets) - 1

    @property
    def num_answers(self) -> npt.NDArray[np.int64]:
        """[E]: tokens of answers in each example."""
        return np.add.reduceat(self.answers.astype(np.int64), self.offsets[:-1])


def load_examples(config: DataConfig, sequence_length: int) -> Examples:
    """Read and tokenize the files of `config`; what is cut or left out is logged."""
    if not config.paths:
        raise DataError(f"data.paths is empty, but instructions must be given: name .jsonl files; {_REMEDY}")
    tokenizer = load_tokenizer(config.tokenizer or "bytes", config.end_of_document)
    end, limit = tokenizer.end_of_document, sequence_length + 1
    render = _renderer(tokenizer)
    tokens: list[npt.NDArray[np.uint32]] = []
    answers: list[npt.NDArray[np.bool_]] = []
    num_cut, beyond = 0, []
    texts = _texts(find_files(config.paths), render)
    while part := list(itertools.islice(texts, _LINES_AT_ONCE)):
        for completes in (False, True):  # a chat template writes special tokens itself
            chosen = [one for one in part if one.completes == completes]
            encoded = tokenizer.encode_with_starts([one.text for one in chosen], special=completes)
            for one, (ids, starts) in zip(chosen, encoded, strict=True):
                one.place(ids, starts, end)
        for one in part:
            is_answer = np.zeros(len(one.ids), np.bool_)
            for begin, stop in one.spans:
                is_answer |= (one.starts >= begin) & (one.starts < stop)
            is_answer[:1] = False
            if not is_answer.any():
                raise DataError(f"{one.where} has an answer without a token of its own; {_REMEDY}")
            num_cut += len(one.ids) > limit
            if is_answer[:limit].any():
                tokens.append(one.ids[:limit])
                answers.append(is_answer[:limit])
            else:
                beyond.append(one.where)
    longest = f"sequence_length is {sequence_length}"
    if not tokens:
        raise DataError(
            f"{longest}, but the answers of all {len(beyond)} examples begin beyond it; raise it"
            if beyond
            else f"data.paths is {list(config.paths)}, but there is no example in it; {_REMEDY}"
        )
    offsets = np.cumsum([0, *map(len, tokens)])
    all_tokens, all_answers = np.concatenate(tokens), np.concatenate(answers)
    logger.info(
        "examples: %d, with %d tokens, of which %d are answers", len(tokens), len(all_tokens), int(all_answers.sum())
    )
    if num_cut:
        logger.warning("%s: %d examples are longer and end there", longest, num_cut - len(beyond))
    if beyond:
        logger.warning(
            "%s: %d examples are left out, as their answers begin beyond it: %s", longest, len(beyond), beyond[0]
        )
    held = held_out(len(tokens), config.validation_fraction)
    identity = hashlib.sha256(b"".join(one.tobytes() for one in (all_tokens, all_answers, offsets, held)))
    return Examples(
        *(all_tokens, all_answers, offsets, np.flatnonzero(~held), np.flatnonzero(held)),
        *(tokenizer.vocab_size, int(all_tokens.max()), end, tokenizer.name, identity.hexdigest()),
    )


class _Text:
    """An example: its text, where in it answers are (characters), and whether it is a completion, which ends there."""

    def __init__(self, where: str, text: str, spans: Sequence[tuple[int, int]], completes: bool) -> None:
        self.where, self.text, self.spans, self.completes = where, text, spans, completes
        self.ids, self.starts = np.empty(0, np.uint32), np.empty(0, np.int64)

    def place(self, ids: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], end: int) -> None:
        """Take the tokens and the characters they begin at; a completion gets the end of the document behind it."""
        if self.completes:
            if len(ids) and ids[-1] == end:  # which some tokenizers append
                ids, starts = ids[:-1], starts[:-1]
            ids, starts = np.append(ids, np.uint32(end)), np.append(starts, self.spans[-1][1] - 1)
        self.ids, self.starts = ids, starts


_Render = Callable[[list[Any], Any, bool], str]
"""Makes the text of messages and tools, and of the words that begin an answer, or without; raises what it likes."""


def _texts(files: Sequence[Path], render: _Render) -> Iterator[_Text]:
    seen: set[Any] = set()
    for file in files:
        for number, record in read_records(file):
            where = f"{file}:{number}"
            keys = set(record) if isinstance(record, dict) else set()
            not_served = (*_NOT_SERVED, "tools") if "prompt" in keys else _NOT_SERVED
            if (name := next((name for name in not_served if name in keys and record[name]), None)) is not None:
                raise DataError(
                    f"{where} has {name!r}, which is not made text of here; write it into the example's text"
                )
            if "messages" in keys and not keys & {"prompt", "completion"}:
                messages, tools = _with_arguments(record["messages"], where), record.get("tools") or None
                text, spans = _conversation(messages, tools, render, where)
                kind = tools is None, *((one["role"], isinstance(one.get("content"), str)) for one in messages)
                if kind not in seen:
                    seen.add(kind)
                    _check_shown(messages, tools, render, where)
                yield _Text(where, whole_text(text, where), spans, completes=False)
            elif {"prompt", "completion"} <= keys and "messages" not in keys:
                prompt, completion = record["prompt"], record["completion"]
                if not isinstance(prompt, str) or not isinstance(completion, str):
                    raise DataError(f"{where} has a prompt or completion that is no string; {_REMEDY}")
                if not completion.strip():
                    raise DataError(f"{where} has an empty completion, from which nothing is learned; leave it out")
                text = whole_text(prompt + completion, where)
                yield _Text(where, text, [(len(prompt), len(text))], completes=True)
            else:
                has = f"has the keys {sorted(keys)}" if isinstance(record, dict) else "is no object"
                raise DataError(f"{where} {has}; {_REMEDY}")


def _with_arguments(messages: Any, where: str) -> Any:
    """Messages whose calls have their arguments as objects, as chat templates write them; OpenAI's are JSON texts."""
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise DataError(f'{where} has messages that are no list of {{"role": "...", "content": "..."}}; write them so')
    found = []
    for number, message in enumerate(messages, 1):
        calls = message.get("tool_calls")
        try:
            found.append({**message, "tool_calls": [_as_object(call) for call in calls]} if calls else message)
        except (ValueError, TypeError, AttributeError):
            raise DataError(
                f"{where} has message {number} with tool_calls that are no list of objects whose function has "
                "arguments, an object or its JSON text; write them so"
            ) from None
    return found


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, TypeError or AttributeError where it is no call."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(arguments, dict):
        raise TypeError
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _conversation(messages: list[Any], tools: Any, render: _Render, where: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and where in it the assistant's answers are, but for those of weight 0."""
    for number, message in enumerate(messages, 1):
        content, weight = message.get("content"), message.get("weight", 1)
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise DataError(f"{where} has message {number} without content; give it text, or leave it out")
        if weight not in (0, 1):
            raise DataError(f"{where} has message {number} of weight {weight!r}, but it must be 0 or 1")
    answers = [n for n, one in enumerate(messages) if one["role"] == "assistant" and one.get("weight", 1)]
    if not answers:
        raise DataError(f"{where} has no message of the role assistant, so there is no answer to learn; leave it out")
    for number in answers:
        content = messages[number].get("content")
        if not (messages[number].get("tool_calls") or (isinstance(content, str) and content.strip())):
            raise DataError(f"{where} has an empty answer, message {number + 1}; leave the line out")
    try:
        text = render(messages, tools, False)
        parts = [
            (render(messages[:number], tools, True), render(messages[: number + 1], tools, False)) for number in answers
        ]
    except DataError as error:
        raise DataError(f"{where} has messages, but {error}") from None
    except Exception as error:  # templates are programs and raise what they like
        raise DataError(f"{where}: the chat template does not take these messages: {error}") from None
    for number, (before, after) in zip(answers, parts, strict=True):
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise DataError(
                f"{where}: the chat template writes message {number + 1} otherwise once others follow, so its tokens "
                "are not those of an answer; make an example of each answer, which ends with it"
            )
    return text, [(len(before), len(after)) for before, after in parts]


def _check_shown(messages: list[Any], tools: Any, render: _Render, where: str) -> None:
    """Refuse what the template leaves out without a word: tools, or messages of roles that it does not know."""
    marks = {n: f"laconicmessage{n}mark" for n, one in enumerate(messages) if one.get("content")}
    marked = [
        {**one, "content": _like(one["content"], marks[n])} if n in marks else one for n, one in enumerate(messages)
    ]
    try:
        text = render(marked, tools, False)
        without = render(marked, None, False) if tools else None
    except Exception:  # it asks for certain values, so it reads them
        return
    if text == without:
        raise DataError(f"{where} has tools, for which the chat template has no place; leave them out")
    for number, mark in marks.items():
        # What an assistant says beside its calls may be left out. A list is none of a template's that prints it whole.
        lost = mark not in text and not messages[number].get("tool_calls")
        if lost or f"'text': '{mark}" in text or f'"text": "{mark}' in text:
            raise DataError(
                f"{where} has message {number + 1}, of the role {messages[number]['role']}, whose content the chat "
                "template does not take; give it as a text and under another role, or leave the message out"
            )


def _like(content: Any, mark: str) -> Any:
    return mark if isinstance(content, str) else [{"type": "text", "text": mark}]


def _renderer(tokenizer: Tokenizer) -> _Render:
    """What writes messages by the chat template beside the tokenizer, which is read when the first are written."""
    found: list[Any] = []

    def render(messages: list[Any], tools: Any, begins_answer: bool) -> str:
        if not found:
            found.append(_chat_tokenizer(tokenizer))
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": begins_answer}
        written: str = found[0].apply_chat_template(messages, **options)
        return written

    return render


def _chat_tokenizer(tokenizer: Tokenizer) -> Any:
    remedy = "put a chat_template.jinja beside it, or give prompts and completions"
    if not isinstance(tokenizer, JsonTokenizer):
        raise DataError(
            "the bytes tokenizer has no chat template; give a tokenizer with one, or prompts and completions"
        )
    from transformers import AutoTokenizer

    try:
        made: Any = AutoTokenizer.from_pretrained(tokenizer.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(
            f"the tokenizer in {tokenizer.folder} has no chat template ({first_line(error)}); {remedy}"
        ) from None
    if made.chat_template is None:
        raise DataError(f"the tokenizer in {tokenizer.folder} has no chat template; {remedy}")
    return made
