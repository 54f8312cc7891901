"""The integer program of one rank: which choices are cheapest under a budget of bytes.

Layers of one stage are alike, or of two kinds (with and without a sliding window), so the program counts instead of
naming: how many layers of a kind keep their gate and up in five bits, how many run again in backward. Solved by HiGHS
through SciPy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from laconic.cost.memory.job import Job, PlannedStage, recomputed_nbytes
from laconic.cost.memory.peak import PeakPoint, peak_points
from laconic.cost.memory.predict import predict
from laconic.cost.memory.saved_tensors import EXACT, RECOMPUTE, Choice, Unit
from laconic.errors import PlanError

_LAYER_INPUT = Choice("int8")
"""How a decoder layer that runs again in backward keeps its input."""

_SCALE = 2.0**20
"""Bytes are handed to the solver in MiB, so that its tolerances are those of numbers of moderate size."""


@dataclass(frozen=True)
class _Option:
    """One choice for a group, with its bytes per micro-batch in flight and its cost."""

    choice: Choice
    nbytes: int
    cost: float


@dataclass(frozen=True, eq=False)
class _Group:
    """Alike units of one stage and one kind of layer, of which each gets one of the options."""

    stage: int
    kind: int | None
    units: tuple[Unit, ...]
    options: tuple[_Option, ...]


@dataclass(frozen=True)
class _Rule:
    """A linear constraint: low <= sum of terms <= high."""

    terms: Mapping[Hashable, float]
    low: float
    high: float


# Columns beside those of (group, option): layers of a stage and kind that run again, whether any of these or any packed
# attention holds its arguments, the bytes of a stage's arguments, whether any layer runs again, whether any
# feed-forward block is packed, and the peak; bytes in _SCALE bytes.
_Again = tuple[str, int, int | None]
_ANY_AGAIN, _ANY_MLP, _PEAK = "any layer runs again", "any feed-forward block is packed", "peak"
_ANY_REBUILT = "any feed-forward block is offloaded or recomputed"


def _one_if_any(flag: Hashable, columns: Mapping[Any, float]) -> _Rule:
    """A column of 0 and 1 has to be 1 if any of `columns`, given with their upper bounds, is not 0."""
    return _Rule({flag: -sum(columns.values())} | dict.fromkeys(columns, 1), -inf, 0)


def _packed(groups: Iterable[_Group]) -> dict[tuple[_Group, _Option], float]:
    return {(group, option): len(group.units) for group in groups for option in group.options if option.choice != EXACT}


def _again(stage: PlannedStage, kind: int | None) -> _Again:
    return ("layers that run again", stage.index, kind)


def _holds(stage: PlannedStage, kind: int | None) -> _Again:
    return ("attention's arguments are held", stage.index, kind)


def _arguments(stage: PlannedStage) -> tuple[str, int]:
    return ("bytes of attention's arguments", stage.index)


def _kinds(stage: PlannedStage) -> dict[int | None, list[int]]:
    kinds: dict[int | None, list[int]] = {}
    for layer in stage.layers:
        kinds.setdefault(stage.job.model.kinds[layer], []).append(layer)
    return kinds


class IntegerProgram:
    """The choices of a rank that holds `stages`, as a mixed-integer linear program.

    Args:
        states: micro-batches in flight by stage, at the maximal states of its schedule.
        words: allowed choices, see `policy.CHOICES`.
        cost: of a choice for one unit.
        layer_cost: of one decoder layer that runs again.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        stages: Sequence[PlannedStage],
        states: Sequence[Mapping[int, int]],
        words: Sequence[str],
        cost: Callable[[Unit, Choice], float],
        layer_cost: float,
    ) -> None:
        self._job, self._stages, self._states = job, stages, states
        self._groups = [group for stage in stages for group in _groups(stage, words, cost)]
        self._layer_cost = layer_cost
        self._layers_may_run_again = "recompute" in words and job.model.is_stack
        packed = {unit.name: Choice("int8") for stage in stages for unit in stage.units()}
        memory = predict(job, packed).ranks[rank]
        self._persistent = memory.parameters_nbytes + memory.optimizer_nbytes + sum(memory.buffers_nbytes.values())
        self._fixed = {stage.index: sum(stage.fixed_nbytes().values()) for stage in stages}
        self._loss = {stage.index: stage.fixed_nbytes().get("logits", 0) for stage in stages}
        self._rules = [*self._every_unit_is_decided(), *self._what_is_used_anywhere(), *self._gate_and_up_can_be_made()]
        self._rules += self._the_peak_is_never_exceeded()

    def solve(self, budget_nbytes: int) -> tuple[dict[str, Choice], dict[int, Choice]] | None:
        """The cheapest choices by unit, and layers that run again, within the budget; None if no choice fits."""
        cost: dict[Hashable, float] = {
            _again(stage, kind): self._layer_cost for stage in self._stages for kind in _kinds(stage)
        }
        columns = [(group, option) for group in self._groups for option in group.options]
        for index, column in enumerate(columns):
            # Equal costs are settled by order, so that the same input always gives the same plan.
            cost[column] = column[1].cost + 1e-9 * index / len(columns)
        values = self._run(cost, budget_nbytes / _SCALE)
        return None if values is None else self._named(values)

    def smallest_budget_nbytes(self) -> int:
        """The smallest budget that `solve` can meet."""
        values = self._run({_PEAK: 1.0}, inf)
        if values is None:
            raise PlanError("no choice is left for some unit; allow one of 16 and 8, which the head can have")
        return round(values[_PEAK] * _SCALE)

    def _every_unit_is_decided(self) -> Iterable[_Rule]:
        stage_of = {stage.index: stage for stage in self._stages}
        for group in self._groups:
            terms: dict[Hashable, float] = {(group, option): 1 for option in group.options}
            if group.units[0].layer is not None:
                terms[_again(stage_of[group.stage], group.kind)] = 1
            yield _Rule(terms, len(group.units), len(group.units))

    def _what_is_used_anywhere(self) -> Iterable[_Rule]:
        """Columns of 0 and 1 that have to be 1 as soon as something is chosen once."""
        again: dict[Hashable, float] = {
            _again(stage, kind): len(layers) for stage in self._stages for kind, layers in _kinds(stage).items()
        }
        yield _one_if_any(_ANY_AGAIN, again)
        feed_forward = [group for group in self._groups if group.units[0].rebuilds]
        packed = _packed(feed_forward)
        yield _one_if_any(_ANY_MLP, packed)
        yield _Rule({_ANY_MLP: 1} | dict.fromkeys(packed, -1), -inf, 0)  # and only then, as it may lower a peak
        rebuilt = {key: most for key, most in packed.items() if key[1].choice.offload or key[1].choice.recompute}
        yield _one_if_any(_ANY_REBUILT, rebuilt)
        for stage in self._stages:
            yield from self._arguments_are_held(stage)

    def _arguments_are_held(self, stage: PlannedStage) -> Iterable[_Rule]:
        """Attention that is packed and layers that run again hold positions and masks: those of the largest kind."""
        job = self._job
        for kind, layers in _kinds(stage).items():
            attention = [
                group
                for group in self._groups
                if (group.stage, group.kind, group.units[0].kind) == (stage.index, kind, "attention")
            ]
            yield _one_if_any(_holds(stage, kind), _packed(attention) | {_again(stage, kind): len(layers)})
            # Each kind has its own: those of all kinds count as soon as one is held.
            nbytes = job.arguments_nbytes(stage.layers)
            yield _Rule({_holds(stage, kind): nbytes / _SCALE, _arguments(stage): -1}, -inf, 0)

    def _gate_and_up_can_be_made(self) -> Iterable[_Rule]:
        """Gate and up are recomputed from the packed input of their norm: no more of them than of packed inputs."""
        for group in self._groups:
            again: dict[Hashable, float] = {(group, o): 1 for o in group.options if o.choice.recompute}
            packed = {
                (other, option): -1
                for other in self._groups
                for option in other.options
                if (other.stage, other.kind) == (group.stage, group.kind)
                and _feeds(other, group)
                and option.choice != EXACT
            }
            if again:
                yield _Rule(again | packed, -inf, 0)

    def _the_peak_is_never_exceeded(self) -> Iterable[_Rule]:
        tp = self._job.layout.tensor_parallel
        layer_input = recomputed_nbytes(self._job, _LAYER_INPUT)
        for state in self._states:
            for point in self._peak_points(state):
                nbytes: dict[Hashable, float] = {}
                for group in self._groups:
                    for option in group.options:
                        nbytes[group, option] = self._num_in_flight(group, state, point) * option.nbytes
                        if point.casts and option.choice == EXACT:
                            nbytes[group, option] -= group.units[0].weight_nbytes
                for stage in self._stages:
                    nbytes |= {_again(stage, kind): state[stage.index] * layer_input for kind in _kinds(stage)}
                    nbytes[_arguments(stage)] = state[stage.index] * _SCALE
                nbytes[_ANY_AGAIN] = point.again_nbytes
                nbytes[_ANY_MLP] = point.packed_nbytes
                nbytes[_ANY_REBUILT] = point.rebuilt_nbytes
                fixed = point.workspace_nbytes + sum(n * self._fixed[index] for index, n in state.items())
                fixed -= 0 if point.loss_is_kept else self._loss[point.stage]
                terms: dict[Hashable, float] = {key: value / tp / _SCALE for key, value in nbytes.items()}
                known = self._persistent + point.gradients_nbytes + fixed / tp
                yield _Rule(terms | {_PEAK: -1}, -inf, -known / _SCALE)

    def _peak_points(self, state: Mapping[int, int]) -> list[PeakPoint]:
        return [point for point in peak_points(self._job, self._stages) if state[point.stage] > 0]

    def _num_in_flight(self, group: _Group, state: Mapping[int, int], point: PeakPoint) -> float:
        count = state[group.stage]
        if group.stage != point.stage:
            return count
        if group.units[0].layer is None:
            return count if point.loss_is_kept else count - 1
        if point.only_first_layer:
            # Of the current micro-batch one layer is left, which keeps at most the average.
            return count - 1 + 1 / next(len(stage.layers) for stage in self._stages if stage.index == group.stage)
        return count

    def _run(self, cost: Mapping[Hashable, float], budget: float) -> dict[Hashable, float] | None:
        """Values of all columns at the least cost, None if the rules cannot be met."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError as error:
            raise PlanError(
                f"choosing under a budget needs SciPy ({error}): pip install 'laconic[plan]'; policies do without"
            ) from error
        upper: dict[Hashable, float] = {(group, o): len(group.units) for group in self._groups for o in group.options}
        for stage in self._stages:
            for kind, layers in _kinds(stage).items():
                upper[_again(stage, kind)] = len(layers) if self._layers_may_run_again else 0
                upper[_holds(stage, kind)] = 1
            upper[_arguments(stage)] = inf
        upper |= {_ANY_AGAIN: 1, _ANY_MLP: 1, _ANY_REBUILT: 1, _PEAK: budget}
        at = {key: index for index, key in enumerate(upper)}
        matrix = np.zeros((len(self._rules), len(at)))
        for row, rule in zip(matrix, self._rules, strict=True):
            for key, value in rule.terms.items():
                row[at[key]] = value
        integrality = np.ones(len(at))
        integrality[[at[_PEAK], *(at[_arguments(stage)] for stage in self._stages)]] = 0
        result = milp(
            [cost.get(key, 0.0) for key in at],
            constraints=LinearConstraint(matrix, [rule.low for rule in self._rules], [r.high for r in self._rules]),
            bounds=Bounds(np.zeros(len(at)), np.array(list(upper.values()))),
            integrality=integrality,
            options={"mip_rel_gap": 0.0},
        )
        return None if result.x is None else {key: float(result.x[index]) for key, index in at.items()}

    def _named(self, values: Mapping[Hashable, float]) -> tuple[dict[str, Choice], dict[int, Choice]]:
        """From counts to layers: those that run again first, then fewest bytes first."""
        recomputed = {
            layer: _LAYER_INPUT
            for stage in self._stages
            for kind, layers in _kinds(stage).items()
            for layer in layers[: round(values[_again(stage, kind)])]
        }
        choices: dict[str, Choice] = {}
        for group in self._groups:
            units = [unit for unit in group.units if unit.layer not in recomputed]
            by_nbytes = sorted(group.options, key=lambda option: option.nbytes)
            ordered = [option.choice for option in by_nbytes for _ in range(round(values[group, option]))]
            choices |= {unit.name: choice for unit, choice in zip(units, ordered, strict=True)}
        for stage in self._stages:
            choices |= _output_projections(stage, choices, recomputed)
        return choices, recomputed


def _groups(stage: PlannedStage, words: Sequence[str], cost: Callable[[Unit, Choice], float]) -> list[_Group]:
    shape = stage.job.model
    alike: dict[tuple[str, int | None], list[Unit]] = {}
    for unit in stage.units():
        if unit.num_elements is not None:
            name = unit.name if unit.layer is None else unit.name.removeprefix(f"{shape.names[unit.layer]}.")
            alike.setdefault((name, None if unit.layer is None else shape.kinds[unit.layer]), []).append(unit)
    groups = []
    for (_, kind), units in alike.items():
        first = units[0]
        options = [_Option(choice, first.nbytes(choice), cost(first, choice)) for choice in _choices(first, words)]
        groups.append(_Group(stage.index, kind, tuple(units), tuple(options)))
    return groups


def _choices(unit: Unit, words: Sequence[str]) -> list[Choice]:
    found = [Choice.from_bits(int(w)) for w in words if w.isdigit() and int(w) >= unit.minimum_bits]
    if "recompute" in words and unit.kind == "mlp":
        found.append(RECOMPUTE)
    if "offload" in words:
        found += [Choice(c.code, c.block_size, c.scale_dtype, offload=True) for c in found if c.code is not None]
    return found


def _feeds(group: _Group, mlp: _Group) -> bool:
    """Whether a group keeps what the first linears of feed-forward blocks read."""
    return group is not mlp and any(site.startswith(f"{mlp.units[0].name}.") for site in group.units[0].sites)


def _output_projections(
    stage: PlannedStage, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
) -> dict[str, Choice]:
    """Projections behind attention that read what it holds or makes again: a format of theirs packs nothing."""
    found = {}
    for unit in stage.units():
        if unit.num_elements is None and unit.rebuilt_with is not None and unit.layer not in recomputed:
            attention = choices.get(unit.rebuilt_with, EXACT)
            found[unit.name] = Choice("nf4") if attention == EXACT else Choice(attention.code or "nf4")
    return found
