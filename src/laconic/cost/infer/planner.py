"""Chooses how workers share a model's inference: split or not, how many of each role, micro-batches, slices, order.

Candidates, all priced by one `InferenceCostModel`:

| kind | workers |
|---|---|
| `replicated` | each runs the whole model on its own requests |
| `sharded` | each runs attention on its own requests and holds a share of the experts; two all-to-alls per layer |
| `naive` | split, one micro-batch, one slice: at any time one side works |
| `pppipe` | split, micro-batches in turn, shared experts inside attention (MegaScale-Infer) |
| `findep` | split, micro-batches, slices and orders (FinDEP) |

Where expert workers are machines of another kind, by their rates or memory, attention workers alone run whole models:
as many as are given, or all workers if the planner chooses how many are of which kind.

Workers form one group, or several equal ones that share nothing, each with all experts and its part of the requests.

The rate is requests per second of one pass over all layers. For every task, seconds / m_a fall or stay when m_a grows;
makespans are monotone in all seconds, and proportional when all grow alike; so for any r1, r2 and fixed order the rate
grows with m_a (FinDEP's theorems 1 and 2, here without its closed form). Therefore each r1 needs only the largest m_a
that fits, and, where requests run out, the two around what each worker can get. The order greedy depends on the times:
nothing is proved for it, and it is tried at the same m_a. What is left is searched best bound first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import ceil
from typing import Any, Literal

from laconic.cost.infer.costs import InferenceCostModel, Split
from laconic.cost.infer.memory import ATTENTION_WORKER, EXPERT_WORKER, Limit, largest_batch
from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import check_whole
from laconic.errors import PlanError
from laconic.schedule.inference import BlockTimes, InferencePlan, Order, Slicing, inference_seconds
from laconic.schedule.slices import largest_slice

Kind = Literal["replicated", "sharded", "naive", "pppipe", "findep"]
KINDS: tuple[Kind, ...] = ("replicated", "sharded", "naive", "pppipe", "findep")
"""From plain to complicated."""
_Capacity = Callable[[InferenceCostModel, Split, int, bool], int]
"""The largest m_a of a split at an r1, for workers that run the whole model or not."""
_UNSPLIT: tuple[Kind, ...] = ("replicated", "sharded")
_TIE = 1e-9
"""Relative difference below which two rates are equal; the plainer plan wins."""


@dataclass(frozen=True)
class Workers:
    """Workers that are there.

    Raises:
        PlanError: a number is not possible.
    """

    total: int
    memory_nbytes: int
    """Of each that runs attention, alone or with the whole model."""
    attention: int | None = None
    """How many run attention, if they are split; None: as is best."""
    attention_first: bool = False
    """Only splits with at least as many attention as expert workers."""
    expert_memory_nbytes: int | None = None
    """Of each expert worker; None: as much."""

    def __post_init__(self) -> None:
        if type(self.total) is not int or self.total < 1:
            raise PlanError(f"total is {self.total!r}, but at least one worker is needed")
        if self.attention is not None and not 1 <= self.attention < self.total:
            raise PlanError(
                f"attention is {self.attention} of {self.total} workers, but both roles need one: it must be from 1 to "
                f"{self.total - 1}"
            )
        for name in ("memory_nbytes", "expert_memory_nbytes"):
            if (nbytes := getattr(self, name)) is not None and nbytes <= 0:
                raise PlanError(f"{name} is {nbytes}, but it must be positive")

    def are_of_two_kinds(self, rates: InferenceRates) -> bool:
        """Whether expert workers have other rates or another memory than attention workers."""
        return rates.are_of_two_kinds or self.expert_memory_nbytes not in (None, self.memory_nbytes)

    def without_split(self, rates: InferenceRates) -> int:
        """How many would run the whole model: all, but not the given expert workers of another kind."""
        return self.attention if self.attention is not None and self.are_of_two_kinds(rates) else self.total

    def splits(self, num_experts: int) -> list[tuple[int, Split]]:
        """List numbers of groups and splits of each: every worker has a role, and every expert worker an expert.

        Raises:
            PlanError: a fixed number of attention workers leaves more expert workers than there are experts.
        """
        if self.attention is not None and (others := self.total - self.attention) > num_experts:
            raise PlanError(
                f"attention is {self.attention} of {self.total} workers, but {others} expert workers cannot share"
                f" {num_experts} experts; give fewer workers, or more attention workers"
            )
        if self.attention is not None:
            ways = [(1, Split(self.attention, self.total - self.attention))]
        else:
            sizes = [(groups, self.total // groups) for groups in range(1, self.total + 1) if self.total % groups == 0]
            ways = [(groups, Split(one, size - one)) for groups, size in sizes for one in range(1, size)]
        most = {split: min(num_experts, split.attention) if self.attention_first else num_experts for _, split in ways}
        return [(groups, split) for groups, split in ways if split.experts <= most[split]]


@dataclass(frozen=True)
class Search:
    """Limits of the search.

    Raises:
        PlanError: one is below 1, or nothing is left.
    """

    max_micro_batches: int = 8
    max_slices: int = 16
    orders: tuple[Order, ...] = ("ASAS", "greedy")
    """Those that the engine runs. The paper's AASS on request: the engine runs it as greedy."""
    slicings: tuple[Slicing, ...] = ("tokens", "experts")

    def __post_init__(self) -> None:
        for name in ("max_micro_batches", "max_slices"):
            check_whole(name, getattr(self, name), 1)
        for name in ("orders", "slicings"):
            if not getattr(self, name):
                raise PlanError(f"{name} is empty, but at least one must be tried")

    @property
    def unsplit_micro_batches(self) -> range:
        """Numbers of micro-batches of an unsplit run, which has at most two."""
        return range(1, min(2, self.max_micro_batches) + 1)


