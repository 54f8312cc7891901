"""Predicted against measured: every way through a layer over slow links, and what autotune chooses among them.

Two hosts (network namespaces, laconic.testing.netlab) of two processes each. Links, codecs and the fixed overhead of
routes are measured once per network and grid. Then layers of other sizes, numbers of experts per token and skews are
priced from these, and every candidate is run, forward and backward. Nothing that is run here goes back into a
prediction.

What is fastest of ten is decided by noise if all ten are timed alike. So what is near the fastest is timed again, with
many more rounds, and those are dealt into two halves: how often the fastest way of one half is among the fastest of the
other says how well anybody could choose here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import join, leave, run_ranks
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe import LayerShape, MoERates
from laconic.cost.moe.search import Candidate, LayerPlan, best_candidate
from laconic.formats import BlockFormat
from laconic.moe import Autotuned, GatedExperts, Grid, MoELayer, Routing, autotune, expert_shard, make_dispatcher
from laconic.moe.gates import Gate
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.moe.tuning.measure_layer import Timed, medians, samples_in_turn
from laconic.testing.netlab import Lab, why_not

_SMOKE = 1 << 12
_NODES, _RANKS_PER_NODE = 2, 2
_RATES = (1e8, 1e9)
_NUM_EXPERTS = 16
_REFERENCE = LayerShape(num_tokens=96, model_dim=256, hidden_dim=256, num_experts=16, top_k=4, item_nbytes=4)
"""What routes are measured with; none of the layers below is like it."""
_SCALES = {1e9: 3}
"""Times as many tokens, by bits per second."""
_NEAR = 0.2
"""What takes at most this much longer than the fastest is timed again."""
_MORE = 2
"""Times as many rounds then as were asked for, and first half as many."""
_CHUNKS = 2
_GRIDS = {"ep": {"ep": 4}, "mp": {"mp": 2, "ep": 2, "esp": 2}}


@dataclass(frozen=True)
class _Case:
    """One layer; skew is the exponent of Zipf's law for the popularity of experts."""

    tokens: int
    model_dim: int
    hidden_dim: int
    top_k: int
    skew: float


def _cases(rate: float, smoke: bool) -> dict[str, list[_Case]]:
    """Layers by grid; on fast networks larger ones, so that layers take some 30 to 200 ms on both."""
    if smoke:
        return {"ep": [_Case(16, 64, 32, 2, 0.0)], "mp": [_Case(16, 64, 32, 2, 0.0)]}
    dims, scale = ((128, 512), (256, 512), (320, 160)), _SCALES.get(rate, 1)
    ep = [
        _Case(scale * tokens, *dim, top_k, skew)
        for (tokens, top_k), dim, skew in itertools.product(((64, 2), (128, 2), (48, 8), (96, 6)), dims, (0.0, 0.8))
    ]
    ways = itertools.product(((64, 2), (96, 3)), dims)
    mp = [_Case(scale * tokens, *dim, top_k, 0.0) for (tokens, top_k), dim in ways]
    return {"ep": ep, "mp": mp + [_Case(scale * 96, *dim, 6, 0.8) for dim in dims[:2]]}


