"""Tunes every layer: chooses the fastest path, depth, code of rows and number of chunks.

[Note: who decides]
Links and the fixed overhead of routes come from a file that `laconic profile --moe` wrote, or are measured. The routing
is that of an example, of all ranks. From these `laconic.cost.moe` prices every candidate. The first few are run on the
example until the fastest is clear, and the fastest in chunks, too. The first rank's prices count for all, and measured
seconds are the same on all ranks, so that rounding cannot lead to different choices. What was measured is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks, group_shape_of, host_name
from laconic.collectives.runtime import torch_compat
from laconic.cost.comm.seconds import MIN_GAIN
from laconic.cost.moe.rates import MoERates, default_moe_path
from laconic.cost.moe.routes import Route
from laconic.cost.moe.routes_text import candidates_text, plan_text
from laconic.cost.moe.search import CostModel, LayerCandidate, LayerPlan, best_candidate, best_plan
from laconic.cost.moe.shape import LayerShape
from laconic.errors import ConfigError
from laconic.moe.huggingface import ExpertsLayer, Parallelized
from laconic.moe.layer import MoELayer, moe_layers
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.placement.consensus import first_answer, gather_counts
from laconic.moe.placement.routing_record import record_of
from laconic.moe.routing import Routing
from laconic.moe.tuning.kept import Kept
from laconic.moe.tuning.measure_cluster import measure_moe
from laconic.moe.tuning.measure_dispatch import dispatcher_of, layout_of, levels_of
from laconic.moe.tuning.measure_layer import benchmark_candidates, shape_of
from laconic.topology import Levels

_EXACT = (Raw(), Lossless("tiered"))
_BENCHMARKED_WITHIN = 0.3
"""Share above the fastest beyond which a candidate is not run: predictions are seldom as far off."""
_WHOLE_SECONDS, _CHUNKS_SECONDS = 6.0, 3.0
"""Budgets of comparing candidates in one piece, and the fastest in chunks."""
_LEAST_ROUNDS = 4
"""Rounds that the budget must allow, the first one included; on slow layers fewer candidates are run."""
_TOLERANCE = 0.03
"""Share of the time within which it does not matter which of two candidates is faster."""


@dataclass(frozen=True)
class Measured:
    """Candidates of one kind of layer that were run; the same on all ranks."""

    seconds: Mapping[LayerPlan, tuple[float, float]]
    """Forward and backward."""
    chosen: LayerPlan
    undecided: Mapping[LayerPlan, tuple[float, float]] = field(default_factory=dict)
    """Plans that noise leaves open: bounds of their seconds over the fastest's."""
    is_kept: bool = False
    """By an earlier run."""

    def to_json(self) -> Any:
        """Return it as JSON values."""
        tables = [[[asdict(plan), *both] for plan, both in one.items()] for one in (self.seconds, self.undecided)]
        return [*tables, asdict(self.chosen)]

    @classmethod
    def from_json(cls, values: Any) -> Measured:
        """Read what `to_json` returned."""
        seconds, undecided = (
            {LayerPlan(**plan): (float(one), float(other)) for plan, one, other in table} for table in values[:2]
        )
        return cls(seconds, LayerPlan(**values[2]), undecided, is_kept=True)


@dataclass(frozen=True)
class LayerChoice:
    """Choice for one layer; the same on all ranks."""

    cost_model: CostModel
    candidates: tuple[LayerCandidate, ...]
    """Fastest first."""
    chosen: LayerCandidate
    measured: Mapping[LayerPlan, tuple[float, float]] = field(default_factory=dict)
    """Seconds, forward and backward, of the candidates that were run."""
    undecided: Mapping[LayerPlan, tuple[float, float]] = field(default_factory=dict)
    """Plans that noise leaves open: least and most of their seconds over the fastest's."""
    is_kept: bool = False
    """Whether an earlier run measured, see `cache` of `autotune`."""

    @property
    def plan(self) -> LayerPlan:
        """Return the plan that the layer runs."""
        return self.chosen.plan

    def __str__(self) -> str:
        measured = {plan: sum(both) for plan, both in self.measured.items()}
        text = candidates_text(self.candidates, measured=measured, chosen=self.plan)
        doubts = [
            f"cannot tell from {plan_text(plan)}, which takes {low:.2f} to {high:.2f} times as long as the fastest:"
            f" keeping {plan_text(self.plan)}"
            for plan, (low, high) in self.undecided.items()
            if plan != self.plan
        ]
        kept = ["measured by an earlier run and kept on disk; autotune(cache=False) measures anew"] * self.is_kept
        return "\n".join([text, *doubts, *kept])