@dataclass(frozen=True)
class Candidate:
    """One way to run a pass, priced."""

    kind: Kind
    split: Split | None
    """None: workers run the whole model."""
    batch: int
    """m_a, requests of a micro-batch on each worker with attention."""
    plan: InferencePlan
    seconds: float
    """Of a pass over all layers, by all micro-batches."""
    num_requests: int
    """That a pass serves."""
    tokens_per_second: float
    num_groups: int = 1
    """Of workers; `split` and `batch` are those of each."""

    @property
    def requests_per_second(self) -> float:
        """Passes of single requests per second."""
        return self.num_requests / self.seconds

    @property
    def plainness(self) -> tuple[object, ...]:
        """Sort key: less machinery first."""
        plan = self.plan
        machinery = (plan.num_micro_batches, plan.num_slices, plan.order != "ASAS", plan.slicing != "tokens")
        return KINDS.index(self.kind), *machinery, self.split.attention if self.split else 0, -self.batch

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as JSON values."""
        return {
            "kind": self.kind,
            "attention_workers": self.split.attention if self.split else None,
            "expert_workers": self.split.experts if self.split else None,
            "batch": self.batch,
            **asdict(self.plan),
            "seconds": self.seconds,
            "num_requests": self.num_requests,
            "tokens_per_second": self.tokens_per_second,
            "num_groups": self.num_groups,
        }


@dataclass(frozen=True)
class Choice:
    """The plan, and the best candidate of every kind that fits."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    """Fastest first; `findep` once for each slicing."""
    limits: Mapping[Candidate, Limit] = field(default_factory=dict)
    """What memory allows each candidate at its r1."""
    no_split: str = ""
    """Where no split fits, which workers are full of what; empty, too, where workers cannot be split."""
    no_unsplit: str = ""
    """The same where no unsplit run fits, of the one that spreads experts most."""

    @property
    def split_pays(self) -> bool:
        """Whether the chosen plan splits attention from experts."""
        return self.best.split is not None

    @property
    def best_split(self) -> Candidate | None:
        """The chosen plan, or the fastest that splits; None if no split fits."""
        return next((one for one in (self.best, *self.candidates) if one.split is not None), None)


def choose(model: InferenceCostModel, workers: Workers, search: Search | None = None) -> Choice:
    """Choose the fastest candidate; of equals, the plainest.

    Args:
        model: seconds and bytes.
        workers: that are there.
        search: limits; None: the default ones.

    Raises:
        PlanError: not even one request fits in any way.
    """
    search = search or Search()
    found: list[Candidate] = []
    failed: dict[bool, list[str]] = {True: [], False: []}

    def capacity(model: InferenceCostModel, split: Split, r1: int, whole: bool) -> int:
        limit = _largest(model, workers, split, r1, whole)
        if r1 == 1 and not limit.batch:
            name = f"unsplit, experts over {split.experts}" if whole else f"split {split}"
            failed[whole].append(f"{name}, {limit}")
        return limit.batch

    for kind in _UNSPLIT:
        found += _best(_unsplit(model, workers, kind, capacity, search))
    found += _best_split(model, workers, "naive", plans_of("naive", "tokens", search), capacity)
    found += _best_split(model, workers, "pppipe", plans_of("pppipe", "tokens", search), capacity)
    for slicing in search.slicings:
        plans = plans_of("findep", slicing, search, shared=model.shape.shared_hidden > 0)
        found += _best_split(model, workers, "findep", plans, capacity)
    if not found:
        memory = f"{workers.memory_nbytes:,} bytes"
        if workers.expert_memory_nbytes is not None:
            memory += f", expert workers of {workers.expert_memory_nbytes:,} bytes,"
        raise PlanError(
            f"{model.shape.name or 'the model'} does not fit on {workers.total} workers of {memory} with even one"
            f" request; {_why(failed[True], failed[False])}; give more workers or memory, or shorter requests"
        )
    found.sort(key=lambda one: (-one.tokens_per_second, one.plainness))
    limits = {one: _limit(model, workers, one) for one in found}
    no_split = _why(failed[False]) if all(one.split is None for one in found) else ""
    no_unsplit = failed[True][-1] if all(one.split is not None for one in found) else ""
    return Choice(_plainest(found), tuple(found), limits, no_split, no_unsplit)


def _why(*failed: list[str]) -> str:
    """The first and the last reason of each list: those of the fewest and of the most workers of a role."""
    return "; ".join(dict.fromkeys(each for reasons in failed for each in reasons[:1] + reasons[-1:]))


def _limit(model: InferenceCostModel, workers: Workers, one: Candidate) -> Limit:
    group = group_costs(model, one.num_groups)
    split = one.split or _whole(group, workers.without_split(model.rates) // one.num_groups)
    return _largest(group, workers, split, one.plan.num_micro_batches, one.split is None)


def _largest(model: InferenceCostModel, workers: Workers, split: Split, r1: int, whole: bool) -> Limit:
    expert_memory = workers.expert_memory_nbytes
    return largest_batch(model, split, workers.memory_nbytes, r1, whole=whole, expert_memory_nbytes=expert_memory)


def plans_of(kind: Kind, slicing: Slicing, search: Search, *, shared: bool = True) -> list[InferencePlan]:
    """List the plans of a kind that the search allows, each once.

    Args:
        slicing: one of the search's; a single slice counts as the first of them.
        shared: whether there are shared experts; without, as with one micro-batch, all orders are the same.
    """
    most = range(1, search.max_micro_batches + 1)
    if kind == "naive":
        return [InferencePlan(shared_first=True)]
    if kind == "pppipe":
        return [InferencePlan(r1, shared_first=True) for r1 in most]
    fewest = 1 if slicing == search.slicings[0] else 2
    return [
        InferencePlan(r1, r2, order, slicing)
        for r1 in most
        for r2 in range(fewest, search.max_slices + 1)
        for order in (search.orders if shared and r1 > 1 else search.orders[:1])
    ]


def priced(
    model: InferenceCostModel, kind: Kind, split: Split, batch: int, plan: InferencePlan, num_groups: int = 1
) -> Candidate:
    """Price a split candidate by simulating all its layers."""
    group = group_costs(model, num_groups)
    seconds = pass_seconds(group, kind, split, batch, plan)
    return _candidate(model, kind, split, group.hosts(split), batch, plan, seconds, num_groups)


def _candidate(
    model: InferenceCostModel,
    kind: Kind,
    split: Split | None,
    hosts: int,
    batch: int,
    plan: InferencePlan,
    seconds: float,
    num_groups: int = 1,
) -> Candidate:
    """A candidate of `hosts` workers with requests in each group; requests beyond those that wait are not counted."""
    waiting, served = model.workload.requests, num_groups * hosts * batch * plan.num_micro_batches
    served = served if waiting is None else min(served, waiting)
    rate = served * model.workload.new_tokens / seconds
    return Candidate(kind, split, batch, plan, seconds, served, rate, num_groups)


def _batches(model: InferenceCostModel, hosts: int, r1: int, most: int) -> Iterator[int]:
    """The m_a of which one is the best for this r1, see the module's docstring."""
    if model.workload.requests is not None:
        needed = ceil(model.workload.requests / hosts / r1)
        if needed <= most:
            yield needed
            most = needed - 1
    if most:
        yield most


