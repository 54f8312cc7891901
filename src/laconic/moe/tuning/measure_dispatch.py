"""What routes cost around their wires: layers whose gate and experts do nothing, less what their wires take.

Every way that rows can take on a grid is run, forward and backward, on random balanced routing of a few sizes. What the
lines of the links explain is taken away, and the rest is a line in rows and bytes (`laconic.cost.moe.overhead`): order
and its inverse, indices, packing, copies, exchanges of counts and announcements, the layer's own calls. So it is known
what small rounds cost on this network, and no constant of the library is written down anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives.codec import Codec, Raw
from laconic.collectives.policy.microbench import Ranks, gaussian
from laconic.collectives.runtime import torch_compat
from laconic.cost.comm.rates import Line
from laconic.cost.comm.seconds import RAW
from laconic.cost.moe.hierarchy import RowCounts, count_vector
from laconic.cost.moe.layer_time import LayerWork
from laconic.cost.moe.overhead import Sample, fit_overhead
from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.search import FLAT, Candidate, LayerPlan, Pricing, overhead_size
from laconic.cost.moe.shape import LayerShape, group_world
from laconic.moe.dispatch.base import Dispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import make_dispatcher
from laconic.moe.experts.modules import GatedExperts
from laconic.moe.gates.base import Gate
from laconic.moe.layer import MoELayer, num_experts_of
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import PipelineSchedule
from laconic.moe.routing import Routing
from laconic.moe.tuning.measure_layer import Timed, seconds_in_turn
from laconic.topology import GridLayout, Levels

__all__ = ["dispatcher_of", "layout_of", "levels_of", "measure_routes", "measure_sharing"]

_CHUNKS = 4
_LONGEST_SECONDS = 2.0
"""Of the repeats at one size, three at least."""
_MOST_TIMES, _BUSY_SHARE = 8, 0.2
_LONGEST_EXCHANGE_SECONDS = 0.05
_BUSY, _ALONE = "busy", "alone"
_Way = tuple[LayerPlan, str]
"""What is run, and what experts do in it: "" nothing, `_BUSY` compute, `_ALONE` compute without anything else."""
_SHARING_NBYTES = 1 << 20
_NOTHING = LayerWork(*[Line(0.0, 0.0)] * 4)


def dispatcher_of(grid: Grid, plan: LayerPlan, codecs: Mapping[str, Codec]) -> Dispatcher:
    """The dispatcher that carries a plan out. `grid` has the levels that the plan's depth needs; codecs are by name."""
    codec = codecs[plan.code]
    if plan.depth is not None:
        inner = codecs[plan.inner_code or plan.code]
        return HierarchicalDispatcher(grid.levels, plan.depth, codec=codec, inner_codec=inner)
    if plan.path == FLAT:
        return FlatDispatcher(grid.ep, codec=codec)
    return make_dispatcher(grid, plan.path, backward=plan.back, codec=codec)  # type: ignore[arg-type]  # paths are Parm's


def layout_of(grid: Grid, ranks_per_node: int | None) -> GridLayout:
    """The grid's layout with its machines; None: all ranks on one node."""
    return replace(grid.layout, ranks_per_node=ranks_per_node)