@benchmark("moe-autotune")
def moe_autotune(options: Options) -> list[Table]:
    """64 configurations: 2 rates x (24 layers spread over 4 ranks, 8 inside MP groups)."""
    reason = why_not()
    if reason is not None:
        return [Table("Autotune", ["not measured"], [[reason]])]
    smoke = options.elements <= _SMOKE
    found: list[dict[str, Any]] = []
    for rate in options.rates or ((1e9,) if smoke else _RATES):
        with Lab(_NODES, rate) as lab:
            for grid, cases in _cases(rate, smoke).items():
                task = {"grid": grid, "cases": [asdict(case) for case in cases], "rounds": options.rounds}
                task |= {"smoke": smoke, "rate": rate}
                result = run_ranks(lab, "benchmarks.moe_autotune", task, ranks_per_host=_RANKS_PER_NODE)
                found += [{"rate": rate, "grid": grid, **one} for one in result["cases"]]
    return [_summary(found), _by_path(found), _choices(found)]


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
            ]
        )
    header = [
        "network, grid",
        "layers",
        "measured",
        "model alone: median error (90 % below)",
        "after the race: error",
        "model alone: choice within 5 % of the best",
        "after the race: within 5 %",
        "worst choice",
        "noise: best of one half of the rounds within 5 % of the best of the other",
        "faster than plain",
    ]
    return Table(
        f"{len(found)} layers over 2 nodes of 2 processes: predicted against measured, and the choice",
        header,
        rows,
        "Error: the median, of the predicted seconds of forward and backward together. After the race: autotune ran"
        " those of the five candidates that it predicted to be fastest within 30 % of the first, repeated those that"
        " were close, took the fastest, and added what it had missed in them to all; errors are those of the others."
        f" The best is the fastest measured of all candidates, so a choice can only lose. All candidates take turns,"
        f" half of `--rounds`; then those within {_NEAR:.0%} of the fastest and the choices take turns again, {_MORE}"
        " times `--rounds`, and only these count for them. Of these rounds, halves are the odd and the even ones:"
        " the noise is what the best of one half loses in the other (the whole is less noisy). Plain: one all-to-all"
        " with its duplicates (in MP groups: the baseline), raw, in one piece.",
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
    return ", ".join(f"{name} {size}" for name, size in _GRIDS[grid].items())


# --- what each rank does ---


class _SkewedGate(Gate):
    """Top-k of Zipf's popularity with Gumbel noise: the same choices in every forward, whatever the tokens say."""

    def __init__(self, case: _Case, seed: int) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.case, self.seed = _NUM_EXPERTS, case.top_k, case, seed
        self.weight = torch.nn.Parameter(torch.randn(_NUM_EXPERTS, case.model_dim) * case.model_dim**-0.5)
        popularity = torch.arange(1, _NUM_EXPERTS + 1).log().mul(-case.skew)
        self.popularity = popularity[torch.randperm(_NUM_EXPERTS, generator=torch.Generator().manual_seed(0))]
        self.noise: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Routing:
        if len(x) not in self.noise:
            generator = torch.Generator().manual_seed(self.seed)
            uniform = torch.rand(len(x), _NUM_EXPERTS, generator=generator).clamp(1e-6, 1 - 1e-6)
            self.noise[len(x)] = self.popularity - (-uniform.log()).log()
        scores = (x @ self.weight.T).softmax(-1)
        experts = self.noise[len(x)].topk(self.top_k).indices
        return Routing.of_choices(experts, scores.gather(1, experts), _NUM_EXPERTS)


def timed_plans(tuned: Autotuned, layer: MoELayer, x: Tensor, plans: Iterable[LayerPlan]) -> list[Timed[Tensor]]:
    """Forward and backward of the layer x [n, M] by each plan, to be timed."""
    grad = torch.randn_like(x)
    wanted = [x, *layer.parameters()]

    def forward(plan: LayerPlan) -> Tensor:
        tuned.install("layer", plan)
        return layer(x)

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, wanted, grad)

    return [Timed(partial(forward, plan), backward) for plan in plans]