class Autotuned:
    """The choices of `autotune`.

    Attributes:
        choices: by layer name.
        rates: that the choices are based on.
    """

    def __init__(
        self,
        layers: Mapping[str, MoELayer],
        grid: Grid,
        rates: MoERates | None,
        codecs: Sequence[Codec],
        degrees: Sequence[int],
        num_benchmarked: int,
        keeps: bool,
    ) -> None:
        self.layers, self.grid = dict(layers), grid
        self.choices: dict[str, LayerChoice] = {}
        self._codecs = {codec.name: codec for codec in codecs}
        self._degrees = tuple(sorted({1, *degrees}))
        self._num_benchmarked = num_benchmarked
        self._measured: dict[str, Measured] = {}
        self._records = {name: record_of(layer) for name, layer in self.layers.items()}
        world = dist.group.WORLD
        assert world is not None, "there is a grid"
        self._world = world
        self._ranks = Ranks(world, torch.device("cuda" if grid.dense_mesh.device_type == "cuda" else "cpu"))
        self._per_node = group_shape_of(self._ranks.texts(host_name())).ranks_per_node
        self._leveled = self._with_levels()
        self._rates = rates
        self._kept = Kept(self._ranks, keeps)

    @property
    def rates(self) -> MoERates:
        """Rates that the choices are based on."""
        assert self._rates is not None, "autotune has measured or read them"
        return self._rates

    def tune(self, names: Sequence[str] | None = None) -> None:
        """Price and choose anew for layers (None: all) by their last forward, and install the choices.

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
            layer.schedule = ChunkedSchedule(plan.degree) if plan.degree > 1 else None

    def begin(self, example: Callable[[], object]) -> None:
        """Run the model once, and choose by what its layers saw; all ranks call it together."""
        for record in self._records.values():
            record.keeps_input = self._num_benchmarked > 0
        with torch.no_grad():
            example()
        self.tune()
        for record in self._records.values():
            record.keeps_input, record.input = False, None

    def __str__(self) -> str:
        parts: dict[str, list[str]] = {}
        for name, choice in self.choices.items():
            parts.setdefault(str(choice), []).append(name)
        return "\n\n".join(f"{_names(names)}\n\n{text}" for text, names in parts.items())

    def _choose(self, name: str) -> LayerChoice:
        layer, seen, layout = self.layers[name], self._records[name].get(), self.grid.layout
        routing = seen.by_slot(layer)
        tokens, loads = self._sums(seen.num_tokens, routing)
        num_tokens = max(1, round(tokens / self._ranks.world))
        shape = shape_of(layer, num_tokens, seen.model_dim, seen.dtype, layout.esp)
        if self._rates is None:
            self._rates = self._measure_rates(shape, seen.dtype)
        grid, dtype, counts, load = layout_of(self._leveled, self._per_node), _name_of(seen.dtype), None, 1.0
        if layout.mp == layout.esp == 1:
            counts = gather_counts(routing, levels_of(grid), self._leveled.levels[0].within)
        else:
            by_rank = loads.view(layout.ep, -1).sum(1)
            load = max(1.0, float(by_rank.max() / by_rank.mean())) if float(by_rank.sum()) else 1.0
        cost_model = CostModel(shape, grid, self._rates, counts, load, dtype)
        found = first_answer(tuple(cost_model.candidates(self._known_codes(dtype))), self._world)
        if self._records[name].input is None or self._num_benchmarked == 0:
            return LayerChoice(cost_model, found, best_candidate(found))
        facts = {
            "gate": type(layer.gate).__name__,
            "experts": type(layer.experts).__name__,
            "shape": asdict(shape),
            "dtype": dtype,
            "grid": asdict(grid),
            "codecs": [*self._codecs],
            "degrees": self._degrees,
            "num_benchmarked": self._num_benchmarked,
            "rates": repr(self._rates),
        }
        return self._with_measured(cost_model, found, self._measured_of(name, facts, found))

    def _measure_rates(self, shape: LayerShape, dtype: torch.dtype) -> MoERates:
        facts = {"rates": asdict(shape), "grid": repr(self._leveled), "dtype": _name_of(dtype)}
        lossy = [codec for codec in self._codecs.values() if not codec.lossless]
        facts |= {"codecs": [codec.name for codec in lossy]}
        rates = self._kept.get(facts, MoERates.from_dict)
        if rates is None:
            rates = measure_moe(self._leveled, shape, dtype=dtype, device=self._ranks.device, codecs=lossy)
            rates = MoERates.from_dict(rates.to_dict())  # as a later run reads them: choices are kept by rates
            self._kept.put(facts, rates.to_dict())
        return rates

    def _sums(self, num_tokens: int, routing: Routing) -> tuple[float, Tensor]:
        """Sum the tokens and the rows of each expert over all ranks."""
        loads = routing.counts().double()
        total = torch.cat([loads, loads.new_tensor([float(num_tokens)])])
        torch_compat.all_reduce(total, self._world).wait()
        return float(total[-1]), total[:-1]

    def _measured_of(self, name: str, facts: dict[str, Any], found: Sequence[LayerCandidate]) -> Measured:
        """Return measurements of layers like this one: of an earlier layer, those kept on disk, or new ones."""
        kind = repr(facts)
        if kind not in self._measured:
            kept = self._kept.get(facts, Measured.from_json)
            if kept is None or replace(kept.chosen, degree=1) not in {one.plan for one in found}:
                kept = self._measure(name, found)
                self._kept.put(facts, kept.to_json())
            self._measured[kind] = kept
        return self._measured[kind]

    def _measure(self, name: str, found: Sequence[LayerCandidate]) -> Measured:
        """Compare the candidates predicted to be fastest in one piece, then the fastest of them in chunks."""
        limit = (1 + _BENCHMARKED_WITHIN) * found[0].seconds
        first = [one for one in found[: self._num_benchmarked] if one.seconds <= limit]
        plans = [one.plan for one in first[: _affordable(_WHOLE_SECONDS, found[0].seconds)]]
        whole = self._compared(name, plans, _WHOLE_SECONDS, _TOLERANCE)
        seconds = sum(whole.seconds[whole.chosen])
        degrees = self._degrees if self.grid.layout.joint > 1 else ()
        if len(degrees) < 2:
            return whole
        near = _best_of_paths(whole.seconds)
        cut = [replace(plan, degree=degree) for degree in degrees for plan in near]
        chunks = self._compared(
            name, cut[: max(2 * len(near), _affordable(_CHUNKS_SECONDS, seconds))], _CHUNKS_SECONDS, MIN_GAIN
        )
        chosen = chunks.chosen
        if chosen.degree == 1 or whole.chosen in chunks.undecided:
            chosen = whole.chosen
        pair = (replace(chosen, degree=1), chosen)
        shown = {plan: chunks.seconds[plan] for plan in pair if chosen != whole.chosen}
        return Measured({**whole.seconds, **shown}, chosen, {**whole.undecided, **chunks.undecided})

    def _compared(self, name: str, plans: Sequence[LayerPlan], budget_seconds: float, tolerance: float) -> Measured:
        """Run the layer by each of these plans, forward and backward, on the example's tokens."""
        record, layer = self._records[name], self.layers[name]
        assert record.input is not None, "kept by the example's forward"
        found = benchmark_candidates(
            layer,
            record.input,
            [partial(self.install, name, plan) for plan in plans],
            self._ranks,
            record.get().routing if isinstance(layer, ExpertsLayer) else None,
            budget_seconds=budget_seconds,
            tolerance=tolerance,
        )
        seconds = dict(zip(plans, found.seconds, strict=True))
        chosen = best_plan({plan: sum(both) for plan, both in seconds.items()})
        return Measured(seconds, chosen, {plans[case]: bounds for case, bounds in found.rivals.items()})

    def _with_measured(
        self, cost_model: CostModel, found: tuple[LayerCandidate, ...], measured: Measured
    ) -> LayerChoice:
        """Add the mean of what the predictions missed to all candidates."""
        run = [(one, measured.seconds[one.plan]) for one in found if one.plan in measured.seconds]
        missed = [fmean(both[way] - _routes(one)[way].seconds for one, both in run) for way in (0, 1)]
        found = tuple(one.plus(*missed) for one in found)
        best = next(one for one in found if one.plan == replace(measured.chosen, degree=1))
        if measured.chosen != best.plan:
            best = replace(best, plan=measured.chosen)
            found = (best, *found)
        return LayerChoice(cost_model, found, best, measured.seconds, measured.undecided, measured.is_kept)

    def _known_codes(self, dtype: str) -> list[str]:
        rates = self.rates
        known = {"raw", *rates.wire.codecs.get(dtype, {}), *rates.codecs.get(dtype, {})}
        return [name for name in self._codecs if name in known]

    def _with_levels(self) -> Grid:
        """Return the grid, with the nodes as a level if it has none and they could be one."""
        layout = self.grid.layout
        nodes = layout.ep // self._per_node if layout.ep % self._per_node == 0 else 1
        if layout.levels or layout.mp > 1 or layout.esp > 1 or nodes < 2 or self._per_node == 1:
            return self.grid
        levels = Levels.of_nodes(layout.ep, self._per_node).num_groups[1:]
        return Grid(layout.mp, layout.ep, layout.esp, levels=levels, device_type=self.grid.dense_mesh.device_type)


