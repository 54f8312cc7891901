"""Plans for requests that keep arriving: batches by Little's law, expected time to first token and per token.

A pass of prefill takes P seconds for n_p prompts, a pass of decoding D seconds for n_d requests. Requests arrive at
rate L, each with `output` tokens, the first of which its prefill makes. Prefill goes first and takes the share
r = L P / n_p of the time, so that

    time to first token     P + r P / (2 (1 - r)) + (1 - r) D / 2      own pass, queue (M/D/1), pass in progress
    backlog                 B = (r + r^2 / (2 (1 - r))) P / (1 - r)    prompts that came meanwhile, and during those
    further tokens          (output - 1) D / (1 - r) + B
    requests being decoded  N = L ((output - 1) D / (1 - r) + B)       Little's law

A batch carries the load if r < 1 and N <= n_d. D / n_d falls or stays when the batch grows (planner.py), so that the
smallest batch of decoding is found by bisection; it is the fastest, since D grows with the batch. Batches of prefill
are powers of two per worker and micro-batch. The best plan has the least seconds from arrival to the last token; for
fixed orders those grow with the rate. A batch of decoding has at least a row for each slice of tokens.

What this is not: passes are taken to be full, prompts and answers of one length, and arrivals spread evenly over groups
and workers. Bursts and mixed lengths wait longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from laconic.cost.infer.costs import InferenceCostModel, Split, Workload
from laconic.cost.infer.memory import CACHE, largest_batch, worker_nbytes
from laconic.cost.infer.planner import (
    KINDS,
    Kind,
    Search,
    Workers,
    choose,
    floor_seconds,
    least_seconds,
    pass_seconds,
    plans_of,
)
from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import InferenceShape, check_whole
from laconic.errors import PlanError
from laconic.schedule.inference import InferencePlan
from laconic.schedule.slices import largest_slice

_TIE = 1e-9


@dataclass(frozen=True)
class Arrivals:
    """Requests that keep arriving, at random.

    Attributes:
        requests_per_second: mean rate.
        prompt: tokens of each prompt.
        output: tokens of each answer.

    Raises:
        PlanError: a number is not possible.
    """

    requests_per_second: float
    prompt: int
    output: int

    def __post_init__(self) -> None:
        if not 0 < self.requests_per_second < math.inf:
            raise PlanError(f"requests_per_second is {self.requests_per_second!r}, but it must be above 0 and finite")
        for name in ("prompt", "output"):
            check_whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Steady:
    """One way to carry arrivals, in the steady state.

    Attributes:
        kind, split, plan, num_groups: as in Candidate.
        prefill_batch, decode_batch: m_a of the two kinds of passes.
        first_token_seconds: expected time to first token.
        token_seconds: expected time per further token, waiting included.
        prefill_share: r, of the time.
        requests_in_flight: N, expected, of all groups.
        decode_slots: requests that passes of decoding have room for, in all groups.
        seconds: expected, from arrival to the last token.
    """

    kind: Kind
    split: Split | None
    plan: InferencePlan
    num_groups: int
    prefill_batch: int
    decode_batch: int
    first_token_seconds: float
    token_seconds: float
    prefill_share: float
    requests_in_flight: float
    decode_slots: int
    seconds: float

    @property
    def plainness(self) -> tuple[object, ...]:
        """Sort key: less machinery first."""
        plan = self.plan
        machinery = (plan.num_micro_batches, plan.num_slices, plan.order != "ASAS", plan.slicing != "tokens")
        return KINDS.index(self.kind), *machinery, self.split.attention if self.split else 0, self.decode_batch

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON."""
        found = asdict(self)
        del found["split"]
        workers = {
            "attention_workers": self.split.attention if self.split else None,
            "expert_workers": self.split.experts if self.split else None,
        }
        return workers | found.pop("plan") | found


@dataclass(frozen=True)
class ArrivalChoice:
    """The best way to carry arrivals, and the best of every kind that can, fastest first."""

    best: Steady
    candidates: tuple[Steady, ...]


