"""Chooses what every unit keeps, under a budget of bytes per rank, by integer programming.

Layers of one stage are alike, so the program counts instead of naming: how many layers of a stage keep their gate and
up in five bits, how many layers run again in backward. A choice costs the squared error that it adds to the gradient
and the time that it adds to the step; both are weighed in one sum. Ranks do not depend on each other, so each is a
program of its own, solved by HiGHS through SciPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from laconic.cost.job import Job, Stage, kept_nbytes, recomputed_nbytes
from laconic.cost.memory import Prediction, predict
from laconic.cost.moments import Moment, moments_of
from laconic.cost.rates import Hardware, Sensitivity, layer_forward_flops, pack_seconds, recompute_seconds
from laconic.cost.units import EXACT, RECOMPUTE, Choice, Unit
from laconic.errors import PlanError

__all__ = ["CHOICES", "Chosen", "Weights", "choose", "by_bits", "agoq"]

CHOICES = ("16", "8", "6", "5", "4", "recompute", "offload")
"""What may be chosen, by the word used on the command line."""

LAYER_INPUT = Choice("int8")
"""How a decoder layer that runs again in backward keeps its input."""

_ERROR_UNIT = 0.05
_TIME_UNIT = 0.02


@dataclass(frozen=True)
class Weights:
    """What the planner minimizes: (relative gradient error / 0.05)^2 + time * (share of the step's time / 0.02).

    So with a time weight of 1, two per cent of the step are worth a gradient that is off by five per cent.
    """

    time: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.time < float("inf"):
            raise PlanError(f"time weight is {self.time!r}, but it must be finite and not negative")


@dataclass(frozen=True)
class Chosen:
    """An assignment and what it means.

    choices: by name of the unit; recomputed: layers that run again in backward, with the format of their input.
    relative_error: predicted norm of the gradient's error over that of the gradient. time_share: predicted seconds
    added over seconds of the layers' forward and backward, in the slowest stage. policy: who decided.
    """

    choices: Mapping[str, Choice]
    recomputed: Mapping[int, Choice]
    relative_error: float
    time_share: float
    prediction: Prediction
    policy: str


@dataclass(frozen=True)
class _Option:
    """One choice for a group of alike units of a stage, with its bytes per waiting micro-batch and its cost."""

    choice: Choice
    nbytes: int
    cost: float


@dataclass(frozen=True)
class _Group:
    """Alike units of one stage, of which each gets one of the options."""

    stage: int
    units: tuple[Unit, ...]
    options: tuple[_Option, ...]


def choose(
    job: Job,
    budget_nbytes: int,
    *,
    allowed: Iterable[str] = CHOICES,
    sensitivity: Sensitivity | None = None,
    hardware: Hardware | None = None,
    weights: Weights | None = None,
) -> Chosen:
    """The cheapest choices with which no rank exceeds its budget.

    Args:
        job: what runs.
        budget_nbytes: of each rank's device.
        allowed: words of `CHOICES`.
        sensitivity, hardware: what choices cost; None takes what is shipped, for an H100.
        weights: of error against time.

    Raises:
        PlanError: nothing meets the budget (the message says the smallest that can be met), a word is not known, or
            SciPy is missing.
    """
    words = list(allowed)
    for word in words:
        if word not in CHOICES:
            raise PlanError(f"choices name {word!r}, but they must be among {', '.join(CHOICES)}")
    if not set(words) - {"offload"}:
        raise PlanError("choices are empty, but at least one of 16, 8, 6, 5, 4 and recompute is needed")
    costs = _Costs(job, sensitivity or Sensitivity.default(), hardware or Hardware.named("h100"), weights or Weights())
    stages = job.stages()
    schedule = job.layout.make_schedule()
    choices: dict[str, Choice] = {}
    recomputed: dict[int, Choice] = {}
    smallest = 0
    for rank in range(schedule.num_ranks):
        own = [stages[index] for index in schedule.stages_of(rank)]
        program = _Program(job, own, schedule.peak_states(rank), costs, words, rank)
        found = program.solve(budget_nbytes)
        if found is None:
            smallest = max(smallest, program.smallest_budget_nbytes())
            continue
        choices |= found[0]
        recomputed |= found[1]
    if smallest:
        raise PlanError(
            f"the budget is {budget_nbytes:,} bytes per device, but the least that these choices can do with is "
            f"{smallest:,} bytes ({smallest / 1e9:.2f} GB) on the fullest rank; raise the budget, allow more choices, "
            f"shorten the micro-batch, shard parameters, or use 8-bit gradients and optimizer"
        )
    return describe(job, choices, recomputed, "budget", costs)


def by_bits(job: Job, bits_of_stage: Sequence[int], attention: Choice = EXACT, policy: str = "uniform") -> Chosen:
    """The same format in a whole stage, attention apart, at least 8 bits for the head. Policies are made of it."""
    choices = {}
    for stage in job.stages():
        for unit in stage.units():
            choice = Choice.from_bits(max(bits_of_stage[stage.index], unit.minimum_bits))
            choices[unit.name] = attention if unit.kind == "attention" else choice
    return describe(job, choices, {}, policy)


def agoq(job: Job, attention: Choice = EXACT) -> Chosen:
    """The paper's rule: 4 bits on the rank with the most micro-batches in flight, more where fewer wait.

    Rank r gets 4 N_max / N_r bits (Eq. 22, with N counted from the schedule, as Eq. 21 is printed with its index
    reversed), rounded to the nearest of 4, 5, 6 and 8, down if two are as near. Four ranks of interleaved 1F1B with two
    chunks each and eight micro-batches give 4, 4.9, 6.3, 8.8, so 4, 5, 6, 8. Attention is exact unless said otherwise.
    """
    schedule = job.layout.make_schedule()
    in_flight = schedule.peak_in_flight()
    rank_bits = [min((4, 5, 6, 8), key=lambda b: (abs(b - 4 * max(in_flight) / n), b)) for n in in_flight]
    bits = [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for index in schedule.stages_of(rank):
            bits[index] = rank_bits[rank]
    return by_bits(job, bits, attention, policy="agoq")


def describe(
    job: Job,
    choices: Mapping[str, Choice],
    recomputed: Mapping[int, Choice],
    policy: str,
    costs: _Costs | None = None,
) -> Chosen:
    """An assignment with its prediction and its costs."""
    costs = costs or _Costs(job, Sensitivity.default(), Hardware.named("h100"), Weights())
    squared_error, shares = 0.0, []
    for stage in job.stages():
        seconds = sum(costs.layer_seconds for layer in stage.layers if layer in recomputed)
        for unit in stage.units():
            if unit.layer in recomputed:
                continue
            choice = choices.get(unit.name, EXACT)
            squared_error += costs.squared_error(unit, choice)
            seconds += costs.seconds(unit, choice)
        shares.append(seconds / (3 * len(stage.layers) * costs.layer_seconds))
    return Chosen(
        choices=dict(choices),
        recomputed=dict(recomputed),
        relative_error=squared_error**0.5,
        time_share=max(shares),
        prediction=predict(job, choices, recomputed),
        policy=policy,
    )


class _Costs:
    """Error and time of every choice, for one job."""

    def __init__(self, job: Job, sensitivity: Sensitivity, hardware: Hardware, weights: Weights) -> None:
        self._job, self._sensitivity, self._hardware, self._weights = job, sensitivity, hardware, weights
        self._num_units: dict[str, int] = {}
        for stage in job.stages():
            for unit in stage.units():
                self._num_units[unit.kind] = self._num_units.get(unit.kind, 0) + 1
        self.layer_seconds = recompute_seconds(job, hardware)
        # A backward takes twice its forward.
        self.step_seconds = 3 * job.shape.num_layers * layer_forward_flops(job) / hardware.matmul_flops_per_second

    def squared_error(self, unit: Unit, choice: Choice) -> float:
        return self._sensitivity.squared_error(unit, choice, self._num_units[unit.kind])

    def seconds(self, unit: Unit, choice: Choice) -> float:
        measured = self._sensitivity.time_share(unit, choice, self._num_units[unit.kind])
        if measured is not None:
            return measured * self.step_seconds
        return pack_seconds(self._job, self._hardware, unit, choice)

    def of(self, unit: Unit, choice: Choice) -> float:
        """What the solver minimizes, for one unit."""
        return self.squared_error(unit, choice) / _ERROR_UNIT**2 + self._time(self.seconds(unit, choice))

    def of_recomputed_layer(self) -> float:
        """What the solver minimizes, for one layer that runs again."""
        return self._time(self.layer_seconds)

    def _time(self, seconds: float) -> float:
        return self._weights.time * seconds / self.step_seconds / _TIME_UNIT


class _Program:
    """The integer program of one rank."""

    def __init__(
        self,
        job: Job,
        stages: Sequence[Stage],
        states: Sequence[Mapping[int, int]],
        costs: _Costs,
        words: Sequence[str],
        rank: int,
    ) -> None:
        self._job, self._stages, self._states = job, stages, states
        self._groups = [group for stage in stages for group in _groups(stage, costs, words)]
        self._layer_cost = costs.of_recomputed_layer()
        self._layers_may_run_again = "recompute" in words
        packed = {u.name: Choice("int8") for stage in job.stages() for u in stage.units()}
        plain = predict(job, packed).ranks[rank]
        self._lasting = plain.parameters_nbytes + plain.optimizer_nbytes + sum(plain.buffers_nbytes.values())
        self._moments = moments_of(job, stages)
        # What a stage keeps whatever is chosen, and what it keeps as soon as attention is packed in one of its layers.
        self._fixed = {stage.index: _shared_nbytes(stage, {}) for stage in stages}
        self._arguments = {stage.index: _shared_nbytes(stage, packed) - self._fixed[stage.index] for stage in stages}

        self._loss_nbytes = {stage.index: stage.fixed_nbytes().get("logits", 0) for stage in stages}

    def solve(self, budget_nbytes: int) -> tuple[dict[str, Choice], dict[int, Choice]] | None:
        """The cheapest choices within the budget; None if there are none."""
        values = self._run(budget_nbytes)
        return None if values is None else self._named(values)

    def smallest_budget_nbytes(self) -> int:
        """The least with which `solve` finds something."""
        values = self._run(None)
        if values is None:
            raise PlanError("no choice is left for some unit; allow one of 16 and 8, which the head can have")
        return -(-round(values[-1] * _SCALE) // 1)

    def _run(self, budget_nbytes: int | None) -> list[float] | None:
        """Solves for cost under a budget, or, without one, for the smallest budget (the last value, scaled)."""
        try:
            import numpy as np
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError as error:
            raise PlanError("choosing under a budget needs SciPy; pip install laconic[plan]") from error

        # 1. Columns: one per group and option; per stage one for layers that run again and one that says whether any
        #    attention is packed; one each that says whether any layer runs again, and whether any feed-forward block is
        #    packed; and the budget itself.
        columns = [(group, option) for group in self._groups for option in group.options]
        num = len(columns) + 2 * len(self._stages) + 3
        any_again, any_mlp, peak = num - 3, num - 2, num - 1
        again = {stage.index: len(columns) + i for i, stage in enumerate(self._stages)}
        packs = {stage.index: len(columns) + len(self._stages) + i for i, stage in enumerate(self._stages)}
        cost, upper = np.zeros(num), np.zeros(num)
        for index, (group, option) in enumerate(columns):
            # Equal costs are settled by order, so that the same input always gives the same plan.
            cost[index] = option.cost + 1e-9 * index / num
            upper[index] = len(group.units)
        for stage in self._stages:
            cost[again[stage.index]] = self._layer_cost
            upper[again[stage.index]] = len(stage.layers) if self._layers_may_run_again else 0
            upper[packs[stage.index]] = 1
        upper[any_again], upper[any_mlp], upper[peak] = 1, 1, np.inf

        # 2. Every unit has one choice, or its layer runs again.
        rows: list[np.ndarray] = []
        low: list[float] = []
        high: list[float] = []
        for group in self._groups:
            row = np.zeros(num)
            row[[index for index, (other, _) in enumerate(columns) if other is group]] = 1
            if group.units[0].layer is not None:
                row[again[group.stage]] = 1
            rows.append(row)
            low.append(len(group.units))
            high.append(len(group.units))
        row = np.zeros(num)
        row[list(again.values())] = 1
        row[any_again] = -sum(len(stage.layers) for stage in self._stages)
        rows.append(row)
        low.append(-np.inf)
        high.append(0)

        for stage in self._stages:
            row = np.zeros(num)
            for index, (group, option) in enumerate(columns):
                if group.stage == stage.index and group.units[0].kind == "attention" and option.choice != EXACT:
                    row[index] = 1
            row[packs[stage.index]] = -len(stage.layers)
            rows.append(row)
            low.append(-np.inf)
            high.append(0)

        row = np.zeros(num)
        for index, (group, option) in enumerate(columns):
            if group.units[0].kind == "mlp" and option.choice != EXACT:
                row[index] = 1
        row[any_mlp] = -sum(len(stage.layers) for stage in self._stages)
        rows.append(row)
        low.append(-np.inf)
        high.append(0)

        # 3. Gate and up are made again from the packed input of their norm.
        for group in self._groups:
            if any(option.choice.recompute for option in group.options):
                row = np.zeros(num)
                for index, (other, option) in enumerate(columns):
                    if other is group and option.choice.recompute:
                        row[index] = 1
                    elif other.stage == group.stage and _feeds(other, group) and option.choice != EXACT:
                        row[index] = -1
                rows.append(row)
                low.append(-np.inf)
                high.append(0)

        # 4. At none of the fullest moments is the budget exceeded.
        tp = self._job.layout.tensor_parallel
        for state in self._states:
            for moment in self._moments:
                if state[moment.stage] == 0:
                    continue
                row = np.zeros(num)
                for index, (group, option) in enumerate(columns):
                    row[index] = _waiting(group, state, moment, self._stages) * option.nbytes / tp / _SCALE
                    if moment.casts and option.choice == EXACT:
                        row[index] -= group.units[0].weight_nbytes / tp / _SCALE
                for stage in self._stages:
                    count = state[stage.index]
                    row[again[stage.index]] = count * recomputed_nbytes(self._job, LAYER_INPUT) / tp / _SCALE
                    row[packs[stage.index]] = count * self._arguments[stage.index] / tp / _SCALE
                row[any_again] = moment.again_nbytes / tp / _SCALE
                row[any_mlp] = moment.packed_nbytes / tp / _SCALE
                row[peak] = -1
                rows.append(row)
                fixed = sum(count * self._fixed[index] for index, count in state.items())
                if not moment.loss_is_kept:
                    fixed -= self._loss_nbytes[moment.stage]
                fixed += moment.workspace_nbytes
                low.append(-np.inf)
                high.append(-(self._lasting + moment.gradients_nbytes + fixed / tp) / _SCALE)

        integrality = np.ones(num)
        integrality[peak] = 0
        if budget_nbytes is None:
            cost = np.zeros(num)
            cost[peak] = 1.0
        else:
            upper[peak] = budget_nbytes / _SCALE
        result = milp(
            cost,
            constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
            bounds=Bounds(np.zeros(num), upper),
            integrality=integrality,
            options={"mip_rel_gap": 0.0},
        )
        return None if result.x is None else [float(value) for value in result.x]

    def _named(self, values: Sequence[float]) -> tuple[dict[str, Choice], dict[int, Choice]]:
        """From counts to layers: those that run again first, then fewest bytes first."""
        columns = [(group, option) for group in self._groups for option in group.options]
        counts = [round(value) for value in values]
        recomputed: dict[int, Choice] = {}
        for index, stage in enumerate(self._stages):
            for layer in stage.layers[: counts[len(columns) + index]]:
                recomputed[layer] = LAYER_INPUT
        choices: dict[str, Choice] = {}
        for group in self._groups:
            units = [unit for unit in group.units if unit.layer not in recomputed]
            picked = [(o, counts[i]) for i, (g, o) in enumerate(columns) if g is group and counts[i] > 0]
            ordered = [o.choice for o, n in sorted(picked, key=lambda pair: pair[0].nbytes) for _ in range(n)]
            choices |= {unit.name: choice for unit, choice in zip(units, ordered, strict=True)}
        for stage in self._stages:
            choices |= _output_projections(stage, choices, recomputed)
        return choices, recomputed


_SCALE = 2.0**20
"""Bytes are handed to the solver in MiB, so that its tolerances are those of numbers of moderate size."""


def _waiting(group: _Group, state: Mapping[int, int], moment: Moment, stages: Sequence[Stage]) -> float:
    """How many micro-batches of a unit wait at a moment."""
    count = float(state[group.stage])
    if group.stage == moment.stage:
        layer = group.units[0].layer
        if layer is None:
            return count if moment.loss_is_kept else count - 1
        if moment.only_first_layer:
            # Of the current micro-batch one layer is left, which keeps at most the average.
            num_layers = next(len(stage.layers) for stage in stages if stage.index == group.stage)
            return count - 1 + 1 / num_layers
    return count


def _shared_nbytes(stage: Stage, choices: Mapping[str, Choice]) -> int:
    """What a waiting micro-batch keeps in a stage that belongs to no unit."""
    return sum(nbytes for name, (_, nbytes, _) in kept_nbytes(stage, choices, {}).items() if name.startswith("("))


def _groups(stage: Stage, costs: _Costs, words: Sequence[str]) -> list[_Group]:
    """Alike units of a stage with what may be chosen for them."""
    alike: dict[str, list[Unit]] = {}
    for unit in stage.units():
        if unit.rows:
            key = unit.name.replace(f"layers.{unit.layer}.", "")
            alike.setdefault(key, []).append(unit)
    groups = []
    for units in alike.values():
        first = units[0]
        options = [_Option(c, first.nbytes(c), costs.of(first, c)) for c in _choices(first, words)]
        groups.append(_Group(stage.index, tuple(units), tuple(options)))
    return groups


def _feeds(group: _Group, mlp: _Group) -> bool:
    """Whether a group keeps what the first linears of feed-forward blocks read."""
    return any(site.startswith(f"{mlp.units[0].name}.") for site in group.units[0].sites) and group is not mlp


def _choices(unit: Unit, words: Sequence[str]) -> list[Choice]:
    found = [Choice.from_bits(int(w)) for w in words if w.isdigit() and int(w) >= unit.minimum_bits]
    if "recompute" in words and unit.kind == "mlp":
        found.append(RECOMPUTE)
    if "offload" in words:
        found += [Choice(c.code, c.block_size, c.scale_dtype, offload=True) for c in found if c.code is not None]
    return found


def _output_projections(
    stage: Stage, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice]
) -> dict[str, Choice]:
    """Projections behind attention that read what it holds or makes again: a format of theirs packs nothing."""
    found = {}
    for unit in stage.units():
        if not unit.rows and unit.rebuilt_with is not None and unit.layer not in recomputed:
            attention = choices.get(unit.rebuilt_with, EXACT)
            found[unit.name] = Choice("nf4") if attention == EXACT else Choice(attention.code or "nf4")
    return found
