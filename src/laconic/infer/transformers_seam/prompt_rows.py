"""Logits of whole prompts, for requests that ask for logprobs of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ModelError
from laconic.infer.sampling import ChosenToken, report_token


class PromptReport:
    """The logprobs of one prompt, as its rows come, with the `count` most probable tokens at each place."""

    def __init__(self, prompt: list[int], count: int) -> None:
        self.prompt = prompt
        self._count = count
        self._found = {0: ChosenToken(prompt[0])}

    def hear(self, place: int, logits: Tensor) -> None:
        """Take the logits, floating [vocabulary], of the token at `place`; those that come last count.

        A value that is no number is a ModelError.
        """
        if not bool(logits.max() < torch.inf):  # NaN if any is
            raise ModelError(f"the logits of the prompt's token {place} hold NaN or +inf, so it has no logprob")
        self._found[place] = report_token(logits, self.prompt[place], self._count)

    def tokens(self) -> tuple[ChosenToken, ...]:
        """Return all tokens of the prompt; a ModelError if logits of some have not come."""
        if len(self._found) < len(self.prompt):
            place = next(place for place in range(len(self.prompt)) if place not in self._found)
            raise ModelError(f"the prompt's token {place} has no logprob: its logits have not been computed")
        return tuple(self._found[place] for place in range(len(self.prompt)))


class PromptRows:
    """Has the batches of a manager compute logits also where prompts are, not only where requests get a token.

    A request has its report as `logit_processor_kwargs["report"]`; where none of a batch has one, nothing changes.
    `on_failed` is called with a request's name and what keeps its prompt from being reported.
    """

    def __init__(self, on_failed: Callable[[str, Exception], None]) -> None:
        self._on_failed = on_failed
        self._wanted: list[tuple[Any, int, int]] = []
        self._first_row = 0

    def watch(self, processor: Any) -> None:
        """Change what a manager's processor asks of the model, and let these prompts share no computed prefix."""
        cache, scheduler, batch = processor.cache, processor.scheduler, processor.inputs_and_outputs
        search, model_kwargs = cache.search_prefix_match, batch.get_model_kwargs

        def search_match(name: str, tokens: list[int]) -> int:
            state = scheduler.waiting_requests.get(name)
            return 0 if state is not None and report_of(state) is not None else int(search(name, tokens))

        def with_prompts(*args: Any, **kwargs: Any) -> Any:
            made = model_kwargs(*args, **kwargs)
            if self._wanted:
                rows = made["logits_indices"]
                self._first_row = len(rows)
                made["logits_indices"] = torch.cat([rows, rows.new_tensor([row for _, _, row in self._wanted])])
            return made

        cache.search_prefix_match, batch.get_model_kwargs = search_match, with_prompts

    def prepare(self, requests_in_batch: list[Any]) -> None:
        """Take note of what is wanted of a batch: a row of the model's input has the logits of the token behind it."""
        self._wanted, start = [], 0
        if all(report_of(request.state) is None for request in requests_in_batch):
            return
        for request in requests_in_batch:
            report, count = report_of(request.state), request.query_length
            if report is not None:
                before = request.state.position_offset - count
                places = range(before + 1, min(before + count + 1, len(report.prompt)))
                self._wanted += [(request.state, place, start + place - before - 1) for place in places]
            start += count

    def hear(self, scores: Tensor) -> None:
        """Take a batch's logits, float32 [rows, vocabulary]."""
        failed: set[str] = set()
        for row, (state, place, _) in enumerate(self._wanted, self._first_row):
            if state.request_id in failed:
                continue
            try:
                state.logit_processor_kwargs["report"].hear(place, scores[row].cpu())
            except Exception as error:  # of this request alone
                failed.add(state.request_id)
                self._on_failed(state.request_id, error)


def report_of(state: Any) -> PromptReport | None:
    """Return what a request's prompt is reported to; None if nobody asks."""
    found: PromptReport | None = state.logit_processor_kwargs.get("report")
    return found