@dataclass(frozen=True)
class _Way:
    """Workers of one group and a plan, or what all plans of an r1 cannot be faster than."""

    kind: Kind
    split: Split
    plan: InferencePlan
    num_groups: int

    @property
    def whole(self) -> bool:
        return self.kind in ("replicated", "sharded")

    @property
    def slots(self) -> int:
        """Requests of a group per unit of m_a."""
        return self.split.attention * self.plan.num_micro_batches

    @property
    def least_batch(self) -> int:
        """Smallest m_a of decoding: each slice of tokens has a row."""
        return self.plan.num_slices if self.plan.slicing == "tokens" else 1


class _Room(NamedTuple):
    """Largest m_a of both kinds of passes alone; bytes of the worker with caches that are free, and per request."""

    prefill: int
    decode: int
    free_nbytes: float
    prefill_nbytes: float
    cache_nbytes: float


@dataclass
class _Pricing:
    """Seconds and room of ways, for one model and its arrivals."""

    shape: InferenceShape
    rates: InferenceRates
    arrivals: Arrivals
    memory_nbytes: int
    shares: tuple[float, ...] = ()
    expert_memory_nbytes: int | None = None
    prefill: InferenceCostModel = field(init=False)
    decode: InferenceCostModel = field(init=False)
    _rooms: dict[object, _Room] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompt, output = self.arrivals.prompt, self.arrivals.output
        self.prefill = InferenceCostModel(self.shape, self.rates, Workload.prefill(prompt, output), self.shares)
        self.decode = InferenceCostModel(self.shape, self.rates, Workload.decode(prompt, output), self.shares)

    def most_prefill(self, way: _Way) -> int:
        """Largest m_a of prefill beside one request that is decoded."""
        most = self._room(way).prefill
        while most and not self.most_decode(way, most):
            most //= 2
        return most

    def most_decode(self, way: _Way, prefill_batch: int) -> int:
        """Largest m_a of decoding, its caches beside a prefill of this batch."""
        if self.arrivals.output == 1:
            return 1
        room = self._room(way)
        left = (room.free_nbytes - prefill_batch * room.prefill_nbytes) / room.cache_nbytes
        return max(0, min(room.decode, int(left)))

    def _room(self, way: _Way) -> _Room:
        r1 = way.plan.num_micro_batches
        key = (way.split, r1, way.whole)
        if key not in self._rooms:
            prefill, decode = (
                largest_batch(
                    model,
                    way.split,
                    self.memory_nbytes,
                    r1,
                    whole=way.whole,
                    expert_memory_nbytes=self.expert_memory_nbytes,
                ).batch
                for model in (self.prefill, self.decode)
            )
            none, one = (worker_nbytes(self.prefill, way.split, m, r1, whole=way.whole) for m in (0, 1))
            role = next(role for role in none if CACHE in none[role])
            empty, cache = sum(none[role].values()), one[role][CACHE]
            free, step = self.memory_nbytes - empty, sum(one[role].values()) - empty
            self._rooms[key] = _Room(prefill, decode, free, step, cache)
        return self._rooms[key]


def steady(pricing: _Pricing, way: _Way, prefill_batch: int, at_least: int = 1) -> Steady | None:
    """Size the batch of decoding for one way and batch of prefill; None if it cannot carry the load.

    Args:
        at_least: an m_a of decoding below which the load is surely not carried.
    """
    arrivals, tokens = pricing.arrivals, pricing.arrivals.output - 1
    rate = arrivals.requests_per_second / way.num_groups
    prompt_seconds = pass_seconds(pricing.prefill, way.kind, way.split, prefill_batch, way.plan)
    share = rate * prompt_seconds / (prefill_batch * way.slots)
    most = pricing.most_decode(way, prefill_batch)
    if share >= 1 or most < at_least:
        return None
    known: dict[int, float] = {}

    def seconds(batch: int) -> float:
        if batch not in known:
            known[batch] = pass_seconds(pricing.decode, way.kind, way.split, batch, way.plan) if tokens else 0.0
        return known[batch]

    def carries(batch: int) -> bool:
        return _in_flight(rate, share, prompt_seconds, tokens, seconds(batch)) <= batch * way.slots

    low, high = at_least, at_least
    while not carries(high):
        if high == most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if carries(middle) else (middle + 1, high)
    in_flight = _in_flight(rate, share, prompt_seconds, tokens, seconds(high))
    rest = in_flight / rate
    queue = share * prompt_seconds / (2 * (1 - share)) + (1 - share) * seconds(high) / 2
    return Steady(
        way.kind,
        None if way.whole else way.split,
        way.plan,
        way.num_groups,
        prefill_batch,
        high,
        prompt_seconds + queue,
        rest / tokens if tokens else 0.0,
        share,
        in_flight * way.num_groups,
        way.num_groups * way.slots * high,
        prompt_seconds + queue + rest,
    )


