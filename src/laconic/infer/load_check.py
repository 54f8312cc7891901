"""The check of every load: the engine's logits, as it will run, against those of the model's plain forward.

A family whose attention never asks the paged cache, a mask that is off by one or a cache block that is not written
give fluent wrong tokens and no error. So a few made-up sequences are run both ways before the first request: first by
the model as transformers calls it, then by the engine with its cache, its batches and its workers. Their tokens are
given, whatever the logits say, so that both see the same inputs.

    sequence     prompt  what it tries
    short             3  prefill beside longer prompts
    at the edge      15  decode steps that fill a cache block and begin the next
    long             20  a prompt of two blocks
    late             19  comes when the others decode; shares the first block of `long`, and reads what that wrote
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ModelError
from laconic.infer.transformers_seam import CacheLimits, Finished, Replay, Requests, num_positions

_NUM_STEPS = 4
"""Tokens of each answer: one after the prompt, the others one by one."""
_SHARED = CacheLimits.PAGE_TOKENS
_PROMPTS = {"short": 3, "at the edge": _SHARED - 1, "long": _SHARED + 4, "late": _SHARED + 3}

_ROUNDING = {torch.float32: (5e-5, 1e-3), torch.float16: (0.01, 0.1), torch.bfloat16: (0.06, 0.15)}
"""Least and most that passes for rounding: root mean square of a row's difference over the spread of its logits.

Random models of two layers in 87 families show up to 2.5e-6 in float32 and 0.033 in bfloat16; ignored soft caps, the
smallest fault among refused families, 5e-4. Between the two the model's own noise decides, see `Expected.noise`.
"""
_COARSE = 0.15
"""What passes where rows travel in 8 bits; a random Mixtral of two layers shows 0.066."""
_NOISE_FACTOR = 8.0


@dataclass(frozen=True)
class Trial:
    """A made-up sequence: tokens of a prompt, and those given as its answer; the last of them is never an input."""

    name: str
    prompt: list[int]
    answer: list[int]

    @property
    def inputs(self) -> list[int]:
        """All tokens that the model sees."""
        return self.prompt + self.answer[:-1]


@dataclass(frozen=True)
class Expected:
    """What the model's plain forward says: by trial logits, float32 [len(answer), vocabulary] on the CPU.

    `noise` is how much the shortest sequence's last logits move, as `difference` counts, when transformers itself runs
    its last token alone, on the cache of the others. `coarse` says that rows travel rounded to 8 bits. `expert_format`
    is that of the experts that were asked, here and by the engine, so that the bound stays that of exact ones.
    """

    trials: list[Trial]
    logits: list[Tensor]
    noise: float
    family: str
    dtype: torch.dtype
    coarse: bool
    expert_format: str
    seconds: float

    @property
    def bound(self) -> float:
        """Largest difference that is taken for rounding."""
        if self.coarse:  # what rounded rows move is not in `noise`
            return _COARSE
        least, most = _ROUNDING[self.dtype]
        return min(max(least, _NOISE_FACTOR * self.noise), most)

    @property
    def exceptions(self) -> int:
        """How many of four rows may differ by more.

        In half precision a near tie of two experts can be decided otherwise, which is another row, not a rounding.
        """
        return 0 if self.dtype == torch.float32 and not self.coarse else 1


def made_up_trials(config: Any, limits: CacheLimits) -> list[Trial]:
    """Return the sequences for a model, of random tokens, none longer than its positions and its cache.

    Tokens that the configuration names (end of sequence, padding, images) are left out.
    """
    text = config.get_text_config()
    named = {value for key, value in text.to_dict().items() if key.endswith("_token_id") and isinstance(value, int)}
    plain = [token for token in range(min(text.vocab_size, 100_000)) if token not in named] or [0]
    generator = torch.Generator().manual_seed(0)
    most = min(limits.cache_tokens, num_positions(config) or limits.cache_tokens)
    steps = max(1, min(_NUM_STEPS, most))
    trials: list[Trial] = []
    for name, length in _PROMPTS.items():
        length = max(1, min(length, most + 1 - steps))
        drawn = [
            plain[each]
            for each in torch.randint(len(plain), (length + steps,), generator=generator, device="cpu").tolist()
        ]
        prompt, answer = drawn[:length], drawn[length:]
        if name == "late":
            shared = trials[-1].prompt[:_SHARED]
            prompt = (shared + prompt[len(shared) :])[:length]
        trials.append(Trial(name, prompt, answer))
    return trials


@torch.no_grad()
def expected_logits(model: Any, trials: list[Trial], coarse: bool = False, expert_format: str = "exact") -> Expected:
    """Run the sequences by the model's plain forward, two by two, the shorter padded behind.

    The model is as transformers has loaded it, before an engine has changed anything; one that fails is a ModelError.
    """
    start = time.monotonic()
    family = model.config.get_text_config().model_type
    rows: list[Tensor] = []
    try:
        for pair in (trials[:2], trials[2:]):
            width = max(len(trial.inputs) for trial in pair)
            # Padding comes behind what it could influence.
            batch = [trial.inputs + trial.inputs[-1:] * (width - len(trial.inputs)) for trial in pair]
            logits = model(input_ids=torch.tensor(batch, device=model.device), use_cache=False).logits
            rows += [
                each[len(trial.prompt) - 1 : len(trial.inputs)].float().cpu()
                for trial, each in zip(pair, logits, strict=True)
            ]
    except Exception as error:  # foreign code may raise anything
        raise ModelError(
            f"the model's own forward fails for a made-up prompt, so a {family} model cannot be served:"
            f" {type(error).__name__}: {error}"
        ) from error
    noise = _noise(model, trials[0], rows[0][-1:])
    return Expected(trials, rows, noise, family, model.dtype, coarse, expert_format, time.monotonic() - start)


def _noise(model: Any, trial: Trial, last: Tensor) -> float:
    """Return by how much a sequence's last logits, [1, vocabulary], move when its last token comes by itself."""
    tokens = torch.tensor([trial.inputs], device=model.device)
    try:
        before = model(input_ids=tokens[:, :-1], use_cache=True)
        name = "cache" if "cache" in before else "past_key_values"  # before transformers 5.24
        logits = model(input_ids=tokens[:, -1:], use_cache=True, **{name: before[name]}).logits
        return max(difference(logits[0].float().cpu(), last))
    except Exception:  # a family without such a cache, or a sequence of one token, says nothing about rounding
        return 0.0


