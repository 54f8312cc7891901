"""Rules that change the logits of one request before its token is chosen: the model's, and the request's own.

They are transformers' own logits processors, with which `generate` makes the same tokens, over all tokens of the
request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ModelError
from laconic.infer.generation_config import PROCESSORS, WARPERS
from laconic.infer.grammars import GrammarMask
from laconic.infer.sampling import Sampling

_LEAST_TEMPERATURE = 1e-30
_LEAST_LENGTHS = ("min_length", "min_new_tokens")
"""Rules of a model that an answer by a grammar does not follow: it ends where the grammar allows no more."""


class LogitsRules:
    """The logits processors of one request, and the tokens that they look at; `sampling` is without what they do."""

    def __init__(self, processors: Any, sampling: Sampling, prompt: list[int]) -> None:
        self._processors, self.sampling = processors, sampling
        self._tokens = torch.tensor([[*prompt, *[0] * sampling.max_new_tokens]], device="cpu")
        self._prompt_tokens = len(prompt)

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """Return what the rules make of logits, float32 [vocabulary], after `position` tokens of the answer."""
        scores: Tensor = self._processors(self._tokens[:, : self._prompt_tokens + position], logits[None].clone())
        return scores[0]

    def take(self, token: int, position: int) -> None:
        """Take the token that has been chosen after `position` others; a later call with this position counts."""
        self._tokens[0, self._prompt_tokens + position] = token


def make_rules(
    model: Any,
    generation: Any,
    sampling: Sampling,
    prompt: list[int],
    eos: list[int],
    grammar: GrammarMask | None = None,
) -> LogitsRules | None:
    """Return the rules of a request that `eos` tokens end; None if it has none. transformers may refuse a value.

    `generation` is the model's GenerationConfig. The mask of `grammar` comes after all rules but the cuts and the
    watermark.
    """
    from transformers import GenerationConfig

    values = {name: getattr(generation, name, None) for name in PROCESSORS | WARPERS} | dict(sampling.rules)
    if generation.sequence_bias and sampling.rules.get("sequence_bias"):
        # Of two biases of the same tokens in a list, transformers would take the last alone.
        models, asked = _by_tokens(generation.sequence_bias), _by_tokens(sampling.rules["sequence_bias"])
        sums = {tokens: models.get(tokens, 0.0) + asked.get(tokens, 0.0) for tokens in models | asked}
        values["sequence_bias"] = [[list(tokens), value] for tokens, value in sums.items()]
    if values["min_new_tokens"] is not None:
        values["min_length"] = None  # as in generate
    if not eos:
        values["exponential_decay_length_penalty"] = None  # raises the score of the end, and nothing ends this one
    left_out = WARPERS if sampling.is_greedy else ()
    values = {name: value for name, value in values.items() if value not in (None, [], {}) and name not in left_out}
    own: list[Any] = []
    if sampling.frequency_penalty or sampling.presence_penalty:
        own.append(_Penalties(sampling, len(prompt)))
    if grammar is not None:
        own.append(grammar)
        values = {name: value for name, value in values.items() if name not in _LEAST_LENGTHS}
    if not values and not own:
        return None
    # Cuts that laconic does not make come after those that it does, and a watermark after all of them: transformers'
    # own processors make all of them then, and leave nothing but the draw.
    draws = sampling.temperature > 0 and not values.keys().isdisjoint({*WARPERS, "watermarking_config"})
    # Theirs divide float32: by less than this logits are infinite, and by this all but the greatest have no weight.
    temperature = max(sampling.temperature, _LEAST_TEMPERATURE)
    cuts = {"do_sample": True, "temperature": temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    config = GenerationConfig(**values | (cuts if draws else {}))
    config.max_length = len(prompt) + sampling.max_new_tokens
    config._eos_token_tensor = torch.tensor(eos, device="cpu") if eos else None
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(prompt), logits_processor=own, device="cpu"
    )
    left = replace(sampling, temperature=1.0, top_k=0, top_p=1.0) if draws else sampling
    return LogitsRules(processors, left, prompt) if processors else None


def try_rules(model: Any, generation: Any) -> None:
    """Run the rules of a model once, on logits that are all the same; what transformers refuses is a ModelError."""
    eos = generation.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    logits = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.float32, device="cpu")
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        try:
            rules = make_rules(model, generation, sampling, [0], ends)
            if rules is not None:
                rules.scores(logits, 0)
        except Exception as error:  # transformers checks some values when they are used
            raise ModelError(
                f"transformers refuses the rules in the model's generation_config.json: {error}"
            ) from error


class _Penalties:
    """Frequency and presence penalties of OpenAI's API, as a logits processor."""

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._sampling, self._prompt_tokens = sampling, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_tokens :], minlength=scores.shape[1])
        penalties = self._sampling.frequency_penalty * counts + self._sampling.presence_penalty * (counts > 0)
        return scores - penalties


def _by_tokens(sequence_bias: Any) -> dict[tuple[int, ...], float]:
    pairs = sequence_bias.items() if isinstance(sequence_bias, dict) else sequence_bias
    return {tuple(tokens): value for tokens, value in pairs}
