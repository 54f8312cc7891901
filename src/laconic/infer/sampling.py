"""How the next token is chosen from a row of logits: greedily, or at random among the most probable ones.

A draw depends on the logits and on (seed, request, position) alone: on no state, no other request of the batch and no
order of calls. So a request with a seed gives the same tokens in any batch whose logits are the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError, ModelError
from laconic.infer.generation_config import PROCESSORS, WARPERS

_FIRST_TRY = 512  # tokens among which top_p looks first: sorting a whole vocabulary takes as long as many layers


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen, and when it ends.

    The rules of the model's generation_config.json, and `rules` in their place, change the logits; they are divided by
    `temperature`; `top_k`, then `top_p` leave the most probable tokens; one of them is drawn.

    Attributes:
        temperature: at least 0; 0 takes the most probable token, of several the one with the lowest id.
        top_p: draw from the fewest most probable tokens whose probabilities sum to at least `top_p`, in (0, 1].
        top_k: draw from the `top_k` most probable tokens; 0 draws from all.
        seed: of the draws, an integer of 64 bits with sign.
        request: tells requests with one seed apart, 0 to 2**63 - 1: the number of a choice, say.
        max_new_tokens: after which the request ends, at least 1.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens; they are part of the
            answer.
        logprobs: how many of the most probable tokens to report at each position; None reports no logprob at all.
        prompt_logprobs: the same for each token of the prompt but the first; they come with the answer's first token.
        rules: for logits, by their names in transformers' GenerationConfig (repetition_penalty, min_p, ...), in place
            of the model's; None switches one off, and sequence_bias is added to the model's.
        frequency_penalty: taken from a token's logit for each time that it is in the answer, as in OpenAI's API.
        presence_penalty: taken from the logits of tokens that are in the answer.
        ignore_eos: whether the model's end-of-sequence tokens do not end the request.
        grammar: that the answer follows, of `laconic.infer.grammars.make_grammar`; None is any text.

    Raises:
        ConfigError: a value breaks its rule.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    request: int = 0
    max_new_tokens: int = 20
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", lambda value: 0 <= value < math.inf, "a finite number of at least 0")
        self._check_number("top_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1")
        self._check_integer("top_k", 0, 2**63 - 1)
        self._check_integer("seed", -(2**63), 2**63 - 1)
        self._check_integer("request", 0, 2**63 - 1)
        self._check_integer("max_new_tokens", 1, 2**63 - 1)
        self._check_number("frequency_penalty", math.isfinite, "a finite number")
        self._check_number("presence_penalty", math.isfinite, "a finite number")
        if unknown := sorted(set(self.rules) - PROCESSORS - WARPERS):
            known = ", ".join(sorted(PROCESSORS | WARPERS))
            raise ConfigError(f"rules holds {', '.join(unknown)}, but rules for logits are {known}")
        if isinstance(least := self.rules.get("min_new_tokens"), int) and least > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {least}, but max_new_tokens is {self.max_new_tokens}; give at most that"
            )
        if isinstance(bias := self.rules.get("sequence_bias"), dict):
            pairs = [[list(tokens), value] for tokens, value in bias.items()]
            object.__setattr__(self, "rules", {**self.rules, "sequence_bias": pairs})
        for name, value in self.rules.items():
            try:
                json.dumps(value)  # as they travel to workers
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"rules has {name} = {value!r}, but values are made of Python's own numbers, booleans, strings,"
                    f" lists and dicts ({error}); give those"
                ) from None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_integer(name, 0, 2**63 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.grammar is not None and (self.ignore_eos or self.rules.get("min_new_tokens")):
            raise ConfigError(
                "grammar is given with ignore_eos or min_new_tokens, but its answer ends where it allows no more;"
                " leave these out"
            )
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ConfigError(f"stop_token_ids holds {token!r}, but a token id is an integer of at least 0")

    def _check_number(self, name: str, holds: Callable[[float], bool], rule: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
            raise ConfigError(f"{name} is {value!r}, but it must be {rule}")

    def _check_integer(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = "" if most == 2**63 - 1 and least >= 0 else f" and at most {most}"
            raise ConfigError(f"{name} is {value!r}, but it must be an integer of at least {least}{upper}")

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is made: temperature 0, or one token to choose from."""
        return self.temperature == 0 or self.top_k == 1

    def to_options(self) -> dict[str, Any]:
        """Return the values by name, as JSON can hold them."""
        return asdict(self) | {"stop_token_ids": list(self.stop_token_ids)}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Sampling:
        """Make a Sampling of values by name, such as `to_options` returns; those left out are the defaults.

        Raises:
            ConfigError: an option is unknown, or a value breaks its rule.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"{', '.join(unknown)}: no such option of sampling; there are {', '.join(known)}")
        return cls(**options)


@dataclass(frozen=True)
class ChosenToken:
    """A token that has been chosen.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the model, before rules, temperature, top_k and top_p; None
            if it was not asked for.
        top: the most probable tokens (id, logprob) in descending order, as many as `Sampling.logprobs` asks for.
        prompt: with the first token of an answer, the tokens of its prompt, if their logprobs were asked for. The
            first has none, as nothing comes before it.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[ChosenToken, ...] = ()

    def to_fields(self) -> tuple[Any, ...]:
        """Return the values, as JSON can hold them."""
        return self.token, self.logprob, self.top, [each.to_fields() for each in self.prompt]

    @classmethod
    def from_fields(cls, token: int, logprob: float | None, top: Any = (), prompt: Any = ()) -> ChosenToken:
        """Make a token of what `to_fields` returns, also after JSON."""
        pairs = tuple((each, its) for each, its in top)
        return cls(token, logprob, pairs, tuple(cls.from_fields(*each) for each in prompt))