def _best_split(
    model: InferenceCostModel, workers: Workers, kind: Kind, plans: Iterable[InferencePlan], capacity: _Capacity
) -> list[Candidate]:
    by_r1: dict[int, list[InferencePlan]] = {}
    for plan in plans:
        by_r1.setdefault(plan.num_micro_batches, []).append(plan)
    bounded = []
    for num_groups, split in workers.splits(model.shape.num_experts):
        group = group_costs(model, num_groups)
        hosts, held = group.hosts(split), largest_slice(model.shape.num_experts, split.experts)
        for r1, of_r1 in by_r1.items():
            for batch in _batches(group, hosts, r1, capacity(group, split, r1, False)):
                rates: dict[int, float] = {}
                for plan in of_r1:
                    most = held if plan.slicing == "experts" else batch * model.workload.new_tokens
                    if plan.num_slices > most:
                        continue
                    if plan.num_slices not in rates:
                        seconds = least_seconds(group, batch, split, plan)
                        bound = _candidate(model, kind, split, hosts, batch, plan, seconds, num_groups)
                        rates[plan.num_slices] = bound.tokens_per_second
                    bounded.append((rates[plan.num_slices], split, batch, plan, num_groups))
    bounded.sort(key=lambda one: -one[0])
    found: list[Candidate] = []
    fastest = 0.0
    for rate, split, batch, plan, num_groups in bounded:
        if rate < fastest * (1 - _TIE):
            break
        found.append(priced(model, kind, split, batch, plan, num_groups))
        fastest = max(fastest, found[-1].tokens_per_second)
    return _best(found)