def autotune(
    model: nn.Module | Parallelized,
    mesh: Grid | DeviceMesh | None = None,
    example: Tensor | Callable[[], object] | None = None,
    *,
    rates: MoERates | None = None,
    codecs: Sequence[Codec] = _EXACT,
    degrees: Sequence[int] = (1, 2, 4, 8),
    num_benchmarked: int = 5,
    report: Callable[[str], object] | None = print,
    cache: bool = True,
) -> Autotuned:
    """Choose and install path, depth, code and degrees of every MoELayer of a model; all ranks call it together.

    Args:
        model: a MoELayer, a module with some, or what `parallelize` returned.
        mesh: the Grid that the layers are spread over, or its DeviceMesh; may be left out for `parallelize`'s result.
        example: the model's input, or a function that runs it; run once, without gradients, to see sizes and routing.
        rates: of the cluster; None: the file of `laconic profile --moe` (first rank's), else they are measured now.
        codecs: of rows; the default ones change no bit. Others, as Blockwise(BlockFormat("int8")), round values.
        degrees: numbers of chunks that the fastest candidate is run in; 1 alone where transformers checkpoints layers
            without use_reentrant.
        num_benchmarked: at most so many of the candidates predicted to be fastest are run on the example, until the
            fastest is clear or 10 s are over, and the fastest of those is taken, whole unless chunks turn out clearly
            faster; what the predictions missed in them is added to all. 0 trusts the predictions, and tries no chunks.
        report: called with the table of candidates, the choice and the reason, on the first rank; None reports nothing.
        cache: keep what was measured in the first rank's laconic/moe_autotune of $XDG_CACHE_HOME (~/.cache), and take
            what is kept there of layers of this shape, on this cluster, by this version.

    Raises:
        ConfigError: there are no layers, no grid or no example, or a layer has copies of experts or cannot be priced.
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
    copied = [name for name, layer in layers.items() if getattr(layer.placement, "copies", None) is not None]
    if copied:
        raise ConfigError(
            f"{copied[0]} has copies of experts, which run whole by the dispatcher that they were made with; drop them"
            " by copy_hot_experts(layers, grid, 0), or call autotune before them"
        )
    grid = Grid.from_mesh(grid) if isinstance(grid, DeviceMesh) else grid
    if not any(codec.name == "raw" for codec in codecs):
        codecs = (Raw(), *codecs)
    if _is_checkpointed(module):
        degrees = (1,)  # such layers run whole, see ChunkedSchedule
    tuned = Autotuned(layers, grid, _agreed(rates), codecs, degrees, num_benchmarked, cache)
    tuned.begin(example if not isinstance(example, Tensor) else partial(module, example))
    if report is not None and dist.get_rank() == 0:
        report(str(tuned))
    return tuned


def _is_checkpointed(model: nn.Module) -> bool:
    """Return whether transformers recomputes layers of `model` in backward by non-reentrant checkpoints."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if not getattr(function, "keywords", {}).get("use_reentrant", False):
                return True
    return False


