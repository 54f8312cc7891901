"""Chooses how every unit is saved: the cheapest choices under a budget of bytes per rank, or a policy.

A choice costs the squared error that it adds to the gradient and the time that it adds to the step, in one weighted
sum. Ranks do not depend on each other, so each is an integer program of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from laconic.cost.hardware.compute import Hardware, Sensitivity, layer_forward_flops, pack_seconds, recompute_seconds
from laconic.cost.memory.job import Job
from laconic.cost.memory.predict import Prediction, predict
from laconic.cost.memory.saved_tensors import EXACT, Choice, Unit
from laconic.cost.planner.milp import IntegerProgram
from laconic.cost.sizes import format_nbytes
from laconic.errors import PlanError

CHOICES = ("16", "8", "6", "5", "4", "recompute", "offload")
"""Choices by their word on the command line, those that are allowed if nothing is said."""

ALL_CHOICES = (*CHOICES, "2")
"""Two bits are taken only by who names them."""

_ERROR_UNIT = 0.05
_TIME_UNIT = 0.02


@dataclass(frozen=True)
class Weights:
    """The planner's objective: (relative gradient error / 0.05)^2 + time * (share of the step's time / 0.02).

    So with a time weight of 1, two per cent of the step are worth a gradient that is off by five per cent.
    """

    time: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.time < float("inf"):
            raise PlanError(f"time weight is {self.time!r}, but it must be finite and not negative")


@dataclass(frozen=True)
class Chosen:
    """An assignment of choices with its predicted memory, error and time.

    Attributes:
        choices: by name of the unit.
        recomputed: layers that run again in backward, with the format of their saved input.
        relative_error: predicted norm of the gradient's error over that of the gradient.
        time_share: predicted seconds added over seconds of the layers' forward and backward, in the slowest stage.
        prediction: bytes of every rank.
        policy: who decided.
    """

    choices: Mapping[str, Choice]
    recomputed: Mapping[int, Choice]
    relative_error: float
    time_share: float
    prediction: Prediction
    policy: str


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
        budget_nbytes: of each rank's device.
        allowed: words of `ALL_CHOICES`.
        sensitivity, hardware: cost of choices; None takes the shipped tables, for an H100.
        weights: of error against time.

    Raises:
        BudgetError: nothing meets the budget; the message says the smallest that can be met.
        PlanError: a word is not known, or SciPy is missing.
    """
    words = [word for word in allowed if word != "offload" or job.settings.device != "cpu"]
    for word in words:
        if word not in ALL_CHOICES:
            raise PlanError(f"choices name {word!r}, but they must be among {', '.join(ALL_CHOICES)}")
    if not set(words) - {"offload"}:
        raise PlanError("choices are empty, but at least one of 16, 8, 6, 5, 4, 2 and recompute is needed")
    costs = _Costs(job, sensitivity or Sensitivity.default(), hardware or Hardware.named("h100"), weights or Weights())
    if job.model.shares:
        return _cheapest_uniform(job, budget_nbytes, words, costs)
    stages = job.stages()
    schedule = job.layout.make_schedule()
    choices: dict[str, Choice] = {}
    recomputed: dict[int, Choice] = {}
    smallest = 0
    for rank in range(schedule.num_ranks):
        own = [stages[index] for index in schedule.stages_of(rank)]
        program = IntegerProgram(job, rank, own, schedule.peak_states(rank), words, costs.of, costs.of_recomputed_layer)
        found = program.solve(budget_nbytes)
        if found is None:
            smallest = max(smallest, program.smallest_budget_nbytes())
            continue
        choices |= found[0]
        recomputed |= found[1]
    if smallest:
        raise _too_little(budget_nbytes, smallest)
    return describe(job, choices, recomputed, "budget", costs)


