"""Compares plans of inference on the same requests: interleaved rounds of throughput and of latency."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from laconic.infer.bench.measure import Answer, run_at, run_together
from laconic.infer.bench.plans import BenchPlan, Kind, first_candidates, sweep
from laconic.infer.bench.workload import poisson_arrivals
from laconic.infer.token_engine import TokenEngine

SHARES = (50, 90, 99)
"""Percentiles that are reported."""

StartEngine = Callable[[BenchPlan], AbstractContextManager[TokenEngine]]

_SWEEP_RUNS = 2


@dataclass(frozen=True)
class Latency:
    """Percentiles (SHARES) of one round's seconds to the first token (TTFT), and from one token to the next (TPOT).

    The latter is the mean in an answer, and empty if all answers have one token.
    """

    first_token: tuple[float, ...]
    per_token: tuple[float, ...]

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Latency:
        """Take the percentiles of answers, with linear interpolation."""
        per_token = [seconds for answer in answers if (seconds := answer.token_seconds) is not None]
        return cls(_percentiles([answer.first_token_seconds for answer in answers]), _percentiles(per_token))


@dataclass
class PlanResult:
    """What was measured of one plan: by round new tokens per second, from the first request to the last token.

    `same_answers` are requests of the first round whose tokens are the first plan's; `latency` is by arrivals per
    second.
    """

    plan: BenchPlan
    tokens_per_second: list[float] = field(default_factory=list)
    same_answers: int = 0
    latency: dict[float, list[Latency]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured; `swept` has tokens per second of all candidates that were tried before, by name."""

    results: list[PlanResult]
    swept: dict[str, float]
    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int


def compare(
    start: StartEngine,
    kinds: Sequence[Kind],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    micro_batches: Sequence[int] = (1, 2),
    slices: Sequence[int] = (1, 2),
    rates: Sequence[float] | None = None,
    rounds: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure plans on the same requests.

    The engines of all plans, made by `start`, stay up; in each round every plan runs all requests once, beginning with
    another plan every time. One round before the `rounds` does not count, nor does what a sweep measured.
    `micro_batches` and `slices` are r1 and r2 that PPPipe and FinDEP may choose from. `rates` are arrivals per second,
    the same for all plans by `seed`; None takes half of the requests that the slowest plan finishes per second.
    """
    swept: dict[str, float] = {}

    def rate_of(plan: BenchPlan) -> float:
        """Start a candidate, which has the machine for itself and idle engines."""
        with start(plan) as engine:
            run_together(engine, prompts, max_new_tokens)
            found = []
            for _ in range(_SWEEP_RUNS):
                began = time.perf_counter()
                answers = run_together(engine, prompts, max_new_tokens)
                found.append(sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - began))
        swept[str(plan)] = median(found)
        say(f"tried {plan}: {swept[str(plan)]:.0f} tokens/s")
        return swept[str(plan)]

    with contextlib.ExitStack() as stack:
        engines: dict[BenchPlan, TokenEngine] = {}
        for kind in kinds:
            plan = sweep(first_candidates(kind, micro_batches, slices), rate_of)
            engines[plan] = stack.enter_context(start(plan))
        results = {plan: PlanResult(plan) for plan in engines}

        # 1. All requests at once.
        expected: list[list[int]] = []
        for number, plan in _turns(engines, rounds):
            began = time.perf_counter()
            answers = run_together(engines[plan], prompts, max_new_tokens)
            seconds = time.perf_counter() - began
            tokens = [answer.tokens for answer in answers]
            expected = expected or tokens
            if number == 0:
                results[plan].same_answers = sum(map(list.__eq__, tokens, expected))
            if number > 0:
                results[plan].tokens_per_second.append(sum(map(len, tokens)) / seconds)
                say(f"round {number}, {plan}: {results[plan].tokens_per_second[-1]:.0f} tokens/s")

        # 2. Requests one by one.
        total = sum(map(len, expected))
        if rates is None:
            slowest = min(median(result.tokens_per_second) for result in results.values())
            rates = [float(f"{slowest / total * len(prompts) / 2:.2g}")]
        for rate in rates:
            for number, plan in _turns(engines, rounds, warm_up=False):
                arrivals = poisson_arrivals(len(prompts), rate, seed + number)
                latency = Latency.of(run_at(engines[plan], prompts, max_new_tokens, arrivals))
                results[plan].latency.setdefault(rate, []).append(latency)
                say(f"round {number}, {plan}, {rate:g} requests/s: first token after {latency.first_token[0]:.3f} s")
    return Comparison(list(results.values()), swept, len(prompts), sum(map(len, prompts)), total)


def _turns(
    engines: Mapping[BenchPlan, object], rounds: int, *, warm_up: bool = True
) -> Iterator[tuple[int, BenchPlan]]:
    """Yield number of the round, from 0 (the warm-up) or 1, and plan; each round begins with the next plan."""
    plans = list(engines)
    for number in range(0 if warm_up else 1, rounds + 1):
        first = number % len(plans)
        for plan in [*plans[first:], *plans[:first]]:
            yield number, plan


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.percentile(values, SHARES)) if values else ()
