"""What routes cost around their wires: layers whose gate and experts do nothing, less what their wires take.

Every way that rows can take on a grid is run, forward and backward, on random balanced routing of a few sizes. What the
lines of the links explain is taken away, and the rest is a line in rows and bytes (`laconic.cost.moe.overhead`): order
and its inverse, indices, packing, copies, exchanges of counts and announcements, the layer's own calls. So it is known
what small rounds cost on this network, and no constant of the library is written down anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import native
from laconic.collectives.codec import Codec, Raw
from laconic.collectives.measure import Ranks, gaussian
from laconic.cost.moe.candidates import FLAT, Candidate, LayerPlan, Pricing, overhead_size
from laconic.cost.moe.hierarchy import Hierarchy, RowCounts, count_vector
from laconic.cost.moe.overhead import Overhead, Sample, fit_overhead
from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.shape import GridShape, LayerShape
from laconic.cost.moe.work import LayerWork
from laconic.cost.wire.rates import Line
from laconic.moe.dispatch import Dispatcher
from laconic.moe.flat import FlatDispatcher
from laconic.moe.gates.base import Gate
from laconic.moe.grid import Grid
from laconic.moe.hierarchy import HierarchicalDispatcher
from laconic.moe.layer import MoELayer
from laconic.moe.measure_layer import Timed, seconds_in_turn
from laconic.moe.parm import S1Dispatcher, make_dispatcher
from laconic.moe.pipeline import PipelineSchedule
from laconic.moe.routing import Routing

__all__ = ["dispatcher_of", "hierarchy_of_grid", "measure_routes", "measure_sharing", "shape_of_grid"]

_CHUNKS = 4
_SHARING_NBYTES = 1 << 20
_NOTHING = LayerWork(*[Line(0.0, 0.0)] * 4)


def dispatcher_of(grid: Grid, plan: LayerPlan, codec: Codec) -> Dispatcher:
    """The dispatcher that carries a plan out. `grid` has the levels that the plan's depth needs."""
    if plan.depth is not None:
        return HierarchicalDispatcher(grid.levels, plan.depth, codec=codec)
    if plan.path == FLAT:
        return FlatDispatcher(grid.ep, codec=codec)
    return make_dispatcher(grid, plan.path, backward=plan.back, codec=codec)  # type: ignore[arg-type]  # paths are Parm's


def shape_of_grid(grid: Grid, ranks_per_node: int | None) -> GridShape:
    """The grid for the cost model; None: all ranks on one node."""
    layout = grid.layout
    return GridShape(layout.num_ranks, layout.mp, layout.ep, layout.esp, ranks_per_node)


def hierarchy_of_grid(grid: Grid, ranks_per_node: int | None) -> Hierarchy:
    """The levels of the grid's EP groups."""
    ep = grid.layout.ep
    per_node = min(ep, ranks_per_node or ep)
    return Hierarchy(ep, tuple(n for n in grid.layout.levels if 1 < n < ep), per_node if ep % per_node == 0 else 1)


def measure_routes(
    grid: Grid,
    shape: LayerShape,
    rates: MoERates,
    ranks: Ranks,
    *,
    ranks_per_node: int | None = None,
    codecs: Sequence[Codec] = (Raw(),),
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 3,
) -> dict[str, dict[str, Overhead]]:
    """`MoERates.overheads` of every path on this grid in every codec, with what further chunks cost.

    rates: with the lines of the grid's groups and the codecs, without overheads. All ranks call it together.
    """
    rates = replace(rates, overheads={})
    grid_shape, hierarchy = shape_of_grid(grid, ranks_per_node), hierarchy_of_grid(grid, ranks_per_node)
    paths = _pricing(shape, grid, grid_shape, hierarchy, rates, dtype, None).paths
    ways = [(path, codec) for codec in codecs for path, back in paths if not back]  # mixtures: of two that are measured
    samples: dict[str, dict[str, list[Sample]]] = {}
    for case in _cases(shape, grid):
        gate = _FixedGate(case, grid)
        pricing = _pricing(case, grid, grid_shape, hierarchy, rates, dtype, gate)
        plans, timed = [], []
        for path, codec in ways:
            plan = LayerPlan(path, code=codec.name)
            layer = MoELayer(gate, _Identity(), dispatcher=dispatcher_of(grid, plan, codec))
            plans.append(plan)
            timed.append(_timed(layer, case, dtype, ranks.device))
            if codec.name == Raw().name and _cuts(layer.dispatcher) and case.num_tokens >= _CHUNKS:
                plans.append(replace(plan, degrees=(_CHUNKS, _CHUNKS)))
                layer = MoELayer(gate, _Identity(), dispatcher=layer.dispatcher, schedule=PipelineSchedule(_CHUNKS))
                timed.append(_timed(layer, case, dtype, ranks.device))
        for plan, taken in zip(plans, seconds_in_turn(ranks, timed, repeats), strict=True):
            size = overhead_size(plan.path, case, grid_shape, pricing.counts)
            _add(samples, pricing.candidate(plan), taken, size)
    # What a further chunk costs is used many times over, so it may not be less than nothing.
    return {
        name: {way: fit_overhead(some, signed=not name.endswith("per chunk")) for way, some in both.items()}
        for name, both in samples.items()
    }


