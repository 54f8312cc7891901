"""Measures the fixed overhead of routes: layers whose gate and experts do nothing, less the time of their links.

Every route on a grid is run, forward and backward, on random balanced routing of a few sizes. The time that the lines
of the links predict is subtracted, and the rest is a line in rows and bytes (`laconic.cost.moe.overhead`): order and
its inverse, indices, packing, copies, exchanges of counts and announcements, the layer's own calls. So the overhead of
small rounds is measured on this network, and no constant of the library is hard-coded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from laconic.collectives.codec import Codec, Raw
from laconic.collectives.policy.microbench import Ranks, gaussian
from laconic.cost.comm.seconds import RAW
from laconic.cost.moe.hierarchy import RowCounts
from laconic.cost.moe.overhead import BothWays, Sample, fit_overhead
from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.search import FLAT, CostModel, LayerCandidate, LayerPlan, overhead_size
from laconic.cost.moe.shape import LayerShape, group_shape
from laconic.moe.dispatch.base import Dispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import make_dispatcher
from laconic.moe.gates.base import Gate
from laconic.moe.layer import MoELayer
from laconic.moe.parallel.grid import Grid
from laconic.moe.placement.consensus import gather_counts
from laconic.moe.routing import Routing
from laconic.moe.tuning.measure_layer import Timed, medians, samples_in_turn
from laconic.topology import GridLayout, Levels

_LONGEST_SECONDS = 2.0
"""Limit of the repeats at one size, three at least."""
_LONGEST_EXCHANGE_SECONDS = 0.05
_LEAST_TOKENS = 32


def dispatcher_of(grid: Grid, plan: LayerPlan, codecs: Mapping[str, Codec]) -> Dispatcher:
    """Make the dispatcher of a plan. `grid` has the levels that the plan's depth needs; codecs are by name."""
    codec = codecs[plan.code]
    if plan.depth is not None:
        inner = codecs[plan.inner_code or plan.code]
        return HierarchicalDispatcher(grid.levels, plan.depth, codec=codec, inner_codec=inner)
    if plan.path == FLAT:
        return FlatDispatcher(grid.ep, codec=codec)
    return make_dispatcher(grid, plan.path, codec=codec)  # type: ignore[arg-type]  # paths are Parm's


def layout_of(grid: Grid, ranks_per_node: int | None) -> GridLayout:
    """Return the grid's layout with its machines; None: all ranks on one node."""
    return replace(grid.layout, ranks_per_node=ranks_per_node)


def levels_of(layout: GridLayout) -> Levels:
    """Return the levels of the layout's EP groups."""
    per_node = min(layout.ep, layout.ranks_per_node or layout.ep)
    return Levels.of_groups(layout.ep, layout.levels, per_node if layout.ep % per_node == 0 else 1)


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
) -> MoERates:
    """Return `rates` with `overheads` of every path on this grid in every codec. All ranks call it together.

    The rates have the lines of the grid's groups and the codecs; `ranks_per_node` None puts all ranks on one node.
    """
    rates = replace(rates, overheads={})
    layout = layout_of(grid, ranks_per_node)
    levels = levels_of(layout)
    shape = _short(shape, layout, rates)
    by_name = {codec.name: codec for codec in (Raw(), *codecs)}
    paths = _cost_model(shape, grid, layout, levels, rates, dtype, None).paths
    plans = [LayerPlan(path, code=codec.name) for codec in codecs for path in paths]
    plans += [replace(one, inner_code=RAW) for one in plans if (one.depth or 1) > 1 and one.code != RAW]
    samples: dict[str, dict[str, list[Sample]]] = {}
    for case in _cases(shape):
        gate = _FixedGate(case, grid)
        cost_model = _cost_model(case, grid, layout, levels, rates, dtype, gate)
        layers = [MoELayer(gate, _Identity(), dispatcher=dispatcher_of(grid, plan, by_name)) for plan in plans]
        timed = [_timed(layer, case, dtype, ranks.device) for layer in layers]
        measured = samples_in_turn(ranks, timed, repeats, longest_seconds=_LONGEST_SECONDS)
        taken = [medians(one) for one in measured]
        for plan, both in zip(plans, taken, strict=True):
            size = overhead_size(plan.path, case, layout, cost_model.counts)
            _add(samples, cost_model.candidate(plan), both, size)
    overheads: dict[str, BothWays] = {
        name: {"forward": fit_overhead(ways["forward"]), "backward": fit_overhead(ways["backward"])}
        for name, ways in samples.items()
    }
    return replace(rates, overheads=overheads)


