"""Answers that follow a grammar: what a client asks for as a grammar of llguidance, and its mask over a row of logits.

llguidance works on the bytes of tokens, so that any tokenizer will do whose tokens have bytes, byte fallback included.
A grammar is a string, so that it travels to the workers as it is; each has a matcher for each of its requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laconic.errors import ConfigError, ModelError
from laconic.json_text import parse_json

if TYPE_CHECKING:
    from laconic.infer.tokenizer import TextTokenizer

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("answers by a grammar need llguidance: pip install 'laconic[grammar]'") from None
    return llguidance


def make_grammar(kind: GrammarKind, value: Any) -> str:
    """Return a grammar, as `Sampling.grammar` takes it; a ConfigError if there is none, or llguidance is missing.

    `value` is a JSON schema (an object, a truth value or its text), a regular expression for the whole answer, the
    texts that it may be, or a grammar in Lark's format.
    """
    matcher = _llguidance().LLMatcher
    try:
        if kind == "json_schema":
            schema = parse_json(value) if isinstance(value, str) else value
            if not isinstance(schema, (Mapping, bool)):
                raise ValueError("a schema is an object")
            # As text: {} is any value, and a dict without keys would be none to llguidance
            made = matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema))
        elif kind == "choice":
            made = matcher.grammar_from_regex("|".join(map(re.escape, value)))
        elif kind == "regex":
            made = matcher.grammar_from_regex(value)
        else:
            made = matcher.grammar_from_lark(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"it cannot be read: {error}") from None
    failed, messages = matcher.validate_grammar_with_warnings(made)
    if failed:
        raise ConfigError(f"it is refused: {' '.join(messages).split(chr(10))[0]}")
    return str(made)


def grammar_tokenizer(tokenizer: TextTokenizer, eos_token_ids: Sequence[int]) -> Any:
    """Return what llguidance knows of a tokenizer; for a large vocabulary it takes a second.

    It is a ConfigError if no token ends an answer, or llguidance is missing.
    """
    llguidance = _llguidance()
    if not eos_token_ids:
        raise ConfigError(
            "the model has no end-of-sequence token, which ends an answer whose grammar allows no more; set"
            " eos_token_id in its generation_config.json"
        )
    tokens, special = tokenizer.vocabulary()
    tokens += [b""] * (max(eos_token_ids) + 1 - len(tokens))
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(tokens, sorted({*special, *eos_token_ids}), eos_token_ids[0])),
        eos_token=list(eos_token_ids),
    )


class _Vocabulary:
    """Tokens in the form that llguidance asks for; what a grammar leaves no choice of becomes the longest of them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_token_id
        hidden = set(special)
        self._ids = {token: each for each, token in enumerate(tokens) if token and each not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        found, place = [], 0
        while place < len(text):
            lengths = range(min(self._longest, len(text) - place), 0, -1)
            length = next((each for each in lengths if text[place : place + each] in self._ids), 0)
            if not length:
                break  # no token has this byte, and no answer follows such a grammar
            found.append(self._ids[text[place : place + length]])
            place += length
        return found


class GrammarMask:
    """The grammar of one request, as a logits processor of transformers; one that is refused is a ConfigError."""

    def __init__(self, tokenizer: Any, grammar: str, prompt_tokens: int) -> None:
        self._matcher = _llguidance().LLMatcher(tokenizer, grammar, log_level=0)
        self._prompt_tokens = prompt_tokens
        self._consumed: list[int] = []
        if self._matcher.is_error():
            raise ConfigError(f"the grammar is refused: {self._matcher.get_error()}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, floating [1, vocabulary], with -inf for what the grammar allows not after `input_ids`."""
        self._follow(input_ids[0, self._prompt_tokens :].tolist())
        bias = bytearray(self._matcher.compute_logit_bias())
        if self._matcher.is_error():
            raise ModelError(f"the answer cannot follow its grammar: {self._matcher.get_error().splitlines()[0]}")
        allowed = torch.frombuffer(bias, dtype=torch.uint8)[: scores.shape[1]].bool()
        masked = torch.full_like(scores, -torch.inf)
        masked[0, : len(allowed)].copy_(scores[0, : len(allowed)].masked_fill(~allowed, -torch.inf))
        return masked

    def __deepcopy__(self, memo: Any) -> GrammarMask:
        copied = object.__new__(GrammarMask)
        copied.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _consumed=list(self._consumed))
        return copied

    def _follow(self, answer: list[int]) -> None:
        """Bring the matcher to where the answer is; a batch that failed is tried again, a step or more before."""
        common = 0
        while common < min(len(answer), len(self._consumed)) and answer[common] == self._consumed[common]:
            common += 1
        if common < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - common)
        if not self._matcher.consume_tokens(answer[common:]):
            raise ModelError(f"the answer has left its grammar: {self._matcher.get_error().splitlines()[0]}")
        self._consumed = answer
