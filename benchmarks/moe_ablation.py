"""What each part of a choice is worth: all choices are judged by one measurement of every candidate.

Two hosts (network namespaces, netlab) of two processes each. A choice is made with the whole cost model, with one part
of it left out or replaced by a constant, by running candidates (with the model and without it), and by always taking
the same configuration. Its regret is how much longer it takes than the fastest candidate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.kit.moe_layers import (
    INT8,
    SCALES,
    Case,
    layer_of,
    run_as_rank,
    run_cases,
    timed_plans,
    timed_twice,
)
from benchmarks.registry import Options, Table, benchmark
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe import MoERates
from laconic.cost.moe.routes_text import plan_text
from laconic.cost.moe.search import CostModel, LayerPlan, best_candidate, best_plan
from laconic.moe import Grid, autotune
from laconic.moe.placement.consensus import first_answer
from laconic.moe.tuning.measure_layer import benchmark_candidates
from netlab import why_not

_DEGREES = (1, 2, 4, 8)
_ALL_SECONDS = 20.0
_MODEL, _RACED, _ALL = "the whole model", "the model, and a race of its first five", "a race of all, no model"
_KEPT = "kept from balanced routing", "kept from skewed routing", "kept from other numbers of tokens"


def _cases(rate: float, smoke: bool) -> dict[str, list[Case]]:
    if smoke:
        return {"ep": [Case(16, 64, 32, 2, 0.0), Case(16, 64, 32, 2, 0.8)], "mp": [Case(16, 64, 32, 2, 0.0)]}
    scale = SCALES.get(rate, 1)
    sizes = ((64, 128, 512, 2), (48, 320, 160, 8))
    ep = [Case(scale * tokens, *others, skew) for tokens, *others in sizes for skew in (0.0, 0.8)]
    ep += [Case(scale * tokens, 320, 160, 2, 0.0) for tokens in (64, 128)]
    ep += [Case(256, 256, 1792, 2, 0.0)]  # computing takes as long as sending
    mp = [Case(scale * 64, 128, 512, 2, 0.0), Case(scale * 96, 256, 512, 3, 0.0)]
    return {"ep": ep, "mp": mp}


@benchmark("moe-ablation")
def moe_ablation(options: Options) -> list[Table]:
    """Choices with and without each part of the model, on 2 rates x (7 layers over 4 ranks, 2 inside MP groups)."""
    reason = why_not()
    if reason is not None:
        return [Table("Ablation", ["not measured"], [[reason]])]
    found, profiled = run_cases("benchmarks.moe_ablation", options, _cases)
    _keep_choices(found)
    return [_summary(found, profiled), _layers(found)]


def _keep_choices(found: Sequence[dict[str, Any]]) -> None:
    """Add what is lost by keeping the fastest configuration of a layer like this one with another routing."""
    for case in found:
        for other in found:
            same = all(case[key] == other[key] for key in ("rate", "grid")) and case is not other
            one, two = case["case"], other["case"]
            changed = {key for key in one if one[key] != two[key]}
            kept = other["best"]
            if not same or kept not in case["seconds"]:
                continue
            if changed == {"skew"}:
                case["chosen"][_KEPT[0] if one["skew"] else _KEPT[1]] = kept
            elif changed == {"tokens"}:
                case["chosen"][_KEPT[2]] = kept


def _regret(case: Mapping[str, Any], choice: str) -> float:
    best: float = min(case["seconds"].values())
    return case["seconds"][choice] / best - 1


def _summary(found: Sequence[dict[str, Any]], profiled: Sequence[float]) -> Table:
    rows = []
    for name in dict.fromkeys(name for case in found for name in case["chosen"]):
        cases = [case for case in found if name in case["chosen"]]
        losses = [_regret(case, case["chosen"][name]) for case in cases]
        changed = sum(case["chosen"][name] != case["chosen"][_MODEL] for case in cases)
        near = sum(loss <= 0.05 for loss in losses) / len(losses)
        took = median(case["took"][name] for case in cases) if name in cases[0]["took"] else 0.0
        rows.append(
            [
                name,
                str(len(cases)),
                str(changed),
                f"{near:.0%}",
                f"{sum(losses) / len(losses):.1%}",
                f"{max(losses):.1%}",
                f"{took:.1f} s" if took else "-",
            ]
        )
    header = [
        "choice by",
        "layers",
        "other choices than the whole model's",
        "within 5 % of the fastest",
        "mean regret",
        "worst",
        "seconds per layer",
    ]
    note = (
        "Regret: how much longer the choice takes than the fastest measured candidate. The model needs rates, which"
        " took"
        f" {min(profiled):.0f} to {max(profiled):.0f} s to measure per network and grid, beside its seconds per layer."
    )
    return Table("What each part of the choice is worth", header, rows, note)


def _layers(found: Sequence[dict[str, Any]]) -> Table:
    rows, shown = [], (_MODEL, _RACED, _ALL)
    for case in found:
        rows.append(
            [
                f"{case['rate'] / 1e6:g} Mbit/s",
                case["name"],
                case["best"],
                f"{case['seconds'][case['best']] * 1e3:.1f}",
                *(f"{case['chosen'][name]} ({_regret(case, case['chosen'][name]):.0%})" for name in shown),
            ]
        )
    header = ["network", "layer", "fastest", "ms", *shown]
    return Table("Layer by layer: the fastest candidate, and choices with their regret", header, rows)


# --- what each rank does ---


def _ablations(cost_model: CostModel) -> dict[str, CostModel]:
    rates = cost_model.rates
    raw = {name: both for name, both in rates.overheads.items() if name.endswith(" raw")}
    groups = {name: link for name, link in rates.groups.items() if not name.startswith("int")}
    changes: dict[str, dict[str, Any]] = {
        _MODEL: {},
        "no fixed overhead lines (copies instead)": {"overheads": {}},
        "fixed overhead of raw rows for all codes": {"overheads": raw},
        "no links of levels (those of their kind)": {"groups": groups},
        "links and copies alone": {"overheads": {}, "groups": groups},
    }
    return {name: replace(cost_model, rates=replace(rates, **change)) for name, change in changes.items()}


def _fixed(alone: bool) -> dict[str, LayerPlan]:
    int8 = INT8.name
    if not alone:
        return {f"always {path}": LayerPlan(path) for path in ("baseline", "s1", "s2", "sharded")}
    return {
        "always flat, raw": LayerPlan("flat"),
        "always flat, int8": LayerPlan("flat", code=int8),
        "always depth 1, raw": LayerPlan("depth 1"),
        "always depth 1, int8": LayerPlan("depth 1", code=int8),
        "always depth 2, int8 between nodes": LayerPlan("depth 2", code=int8, inner_code="raw"),
    }


def _run(case: Case, grid: Grid, rates: MoERates, ranks: Ranks, rounds: int) -> dict[str, Any]:
    layer, x, codecs = layer_of(case, grid)
    started = time.perf_counter()
    autotune(layer, grid, x, rates=rates, codecs=codecs, num_benchmarked=0, report=None)
    took = {_MODEL: time.perf_counter() - started}
    started = time.perf_counter()
    tuned = autotune(layer, grid, x, rates=rates, codecs=codecs, degrees=_DEGREES, report=None, cache=False)
    took[_RACED] = time.perf_counter() - started
    (choice,) = tuned.choices.values()
    codes = [codec.name for codec in codecs]
    chosen = {_RACED: choice.plan}
    for name, cost_model in _ablations(choice.cost_model).items():
        chosen[name] = best_candidate(cost_model.candidates(codes)).plan
    chosen |= _fixed(grid.layout.mp == 1)
    chosen = first_answer(chosen, ranks.group)
    started = time.perf_counter()
    uncut = [one.plan for one in choice.cost_model.candidates(codes)]
    uncut = first_answer(uncut, ranks.group)

    def best_of(plans: Sequence[LayerPlan]) -> LayerPlan:
        installs = [partial(tuned.install, "layer", plan) for plan in plans]
        found = benchmark_candidates(layer, x, installs, ranks, budget_seconds=_ALL_SECONDS)
        return best_plan({plan: sum(both) for plan, both in zip(plans, found.seconds, strict=True)})

    best = best_of(uncut)
    chosen[_ALL] = best_of([replace(best, degree=degree) for degree in _DEGREES])
    took[_ALL] = time.perf_counter() - started
    plans = [*dict.fromkeys([*uncut, *chosen.values(), *(replace(best, degree=d) for d in (2, 4))])]
    timed = timed_plans(tuned, layer, x, plans)
    seconds = [sum(both) for both in timed_twice(ranks, timed, rounds, 2 * rounds).taken]
    by_name = {plan_text(plan): one for plan, one in zip(plans, seconds, strict=True)}
    return {
        "name": case.title(grid),
        "case": asdict(case),
        "chosen": {name: plan_text(plan) for name, plan in chosen.items()},
        "took": took,
        "best": min(by_name, key=lambda name: by_name[name]),
        "seconds": by_name,
    }


if __name__ == "__main__":
    run_as_rank(_run)