def _in_flight(rate: float, share: float, prompt_seconds: float, tokens: int, decode_seconds: float) -> float:
    """Requests of a group that are being decoded, by Little's law; infinite if prefill takes all the time."""
    if not tokens:
        return 0.0
    if share >= 1:
        return math.inf
    backlog = (share + share * share / (2 * (1 - share))) * prompt_seconds / (1 - share)
    return rate * (tokens * decode_seconds / (1 - share) + backlog)


def choose_for_arrivals(
    shape: InferenceShape,
    rates: InferenceRates,
    workers: Workers,
    arrivals: Arrivals,
    search: Search | None = None,
    shares: tuple[float, ...] = (),
) -> ArrivalChoice:
    """Choose the plan with the least expected seconds from arrival to the last token; of equals, the plainest.

    Args:
        shape, rates: of model and machines.
        workers: that are there.
        arrivals: of requests.
        search: limits; None: the default ones.
        shares: measured routing, as in InferenceCostModel.

    Raises:
        PlanError: no plan carries the load, or not even one request fits.
    """
    search = search or Search()
    pricing = _Pricing(shape, rates, arrivals, workers.memory_nbytes, shares, workers.expert_memory_nbytes)
    found: list[Steady] = []
    for kind in KINDS:
        if (best := _best(pricing, kind, workers, search)) is not None:
            found.append(best)
    if not found:
        raise PlanError(_refusal(pricing, workers, search))
    found.sort(key=lambda one: (one.seconds, one.plainness))
    near = (one for one in found if one.seconds <= found[0].seconds * (1 + _TIE))
    return ArrivalChoice(min(near, key=lambda one: one.plainness), tuple(found))


def _best(pricing: _Pricing, kind: Kind, workers: Workers, search: Search) -> Steady | None:
    """The best of a kind: coarse bounds for all plans of an r1, then bounds of plans, then prices, each best first."""
    best: Steady | None = None

    def hopeless(seconds: float) -> bool:
        return best is not None and seconds > best.seconds * (1 + _TIE)

    coarse = []
    for group in _groups(pricing, kind, workers, search):
        bound = _bound(pricing, group[0], _floor)
        if bound is not None:
            coarse.append((*bound, group))
    for seconds, _, ways in sorted(coarse, key=lambda one: one[0]):
        if hopeless(seconds):
            break
        fine = []
        for way in ways:
            bound = _bound(pricing, way, _least)
            if bound is not None:
                fine.append((*bound, way))
        for bounded, at_least, way in sorted(fine, key=lambda one: one[0]):
            if hopeless(bounded):
                break
            rest = bounded - _least(pricing.prefill, 1, way)
            for batch in _powers(pricing.most_prefill(way)):
                if batch > 1 and hopeless(_least(pricing.prefill, batch, way) + rest):
                    break
                one = steady(pricing, way, batch, at_least)
                if one is None:
                    continue
                faster = best is None or one.seconds < best.seconds * (1 - _TIE)
                if faster or (best is not None and not hopeless(one.seconds) and one.plainness < best.plainness):
                    best = one
    return best


