"""What each part of a choice is worth: all choices are judged by one measurement of every candidate.

Two hosts (network namespaces, laconic.testing.netlab) of two processes each. A choice is made with the whole cost
model, with one part of it left out or replaced by a constant, by running candidates (with the model and without it),
and by always taking the same configuration. Its regret is how much longer it takes than the fastest candidate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.moe_autotune import (
    _GRIDS,
    _NODES,
    _NUM_EXPERTS,
    _RANKS_PER_NODE,
    _REFERENCE,
    _SCALES,
    _SMOKE,
    _Case,
    _SkewedGate,
    timed_plans,
)
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import join, leave, run_ranks
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe import LayerShape, MoERates
from laconic.cost.moe.search import LayerPlan, Pricing, best_candidate, best_plan
from laconic.formats import BlockFormat
from laconic.moe import GatedExperts, Grid, MoELayer, autotune, expert_shard, make_dispatcher
from laconic.moe.placement.consensus import first_answer
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.moe.tuning.measure_layer import medians, race, samples_in_turn
from laconic.testing.netlab import Lab, why_not

_RATES = (1e8, 1e9)
_NEAR = 0.2
_DEGREES = (1, 2, 4, 8)
_INT8 = Blockwise(BlockFormat("int8", 128))
_MODEL, _RACED, _ALL = "the whole model", "the model, and a race of its first five", "a race of all, no model"
_KEPT = "kept from balanced routing", "kept from skewed routing", "kept from other numbers of tokens"


def _cases(rate: float, smoke: bool) -> dict[str, list[_Case]]:
    if smoke:
        return {"ep": [_Case(16, 64, 32, 2, 0.0), _Case(16, 64, 32, 2, 0.8)], "mp": [_Case(16, 64, 32, 2, 0.0)]}
    scale = _SCALES.get(rate, 1)
    sizes = ((64, 128, 512, 2), (48, 320, 160, 8))
    ep = [_Case(scale * tokens, *others, skew) for tokens, *others in sizes for skew in (0.0, 0.8)]
    ep += [_Case(scale * tokens, 320, 160, 2, 0.0) for tokens in (64, 128)]
    ep += [_Case(256, 256, 1792, 2, 0.0)]  # computing takes as long as sending
    mp = [_Case(scale * 64, 128, 512, 2, 0.0), _Case(scale * 96, 256, 512, 3, 0.0)]
    return {"ep": ep, "mp": mp}


@benchmark("moe-ablation")
def moe_ablation(options: Options) -> list[Table]:
    """Choices with and without each part of the model, on 2 rates x (7 layers over 4 ranks, 2 inside MP groups)."""
    reason = why_not()
    if reason is not None:
        return [Table("Ablation", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    found: list[dict[str, Any]] = []
    profiled = []
    for rate in options.rates or ((1e9,) if smoke else _RATES):
        with Lab(_NODES, rate) as lab:
            for grid, cases in _cases(rate, smoke).items():
                task = {"grid": grid, "cases": [asdict(case) for case in cases], "rounds": options.rounds}
                task |= {"smoke": smoke, "rate": rate}
                result = run_ranks(lab, "benchmarks.moe_ablation", task, ranks_per_host=_RANKS_PER_NODE)
                profiled.append(result["profile_seconds"])
                found += [{"rate": rate, "grid": grid, **one} for one in result["cases"]]
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


def _ablations(pricing: Pricing) -> dict[str, Pricing]:
    rates = pricing.rates
    raw = {name: both for name, both in rates.overheads.items() if name.endswith(" raw")}
    groups = {name: link for name, link in rates.groups.items() if not name.startswith("int")}
    changes: dict[str, dict[str, Any]] = {
        _MODEL: {},
        "no fixed overhead lines (copies instead)": {"overheads": {}},
        "fixed overhead of raw rows for all codes": {"overheads": raw},
        "no links of levels (those of their kind)": {"groups": groups},
        "links and copies alone": {"overheads": {}, "groups": groups},
    }
    return {name: replace(pricing, rates=replace(rates, **change)) for name, change in changes.items()}


def _fixed(alone: bool) -> dict[str, LayerPlan]:
    int8 = _INT8.name
    if not alone:
        return {f"always {path}": LayerPlan(path) for path in ("baseline", "s1", "s2", "sharded")}
    return {
        "always flat, raw": LayerPlan("flat"),
        "always flat, int8": LayerPlan("flat", code=int8),
        "always depth 1, raw": LayerPlan("depth 1"),
        "always depth 1, int8": LayerPlan("depth 1", code=int8),
        "always depth 2, int8 between nodes": LayerPlan("depth 2", code=int8, inner_code="raw"),
    }


def _run(case: _Case, grid: Grid, rates: MoERates, ranks: Ranks, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    alone = grid.layout.mp == 1
    gate = _SkewedGate(case, 1 + (grid.ep.rank() if alone else grid.dp.rank()))
    experts = expert_shard(GatedExperts(_NUM_EXPERTS, case.model_dim, case.hidden_dim), grid)
    layer = MoELayer(gate, experts, dispatcher=make_dispatcher(grid, "joint" if alone else "s1", codec=Raw()))
    x = torch.randn(case.tokens, case.model_dim, generator=torch.Generator().manual_seed(grid.dp.rank()))
    x.requires_grad_()
    codecs: list[Codec] = [Raw(), Lossless("tiered")] + ([_INT8] if alone else [])
    started = time.perf_counter()
    autotune(layer, grid, x, rates=rates, codecs=codecs, num_raced=0, report=None)
    took = {_MODEL: time.perf_counter() - started}
    started = time.perf_counter()
    tuned = autotune(layer, grid, x, rates=rates, codecs=codecs, degrees=_DEGREES, report=None)
    took[_RACED] = time.perf_counter() - started
    (choice,) = tuned.choices.values()
    codes = [codec.name for codec in codecs]
    chosen = {_RACED: choice.plan}
    for name, pricing in _ablations(choice.pricing).items():
        chosen[name] = best_candidate(pricing.candidates(codes)).plan
    chosen |= _fixed(alone)
    chosen = first_answer(chosen, ranks.group)
    started = time.perf_counter()
    uncut = [one.plan for one in choice.pricing.candidates(codes)]
    uncut = first_answer(uncut, ranks.group)
    taken = race(layer, x, [partial(tuned.install, "layer", plan) for plan in uncut], ranks)
    best = best_plan({plan: sum(both) for plan, both in zip(uncut, taken, strict=True)})
    cut = [replace(best, degree=degree) for degree in _DEGREES]
    taken = race(layer, x, [partial(tuned.install, "layer", plan) for plan in cut], ranks)
    chosen[_ALL] = best_plan({plan: sum(both) for plan, both in zip(cut, taken, strict=True)})
    took[_ALL] = time.perf_counter() - started
    plans = [*dict.fromkeys([*uncut, *chosen.values(), *(replace(best, degree=d) for d in (2, 4))])]
    timed = timed_plans(tuned, layer, x, plans)
    seconds = [sum(medians(samples)) for samples in samples_in_turn(ranks, timed, (rounds + 1) // 2)]
    limit = (1 + _NEAR) * min(seconds)
    near = [i for i, one in enumerate(seconds) if one <= limit]
    again = samples_in_turn(ranks, [timed[i] for i in near], 2 * rounds, warm_ups=0)
    for i, samples in zip(near, again, strict=True):
        seconds[i] = sum(medians(samples))
    by_name = {_name(plan): one for plan, one in zip(plans, seconds, strict=True)}
    return {
        "name": f"{case.tokens} tokens, {case.model_dim} x {case.hidden_dim}, top-{case.top_k}"
        f"{', Zipf' if case.skew else ''}{'' if alone else ', mp 2'}",
        "case": asdict(case),
        "chosen": {name: _name(plan) for name, plan in chosen.items()},
        "took": took,
        "best": min(by_name, key=lambda name: by_name[name]),
        "seconds": by_name,
    }


def _name(plan: LayerPlan) -> str:
    code = "" if plan.rows == "raw" else f", {plan.rows}"
    return f"{plan}{code}" + (f", {plan.degree} chunks" if plan.degree > 1 else "")


def main() -> None:
    """As a rank of a lab: measure rates, then choose in all ways and run all candidates."""
    task = join()
    sizes = _GRIDS[task["grid"]]
    alone = "mp" not in sizes
    grid = Grid(**sizes, levels=(_NODES,) if alone else (), device_type="cpu")
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    started = time.perf_counter()
    usual = replace(_REFERENCE, num_tokens=_SCALES.get(task["rate"], 1) * _REFERENCE.num_tokens)
    shape = LayerShape(32, 64, 64, 16, 4, item_nbytes=4) if task["smoke"] else usual
    rates = measure_moe(grid, shape, dtype=torch.float32, codecs=[_INT8] if alone else [], quick=task["smoke"])
    profiled = time.perf_counter() - started
    cases = [_run(_Case(**case), grid, rates, ranks, task["rounds"]) for case in task["cases"]]
    leave({"cases": cases, "profile_seconds": profiled})


if __name__ == "__main__":
    main()