def least_seconds(model: InferenceCostModel, batch: int, split: Split, plan: InferencePlan) -> float:
    """A bound that no order beats: what each stream has to do, and one micro-batch on its own way.

    Nothing travels before all micro-batches have passed the dense layers, and the output projection of the last one
    comes after all that travels.
    """
    times = model.block_times(batch, split, plan)
    own = times.attention + times.dispatch[0] + sum(times.experts) + times.combine[-1]
    return _bound_seconds(model, batch, times, plan.num_micro_batches, own)


def floor_seconds(model: InferenceCostModel, batch: int, split: Split, num_micro_batches: int) -> float:
    """A bound that no number of slices beats either: slices only add to what streams have to do."""
    times = model.block_times(batch, split, InferencePlan(num_micro_batches))
    return _bound_seconds(model, batch, times, num_micro_batches, times.attention + times.experts[0])


def _bound_seconds(model: InferenceCostModel, batch: int, times: BlockTimes, r1: int, own: float) -> float:
    """The bound of a pass, where a micro-batch's own way through a layer takes at least `own` seconds."""
    num_layers, before, after = model.shape.num_moe_layers, 0.0, model.head_seconds(batch)
    if model.shape.num_dense_layers:
        dense = model.dense_times(batch)
        before = model.shape.num_dense_layers * r1 * (dense.attention + dense.shared)
    core = num_layers * r1 * (times.attention + times.shared) + r1 * after
    busiest = r1 * max(map(sum, (times.dispatch, times.experts, times.combine)))
    return before + max(core, num_layers * max(busiest, own) + after)


def group_costs(model: InferenceCostModel, num_groups: int) -> InferenceCostModel:
    """Return the costs of one of several groups, with its part of the requests."""
    waiting = model.workload.requests
    if waiting is None or num_groups == 1:
        return model
    return replace(model, workload=replace(model.workload, requests=ceil(waiting / num_groups)))


def _whole(group: InferenceCostModel, size: int) -> Split:
    return Split(group.hosts(Split(size, size)), size)


