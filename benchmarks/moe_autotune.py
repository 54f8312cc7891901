"""Predicted against measured: every way through a layer over slow links, and what autotune chooses among them.

Two hosts (network namespaces, netlab) of two processes each. Links, codecs and the fixed overhead of routes are
measured once per network and grid. Then layers of other sizes, numbers of experts per token and skews are predicted
from these, and every candidate is run, forward and backward. Nothing that is run here goes back into a prediction.

The rounds of the candidates near the fastest are dealt into two halves: how often the fastest of one half is among the
fastest of the other says how well anybody could choose here. The same measurements judge choices of the model with one
part left out, and of always the same configuration.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks.kit.moe_layers import (
    GRIDS,
    INT8,
    NEAR,
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
from laconic.cost.moe.search import CostModel, LayerPlan, best_candidate
from laconic.moe import Grid, autotune
from laconic.moe.tuning.measure_layer import medians
from netlab import why_not

_MORE = 2
"""Times as many rounds in the second pass as were asked for; the first has half as many."""
_CHUNKS = 2


def _cases(rate: float, smoke: bool) -> dict[str, list[Case]]:
    """Layers by grid; on fast networks larger ones, so that layers take some 30 to 200 ms on both."""
    if smoke:
        return {"ep": [Case(16, 64, 32, 2, 0.0)], "mp": [Case(16, 64, 32, 2, 0.0)]}
    dims, scale = ((128, 512), (256, 512), (320, 160)), SCALES.get(rate, 1)
    ep = [
        Case(scale * tokens, *dim, top_k, skew)
        for (tokens, top_k), dim, skew in itertools.product(((64, 2), (128, 2), (48, 8), (96, 6)), dims, (0.0, 0.8))
    ]
    sizes = itertools.product(((64, 2), (96, 3)), dims)
    mp = [Case(scale * tokens, *dim, top_k, 0.0) for (tokens, top_k), dim in sizes]
    return {"ep": ep, "mp": mp + [Case(scale * 96, *dim, 6, 0.8) for dim in dims[:2]]}


@benchmark("moe-autotune")
def moe_autotune(options: Options) -> list[Table]:
    """64 configurations: 2 rates x (24 layers spread over 4 ranks, 8 inside MP groups)."""
    reason = why_not()
    if reason is not None:
        return [Table("Autotune", ["not measured"], [[reason]])]
    found, _ = run_cases("benchmarks.moe_autotune", options, _cases)
    return [_summary(found), _parts(found), _by_path(found), _choices(found)]


def _of_errors(errors: Sequence[float]) -> str:
    if not errors:
        return "-"
    return f"{median(errors):.1%} ({sorted(errors)[int(0.9 * (len(errors) - 1))]:.1%})"


def _within(losses: Sequence[float]) -> str:
    return f"{sum(loss <= 0.05 for loss in losses) / len(losses):.0%}"


def _error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def _pairs(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**case, **one} for case in found for one in case["candidates"]]


def _summary(found: Sequence[dict[str, Any]]) -> Table:
    rows = []
    kinds = sorted({(case["rate"], case["grid"]) for case in found})
    for name, chosen in [
        *((f"{rate / 1e6:g} Mbit/s, {_grid_name(grid)}", [(rate, grid)]) for rate, grid in kinds),
        ("all", kinds),
    ]:
        cases = [case for case in found if (case["rate"], case["grid"]) in chosen]
        pairs = _pairs(cases)
        errors = [abs(_error(one["predicted"], one["measured"])) for one in pairs]
        anchored = [abs(_error(one["anchored"], one["measured"])) for one in pairs if one["anchored"]]
        losses = [case["chosen_seconds"] / case["best_seconds"] - 1 for case in cases]
        alone = [case["alone_seconds"] / case["best_seconds"] - 1 for case in cases]
        plain = [case["plain_seconds"] / case["chosen_seconds"] for case in cases]
        took = [case["took"] for case in cases]
        loads = [case["load"] for case in cases]
        rows.append(
            [
                name,
                str(len(cases)),
                str(len(errors)),
                _of_errors(errors),
                _of_errors(anchored),
                _within(alone),
                _within(losses),
                f"{max(losses):.1%}",
                _within([case["other_half"] for case in cases]),
                f"{median(plain):.2f}x",
                f"{median(took):.1f} s ({max(took):.1f} s)",
                f"{sum(case['undecided'] for case in cases)}",
                f"{min(loads):.0f} to {max(loads):.0f}",
            ]
        )
    header = [
        "network, grid",
        "layers",
        "measured",
        "model alone: median error (90 % below)",
        "after running: error",
        "model alone: choice within 5 % of the best",
        "after running: within 5 %",
        "worst choice",
        "noise: best of one half of the rounds within 5 % of the best of the other",
        "faster than plain",
        "autotune took: median (longest)",
        "said that it cannot tell",
        "load of the machine",
    ]
    return Table(
        f"{len(found)} layers over 2 nodes of 2 processes: predicted against measured, and the choice",
        header,
        rows,
        "Error: the median, of the predicted seconds of forward and backward together. After running: autotune"
        " ran those of the five candidates that it predicted to be fastest within 30 % of the first, in turn, until the"
        " fastest was clear, and added what it had missed in them to all; errors are those of the others."
        f" The best is the fastest measured of all candidates, so a choice can only lose. All candidates take turns,"
        f" half of `--rounds`; then those within {NEAR:.0%} of the fastest and the choices take turns again, {_MORE}"
        " times `--rounds`, and only these count for them. Of these rounds, halves are the odd and the even ones:"
        " the noise is what the best of one half loses in the other (the whole is less noisy). Plain: one all-to-all"
        " with its duplicates (in MP groups: the baseline), raw, in one piece.",
    )


def _parts(found: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for case in found for name in case["others"]))

    def regrets(name: str) -> list[float]:
        return [case["others"][name] / case["best_seconds"] - 1 for case in found if name in case["others"]]

    return Table.of(
        "What each part of the model is worth",
        names,
        [
            ("choice by", str),
            ("layers", lambda name: str(len(regrets(name)))),
            ("within 5 % of the fastest", lambda name: _within(regrets(name))),
            ("mean regret", lambda name: f"{mean(regrets(name)):.1%}"),
            ("worst", lambda name: f"{max(regrets(name)):.1%}"),
        ],
        "Regret: how much longer the choice takes than the fastest measured candidate. Nothing is run to choose.",
    )


def _by_path(found: Sequence[dict[str, Any]]) -> Table:
    rows = []
    pairs = _pairs(found)
    for path in dict.fromkeys((one["path"], one["code"], one["cut"]) for one in pairs):
        these = [one for one in pairs if (one["path"], one["code"], one["cut"]) == path]
        errors = [_error(one["predicted"], one["measured"]) for one in these]
        forward = [_error(one["predicted_forward"], one["measured_forward"]) for one in these]
        both = f"{median(map(abs, errors)):.1%}"
        rows.append(
            [path[0], path[1], path[2], str(len(these)), both, f"{median(errors):+.1%}", f"{median(forward):+.1%}"]
        )
    header = ["path", "rows", "chunks", "measured", "median error", "with sign", "forward, with sign"]
    return Table("By schedule", header, sorted(rows))


def _choices(found: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for case in found:
        rows.append(
            [
                f"{case['rate'] / 1e6:g} Mbit/s",
                case["name"],
                case["chosen"],
                f"{case['predicted_seconds'] * 1e3:.1f}",
                f"{case['chosen_seconds'] * 1e3:.1f}",
                case["best"],
                f"{case['best_seconds'] * 1e3:.1f}",
                f"{case['plain_seconds'] * 1e3:.1f}",
            ]
        )
    header = ["network", "layer", "chosen", "predicted ms", "measured ms", "best measured", "ms", "plain ms"]
    return Table("Layer by layer", header, rows)


def _grid_name(grid: str) -> str:
    return ", ".join(f"{name} {size}" for name, size in GRIDS[grid].items())


# --- what each rank does ---


def _run(case: Case, grid: Grid, rates: MoERates, ranks: Ranks, rounds: int) -> dict[str, Any]:
    layer, x, codecs = layer_of(case, grid)
    started = time.perf_counter()
    tuned = autotune(layer, grid, x, rates=rates, codecs=codecs, report=None, cache=False)
    took = time.perf_counter() - started
    (choice,) = tuned.choices.values()
    anchored = {one.plan: one.seconds for one in choice.candidates}
    # By the model alone; and every path in one piece and, with raw rows, in chunks too, whether it was chosen or not.
    plans = dict.fromkeys(anchored)
    plans |= dict.fromkeys(replace(plan, degree=_CHUNKS) for plan in anchored if plan.rows == "raw")
    candidates = [choice.cost_model.candidate(plan) for plan in plans]
    timed = timed_plans(tuned, layer, x, [one.plan for one in candidates])
    alone_chosen = candidates.index(best_candidate(one for one in candidates if one.plan.degree == 1))
    chosen = [one.plan for one in candidates].index(choice.plan)
    again = 2 * max(1, _MORE * rounds // 2)
    timings = timed_twice(ranks, timed, rounds, again, always=(chosen, alone_chosen))
    forward, seconds = [one[0] for one in timings.taken], [sum(one) for one in timings.taken]
    best = min(timings.near, key=lambda i: seconds[i])
    halves = [[sum(medians(samples[start::2])) for samples in timings.again] for start in (0, 1)]
    other_half = median(_lost(one, other) for one, other in (halves, halves[::-1]))
    plain = next(
        i for i, one in enumerate(candidates) if one.plan.degree == 1 and one.plan.code == "raw"
        and one.plan.path == ("flat" if grid.layout.mp == 1 else "baseline")
    )  # fmt: skip
    return {
        "name": case.title(grid),
        "took": took,
        "undecided": bool(choice.undecided),
        "load": os.getloadavg()[0],
        "chosen": plan_text(candidates[chosen].plan),
        "predicted_seconds": anchored[choice.plan],
        "alone_seconds": seconds[alone_chosen],
        "chosen_seconds": seconds[chosen],
        "best": plan_text(candidates[best].plan),
        "best_seconds": seconds[best],
        "other_half": other_half,
        "plain_seconds": seconds[plain],
        "others": _others(choice.cost_model, [codec.name for codec in codecs], dict(zip(plans, seconds, strict=True))),
        "candidates": [
            {
                "path": str(one.plan),
                "code": one.plan.rows,
                "cut": "1" if one.plan.degree == 1 else "more",
                "plan": plan_text(one.plan),
                "predicted": one.seconds,
                "anchored": anchored.get(one.plan) if one.plan not in choice.measured else None,
                "measured": seconds[i],
                "predicted_forward": one.forward.seconds,
                "measured_forward": forward[i],
                "steps": [[step.name, step.seconds] for step in (*one.forward.steps, *one.backward.steps)],
            }
            for i, one in enumerate(candidates)
        ],
    }


def _others(cost_model: CostModel, codes: Sequence[str], seconds: Mapping[LayerPlan, float]) -> dict[str, float]:
    """Seconds of what a model without one part chooses, and of the same plan always."""
    rates = cost_model.rates
    raw = {name: both for name, both in rates.overheads.items() if name.endswith(" raw")}
    groups = {name: link for name, link in rates.groups.items() if not name.startswith("int")}
    changes: dict[str, dict[str, Any]] = {
        "the whole model": {},
        "no fixed overhead lines (copies instead)": {"overheads": {}},
        "fixed overhead of raw rows for all codes": {"overheads": raw},
        "no links of levels (those of their kind)": {"groups": groups},
        "links and copies alone": {"overheads": {}, "groups": groups},
    }
    chosen = {
        name: best_candidate(replace(cost_model, rates=replace(rates, **change)).candidates(codes)).plan
        for name, change in changes.items()
    }
    fixed = [LayerPlan(path) for path in ("flat", "depth 1", "baseline", "s1", "s2", "sharded")]
    fixed += [LayerPlan(path, INT8.name) for path in ("flat", "depth 1")]
    fixed.append(LayerPlan("depth 2", INT8.name, inner_code="raw"))
    chosen |= {f"always {plan_text(plan)}": plan for plan in fixed if plan in seconds}
    return {name: seconds[plan] for name, plan in chosen.items()}


def _lost(seconds: Sequence[float], others: Sequence[float]) -> float:
    """What the fastest way by some measurements takes more than the fastest by others, in those others."""
    return others[min(range(len(seconds)), key=lambda i: seconds[i])] / min(others) - 1


if __name__ == "__main__":
    run_as_rank(_run)