def difference(found: Tensor, wanted: Tensor) -> list[float]:
    """Return, for each row, the root mean square of the difference over the spread of what was wanted.

    Args:
        found, wanted: float32 [rows, vocabulary]; where both are the same infinity, or both no number, they agree.
    """
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = torch.where(same, 0.0, found.double() - wanted.double()).square().mean(-1).sqrt()
    finite = wanted.double().masked_fill(~wanted.isfinite(), torch.nan)
    spread = (finite - finite.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt().nan_to_num(0.0)
    tiny = torch.finfo(torch.float32).tiny
    return [float(each) for each in (apart / spread.clamp_min(tiny)).nan_to_num(torch.inf, torch.inf)]


def try_engine(expected: Expected, requests: Sequence[Requests], on_trouble: Callable[[], None]) -> str:
    """Run the sequences through each micro-batch of an engine, and compare; returns a line for the user.

    A ModelError if the engine cannot run the model, or its logits differ by more than rounding; `on_trouble` is called
    before and may raise another that explains it.
    """
    start = time.monotonic()
    ended: queue.SimpleQueue[tuple[int, int, Finished]] = queue.SimpleQueue()
    found: dict[tuple[int, int], list[Tensor]] = {}
    for number, each in enumerate(requests):
        _submit(expected, each, number, found, ended)
    count = len(requests) * len(expected.trials)
    ends = [ended.get() for _ in range(count)]
    for _, trial, end in ends:
        if end.error is not None:
            on_trouble()
            raise ModelError(
                f"the engine fails where the model's own forward does not, so {expected.family} models cannot be served"
                f" ({expected.trials[trial].name} prompt: {end.error}); {_REMEDY}"
            )
    worst = 0.0
    for number in range(len(requests)):
        rows = [found[number, trial] for trial in range(len(expected.trials))]
        worst = max(worst, _compare(expected, rows))
    seconds = expected.seconds + time.monotonic() - start
    same = "" if expected.expert_format == "exact" else f", its experts rounded to {expected.expert_format} in both,"
    return (
        f"checked: {expected.family} in {str(expected.dtype).removeprefix('torch.')} gives the logits of the model's"
        f" plain forward{same} to {worst:.1e} of their spread (bound {expected.bound:.1e}), {seconds:.2f} s"
    )


_REMEDY = (
    "use transformers' own generate for this model, or another version of transformers, in which the family's attention"
    " may reach the paged cache"
)


def recheck(expected: Expected, requests: Requests, name: str, on_end: Callable[[str | None], None]) -> None:
    """Run the shortest sequence once more; `on_end` hears, on another thread, what is wrong, or None."""
    rows: list[Tensor] = []

    def end(finished: Finished) -> None:
        if finished.error is not None:
            on_end(finished.error)
            return
        apart = difference(torch.stack(rows), expected.logits[0])
        wrong = sum(each > expected.bound for each in apart) > expected.exceptions
        on_end(f"its logits are off by {max(apart):.1e} of their spread" if wrong else None)

    trial = expected.trials[0]
    requests.replay(name, trial.prompt, Replay(trial.answer, lambda step, row: _put(rows, step, row), end))


def _put(rows: list[Tensor], step: int, row: Tensor) -> None:
    """Keep a row as the step's; a request that lost its place may hear of a step twice."""
    del rows[step:]
    rows.append(row.clone())


def _submit(
    expected: Expected,
    requests: Requests,
    number: int,
    found: dict[tuple[int, int], list[Tensor]],
    ended: queue.SimpleQueue[tuple[int, int, Finished]],
) -> None:
    """Give a micro-batch all sequences, the last of them once the one before has its first token."""
    last = len(expected.trials) - 1

    def start(trial: int) -> None:
        rows = found[number, trial] = []

        def hear(step: int, row: Tensor) -> None:
            _put(rows, step, row)
            if step == 0 and trial == last - 1 and (number, last) not in found:
                start(last)

        def end(finished: Finished) -> None:
            ended.put((number, trial, finished))
            if finished.error is not None and trial == last - 1 and (number, last) not in found:
                found[number, last] = []
                ended.put((number, last, finished))  # it was never begun

        each = expected.trials[trial]
        requests.replay(f"check-{trial}", each.prompt, Replay(each.answer, hear, end))

    for trial in range(last):
        start(trial)


def _compare(expected: Expected, found: list[list[Tensor]]) -> float:
    """Return the largest difference, in half precision none that is excepted; above the bound is a ModelError."""
    apart = [difference(torch.stack(rows), wanted) for rows, wanted in zip(found, expected.logits, strict=True)]
    # Rows of one sequence, and the first rows of all: a fault of prefill alone shows in these.
    groups = [[(trial, step) for step in range(len(rows))] for trial, rows in enumerate(apart)]
    groups.append([(trial, 0) for trial in range(len(apart))])
    worst = 0.0
    for group in groups:
        ordered = sorted(group, key=lambda place: apart[place[0]][place[1]], reverse=True)
        counted = ordered[min(expected.exceptions, len(ordered) - 1) :]
        trial, step = counted[0]
        if (off := apart[trial][step]) > expected.bound:
            each = expected.trials[trial]
            when = "the first token after it" if step == 0 else f"the token at position {len(each.prompt) + step}"
            raise ModelError(
                f"{expected.family} models cannot be served: the engine's logits are not those of the model's own"
                f" forward. For a made-up prompt of {len(each.prompt)} tokens ({each.name}), those of {when} are"
                f" {off:.2g} of their spread away, and {str(expected.dtype).removeprefix('torch.')} rounds to"
                f" {expected.bound:.1e}; {_REMEDY}"
            )
        worst = max(worst, off)
    return worst