def measure_sharing(ranks: Ranks, across: dist.ProcessGroup, within: dist.ProcessGroup, repeats: int = 3) -> float:
    """How much the ranks of a node share its wire: `MoERates.sharing`.

    across: one rank of each node, this rank among them; within: the ranks of its node. All ranks call it together.
    """
    if within.size() == 1 or across.size() == 1:
        return 0.0
    sent = torch.zeros(across.size(), _SHARING_NBYTES // across.size(), dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)

    def exchange(all_of_them: bool) -> None:
        if all_of_them or within.rank() == 0:
            native.all_to_all(received, sent, across).wait()

    one, all_ = (median(ranks.seconds(partial(exchange, which), repeats)) for which in (False, True))
    return min(1.0, max(0.0, (all_ / one - 1) / (within.size() - 1)))


def _cases(shape: LayerShape, grid: Grid) -> list[LayerShape]:
    """Few and many tokens; narrow rows too, to tell the cost of a row from that of its bytes."""
    few = max(1, shape.num_tokens // 8)
    narrow = max(8, shape.model_dim // 4)
    sizes = [(few, shape.model_dim), (max(1, shape.num_tokens // 2), shape.model_dim)]
    sizes += [(shape.num_tokens, shape.model_dim), (shape.num_tokens, narrow)]
    return [replace(shape, num_tokens=tokens, model_dim=dim) for tokens, dim in dict.fromkeys(sizes)]


def _add(
    samples: dict[str, dict[str, list[Sample]]],
    candidate: Candidate,
    taken: tuple[float, float],
    size: tuple[float, float],
) -> None:
    """What was taken beside the wires; in chunks, by each of those after the first more than in one piece."""
    plan = candidate.plan
    whole, further = f"{plan.path} {plan.code}", max(plan.degrees) - 1
    both = samples.setdefault(f"{whole} per chunk" if further else whole, {"forward": [], "backward": []})
    for route, seconds, way in zip((candidate.forward, candidate.backward), taken, both, strict=True):
        wires = sum(step.seconds for step in route.steps if step.operation) - route.hidden_seconds
        before = samples[whole][way][-1].seconds if further else 0.0
        parts = max(1, further)
        both[way].append(Sample(*size, (seconds - wires - before) / parts, seconds / parts))


def _pricing(
    shape: LayerShape,
    grid: Grid,
    grid_shape: GridShape,
    hierarchy: Hierarchy,
    rates: MoERates,
    dtype: torch.dtype,
    gate: _FixedGate | None,
) -> Pricing:
    counts = None
    if grid_shape.mp == grid_shape.esp == 1:
        counts = RowCounts.uniform(shape.num_tokens, shape.num_experts, shape.top_k, hierarchy)
        if gate is not None:
            routing = gate.routing(shape.num_tokens)
            vector = count_vector(routing.tokens.numpy(), routing.experts.numpy(), shape.num_experts, hierarchy)
            told = torch.empty(grid.ep.size(), len(vector), dtype=torch.int64)
            device = torch.device("cuda") if grid.dense_mesh.device_type == "cuda" else torch.device("cpu")
            told = told.to(device)
            native.all_gather(told, torch.from_numpy(vector).to(device), grid.ep).wait()
            counts = RowCounts.of_vectors(told.cpu().numpy(), hierarchy)
    name = str(dtype).removeprefix("torch.")
    return Pricing(shape, grid_shape, rates, _NOTHING, counts, dtype=name)


def _timed(layer: MoELayer, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Timed[Tensor]:
    x = gaussian(shape.num_tokens * shape.model_dim, dtype, device).view(-1, shape.model_dim).requires_grad_()
    grad = x.detach().clone()

    def backward(out: Tensor) -> None:
        out.backward(grad)
        x.grad = None

    return Timed(partial(layer, x), backward)


def _cuts(dispatcher: Dispatcher) -> bool:
    """Whether the cost model knows what `PipelineSchedule` makes of it."""
    return isinstance(dispatcher, (FlatDispatcher, HierarchicalDispatcher, S1Dispatcher))


class _FixedGate(Gate):
    """Balanced random choices that are known beforehand, with weights that want gradients."""

    def __init__(self, shape: LayerShape, grid: Grid) -> None:
        super().__init__()
        self.num_experts, self.top_k = shape.num_experts, shape.top_k
        alone = grid.layout.mp == grid.layout.esp == 1
        self._seed = 1 + (grid.ep.rank() if alone else 0)  # ranks of an MP or ESP group decide alike
        self._routings: dict[int, Routing] = {}

    def routing(self, num_tokens: int) -> Routing:
        if num_tokens not in self._routings:
            generator = torch.Generator().manual_seed(self._seed)
            scores = torch.rand(num_tokens, self.num_experts, generator=generator)
            weights, experts = scores.topk(self.top_k)
            self._routings[num_tokens] = Routing.of_choices(experts, weights, self.num_experts)
        return self._routings[num_tokens]

    def forward(self, x: Tensor) -> Routing:
        routing = self.routing(len(x))
        if routing.experts.device != x.device:
            routing = Routing.of_choices(
                routing.experts.view(-1, self.top_k).to(x.device),
                routing.weights.view(-1, self.top_k).to(x.device),
                self.num_experts,
            )
        return replace(routing, weights=routing.weights.detach().requires_grad_())


class _Identity(nn.Module):
    """Experts that do nothing."""

    num_experts = 1

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows.view_as(rows)