def sample(logits: Tensor, sampling: Sampling, position: int, scores: Tensor | None = None) -> ChosenToken:
    """Choose a token by logits, floating [vocabulary]; -inf is a token of probability 0, which is never chosen.

    Probabilities are computed in float64. Of equal logits the lower id counts as the more probable. `position` is the
    number of tokens that the request has been given. `scores` are the logits as rules have changed them, by which the
    token is chosen; None has no rules. A ModelError if they hold NaN or +inf, or nothing but -inf.
    """
    ruled = scores is not None
    scores = logits if scores is None else scores
    best = float(scores.max())
    # Rules may leave one token that must come, at +inf: it can be taken, but not drawn.
    if not math.isfinite(best) and not (ruled and sampling.is_greedy and best == math.inf):
        found = "nothing but -inf" if best == -math.inf else "+inf" if best == math.inf else "NaN"  # NaN if any is
        remedy = "or the rules in generation_config.json and in the request" if ruled else ""
        raise ModelError(
            f"the logits at position {position} hold {found}, so no token can be chosen; load the model in a wider"
            f" dtype or check its weights {remedy}".rstrip()
        )
    token = int(scores.argmax()) if sampling.is_greedy else _draw(scores.double(), best, sampling, position)
    if sampling.logprobs is None:
        return ChosenToken(token)
    if ruled and not math.isfinite(float(logits.max())):
        logits = scores  # the rules have removed what is no number
    return report_token(logits, token, sampling.logprobs)


def report_token(logits: Tensor, token: int, count: int) -> ChosenToken:
    """Return a token with its logprob and the `count` most probable ones, of logits, floating [vocabulary]."""
    logprobs = logits.double().log_softmax(0)
    top = tuple((each, float(logprobs[each])) for each in _most_probable(logits, count).tolist())
    return ChosenToken(token, float(logprobs[token]), top)


def _draw(scores: Tensor, greatest: float, sampling: Sampling, position: int) -> int:
    """Return a token at random from `scores`, float64 [vocabulary], of which `greatest` is the greatest.

    They are put in order as they are: with `greatest` subtracted, two that differ may be equal.
    """
    order: Tensor | None = None
    if 0 < sampling.top_k < len(scores):  # else it is as if there were none, also of the draws
        order = _most_probable(scores, sampling.top_k)
        scores = scores[order]
    weights = ((scores - greatest) / sampling.temperature).exp()
    if sampling.top_p < 1:
        # By the scores and not by the weights: those of different scores may be equal, at high temperatures.
        needed, count = sampling.top_p * weights.sum(), _FIRST_TRY
        best = _most_probable(scores, count)
        while weights[best].sum() < needed and count < len(scores):
            count *= 8
            best = _most_probable(scores, count)
        sums = weights[best].cumsum(0)
        sums = sums[: int(torch.searchsorted(sums, needed)) + 1]
        order = best if order is None else order[best]
    else:
        sums = weights.cumsum(0)
    # The first sum above the threshold: a token of weight 0 adds nothing to the sum before it and is never the first.
    # Where rounding makes the threshold the whole sum, it is the last token that adds to it.
    threshold = _uniform(sampling.seed, sampling.request, position) * sums[-1]
    last = int(torch.searchsorted(sums, sums[-1]))
    index = min(int(torch.searchsorted(sums, threshold, right=True)), last)
    return index if order is None else int(order[index])


def _most_probable(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` greatest scores in descending order; of equal ones the lower id comes first."""
    if count == 0 or count >= len(scores):
        return scores.argsort(descending=True, stable=True)[:count]
    some = (scores >= scores.topk(count).values[-1]).nonzero().flatten()
    return some[scores[some].argsort(descending=True, stable=True)][:count]


def _uniform(seed: int, request: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits: a hash of its arguments, so it needs no state."""
    packed = struct.pack("<qqq", seed, request, position)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"laconic sample").digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
