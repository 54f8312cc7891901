"""Every layer on the way that is predicted to be fastest: path, depth, code of rows, degrees of the pipeline.

[Note: who decides]
Links and what routes cost around them come from a file that `laconic profile --moe` wrote, or are measured. The layer's
own gate and experts are measured as they are. The routing is that of an example, of all ranks. From these
`laconic.cost.moe` prices every candidate; the first rank's prices and choice count for all, so that rounding cannot
part the ranks. While the model trains, `Autotuned.step` looks whether tokens, load or duplicates have left what was
priced, and prices again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks, host_name, world_of
from laconic.cost.moe.layer_time import LayerWork
from laconic.cost.moe.rates import Coding, MoERates, default_moe_path
from laconic.cost.moe.routes import Route
from laconic.cost.moe.search import Candidate, LayerPlan, Pricing, best_candidate, best_plan
from laconic.cost.moe.shape import group_world
from laconic.cost.moe.swap_period import DIRECTIONS, expert_nbytes, move_seconds
from laconic.cost.moe.table import candidates_text
from laconic.errors import ConfigError
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.huggingface import ExpertsLayer, Parallelized
from laconic.moe.layer import MoELayer, moe_layers
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import PipelineSchedule
from laconic.moe.placement.consensus import first_answer, gather_counts
from laconic.moe.placement.swap_query import agree_on_swaps
from laconic.moe.tuning.drift import Drift, RoutingStatistics, RoutingWatch
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.moe.tuning.measure_dispatch import dispatcher_of, layout_of, levels_of
from laconic.moe.tuning.measure_layer import measure_layer, race, shape_of
from laconic.topology import Levels

__all__ = ["Autotuned", "LayerChoice", "SwapAdvice", "autotune"]

T = TypeVar("T")

_EXACT = (Raw(), Lossless("tiered"))
_RACED_WITHIN = 0.3
"""What is predicted to take more than this beyond the fastest is not run: predictions are seldom as far off."""


@dataclass(frozen=True)
class SwapAdvice:
    """What exchanging two experts would bring, predicted for the routing that was priced."""

    gain_seconds: float
    """Per training step; 0 where no pair helps."""
    cost_seconds: float
    """Once."""

    @property
    def period(self) -> int | None:
        """Steps after which a swap has paid: `ExpertBalancer(min_period=...)`. None if it never does."""
        return max(1, math.ceil(self.cost_seconds / self.gain_seconds)) if self.gain_seconds > 0 else None

    def __str__(self) -> str:
        if self.period is None:
            return "swap: no pair of experts shortens the all-to-alls"
        return (
            f"swap: one pair gains {self.gain_seconds * 1e3:.3g} ms per step and costs"
            f" {self.cost_seconds * 1e3:.3g} ms: it pays after {self.period} steps"
        )


@dataclass(frozen=True)
class LayerChoice:
    """What was decided for one layer; the same on all ranks."""

    pricing: Pricing
    candidates: tuple[Candidate, ...]
    """Fastest first."""
    chosen: Candidate
    statistics: RoutingStatistics
    measured: Mapping[LayerPlan, tuple[float, float]] = field(default_factory=dict)
    """Seconds, forward and backward, of the candidates that were run."""
    swap: SwapAdvice | None = None
    """Where experts can move: the layer has a Placement and rows are counted by rank."""

    @property
    def plan(self) -> LayerPlan:
        """What the layer runs."""
        return self.chosen.plan

    def __str__(self) -> str:
        text = candidates_text(self.candidates, measured={plan: sum(one) for plan, one in self.measured.items()})
        return text if self.swap is None else f"{text}\n{self.swap}"


class Autotuned:
    """The choices of `autotune`, and what keeps them up to date.

    Attributes:
        choices: by layer name.
        rates: that they rest on.
    """

    def __init__(
        self,
        layers: Mapping[str, MoELayer],
        grid: Grid,
        rates: MoERates | None,
        codecs: Sequence[Codec],
        degrees: Sequence[int],
        drift: Drift,
        num_raced: int,
    ) -> None:
        self.layers, self.grid, self.drift = dict(layers), grid, drift
        self.choices: dict[str, LayerChoice] = {}
        self._codecs = {codec.name: codec for codec in codecs}
        self._degrees = tuple(degrees)
        self._num_steps, self._num_raced = 0, num_raced
        self._work: dict[tuple[object, ...], LayerWork] = {}
        self._races: dict[tuple[object, ...], dict[LayerPlan, tuple[float, float]]] = {}
        self._watches = {name: RoutingWatch(drift.smoothing) for name in self.layers}
        for name, layer in self.layers.items():
            layer.hooks = (*layer.hooks, self._watches[name])
        world = dist.group.WORLD
        assert world is not None, "there is a grid"
        self._world = world
        self._ranks = Ranks(world, torch.device("cuda" if grid.dense_mesh.device_type == "cuda" else "cpu"))
        self._per_node = world_of(self._ranks.texts(host_name())).ranks_per_node
        self._leveled = self._with_levels()
        self._rates = rates

    @property
    def rates(self) -> MoERates:
        """That choices rest on."""
        assert self._rates is not None, "autotune has measured or read them"
        return self._rates

    def tune(self, names: Sequence[str] | None = None) -> None:
        """Price and choose anew for layers (None: all) by their last forward, and install what was chosen.

        All ranks call it together.
        """
        for name in self.layers if names is None else names:
            choice = self._choose(name)
            self.choices[name] = choice
            self.install(name, choice.plan)

    def install(self, name: str, plan: LayerPlan) -> None:
        """Run the layer `name` by a plan, which may be another than the chosen one; all ranks pass the same."""
        if self.grid.layout.joint > 1:
            layer = self.layers[name]
            layer.dispatcher = dispatcher_of(self._leveled, plan, self._codecs)
            layer.schedule = PipelineSchedule(*plan.degrees) if max(plan.degrees) > 1 else None

    def step(self) -> dict[str, str]:
        """After each training step, on all ranks: every `Drift.check_every` steps look whether routing has drifted.

        Returns why layers were priced anew, by name; mostly nothing.
        """
        self._num_steps += 1
        if self._num_steps % self.drift.check_every:
            return {}
        found = {}
        for name, choice in self.choices.items():
            now = self._watches[name].statistics(self.grid.layout.ep, self._world)
            found[name] = choice.statistics.has_left(now, self.drift)
        reasons = {name: reason for name, reason in first_answer(found, self._world).items() if reason}
        self.tune([*reasons])
        return reasons

    def begin(self, example: Callable[[], object]) -> None:
        """Run the model once, and choose by what its layers saw; all ranks call it together."""
        for watch in self._watches.values():
            watch.keeps_input = self._num_raced > 0
        with torch.no_grad():
            example()
        self.tune()
        for watch in self._watches.values():
            watch.keeps_input, watch.input = False, None

    def detach(self) -> None:
        """Look no longer; layers keep what they run."""
        for name, layer in self.layers.items():
            layer.hooks = tuple(hook for hook in layer.hooks if hook is not self._watches[name])

    def __str__(self) -> str:
        parts: dict[str, list[str]] = {}
        for name, choice in self.choices.items():
            parts.setdefault(str(choice), []).append(name)
        return "\n\n".join(f"{_names(names)}\n\n{text}" for text, names in parts.items())

    def _choose(self, name: str) -> LayerChoice:
        layer, watch, layout = self.layers[name], self._watches[name], self.grid.layout
        statistics = watch.statistics(layout.ep, self._world)
        num_tokens = max(1, round(statistics.num_tokens))
        shape = shape_of(layer, num_tokens, watch.model_dim, watch.dtype, layout.esp)
        if self._rates is None:
            lossy = [codec for codec in self._codecs.values() if not codec.lossless]
            self._rates = measure_moe(self._leveled, shape, dtype=watch.dtype, device=self._ranks.device, codecs=lossy)
        grid = layout_of(self._leveled, self._per_node)
        key = (type(layer.gate), type(layer.experts), shape, watch.dtype)
        if key not in self._work:
            self._work[key] = measure_layer(layer, shape, grid, self._ranks, watch.dtype)
        routing = watch.slots(layer)
        assert routing is not None, "statistics were taken"
        dtype, counts, load = str(watch.dtype).removeprefix("torch."), None, 1.0
        alone = layout.mp == layout.esp == 1
        if alone:
            counter = HierarchicalDispatcher(self._leveled.levels)
            counts = gather_counts(counter, routing, levels_of(grid))
        else:
            by_place = [sum(part) for part in _parts(statistics.shares, layout.ep)]
            load = max(1.0, max(by_place) * layout.ep)
        pricing = Pricing(shape, grid, self._rates, self._work[key], counts, load, dtype)
        found = tuple(pricing.candidates(self._known_codes(dtype), self._degrees))
        found = first_answer(found, self._world)
        found, measured = self._race(name, key, found, pricing)
        chosen = (
            best_plan({plan: sum(both) for plan, both in measured.items()}) if measured else best_candidate(found).plan
        )
        best = next(one for one in found if one.plan == chosen)
        swap = None
        if alone and layer.placement is not None:
            counter = HierarchicalDispatcher(self._leveled.levels, chosen.depth or 1)
            coding = None if chosen.code == "raw" else Coding(chosen.code, dtype)
            plan = agree_on_swaps(counter, routing, float(shape.row_nbytes), self._rates, coding=coding)
            cost = move_seconds(expert_nbytes(shape), group_world(grid, "ep"), self._rates)
            swap = first_answer(SwapAdvice(DIRECTIONS * plan.gain_seconds, cost), self._world)
        return LayerChoice(pricing, found, best, statistics, measured, swap)

    def _race(
        self, name: str, kind: tuple[object, ...], found: tuple[Candidate, ...], pricing: Pricing
    ) -> tuple[tuple[Candidate, ...], dict[LayerPlan, tuple[float, float]]]:
        """All candidates with what the model missed in the first few, the mean, and what those take: they are run, in
        one piece too. Layers of one kind with the same first few share what the first of them took."""
        limit = (1 + _RACED_WITHIN) * found[0].seconds
        x, first = self._watches[name].input, [one for one in found[: self._num_raced] if one.seconds <= limit]
        if x is None or not first:
            return found, {}
        whole = {one.plan: pricing.candidate(one.plan.uncut()) for one in first if one.plan != one.plan.uncut()}
        raced = first_answer([*first, *whole.values()], self._world)
        plans = tuple(one.plan for one in raced)
        if (kind, plans) not in self._races:
            installs = [partial(self.install, name, plan) for plan in plans]
            layer = self.layers[name]
            given = self._watches[name].routing if isinstance(layer, ExpertsLayer) else None
            taken = race(layer, x, installs, self._ranks, given)
            self._races[kind, plans] = dict(zip(plans, taken, strict=True))
        measured = self._races[kind, plans]
        missed = [fmean(measured[one.plan][way] - _routes(one)[way].seconds for one in raced) for way in (0, 1)]
        for plan, uncut in whole.items():
            if best_plan({one: sum(measured[one]) for one in (plan, uncut.plan)}) == uncut.plan:
                found = tuple(uncut if one.plan == plan else one for one in found)
        return tuple(one.plus(*missed) for one in found), {
            plan: seconds for plan, seconds in measured.items() if any(one.plan == plan for one in found)
        }

    def _known_codes(self, dtype: str) -> list[str]:
        rates = self.rates
        known = {"raw", *rates.wire.codecs.get(dtype, {}), *rates.codecs.get(dtype, {})}
        return [name for name in self._codecs if name in known]

    def _with_levels(self) -> Grid:
        """The grid, with the nodes as a level if it has none and they could be one."""
        layout = self.grid.layout
        nodes = layout.ep // self._per_node if layout.ep % self._per_node == 0 else 1
        if layout.levels or layout.mp > 1 or layout.esp > 1 or nodes < 2 or self._per_node == 1:
            return self.grid
        levels = tuple(n for n in Levels.of_nodes(layout.ep, self._per_node).num_groups if n > 1)
        return Grid(layout.mp, layout.ep, layout.esp, levels=levels, device_type=self.grid.dense_mesh.device_type)


def autotune(
    model: nn.Module | Parallelized,
    mesh: Grid | DeviceMesh | None = None,
    example: Tensor | Callable[[], object] | None = None,
    *,
    rates: MoERates | None = None,
    codecs: Sequence[Codec] = _EXACT,
    degrees: Sequence[int] = (1, 2, 4, 8),
    drift: Drift | None = None,
    num_raced: int = 5,
    report: Callable[[str], object] | None = print,
) -> Autotuned:
    """Choose and install path, depth, code and degrees of every MoELayer of a model; all ranks call it together.

    Arguments:
        model: a MoELayer, a module with some, or what `parallelize` returned.
        mesh: the Grid that the layers are spread over, or its DeviceMesh; may be left out for `parallelize`'s result.
        example: the model's input, or a function that runs it; run once, without gradients, to see sizes and routing.
        rates: of the cluster; None: the file of `laconic profile --moe` (first rank's), else they are measured now.
        codecs: of rows; the default ones change no bit. Others, as Blockwise(BlockFormat("int8")), round values.
        degrees: numbers of chunks that are tried; 1 alone where transformers checkpoints layers without use_reentrant.
        drift: when to price again.
        num_raced: at most so many of the candidates that are predicted to be fastest are run on the example, and the
            fastest of those is taken, in one piece unless chunks turn out clearly faster; what the predictions missed
            in them is added to all. 0 trusts the predictions.
        report: told the table of candidates, the choice and the reason, on the first rank; None says nothing.

    Raises ConfigError without layers, a grid or an example, or where a layer cannot be priced.
    """
    grid = mesh if mesh is not None or not isinstance(model, Parallelized) else model.grid
    module = model.model if isinstance(model, Parallelized) else model
    layers = {name or "layer": one for name, one in moe_layers(module).items()}
    if not layers:
        raise ConfigError(
            f"{type(module).__name__} has no MoELayer, but autotune chooses for those; call laconic.moe.parallelize"
            " first"
        )
    if grid is None:
        raise ConfigError("mesh is None, but ways differ only between processes; pass the Grid of the layers")
    if example is None:
        raise ConfigError("example is None, but sizes and routing are seen in a forward; pass an input or a function")
    grid = Grid.from_mesh(grid) if isinstance(grid, DeviceMesh) else grid
    if not any(codec.name == "raw" for codec in codecs):
        codecs = (Raw(), *codecs)
    if _is_checkpointed(module):
        degrees = (1,)  # such layers run in one piece, see PipelineSchedule
    tuned = Autotuned(layers, grid, _agreed(rates), codecs, degrees, drift or Drift(), num_raced)
    tuned.begin(example if not isinstance(example, Tensor) else partial(module, example))
    if report is not None and dist.get_rank() == 0:
        report(str(tuned))
    return tuned


def _is_checkpointed(model: nn.Module) -> bool:
    """Whether transformers computes layers of `model` again in backward by non-reentrant checkpoints."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if not getattr(function, "keywords", {}).get("use_reentrant", False):
                return True
    return False


def _agreed(rates: MoERates | None) -> MoERates | None:
    """The first rank's, given or in its file."""
    world = dist.group.WORLD
    assert world is not None, "there is a grid"
    told = None
    if dist.get_rank() == 0:
        path = default_moe_path()
        found = rates if rates is not None else MoERates.load(path) if path.exists() else None
        told = None if found is None else found.to_dict()
    told = first_answer(told, world)
    return None if told is None else MoERates.from_dict(told)


def _routes(candidate: Candidate) -> tuple[Route, Route]:
    return candidate.forward, candidate.backward


def _parts(shares: Sequence[float], num_parts: int) -> list[Sequence[float]]:
    size = len(shares) // num_parts
    return [shares[i : i + size] for i in range(0, size * num_parts, size)]


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"