def levels_of(layout: GridLayout) -> Levels:
    """The levels of the layout's EP groups."""
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
    """`rates` with `overheads` and `hiding` of every path on this grid in every codec.

    rates: with the lines of the grid's groups and the codecs. All ranks call it together.
    """
    rates = replace(rates, overheads={}, hiding={})
    layout = layout_of(grid, ranks_per_node)
    levels = levels_of(layout)
    shape = _short(shape, layout, rates)
    by_name = {codec.name: codec for codec in (Raw(), *codecs)}
    paths = _pricing(shape, grid, layout, levels, rates, dtype, None).paths
    # Mixtures of s1 and s2 are made of two that are measured.
    plans = [LayerPlan(path, code=codec.name) for codec in codecs for path, back in paths if not back]
    plans += [replace(one, inner_code=RAW) for one in plans if (one.depth or 1) > 1 and one.code != RAW]
    found: list[tuple[Pricing, dict[_Way, tuple[float, float]]]] = []
    for case in _cases(shape, grid):
        gate = _FixedGate(case, grid)
        pricing = _pricing(case, grid, layout, levels, rates, dtype, gate)
        cut: dict[str, nn.Module] = {}  # experts that layers in chunks run with
        timed: dict[_Way, Timed[Any]] = {}
        if case in (shape, _few(shape)) and case.num_tokens >= _CHUNKS:
            cut[""] = _Identity()
        if cut and case == shape:
            rows, experts = _rows_and_experts(case, grid, layout, rates, dtype, ranks.device)
            cut[_BUSY], timed[plans[0], _ALONE] = experts, _sliced(rows, experts)
        for plan in plans:
            dispatcher = dispatcher_of(grid, plan, by_name)
            timed[plan, ""] = _timed(MoELayer(gate, _Identity(), dispatcher=dispatcher), case, dtype, ranks.device)
            for experts_are, inside in cut.items():
                layer = MoELayer(gate, inside, dispatcher=dispatcher, schedule=PipelineSchedule(_CHUNKS))
                way = replace(plan, degrees=(_CHUNKS, _CHUNKS)), experts_are
                timed[way] = _timed(layer, case, dtype, ranks.device)
        seconds = seconds_in_turn(ranks, [*timed.values()], repeats, _LONGEST_SECONDS)
        found.append((pricing, dict(zip(timed, seconds, strict=True))))
    rates = replace(rates, hiding={name: part for pricing, taken in found for name, part in _hiding(pricing, taken)})
    samples: dict[str, dict[str, list[Sample]]] = {}
    for pricing, taken in found:
        pricing = replace(pricing, rates=rates)
        for (plan, experts_are), both in taken.items():
            if not experts_are:
                size = overhead_size(plan.path, pricing.shape, layout, pricing.counts)
                _add(samples, pricing.candidate(plan), both, size)
    overheads = {name: {way: fit_overhead(some) for way, some in ways.items()} for name, ways in samples.items()}
    return replace(rates, overheads=overheads)