def _cheapest_uniform(job: Job, budget_nbytes: int, words: Sequence[str], costs: _Costs) -> Chosen:
    """The cheapest number of bits for all units, for a model in which choices of neighbours are not independent."""
    found = []
    for bits in sorted({int(word) for word in words if word.isdigit()}, reverse=True):
        units = [unit for stage in job.stages() for unit in stage.units()]
        choices = {unit.name: Choice.from_bits(max(bits, unit.minimum_bits)) for unit in units}
        found.append(describe(job, choices, {}, "budget", costs))
    if not found:
        raise PlanError(f"neighbours of {job.model.family} share what they save, so choices must name bits; allow 16")
    fitting = [chosen for chosen in found if chosen.prediction.peak_nbytes <= budget_nbytes]
    if not fitting:
        raise _too_little(budget_nbytes, min(chosen.prediction.peak_nbytes for chosen in found))
    return min(fitting, key=costs.of_chosen)


class BudgetError(PlanError):
    """No choice meets the budget."""


def _too_little(budget_nbytes: int, smallest: int) -> BudgetError:
    return BudgetError(
        f"the budget is {budget_nbytes:,} bytes per device, but the least that these choices can do with is "
        f"{smallest:,} bytes ({format_nbytes(smallest)}) on the fullest rank; raise the budget, allow more choices, "
        f"shorten the micro-batch, shard parameters, or use the chunked loss, 8-bit gradients and optimizer"
    )


def by_bits(job: Job, bits_of_stage: Sequence[int], attention: Choice = EXACT, policy: str = "uniform") -> Chosen:
    """The same format in a whole stage, except attention; at least 8 bits for the head. Policies are built on it."""
    choices = {}
    for stage in job.stages():
        for unit in stage.units():
            choice = Choice.from_bits(max(bits_of_stage[stage.index], unit.minimum_bits))
            choices[unit.name] = attention if unit.kind == "attention" else choice
    return describe(job, choices, {}, policy)


def agoq(job: Job, attention: Choice = EXACT) -> Chosen:
    """AGoQ's rule: 4 bits on the rank with the most micro-batches in flight, more bits where fewer are.

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
    job: Job, choices: Mapping[str, Choice], recomputed: Mapping[int, Choice], policy: str, costs: _Costs | None = None
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
    def __init__(self, job: Job, sensitivity: Sensitivity, hardware: Hardware, weights: Weights) -> None:
        self._job, self._sensitivity, self._hardware, self._weights = job, sensitivity, hardware, weights
        self._num_units: dict[str, int] = {}
        for stage in job.stages():
            for unit in stage.units():
                self._num_units[unit.kind] = self._num_units.get(unit.kind, 0) + 1
        self.layer_seconds = recompute_seconds(job, hardware)
        # A backward takes twice its forward.
        self.step_seconds = 3 * job.model.num_layers * layer_forward_flops(job) / hardware.matmul_flops_per_second

    def squared_error(self, unit: Unit, choice: Choice) -> float:
        return self._sensitivity.squared_error(unit, choice, self._num_units[unit.kind])

    def seconds(self, unit: Unit, choice: Choice) -> float:
        measured = self._sensitivity.time_share(unit, choice, self._num_units[unit.kind])
        if measured is not None:
            return measured * self.step_seconds
        return pack_seconds(self._job, self._hardware, unit, choice)

    def of(self, unit: Unit, choice: Choice) -> float:
        """The objective for one unit."""
        return self.squared_error(unit, choice) / _ERROR_UNIT**2 + self._time(self.seconds(unit, choice))

    def of_chosen(self, chosen: Chosen) -> float:
        """The objective for a whole assignment."""
        return chosen.relative_error**2 / _ERROR_UNIT**2 + self._weights.time * chosen.time_share / _TIME_UNIT

    @property
    def of_recomputed_layer(self) -> float:
        """The objective for one layer that runs again."""
        return self._time(self.layer_seconds)

    def _time(self, seconds: float) -> float:
        return self._weights.time * seconds / self.step_seconds / _TIME_UNIT