def _agreed(rates: MoERates | None) -> MoERates | None:
    """Return the first rank's rates, given or in its file."""
    world = dist.group.WORLD
    assert world is not None, "there is a grid"
    stored = None
    if dist.get_rank() == 0:
        path = default_moe_path()
        found = rates if rates is not None else MoERates.load(path) if path.exists() else None
        stored = None if found is None else found.to_dict()
    stored = first_answer(stored, world)
    return None if stored is None else MoERates.from_dict(stored)


def _best_of_paths(measured: Mapping[LayerPlan, tuple[float, float]]) -> list[LayerPlan]:
    """Return the best plan of each path that is near the fastest of all."""
    seconds = {plan: sum(both) for plan, both in measured.items()}
    limit = (1 + _BENCHMARKED_WITHIN) * min(seconds.values())
    near = dict.fromkeys(plan.path for plan in seconds if seconds[plan] <= limit)
    return [best_plan({plan: taken for plan, taken in seconds.items() if plan.path == path}) for path in near]


def _affordable(budget_seconds: float, seconds: float) -> int:
    """How many candidates of so many seconds the budget has enough rounds for; two at least."""
    return max(2, int(budget_seconds / max(_LEAST_ROUNDS * seconds, 1e-9)))


def _routes(candidate: LayerCandidate) -> tuple[Route, Route]:
    return candidate.forward, candidate.backward


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"