def _cases(shape: LayerShape) -> list[LayerShape]:
    """Return shapes with few and many tokens; and narrow rows, to separate the cost of a row from that of its bytes."""
    few = replace(shape, num_tokens=max(1, shape.num_tokens // 8))
    half = replace(shape, num_tokens=max(1, shape.num_tokens // 2))
    narrow = replace(shape, model_dim=max(8, shape.model_dim // 4))
    return [*dict.fromkeys((few, half, shape, narrow))]


def _short(shape: LayerShape, grid: GridLayout, rates: MoERates) -> LayerShape:
    """Return the shape with fewer tokens where one exchange of them would exceed `_LONGEST_EXCHANGE_SECONDS`.

    On slow networks fewer tokens show the overhead of routes more clearly.
    """
    seconds = rates.price("all_to_all", "joint", group_shape(grid, "joint"), shape.rows_nbytes).seconds
    share = min(1.0, _LONGEST_EXCHANGE_SECONDS / seconds) if seconds > 0 else 1.0
    return replace(shape, num_tokens=max(min(shape.num_tokens, _LEAST_TOKENS), round(share * shape.num_tokens)))


def _add(
    samples: dict[str, dict[str, list[Sample]]],
    candidate: LayerCandidate,
    taken: tuple[float, float],
    size: tuple[float, float],
) -> None:
    both = samples.setdefault(f"{candidate.plan.path} {candidate.plan.rows}", {"forward": [], "backward": []})
    for route, seconds, way in zip((candidate.forward, candidate.backward), taken, both, strict=True):
        links = sum(step.seconds for step in route.steps if step.operation) - route.overlapped_seconds
        both[way].append(Sample(*size, seconds - links, seconds))


def _cost_model(
    shape: LayerShape,
    grid: Grid,
    layout: GridLayout,
    levels: Levels,
    rates: MoERates,
    dtype: torch.dtype,
    gate: _FixedGate | None,
) -> CostModel:
    counts = None
    if layout.mp == layout.esp == 1:
        counts = RowCounts.uniform(shape.num_tokens, shape.num_experts, shape.top_k, levels)
        if gate is not None:
            device = torch.device("cuda") if grid.dense_mesh.device_type == "cuda" else torch.device("cpu")
            counts = gather_counts(gate.routing(shape.num_tokens), levels, grid.ep, device)
    name = str(dtype).removeprefix("torch.")
    return CostModel(shape, layout, rates, counts, dtype=name)


def _timed(layer: MoELayer, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Timed[Tensor]:
    x = gaussian(shape.num_tokens * shape.model_dim, dtype, device).view(-1, shape.model_dim).requires_grad_()
    grad = x.detach().clone()

    def backward(out: Tensor) -> None:
        out.backward(grad)
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Timed(partial(layer, x), backward)


class _FixedGate(Gate):
    """Gate of balanced random choices that are known beforehand, with weights that require gradients."""

    def __init__(self, shape: LayerShape, grid: Grid) -> None:
        super().__init__()
        self.num_experts, self.top_k = shape.num_experts, shape.top_k
        alone = grid.layout.mp == grid.layout.esp == 1
        self._seed = 1 + (grid.ep.rank() if alone else 0)  # ranks of an MP or ESP group decide alike
        self._routings: dict[int, Routing] = {}

    def routing(self, num_tokens: int) -> Routing:
        if num_tokens not in self._routings:
            generator = torch.Generator().manual_seed(self._seed)
            scores = torch.rand(num_tokens, self.num_experts, generator=generator, dtype=torch.float32, device="cpu")
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
    """Experts that return their rows."""

    num_experts = 1

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows.view_as(rows)
