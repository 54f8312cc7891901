"""Chooses the plan of an engine whose workers, caches and batches are given: micro-batches, slices, order, or no split.

The planner of whole clusters (planner.py) fills memory. An engine has `cache_tokens` per micro-batch and cuts its
batches at `batch_tokens`, so a pass has the rows that these and the expected requests allow:

- micro-batches share the requests of an attention worker equally; each takes as many at a time as its cache holds;
- prompts pass in batches of at most `batch_tokens` tokens, then each request makes one token per pass.

Seconds are those of all requests, prompts and answers, one plan for both. Plans are compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from statistics import median

from laconic.cost.infer.costs import InferenceCostModel, Split, Workload
from laconic.cost.infer.planner import Search, busy_shares, priced, replicated_seconds
from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import InferenceShape, check_whole
from laconic.errors import PlanError
from laconic.schedule.inference import InferencePlan, Order, Slicing, inference_plan, inference_seconds
from laconic.schedule.slices import largest_slice
from laconic.schedule.streams import simulate

_TIE = 1e-9


@dataclass(frozen=True)
class Demand:
    """Requests that an engine expects, all at once.

    Attributes:
        prompt: tokens of each prompt.
        output: tokens of each answer.
        requests: that are in flight together.

    Raises:
        PlanError: a number is below 1.
    """

    prompt: int = 512
    output: int = 128
    requests: int = 8

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "requests"):
            check_whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class EngineLimits:
    """What the engine gives each micro-batch.

    Attributes:
        cache_tokens: tokens of prompts and answers that its cache holds.
        batch_tokens: tokens of one pass.
    """

    cache_tokens: int = 4096
    batch_tokens: int = 256


@dataclass(frozen=True)
class Fixed:
    """Fields of the plan that are given; None leaves them to the planner.

    Attributes:
        num_micro_batches, num_slices, order, slicing, shared_first: as in InferencePlan. Without being asked for,
            `shared_first` is never chosen: rows that wait for shared experts arrive no earlier.
    """

    num_micro_batches: int | None = None
    num_slices: int | None = None
    order: Order | None = None
    slicing: Slicing | None = None
    shared_first: bool = False

    def plans(
        self, search: Search, most_micro_batches: int, most_rows: int, most_experts: int
    ) -> Iterator[InferencePlan]:
        """Yield each plan that is left, the plainest first.

        Args:
            most_micro_batches: that have requests.
            most_rows, most_experts: into so many slices of tokens, and of experts, a micro-batch can be cut.
        """
        r1s = [self.num_micro_batches or 0]
        if self.num_micro_batches is None:
            r1s = list(range(1, min(search.max_micro_batches, most_micro_batches) + 1))
        slicings = search.slicings if self.slicing is None else (self.slicing,)
        orders = search.orders if self.order is None else (self.order,)
        if self.order is None and self.shared_first:
            orders = ("ASAS",)
        for r1, slicing in product(r1s, slicings):
            r2s = [self.num_slices or 0]
            if self.num_slices is None:
                most = min(search.max_slices, most_rows if slicing == "tokens" else most_experts)
                r2s = list(range(1 if slicing == slicings[0] else 2, max(1, most) + 1))
            for r2, order in product(r2s, orders if r1 > 1 or self.order is not None else orders[:1]):
                yield InferencePlan(r1, r2, order, slicing, self.shared_first)


@dataclass(frozen=True)
class EngineChoice:
    """What an engine is to run, and why.

    Attributes:
        split: the workers; None: they run the whole model.
        plan: for the split; one micro-batch in one slice without.
        seconds: predicted for all requests.
        tokens_per_second: of answers.
        step_seconds: predicted for a micro-batch's pass of decoding.
        unsplit_seconds: predicted where workers run the whole model; None if that does not fit.
        demand: that was asked for.
        num_workers: that would run the whole model: all, or those of attention where the others are of another kind.
        is_memory_counted: whether the whole model is known to fit.
        busy: for which part of a pass of decoding each kind of worker, and the links, have work; empty without a split.
    """

    split: Split | None
    plan: InferencePlan
    seconds: float
    step_seconds: float
    unsplit_seconds: float | None
    demand: Demand
    num_workers: int
    is_memory_counted: bool = True
    busy: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def tokens_per_second(self) -> float:
        """Of answers, in the time that prompts and answers take."""
        return self.demand.requests * self.demand.output / self.seconds

    def __str__(self) -> str:
        demand, plan = self.demand, self.plan
        load = f"{demand.requests} requests of {demand.prompt} + {demand.output} tokens"
        rate = f"{self.tokens_per_second:.4g} tokens/s predicted for {load}"
        if self.split is None:
            return f"do not split: {self.num_workers} workers with the whole model, {rate}"
        first = ", shared experts first" if plan.shared_first else ""
        chosen = (
            f"r1 = {plan.num_micro_batches}, r2 = {plan.num_slices} slices of {plan.slicing}, order {plan.order}{first}"
            f" on {self.split.attention} attention and {self.split.experts} expert workers, {rate}"
        )
        if self.busy:
            name = max(self.busy, key=self.busy.__getitem__)
            chosen += f", bottleneck {name} (busy for {self.busy[name]:.0%} of a pass of decoding)"
        if self.unsplit_seconds is None:
            on = "an attention worker" if self.num_workers == self.split.attention else "every worker"
            return f"{chosen}; the whole model does not fit on {on}"
        ratio = f"{self.unsplit_seconds / self.seconds:.2f}x of"
        if self.num_workers != self.split.attention:
            return f"{chosen}, {ratio} as many workers with the whole model"
        faster = ", which is faster: give experts = 0" if self.unsplit_seconds < self.seconds * (1 - _TIE) else ""
        if faster and not self.is_memory_counted:
            faster += " if it fits, which was not counted"
        return f"{chosen}, {ratio} the attention workers alone with the whole model{faster}"


def choose_for_engine(
    shape: InferenceShape,
    rates: InferenceRates,
    split: Split,
    demand: Demand,
    limits: EngineLimits,
    *,
    fixed: Fixed | None = None,
    may_unsplit: bool = True,
    memory_nbytes: int | None = None,
    search: Search | None = None,
) -> EngineChoice:
    """Choose the plan with the least seconds for all requests; of equals, the plainest.

    Args:
        shape, rates: of model and machines.
        split: the workers.
        demand: what is expected.
        limits: of the engine.
        fixed: fields that are not chosen.
        may_unsplit: whether all workers may run the whole model instead; never with fixed fields, which mean a split,
            nor with expert workers of another kind, which would be left over.
        memory_nbytes: of all that run whole models together, which must fit. None: it is not counted.
        search: limits of the search.

    Raises:
        PlanError: a request does not fit into the cache, or into the model's positions.
        ScheduleError: fixed fields contradict each other.
    """
    fixed, search = fixed or Fixed(), search or Search()
    unsplit = Split(split.attention + (0 if rates.are_of_two_kinds else split.experts), 0)
    if demand.prompt + demand.output > limits.cache_tokens:
        raise PlanError(
            f"a request of {demand.prompt} + {demand.output} tokens is expected, but cache_tokens is"
            f" {limits.cache_tokens}; expect shorter requests, or give more"
        )
    if shape.positions is not None and demand.prompt + demand.output > shape.positions:
        raise PlanError(
            f"a request of {demand.prompt} + {demand.output} tokens is expected, but {shape.name or 'the model'} has"
            f" {shape.positions} positions; expect shorter requests"
        )
    costs = EngineCosts(shape, rates, demand, limits)
    per_host = ceil(demand.requests / min(split.attention, demand.requests))
    plans = list(fixed.plans(search, per_host, limits.batch_tokens, largest_slice(shape.num_experts, split.experts)))
    seconds = [costs.seconds(split, plan) for plan in plans]
    fits = memory_nbytes is None or unsplit.attention * shape.num_parameters * shape.item_nbytes <= memory_nbytes
    whole = costs.seconds(unsplit, InferencePlan()) if fits else None
    least = min(seconds)
    may_unsplit = may_unsplit and fixed == Fixed() and not rates.are_of_two_kinds
    if may_unsplit and whole is not None and whole <= least * (1 + _TIE):
        step = costs.step_seconds(unsplit, InferencePlan())
        return EngineChoice(None, InferencePlan(), whole, step, whole, demand, unsplit.attention)
    plan = next(plan for plan, found in zip(plans, seconds, strict=True) if found <= least * (1 + _TIE))
    step, busy = costs.step_seconds(split, plan), costs.busy_shares(split, plan)
    return EngineChoice(split, plan, least, step, whole, demand, unsplit.attention, memory_nbytes is not None, busy)


@dataclass(frozen=True)
class _Batches:
    """What one micro-batch does for its requests: how often it passes prompts, and tokens, and the batches of each."""

    rounds: int
    prefills: int
    prefill_batch: int
    prefill: Workload
    decodes: int
    decode_batch: int
    decode: Workload

    @classmethod
    def of(cls, hosts: int, demand: Demand, limits: EngineLimits, num_micro_batches: int) -> _Batches:
        each = ceil(demand.requests / hosts / num_micro_batches)
        held = min(each, limits.cache_tokens // (demand.prompt + demand.output))
        new = min(demand.prompt, limits.batch_tokens)
        prefill_batch = min(held, max(1, limits.batch_tokens // new))
        decode_batch = min(held, limits.batch_tokens)
        return cls(
            ceil(each / held),
            ceil(held * demand.prompt / (prefill_batch * new)),
            prefill_batch,
            Workload(new, (demand.prompt - new) // 2, None, hosts * prefill_batch * num_micro_batches),
            ceil(held / decode_batch) * (demand.output - 1),  # the last pass of a prompt makes the first token
            decode_batch,
            Workload(1, demand.prompt + demand.output // 2, None, hosts * decode_batch * num_micro_batches),
        )


@dataclass(frozen=True)
class EngineCosts:
    """Predicts what an engine takes for the requests that it expects.

    Every `split` is the workers; with `experts` 0 all of them run the whole model. Of a `plan`, micro-batches without
    requests do nothing, and slices without rows are not sent.
    """

    shape: InferenceShape
    rates: InferenceRates
    demand: Demand
    limits: EngineLimits

    def seconds(self, split: Split, plan: InferencePlan) -> float:
        """Predict the seconds of all requests under one plan."""
        batches, plan = self._batches(split, plan)
        prefill, decode = (
            self._pass_seconds(work, batch, split, plan)
            for work, batch in ((batches.prefill, batches.prefill_batch), (batches.decode, batches.decode_batch))
        )
        return batches.rounds * (batches.prefills * prefill + batches.decodes * decode)

    def step_seconds(self, split: Split, plan: InferencePlan) -> float:
        """Predict a micro-batch's pass of decoding, from its first task to its last, while the others decode, too."""
        model, batch, plan = self._decoding(split, plan)
        if not split.experts:
            return replicated_seconds(model, batch)
        layers = model.layer_times(batch, split, plan)
        num_layers = len(layers)
        spans = simulate(inference_plan(layers, plan, num_layers, num_steps=3)).spans
        lengths = []
        for micro_batch in range(plan.num_micro_batches):
            last = f"{2 * num_layers - 1}.{micro_batch}"
            ends = [f"shared {last}", *(f"combine {last}.{slice}" for slice in range(len(layers[-1].combine)))]
            start = spans[f"attention {num_layers}.{micro_batch}"].start_seconds
            lengths.append(max(spans[name].end_seconds for name in ends) - start)
        return median(lengths)

    def busy_shares(self, split: Split, plan: InferencePlan) -> dict[str, float]:
        """Predict for which part of a pass of decoding each kind of worker, and the links, have work."""
        model, batch, plan = self._decoding(split, plan)
        return busy_shares(model, priced(model, "findep", split, batch, plan))

    def _batches(self, split: Split, plan: InferencePlan) -> tuple[_Batches, InferencePlan]:
        hosts = min(split.attention, self.demand.requests)
        busy = min(plan.num_micro_batches, ceil(self.demand.requests / hosts))
        return _Batches.of(hosts, self.demand, self.limits, busy), replace(plan, num_micro_batches=busy)

    def _decoding(self, split: Split, plan: InferencePlan) -> tuple[InferenceCostModel, int, InferencePlan]:
        batches, plan = self._batches(split, plan)
        model = InferenceCostModel(self.shape, self.rates, batches.decode)
        return model, batches.decode_batch, _cut(model, batches.decode_batch, split, plan)

    def _pass_seconds(self, work: Workload, batch: int, split: Split, plan: InferencePlan) -> float:
        model = InferenceCostModel(self.shape, self.rates, work)
        if not split.experts:
            return replicated_seconds(model, batch)
        plan = _cut(model, batch, split, plan)
        layers = model.layer_times(batch, split, plan)
        return inference_seconds(layers, plan, len(layers))


def _cut(model: InferenceCostModel, batch: int, split: Split, plan: InferencePlan) -> InferencePlan:
    """The plan without slices that would be empty, which the engine does not send."""
    most = batch * model.workload.new_tokens
    if plan.slicing == "experts":
        most = largest_slice(model.shape.num_experts, split.experts)
    return replace(plan, num_slices=min(plan.num_slices, most))