def _groups(pricing: _Pricing, kind: Kind, workers: Workers, search: Search) -> Iterator[list[_Way]]:
    shape, total = pricing.shape, workers.without_split(pricing.rates)
    if kind == "replicated":
        yield [_Way(kind, Split(1, 1), InferencePlan(), total)]
    elif kind == "sharded":
        for size in range(2, min(total, shape.num_experts) + 1):
            if total % size == 0:
                for r1 in search.unsplit_micro_batches:
                    yield [_Way(kind, Split(size, size), InferencePlan(r1), total // size)]
    else:
        slicings = search.slicings if kind == "findep" else ("tokens",)
        plans: dict[int, list[InferencePlan]] = {}
        for slicing in slicings:
            for plan in plans_of(kind, slicing, search, shared=shape.shared_hidden > 0):
                plans.setdefault(plan.num_micro_batches, []).append(plan)
        for num_groups, split in workers.splits(shape.num_experts):
            held = largest_slice(shape.num_experts, split.experts)
            for of_r1 in plans.values():
                yield [
                    _Way(kind, split, plan, num_groups)
                    for plan in of_r1
                    if plan.slicing == "tokens" or plan.num_slices <= held
                ]


def _bound(
    pricing: _Pricing, way: _Way, least: Callable[[InferenceCostModel, int, _Way], float]
) -> tuple[float, int] | None:
    """Seconds, and an m_a of decoding, that a way cannot go below; None if it cannot carry the load.

    Little's law from below: each batch that is too small for its own passes asks for a larger one.
    """
    tokens = pricing.arrivals.output - 1
    rate = pricing.arrivals.requests_per_second / way.num_groups
    if not pricing.most_prefill(way):
        return None
    most, batch, decode = pricing.most_decode(way, 1), way.least_batch if tokens else 1, 0.0
    if batch > most:
        return None
    for _ in range(4):
        decode = least(pricing.decode, batch, way) if tokens else 0.0
        needed = max(batch, math.ceil(rate * tokens * decode / way.slots * (1 - _TIE)))
        if needed > most:
            return None
        if needed == batch:
            break
        batch = needed
    return least(pricing.prefill, 1, way) + tokens * decode, batch


def _floor(model: InferenceCostModel, batch: int, way: _Way) -> float:
    if way.whole:
        return pass_seconds(model, way.kind, way.split, batch, way.plan)
    return floor_seconds(model, batch, way.split, way.plan.num_micro_batches)


def _least(model: InferenceCostModel, batch: int, way: _Way) -> float:
    if way.whole:
        return pass_seconds(model, way.kind, way.split, batch, way.plan)
    return least_seconds(model, batch, way.split, way.plan)


def _powers(most: int) -> Iterator[int]:
    batch = 1
    while batch <= most:
        yield batch
        batch *= 2


def _refusal(pricing: _Pricing, workers: Workers, search: Search) -> str:
    """Why nothing carries the load; raises PlanError if nothing fits at all."""
    arrivals, carried = pricing.arrivals, []
    for model in (pricing.prefill, pricing.decode):
        for one in choose(model, workers, search).candidates:
            size = workers.without_split(pricing.rates) // one.num_groups
            whole = Split(size, size) if one.kind == "sharded" else Split(1, 1)
            way = _Way(one.kind, one.split or whole, one.plan, one.num_groups)
            for batch in _powers(pricing.most_prefill(way)):
                carried.append((_carried(pricing, way, batch), one.kind, str(one.split or size)))
    most, kind, split = max(carried, default=(0.0, "", ""))
    given = f"{arrivals.requests_per_second:g} requests/s of {arrivals.prompt} + {arrivals.output} tokens"
    tried = f"at least {most:.3g} are carried ({kind}, {split})" if carried else "no request fits"
    return (
        f"no plan carries {given} on {workers.total} workers; {tried}; give more workers or memory, or fewer or shorter"
        " requests"
    )


def _carried(pricing: _Pricing, way: _Way, prefill_batch: int) -> float:
    """Requests per second that a way carries with the largest batch of decoding, rounded down."""
    tokens, most = pricing.arrivals.output - 1, pricing.most_decode(way, prefill_batch)
    prefill = pass_seconds(pricing.prefill, way.kind, way.split, prefill_batch, way.plan)
    decode = pass_seconds(pricing.decode, way.kind, way.split, most, way.plan) if tokens else 0.0
    carried, too_many = 0.0, prefill_batch * way.slots / prefill
    for _ in range(40):
        rate = (carried + too_many) / 2
        if _in_flight(rate, rate * prefill / (prefill_batch * way.slots), prefill, tokens, decode) <= most * way.slots:
            carried = rate
        else:
            too_many = rate
    return way.num_groups * carried