def _run(case: _Case, grid: Grid, rates: MoERates, ranks: Ranks, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    alone = grid.layout.mp == 1
    gate = _SkewedGate(case, 1 + (grid.ep.rank() if alone else grid.dp.rank()))
    experts = expert_shard(GatedExperts(_NUM_EXPERTS, case.model_dim, case.hidden_dim), grid)
    layer = MoELayer(gate, experts, dispatcher=make_dispatcher(grid, "joint" if alone else "s1", codec=Raw()))
    x = torch.randn(case.tokens, case.model_dim, generator=torch.Generator().manual_seed(grid.dp.rank()))
    x.requires_grad_()
    codecs: list[Codec] = [Raw(), Lossless("tiered")] + ([Blockwise(BlockFormat("int8", 128))] if alone else [])
    tuned = autotune(layer, grid, x, rates=rates, codecs=codecs, report=None)
    (choice,) = tuned.choices.values()
    anchored = {one.plan: one.seconds for one in choice.candidates}
    # By the model alone; and every path in one piece and, with raw rows, in chunks too, whether it was chosen or not.
    plans = dict.fromkeys(anchored)
    plans |= dict.fromkeys(replace(plan, degree=_CHUNKS) for plan in anchored if plan.rows == "raw")
    candidates = [choice.pricing.candidate(plan) for plan in plans]
    timed = timed_plans(tuned, layer, x, [one.plan for one in candidates])
    alone_chosen = candidates.index(best_candidate(one for one in candidates if one.plan.degree == 1))
    chosen = [one.plan for one in candidates].index(choice.plan)
    taken = [medians(samples) for samples in samples_in_turn(ranks, timed, (rounds + 1) // 2)]
    limit = (1 + _NEAR) * min(map(sum, taken))
    near = [i for i, one in enumerate(taken) if sum(one) <= limit or i in (chosen, alone_chosen)]
    again = samples_in_turn(ranks, [timed[i] for i in near], 2 * max(1, _MORE * rounds // 2), warm_ups=0)
    for i, samples in zip(near, again, strict=True):
        taken[i] = medians(samples)
    forward, seconds = [one[0] for one in taken], [sum(one) for one in taken]
    best = min(near, key=lambda i: seconds[i])
    halves = [[sum(medians(samples[start::2])) for samples in again] for start in (0, 1)]
    other_half = median(_lost(one, other) for one, other in (halves, halves[::-1]))
    plain = next(
        i for i, one in enumerate(candidates) if one.plan.degree == 1 and one.plan.code == "raw"
        and one.plan.path == ("flat" if alone else "baseline")
    )  # fmt: skip
    return {
        "name": f"{case.tokens} tokens, {case.model_dim} x {case.hidden_dim}, top-{case.top_k}"
        f"{', Zipf' if case.skew else ''}{'' if alone else ', mp 2'}",
        "chosen": _name(candidates[chosen]),
        "predicted_seconds": anchored[choice.plan],
        "alone_seconds": seconds[alone_chosen],
        "chosen_seconds": seconds[chosen],
        "best": _name(candidates[best]),
        "best_seconds": seconds[best],
        "other_half": other_half,
        "plain_seconds": seconds[plain],
        "candidates": [
            {
                "path": str(one.plan),
                "code": one.plan.rows,
                "cut": "1" if one.plan.degree == 1 else "more",
                "plan": _name(one),
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


def _lost(seconds: Sequence[float], others: Sequence[float]) -> float:
    """What the fastest way by some measurements takes more than the fastest by others, in those others."""
    return others[min(range(len(seconds)), key=lambda i: seconds[i])] / min(others) - 1


def _name(one: Candidate) -> str:
    code = "" if one.plan.rows == "raw" else f", {one.plan.rows}"
    return f"{one.plan}{code}" + (f", {one.plan.degree} chunks" if one.plan.degree > 1 else "")


def main() -> None:
    """As a rank of a lab: measure rates, then price and run all layers."""
    task = join()
    sizes = _GRIDS[task["grid"]]
    alone = "mp" not in sizes
    grid = Grid(**sizes, levels=(_NODES,) if alone else (), device_type="cpu")
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(world, torch.device("cpu"))
    started = time.perf_counter()
    lossy = [Blockwise(BlockFormat("int8", 128))] if alone else []
    usual = replace(_REFERENCE, num_tokens=_SCALES.get(task["rate"], 1) * _REFERENCE.num_tokens)
    shape = LayerShape(32, 64, 64, 16, 4, item_nbytes=4) if task["smoke"] else usual
    rates = measure_moe(grid, shape, dtype=torch.float32, codecs=lossy, quick=task["smoke"])
    profiled = time.perf_counter() - started
    cases = [_run(_Case(**case), grid, rates, ranks, task["rounds"]) for case in task["cases"]]
    leave({"cases": cases, "profile_seconds": profiled, "rates": rates.to_dict()})


if __name__ == "__main__":
    main()
