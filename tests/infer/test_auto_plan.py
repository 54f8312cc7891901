"""plan="auto": the engine runs what the planner chose, says so, and keeps what was given."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.cli.engine_flags import add_engine_flags, start_engine
from laconic.cli.main import main
from laconic.cost.comm.rates import Line
from laconic.cost.infer.engine_plan import Demand, EngineLimits
from laconic.cost.infer.rates import LinkPair
from laconic.errors import ConfigError, PlanError, ScheduleError
from laconic.infer import AutoPlan, Engine, InferencePlan
from laconic.infer.serving_plan import plan_serving
from laconic.infer.split import EngineSplit
from tests.cost.infer_models import RATES
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, generated, make

FAST = replace(RATES, gemm=Line(1e-6, 1e-8), link=LinkPair(Line(1e-6, 1e-10), Line(1e-6, 1e-10)))
"""Slow products and fast links: two roles overlap."""
SLOW = replace(RATES, link=LinkPair(Line(0.1, 1e-6), Line(0.1, 1e-6)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    SLOW.save(tmp_path / "slow.json")
    return tmp_path / "slow.json"


@pytest.mark.slow
def test_slow_links_make_it_serve_whole_models(model: Path, slow: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", logger="laconic"),
        Engine(model, plan="auto", rates=slow, threads=1, batch_tokens=24) as engine,
    ):
        assert engine.split == EngineSplit(2, 0)
        assert engine.choice is not None
        assert engine.notes[:-1] == (f"plan auto: {engine.choice}",)
        assert [record.message for record in caplog.records] == [f"plan auto: {engine.choice}"]
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)


@pytest.mark.parametrize(
    ("asked", "workers"),
    [
        ({"payload": "lossless"}, EngineSplit(2, 0)),  # which a note says
        ({"expert_format": "int8"}, EngineSplit(1, 1)),
        ({"expert_device": "cpu"}, EngineSplit(1, 1)),
        ({"expert_loads": "loads.json"}, EngineSplit(1, 1)),
        ({"redundant_experts": 1}, EngineSplit(1, 1)),
    ],
)
def test_what_needs_expert_workers_keeps_them(
    model: Path, slow: Path, asked: dict[str, object], workers: EngineSplit
) -> None:
    limits = EngineLimits(4096, 256)
    serving = plan_serving(model, 1, None, "auto", slow, limits, "auto", traced=False, of_experts=asked)
    assert serving.split == workers
    assert [note for note in serving.notes if "payload" in note] == [
        f"every worker holds whole models, so {name} = {value!r} has no effect"
        for name, value in asked.items()
        if name == "payload"
    ]


def test_expert_workers_of_another_kind_are_priced_by_their_rates(model: Path, slow: Path, tmp_path: Path) -> None:
    limits, of_experts = EngineLimits(4096, 256), tmp_path / "experts.json"
    FAST.save(of_experts)
    alike, two = (
        plan_serving(
            model, 1, None, AutoPlan(slow, expert_rates=file), None, limits, "auto", traced=False, of_experts={}
        )
        for file in (None, of_experts)
    )
    assert (alike.split, two.split) == (EngineSplit(2, 0), EngineSplit(1, 1))
    assert two.choice is not None
    assert alike.choice is not None
    assert "x of the attention workers alone with the whole model, which is faster: give experts = 0" in two.notes[0]
    with pytest.raises(ConfigError, match=r"inference rates are '.*none\.json', but it must be a file"):
        plan_serving(
            model, 1, None, AutoPlan(slow, expert_rates=tmp_path / "none.json"), None, limits, "auto", False, {}
        )


@pytest.mark.slow
def test_fast_links_make_it_split_and_overlap(model: Path, tmp_path: Path) -> None:
    FAST.save(tmp_path / "fast.json")
    plan = AutoPlan(tmp_path / "fast.json", prompt=200, output=2, requests=1)
    with Engine(model, plan=plan, threads=1) as engine:
        assert engine.split == EngineSplit(1, 1)
        assert engine.choice is not None
        assert engine.plan == engine.choice.plan
        assert engine.plan.num_slices > 1
        with engine.trace() as recording:
            assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)
        assert recording.trace.summary.planned_step_seconds == engine.choice.step_seconds
        assert f"planned {1e3 * engine.choice.step_seconds:.3f}" in str(recording.trace.summary)


@pytest.mark.slow
def test_workers_and_fields_that_are_given_are_kept(model: Path, slow: Path) -> None:
    with Engine(model, experts=1, plan=AutoPlan(slow, num_slices=2, order="AASS"), threads=1) as engine:
        assert engine.split == EngineSplit(1, 1)
        assert (engine.plan.num_slices, engine.plan.order) == (2, "greedy")
        assert "0." in engine.notes[0].rpartition(" tokens, ")[2]  # how much slower than whole models
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [
        ({}, 4096, (512, 128)),
        ({}, 256, (205, 51)),
        ({}, 1, (1, 1)),
        ({"prompt": 200}, 256, (200, 56)),
        ({"output": 200}, 256, (56, 200)),
        ({"prompt": 300}, 256, (300, 1)),  # refused by those who plan for it
        ({"prompt": 300, "output": 300}, 256, (300, 300)),
    ],
)
def test_what_is_expected_without_being_told_fits(given: dict[str, int], most: int, expected: tuple[int, int]) -> None:
    assert AutoPlan(**given).demand(most) == Demand(*expected, requests=8)


def test_what_contradicts_is_refused(model: Path, slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="only an automatic plan needs rates"):
        Engine(model, rates=slow)
    with pytest.raises(ConfigError, match="only an automatic plan needs rates"):
        Engine(model, plan=InferencePlan(), rates=slow)
    with pytest.raises(ConfigError, match="beside an AutoPlan"):
        Engine(model, plan=AutoPlan(), rates=slow)
    with pytest.raises(ConfigError, match="leaves nothing to choose"):
        Engine(model, experts=0, plan="auto", rates=slow)
    with pytest.raises(ConfigError, match="plan is 'fast'"):
        Engine(model, plan="fast")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="shared_first"):
        Engine(model, plan=AutoPlan(slow, order="greedy", shared_first=True))
    with pytest.raises(ScheduleError, match="num_slices is 0"):
        Engine(model, plan=AutoPlan(slow, num_slices=0))
    with pytest.raises(PlanError, match="cache_tokens is 64"):
        Engine(model, plan=AutoPlan(slow, prompt=64), cache_tokens=64)
    with pytest.raises(PlanError, match="16300 \\+ 128 tokens is expected, but qwen2_moe has 16384 positions"):
        Engine(model, plan=AutoPlan(slow, prompt=16300, output=128), cache_tokens=20000)
    monkeypatch.setenv("LACONIC_INFER_RATES", str(tmp_path / "none.json"))
    with pytest.raises(
        ConfigError, match=r"plan is 'auto', but .*none\.json does not exist; measure with laconic profile --infer"
    ):
        Engine(model, plan="auto")


@pytest.mark.slow
def test_the_command_knows_its_prompts(tmp_path: Path, slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("mixtral", tmp_path, vocab_size=257)
    flags = ["--prompt", "one", "--prompt", "another", "--max-new-tokens", "6", "--plan", "auto", "--rates", str(slow)]
    assert main(["generate", "--model", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert "plan auto: do not split: 2 workers with the whole model, " in out
    assert "2 requests of 7 + 6 tokens" in out
    assert main(["generate", "--model", str(path), *flags, "--json", "--micro-batches", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)["generations"]
    assert [each["tokens"] for each in shown] == generated(path, [list(b"one"), list(b"another")], 6)


@pytest.mark.parametrize(
    "flags",
    [["--rates", "rates.json"], ["--expert-rates", "rates.json"], ["--expect-output", "7"], ["--expect-requests", "1"]],
)
def test_flags_of_an_automatic_plan_are_refused_without_one(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(ConfigError, match=rf"{flags[0]} is '?{flags[1]}'?, but only --plan auto uses it"):
        start_engine(parser.parse_args(["--model", "none", *flags]))
