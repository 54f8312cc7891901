"""Measurements of plans: what is drawn, timed, chosen and written; engines without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from laconic.errors import CollectiveError, ConfigError
from laconic.infer.bench.compare import Latency, compare
from laconic.infer.bench.measure import Answer, run_at, run_together
from laconic.infer.bench.plans import BenchPlan, first_candidates, sweep, variants
from laconic.infer.bench.report import report_json, report_text, save_report
from laconic.infer.bench.workload import draw_prompts, own_text, paragraphs, poisson_arrivals
from laconic.infer.sampling import Sampling
from laconic.infer.server import TokenHandle, TokenListener
from laconic.schedule.inference import InferencePlan
from tests.infer.serving import FakeEngine

PROMPTS = [[1, 2], [3], [4, 5, 6]]


def test_paragraphs_are_cut_at_empty_lines() -> None:
    assert paragraphs("one\n  two\n \n\nthree\t four\n\n") == ["one two", "three four"]
    assert len({len(text.split()) for text in paragraphs(own_text())}) > 20


def test_prompts_are_drawn_without_replacement_and_cut() -> None:
    texts = ["a" * length for length in (1, 2, 3, 9)] + [""]
    drawn = draw_prompts(texts, lambda text: list(text.encode()), 8, 4, seed=1)
    assert sorted(map(len, drawn[:4])) == sorted(map(len, drawn[4:])) == [1, 2, 3, 4]
    assert drawn == draw_prompts(texts, lambda text: list(text.encode()), 8, 4, seed=1)
    with pytest.raises(ConfigError, match="no paragraph with a token"):
        draw_prompts([""], lambda text: [], 1, 4, seed=1)


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, 4.0, seed=0)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0
    assert mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert stdev(gaps) == pytest.approx(0.25, rel=0.03)  # an exponential's mean is its deviation
    assert poisson_arrivals(3, 4.0, seed=0) == arrivals[:3]


def test_latency_counts_from_the_due_time_and_between_tokens() -> None:
    answers = [Answer(1.0, [7, 7, 7], [1.5, 2.0, 4.5]), Answer(2.0, [7], [2.1])]
    latency = Latency.of(answers)
    assert latency.first_token == pytest.approx((0.3, 0.46, 0.496))
    assert latency.per_token == pytest.approx((1.5, 1.5, 1.5))
    assert Latency.of(answers[1:]).per_token == ()


class _SlowToTake(FakeEngine):
    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> Any:
        time.sleep(0.1)
        return super().stream(prompt, sampling, listener)


def test_a_request_that_is_submitted_late_has_waited() -> None:
    with closing(_SlowToTake()) as engine:
        first, second = run_at(engine, PROMPTS[:2], 3, [0.0, 0.0])
    assert first.first_token_seconds >= 0.1
    assert second.first_token_seconds >= 0.2
    assert second.arrival == first.arrival


def test_requests_come_at_their_times() -> None:
    with closing(FakeEngine()) as engine:
        answers = run_at(engine, PROMPTS, 2, [0.0, 0.1, 0.3])
    assert [round(answer.arrival - answers[0].arrival, 6) for answer in answers] == [0.0, 0.1, 0.3]
    assert answers[1].times[-1] < answers[2].arrival < answers[2].times[0]


class _Failing(FakeEngine):
    def stream(self, prompt: Sequence[int], sampling: Sampling, listener: TokenListener) -> TokenHandle:
        listener.on_end(CollectiveError("the worker is lost"))
        return super().stream(prompt, sampling, listener)


def test_a_failure_is_no_measurement() -> None:
    with closing(_Failing()) as engine, pytest.raises(CollectiveError, match="the worker is lost"):
        run_together(engine, PROMPTS, 2)


def test_a_sweep_takes_the_best_and_tries_its_variants() -> None:
    tried: list[str] = []

    def rate(plan: BenchPlan) -> float:
        tried.append(str(plan))
        return {"findep r1=2 r2=1 ASAS": 3.0, "findep r1=2 r2=1 AASS": 4.0}.get(str(plan), 1.0)

    assert str(sweep(first_candidates("findep", [1, 2], [1, 2]), rate)) == "findep r1=2 r2=1 AASS"
    assert len(tried) == len(set(tried)) == 5
    assert [str(plan) for plan in variants(BenchPlan("findep", InferencePlan(2, 2)))] == [
        "findep r1=2 r2=2 by tokens AASS",
        "findep r1=2 r2=2 by experts ASAS",
    ]
    tried.clear()
    for kind in ("unsplit", "naive"):
        assert str(sweep(first_candidates(kind, [1, 2], [1, 2]), rate)) == kind
    assert not tried


def _starter(
    step_seconds: Callable[[BenchPlan], float], log: list[str]
) -> Callable[[BenchPlan], AbstractContextManager[FakeEngine]]:
    @contextmanager
    def start(plan: BenchPlan) -> Any:
        def answer(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            log.append(str(plan))
            wrong = plan.kind == "naive" and list(prompt) == PROMPTS[0]
            return [int(wrong)] * sampling.max_new_tokens

        with closing(FakeEngine(answer, step_seconds(plan))) as engine:
            yield engine

    return start


@pytest.mark.ci
def test_plans_are_compared_in_turns(tmp_path: Path) -> None:
    log: list[str] = []
    start = _starter(lambda plan: 0.02 if plan.kind == "naive" or plan.plan.num_micro_batches == 1 else 0.001, log)
    found = compare(start, ["unsplit", "naive", "pppipe"], PROMPTS, 5, rates=[100.0, 400.0], rounds=3)
    unsplit, naive, pppipe = found.results
    assert str(pppipe.plan) == "pppipe r1=2"
    assert found.swept["pppipe r1=2"] > found.swept["pppipe r1=1"]
    assert (found.num_requests, found.num_prompt_tokens, found.num_new_tokens) == (3, 6, 15)
    assert [each.same_answers for each in found.results] == [3, 2, 3]
    assert all(len(each.tokens_per_second) == 3 for each in found.results)
    assert min(pppipe.tokens_per_second) > max(naive.tokens_per_second)
    assert all(list(each.latency) == [100.0, 400.0] for each in found.results)
    assert pppipe.latency[100.0][0].per_token[0] < unsplit.latency[100.0][0].per_token[0]
    rounds = log[2 * 3 * len(PROMPTS) :: len(PROMPTS)]  # after the sweep of two candidates, thrice each
    names = ["unsplit", "naive", "pppipe r1=2"]
    assert rounds[:9] == [*names, *names[1:], names[0], names[2], *names[:2]]

    text = report_text(found)
    assert "naive" in text
    assert "2 of 3" in text
    assert "Poisson arrivals, 400 requests/s" in text
    files = save_report(found, tmp_path, {"model": "fake"})
    values = json.loads(files[0].read_text())
    assert values == {"model": "fake"} | json.loads(json.dumps(report_json(found)))
    assert values["plans"][2]["plan"]["num_micro_batches"] == 2
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_without_rates_the_slowest_plan_keeps_up() -> None:
    found = compare(_starter(lambda plan: 0.002, []), ["unsplit"], PROMPTS, 1, rounds=1)
    (rate,) = found.results[0].latency
    assert rate == pytest.approx(found.results[0].tokens_per_second[0] / 2, rel=0.06)
    assert "TPOT p50" in report_text(found)  # answers of one token have no time between tokens