def _hiding(pricing: Pricing, taken: Mapping[_Way, tuple[float, float]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Of the experts' seconds, how many the layer in chunks does not take longer with them than without, as a share of
    those that the simulator says."""
    alone = next((seconds for (_, experts_are), seconds in taken.items() if experts_are == _ALONE), None)
    for (plan, experts_are), busy in taken.items():
        if experts_are == _BUSY and alone is not None:
            idle, shares = taken[plan, ""], []
            said = [pricing.hidden_seconds(plan, seconds) for seconds in (alone, (0.0, 0.0))]
            for way in (0, 1):
                hidden, most = alone[way] - (busy[way] - idle[way]), said[0][way] - said[1][way]
                shares.append(min(1.0, max(0.0, hidden / most)) if most > 0 else 0.0)
            yield f"{plan.path} {plan.rows}", dict(zip(("forward", "backward"), shares, strict=True))


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
            torch_compat.all_to_all(received, sent, across).wait()

    one, all_ = (median(ranks.seconds(partial(exchange, which), repeats)) for which in (False, True))
    return min(1.0, max(0.0, (all_ / one - 1) / (within.size() - 1)))


def _cases(shape: LayerShape, grid: Grid) -> list[LayerShape]:
    """Few and many tokens; narrow rows too, to tell the cost of a row from that of its bytes."""
    half = replace(shape, num_tokens=max(1, shape.num_tokens // 2))
    narrow = replace(shape, model_dim=max(8, shape.model_dim // 4))
    return [*dict.fromkeys((_few(shape), half, shape, narrow))]


def _short(shape: LayerShape, grid: GridLayout, rates: MoERates) -> LayerShape:
    """With fewer tokens where one exchange of them would take longer than `_LONGEST_EXCHANGE_SECONDS`: slow networks
    show with less what routes cost besides."""
    seconds = rates.price("all_to_all", "joint", group_world(grid, "joint"), shape.rows_nbytes).seconds
    share = min(1.0, _LONGEST_EXCHANGE_SECONDS / seconds) if seconds > 0 else 1.0
    return replace(shape, num_tokens=max(min(shape.num_tokens, 8 * _CHUNKS), round(share * shape.num_tokens)))


def _few(shape: LayerShape) -> LayerShape:
    return replace(shape, num_tokens=max(1, shape.num_tokens // 8))


def _add(
    samples: dict[str, dict[str, list[Sample]]],
    candidate: Candidate,
    taken: tuple[float, float],
    size: tuple[float, float],
) -> None:
    """What was taken beside the wires; in chunks, by each of those after the first more than in one piece."""
    plan = candidate.plan
    whole, further = f"{plan.path} {plan.rows}", max(plan.degrees) - 1
    both = samples.setdefault(f"{whole} per chunk" if further else whole, {"forward": [], "backward": []})
    for route, seconds, way in zip((candidate.forward, candidate.backward), taken, both, strict=True):
        wires = sum(step.seconds for step in route.steps if step.operation) - route.hidden_seconds
        before = samples[whole][way][-1].seconds if further else 0.0
        parts = max(1, further)
        both[way].append(Sample(*size, (seconds - wires - before) / parts, seconds / parts))


def _pricing(
    shape: LayerShape,
    grid: Grid,
    layout: GridLayout,
    levels: Levels,
    rates: MoERates,
    dtype: torch.dtype,
    gate: _FixedGate | None,
) -> Pricing:
    counts = None
    if layout.mp == layout.esp == 1:
        counts = RowCounts.uniform(shape.num_tokens, shape.num_experts, shape.top_k, levels)
        if gate is not None:
            routing = gate.routing(shape.num_tokens)
            vector = count_vector(routing.tokens.numpy(), routing.experts.numpy(), shape.num_experts, levels)
            told = torch.empty(grid.ep.size(), len(vector), dtype=torch.int64)
            device = torch.device("cuda") if grid.dense_mesh.device_type == "cuda" else torch.device("cpu")
            told = told.to(device)
            torch_compat.all_gather(told, torch.from_numpy(vector).to(device), grid.ep).wait()
            counts = RowCounts.of_vectors(told.cpu().numpy(), levels)
    name = str(dtype).removeprefix("torch.")
    return Pricing(shape, layout, rates, _NOTHING, counts, dtype=name)


def _timed(layer: MoELayer, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Timed[Tensor]:
    x = gaussian(shape.num_tokens * shape.model_dim, dtype, device).view(-1, shape.model_dim).requires_grad_()
    grad = x.detach().clone()

    def backward(out: Tensor) -> None:
        out.backward(grad)
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Timed(partial(layer, x), backward)


def _rows_and_experts(
    shape: LayerShape, grid: Grid, layout: GridLayout, rates: MoERates, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, _Repeated]:
    """Those of a rank: rows evenly over its experts. They work for a good part of one exchange of raw rows: of less it
    could not be seen how much is hidden, and processors that are always busy hide nothing."""
    num_local = max(1, shape.num_experts // layout.ep)
    each = max(1, round(shape.rows_per_token * shape.num_tokens * layout.esp / layout.mp / num_local))
    rows = gaussian(each * num_local * shape.model_dim, dtype, device).view(-1, shape.model_dim)
    hidden_dim = max(1, shape.hidden_dim // layout.esp)
    with torch.random.fork_rng():
        experts = GatedExperts(num_local, shape.model_dim, hidden_dim)
    work = LayerWork.of_rates(shape, layout, rates).experts.seconds(len(rows))
    wire = rates.price("all_to_all", "joint", group_world(layout, "joint"), rows.nbytes).seconds
    times = max(1, min(_MOST_TIMES, round(_BUSY_SHARE * wire / work))) if work > 0 else 1
    return rows, _Repeated(experts.to(device=device, dtype=dtype), times)


def _sliced(rows: Tensor, experts: _Repeated) -> Timed[Any]:
    """Experts in as many slices as chunks, and nothing else."""
    num_local = experts.num_experts
    each = len(rows) // num_local // _CHUNKS
    counts = torch.full((num_local,), each, dtype=torch.int64, device=rows.device)
    parts = [rows[: each * num_local].clone().requires_grad_() for _ in range(_CHUNKS)]

    def forward() -> list[Tensor]:
        return [experts(part, counts) for part in parts]

    def backward(out: list[Tensor]) -> None:
        torch.autograd.backward(out, [one.detach() for one in out])
        for tensor in (*parts, *experts.parameters()):
            tensor.grad = None

    return Timed(forward, backward)


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


class _Repeated(nn.Module):
    """Experts that do their work several times over."""

    def __init__(self, experts: GatedExperts, times: int) -> None:
        super().__init__()
        self.experts, self.times, self.num_experts = experts, times, num_experts_of(experts)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.stack([self.experts(rows, counts) for _ in range(self.times)]).sum(0)


class _Identity(nn.Module):
    """Experts that do nothing."""

    num_experts = 1

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return rows.view_as(rows)
