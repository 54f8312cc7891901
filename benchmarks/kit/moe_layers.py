"""Layers of experts over slow links: the cases, their ranks in a lab, and timing all configurations of one layer.

Two hosts (network namespaces, netlab) of two processes each. What is near the fastest is timed again, with many more
rounds, because noise decides what is fastest of ten if all ten are timed alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.registry import Options
from benchmarks.slow_links import join, leave, run_ranks
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe import LayerShape, MoERates
from laconic.cost.moe.search import LayerPlan
from laconic.formats import BlockFormat
from laconic.moe import Autotuned, GatedExperts, Grid, MoELayer, Routing, expert_shard, make_dispatcher
from laconic.moe.gates import Gate
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.moe.tuning.measure_layer import Timed, medians, samples_in_turn
from netlab import Lab

INT8 = Blockwise(BlockFormat("int8", 128))
GRIDS = {"ep": {"ep": 4}, "mp": {"mp": 2, "ep": 2, "esp": 2}}
SCALES = {1e9: 3}
"""Times as many tokens, by bits per second."""
NEAR = 0.2
"""What takes at most this much longer than the fastest is timed again."""

_SMOKE = 1 << 12
_NODES, _RANKS_PER_NODE = 2, 2
_RATES = (1e8, 1e9)
_NUM_EXPERTS = 16
_REFERENCE = LayerShape(num_tokens=96, model_dim=256, hidden_dim=256, num_experts=16, top_k=4, item_nbytes=4)
"""What routes are measured with; none of the cases is like it."""


@dataclass(frozen=True)
class Case:
    """One layer; skew is the exponent of Zipf's law for the popularity of experts."""

    tokens: int
    model_dim: int
    hidden_dim: int
    top_k: int
    skew: float

    def title(self, grid: Grid) -> str:
        sizes = f"{self.tokens} tokens, {self.model_dim} x {self.hidden_dim}, top-{self.top_k}"
        return f"{sizes}{', Zipf' if self.skew else ''}{'' if grid.layout.mp == 1 else ', mp 2'}"


def run_cases(
    module: str, options: Options, cases: Callable[[float, bool], dict[str, list[Case]]]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Run `python -m module` as the ranks of every network, which calls `run_as_rank`.

    Args:
        module: name of the benchmark's module.
        options: rates of the networks, rounds; few elements make a smoke test.
        cases: the layers by grid, from a network's bits per second and whether it is a smoke test.

    Returns:
        What every layer's run returned, with its rate and grid; seconds of measuring each network and grid.
    """
    smoke = options.elements <= _SMOKE
    found: list[dict[str, Any]] = []
    profiled = []
    for rate in options.rates or ((1e9,) if smoke else _RATES):
        with Lab(_NODES, rate) as lab:
            for grid, layers in cases(rate, smoke).items():
                task = {"grid": grid, "cases": [asdict(case) for case in layers], "rounds": options.rounds}
                task |= {"smoke": smoke, "rate": rate}
                result = run_ranks(lab, module, task, ranks_per_host=_RANKS_PER_NODE)
                profiled.append(result["profile_seconds"])
                found += [{"rate": rate, "grid": grid, **one} for one in result["cases"]]
    return found, profiled


def run_as_rank(run: Callable[[Case, Grid, MoERates, Ranks, int], dict[str, Any]]) -> None:
    """As a rank of a lab: measure rates, then `run(case, grid, rates, ranks, rounds)` for all layers."""
    task = join()
    sizes = GRIDS[task["grid"]]
    alone = "mp" not in sizes
    grid = Grid(**sizes, levels=(_NODES,) if alone else (), device_type="cpu")
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    started = time.perf_counter()
    usual = replace(_REFERENCE, num_tokens=SCALES.get(task["rate"], 1) * _REFERENCE.num_tokens)
    shape = LayerShape(32, 64, 64, 16, 4, item_nbytes=4) if task["smoke"] else usual
    rates = measure_moe(grid, shape, dtype=torch.float32, codecs=[INT8] if alone else [], quick=task["smoke"])
    profiled = time.perf_counter() - started
    cases = [run(Case(**case), grid, rates, ranks, task["rounds"]) for case in task["cases"]]
    leave({"cases": cases, "profile_seconds": profiled})


def layer_of(case: Case, grid: Grid) -> tuple[MoELayer, Tensor, list[Codec]]:
    """The layer, its input [tokens, model_dim], and the codecs that its rows may take."""
    torch.manual_seed(0)
    alone = grid.layout.mp == 1
    gate = _SkewedGate(case, 1 + (grid.ep.rank() if alone else grid.dp.rank()))
    experts = expert_shard(GatedExperts(_NUM_EXPERTS, case.model_dim, case.hidden_dim), grid)
    layer = MoELayer(gate, experts, dispatcher=make_dispatcher(grid, "joint" if alone else "s1", codec=Raw()))
    x = torch.randn(case.tokens, case.model_dim, generator=torch.Generator().manual_seed(grid.dp.rank()))
    return layer, x.requires_grad_(), [Raw(), Lossless("tiered"), *([INT8] if alone else [])]


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


@dataclass(frozen=True)
class Timings:
    """Median seconds, forward and backward, of all plans.

    Attributes:
        taken: by plan; of the second pass where there was one.
        near: the plans of the second pass.
        again: their samples.
    """

    taken: list[tuple[float, float]]
    near: list[int]
    again: list[list[tuple[float, float]]]


def timed_twice(
    ranks: Ranks, timed: Sequence[Timed[Tensor]], rounds: int, again: int, always: Collection[int] = ()
) -> Timings:
    """Time all plans in turn, half of `rounds`; then, `again` rounds, those near the fastest and those in `always`."""
    taken = [medians(samples) for samples in samples_in_turn(ranks, timed, (rounds + 1) // 2)]
    limit = (1 + NEAR) * min(map(sum, taken))
    near = [i for i, one in enumerate(taken) if sum(one) <= limit or i in always]
    repeated = samples_in_turn(ranks, [timed[i] for i in near], again, warm_ups=0)
    for i, samples in zip(near, repeated, strict=True):
        taken[i] = medians(samples)
    return Timings(taken, near, repeated)


class _SkewedGate(Gate):
    """Top-k of Zipf's popularity with Gumbel noise: the same choices in every forward, whatever the tokens say."""

    def __init__(self, case: Case, seed: int) -> None:
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