def _unsplit(
    model: InferenceCostModel, workers: Workers, kind: Kind, capacity: _Capacity, search: Search
) -> Iterator[Candidate]:
    total = workers.without_split(model.rates)
    sizes = range(2, min(total, model.shape.num_experts) + 1) if kind == "sharded" else (1,)
    for size, r1 in product(sizes, search.unsplit_micro_batches if kind == "sharded" else (1,)):
        if total % size:
            continue
        group = group_costs(model, total // size)
        split = _whole(group, size)
        for batch in _batches(group, split.attention, r1, capacity(group, split, r1, True)):
            plan = InferencePlan(r1)
            seconds = pass_seconds(group, kind, split, batch, plan)
            yield _candidate(model, kind, None, split.attention, batch, plan, seconds, total // size)


def pass_seconds(model: InferenceCostModel, kind: Kind, split: Split, batch: int, plan: InferencePlan) -> float:
    """Predict a pass of any kind by one group of workers.

    Args:
        split: the group's workers; for `sharded`, its size twice, for `replicated` Split(1, 1).
        plan: of the group; for unsplit kinds only its number of micro-batches counts.
    """
    if kind == "replicated":
        return replicated_seconds(model, batch)
    if kind == "sharded":
        times, r1 = model.unsplit.block_times(batch, split, InferencePlan()), plan.num_micro_batches
        return sharded_seconds(times, r1, model.shape.num_moe_layers) + r1 * _around_seconds(model, batch)
    layers = model.layer_times(batch, split, plan)
    return inference_seconds(layers, plan, len(layers))


def replicated_seconds(model: InferenceCostModel, batch: int) -> float:
    """Seconds of a pass of `batch` requests on one worker that runs the whole model."""
    experts = model.unsplit.experts_seconds(batch * model.workload.new_tokens, 1)
    layer = model.attention_seconds(batch) + model.shared_seconds(batch) + experts
    return model.shape.num_moe_layers * layer + _around_seconds(model, batch)


def _around_seconds(model: InferenceCostModel, batch: int) -> float:
    seconds = model.head_seconds(batch)
    if model.shape.num_dense_layers:
        dense = model.dense_times(batch)
        seconds += model.shape.num_dense_layers * (dense.attention + dense.shared)
    return seconds


def sharded_seconds(times: BlockTimes, num_micro_batches: int, num_layers: int) -> float:
    """Makespan where every worker runs attention, shared and routed experts, and all-to-alls run beside.

    Per layer the processor runs attention and shared experts of each micro-batch, then the routed experts of each, as
    two-batch overlap does. An all-to-all takes both directions of a link, so that all of them share one stream. One
    micro-batch overlaps its shared experts with its rows' way, and nothing else.
    """
    core = link = 0.0
    ready = [0.0] * num_micro_batches
    for _ in range(num_layers):
        arrived = []
        for m in range(num_micro_batches):
            core = max(core, ready[m]) + times.attention
            link = max(link, core) + times.dispatch[0]
            arrived.append(link)
            core += times.shared
        for m in range(num_micro_batches):
            core = max(core, arrived[m]) + times.experts[0]
            ready[m] = link = max(link, core) + times.combine[0]
    return max(core, link)


def busy_shares(model: InferenceCostModel, one: Candidate) -> dict[str, float]:
    """Predict in which part of a pass each kind of worker, and the busier direction of the links, has work."""
    assert one.split is not None
    layers = group_costs(model, one.num_groups).layer_times(one.batch, one.split, one.plan)
    busy = {
        f"{ATTENTION_WORKER}s": sum(times.attention + times.shared for times in layers),
        f"{EXPERT_WORKER}s": sum(sum(times.experts) for times in layers),
        "links": max(sum(sum(times.dispatch) for times in layers), sum(sum(times.combine) for times in layers)),
    }
    return {name: one.plan.num_micro_batches * each / one.seconds for name, each in busy.items()}


def _best(candidates: Iterable[Candidate]) -> list[Candidate]:
    found = list(candidates)
    return [_plainest(found)] if found else []


def _plainest(candidates: list[Candidate]) -> Candidate:
    fastest = max(one.tokens_per_second for one in candidates)
    near = (one for one in candidates if one.tokens_per_second >= fastest * (1 - _TIE))
    return min(near, key=lambda one: one.plainness)
