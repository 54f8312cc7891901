"""The token of each request of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaconicError, ModelError
from laconic.infer.logits_rules import LogitsRules
from laconic.infer.sampling import ChosenToken, Sampling, sample
from laconic.infer.transformers_seam.prompt_rows import PromptRows, report_of


@dataclass(frozen=True)
class Finished:
    """A request's end, and what ended it if anything did; others go on after an error that is the request's own."""

    name: str
    tokens: list[int]
    error: str | None = None
    is_own: bool = False


@dataclass(frozen=True)
class Replay:
    """A request whose tokens are given: its logits are heard, not obeyed.

    `hear` is called on the thread that runs the model, with the number of a token and the logits before any processor,
    float32 [vocabulary] on the CPU, which are the caller's only until it returns; `on_end` on another thread, at the
    end.
    """

    tokens: list[int]
    hear: Callable[[int, Tensor], None]
    on_end: Callable[[Finished], None]


class Sampler:
    """Chooses the token of each request, in the place of a manager's own choice.

    A manager tells its logits processors which requests are in a batch. The sampler stands before them for that alone:
    there are none, since each request has its own rules. As `ModelRunner._sample` it gets the logits. `on_tokens` is
    called once per batch, with each request's name and token, `on_failed` with what keeps one from being chosen.
    """

    def __init__(
        self,
        processors: Any,
        on_tokens: Callable[[list[tuple[str, ChosenToken]]], None],
        on_failed: Callable[[str, Exception], None],
    ) -> None:
        self._processors, self._on_tokens, self._on_failed = processors, on_tokens, on_failed
        self.tensors_required: int = processors.tensors_required
        self.do_processing: bool = processors.do_processing
        self._states: list[Any] = []
        self.replays: dict[str, Replay] = {}
        self.prompts = PromptRows(on_failed)

    def fill_defaults(self, storage: Tensor) -> None:
        """As transformers' processors do."""
        self._processors.fill_defaults(storage)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept what `Requests.add` gives."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Take note of the requests that get a token in this batch, in its order."""
        self.prompts.prepare(requests_in_batch)
        self._states = [request.state for request in requests_in_batch if request.has_new_token]
        return self._processors.prepare_tensor_args(requests_in_batch, arg_storage)

    def __call__(self, input_ids: Tensor, scores: Tensor, arguments: Tensor) -> Tensor:
        """Process logits; called if `do_processing`."""
        return self._processors(input_ids, scores, arguments)

    def choose(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write the chosen tokens into the first row of `output_ids`, integers [1 or more, at least rows].

        The first rows of the scores, float32 [1, rows, vocabulary], are those of the requests with a new token, in
        order; then come padding, or rows of prompts.
        """
        self.prompts.hear(scores[0])
        if not self._states:
            return
        rows = scores[0, : len(self._states)].cpu()
        # NumPy's argmax is 10 times as fast as torch's here. Both take the first of equals, and NaN for the greatest.
        places = torch.from_numpy(rows.numpy().argmax(-1))
        finite = rows.gather(-1, places[:, None])[:, 0].isfinite().tolist()
        chosen: list[tuple[str, ChosenToken]] = []
        tokens = places.tolist()
        for number, state in enumerate(self._states):
            if (replay := self.replays.get(state.request_id)) is not None:
                step = position_of(state)
                replay.hear(step, rows[number])
                with contextlib.suppress(LaconicError):  # logits without a number
                    sample(rows[number], _TRIAL, step)  # what is tried is all that a request meets
                tokens[number] = replay.tokens[step]
                continue
            options = state.logit_processor_kwargs
            rules: LogitsRules | None = options["rules"]
            sampling: Sampling = options["sampling"]
            if finite[number] and rules is None and sampling.is_greedy and sampling.logprobs is None:
                token: ChosenToken | None = ChosenToken(tokens[number])
            else:
                token = self._sample(state, rows[number], rules)
            token = self._with_prompt(state, token)
            if token is not None:
                tokens[number] = token.token
                chosen.append((state.request_id, token))
        output_ids[0, : len(tokens)] = torch.tensor(tokens, device="cpu")
        self._on_tokens(chosen)

    def _sample(self, state: Any, logits: Tensor, rules: LogitsRules | None) -> ChosenToken | None:
        position = position_of(state)
        try:
            if rules is None:
                return sample(logits, state.logit_processor_kwargs["sampling"], position)
            token = sample(logits, rules.sampling, position, rules.scores(logits, position))
        except Exception as error:  # of this request alone
            self._on_failed(state.request_id, error)
            return None
        rules.take(token.token, position)
        return token

    def _with_prompt(self, state: Any, token: ChosenToken | None) -> ChosenToken | None:
        """Return a token, the first of an answer with the prompt's, if they were asked for; None if that fails."""
        report = report_of(state)
        if token is None or report is None or position_of(state) > 0:
            return token
        try:
            return dataclasses.replace(token, prompt=report.tokens())
        except ModelError as error:
            self._on_failed(state.request_id, error)
            return None


_TRIAL = Sampling(temperature=1.0, top_p=0.9)


def position_of(state: Any) -> int:
    """Number of tokens that a request was given; one that lost its place in the cache has them in its prompt again."""
    return len(state.initial_tokens) - int(state.logit_processor_kwargs["prompt_tokens"]) + int(state.generated_len())
