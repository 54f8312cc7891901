"""Orders of the attention stream in disaggregated inference: all of them, the best one, and what none can beat.

An order is a word (`laconic.schedule.inference.order_word`) and may defer shared experts into the next layer. The
other streams take slices in the order in which they leave attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, get_args

from laconic.errors import ScheduleError
from laconic.schedule.inference import InferencePlan, Order, Times, Travel, checked_word, layers_of, order_word


def layer_words(num_micro_batches: int) -> Iterator[str]:
    """Yield all orders of one layer in which micro-batches keep their order; Catalan's number of r1 counts them.

    FinDEP counts C(2 r1 - 1, r1), which includes orders with shared experts before the attention that they need.

    Args:
        num_micro_batches: r1.
    """

    def grow(word: str, attentions: int, shared: int) -> Iterator[str]:
        if shared == num_micro_batches:
            yield word
        if attentions < num_micro_batches:
            yield from grow(word + "A", attentions + 1, shared)
        if shared < attentions:
            yield from grow(word + "S", attentions, shared + 1)

    return grow("", 0, 0)


def word_seconds(times: Times, plan: InferencePlan, num_layers: int, word: str) -> float:
    """Makespan of `inference_plan(times, plan, num_layers, word=word)`, without making its tasks.

    Raises:
        ScheduleError: times do not fit the plan or the layers, or the word cannot run.
    """
    machine = _Machine(times, plan, num_layers)
    moment = machine.start()
    for letter in checked_word(word, plan.num_micro_batches, num_layers):
        moment = machine.after(moment, letter)
    return moment.end


def best_word(times: Times, plan: InferencePlan, num_layers: int, width: int | None = None) -> str:
    """Find a word of the least makespan by dynamic programming over the numbers of A's and S's done.

    A partial schedule is dropped if another one has done the same tasks and is nowhere later, or if its lower bound
    is above the best known word.

    Args:
        times, plan, num_layers: as in `inference_plan`; the plan's order does not matter.
        width: how many partial schedules to continue for the same tasks, those with the lowest bounds. None: all, so
            that the result is the best of all words. Their number may grow with layers and micro-batches.

    Raises:
        ScheduleError: times do not fit the plan or the layers, or the plan has `shared_first`.
    """
    if plan.shared_first:
        raise ScheduleError("shared_first is True, which leaves no order to search: 'ASAS' is best")
    machine = _Machine(times, plan, num_layers)
    r1, r2 = plan.num_micro_batches, plan.num_slices
    known = [order_word(times, InferencePlan(r1, r2, order), num_layers) for order in get_args(Order)]
    seconds, best = min((word_seconds(times, plan, num_layers, word), word) for word in known)
    front = [(machine.start(), "")]
    while front:
        alike: dict[int, list[tuple[float, _Moment, str]]] = {}
        for moment, word in front:
            letters = machine.possible(moment)
            if not letters and moment.end < seconds:
                seconds, best = moment.end, word
            for letter in letters:
                later = machine.after(moment, letter)
                bound = machine.bound(later)
                if bound < seconds * (1 - 1e-12):
                    alike.setdefault(later.attentions, []).append((bound, later, word + letter))
        front = [one for found in alike.values() for one in _undominated(found)[:width]]
    return best


def lower_bound_seconds(times: Times, plan: InferencePlan, num_layers: int) -> float:
    """Seconds that no word can be faster than.

    The largest of: all work of the attention stream; its work up to the last attention, and that micro-batch's way
    through the last layer; the work of each other stream, what precedes its first slice and what follows its last; the
    last micro-batch's way through all layers, which begins behind the other micro-batches' in the first layer.

    For equal layers of equal slices, ASAS is slower by at most (r1 - 1) t_s.

    Args:
        times, plan, num_layers: as in `inference_plan`; the plan's order does not matter.

    Raises:
        ScheduleError: times do not fit the plan or the layers.
    """
    machine = _Machine(times, plan, num_layers)
    moment = machine.start()
    for letter in ("AS" if plan.shared_first else "A") * plan.num_micro_batches:
        moment = machine.after(moment, letter)
    behind_others = moment.arrivals[-1] + machine.alone[1]
    last = machine.blocks[-1]
    attended = machine.work_after(0, 0) - (0.0 if plan.shared_first else plan.num_micro_batches * last.shared)
    return max(machine.bound(machine.start()), behind_others, attended + last.way)


class _Block(NamedTuple):
    """Seconds of a layer; `way` is what a micro-batch's slices take without others, 0 in a dense layer."""

    attention: float
    shared: float
    travel: Travel | None
    way: float


class _Moment(NamedTuple):
    """A partial schedule, in seconds since its start; what is free before `now` counts as free then.

    Attributes:
        attentions, shared: numbers of tasks done.
        now: end of the last task of the attention stream.
        dispatch, experts, combine: when the other streams are free.
        arrivals: when the next attentions may start, in their order.
    """

    attentions: int
    shared: int
    now: float
    dispatch: float
    experts: float
    combine: float
    arrivals: tuple[float, ...]

    @property
    def end(self) -> float:
        return max(self.now, self.combine, *self.arrivals)

    def no_later(self, other: _Moment) -> bool:
        """Whether nothing is free later than in another schedule of the same tasks."""
        return (
            self.now <= other.now
            and self.dispatch <= other.dispatch
            and self.experts <= other.experts
            and self.combine <= other.combine
            and all(a <= b for a, b in zip(self.arrivals, other.arrivals, strict=True))
        )


class _Machine:
    """Runs words letter by letter, and bounds what may follow."""

    def __init__(self, times: Times, plan: InferencePlan, num_layers: int) -> None:
        layers = layers_of(times, plan, num_layers)
        self._r1, self._shared_first = plan.num_micro_batches, plan.shared_first
        self._total = plan.num_micro_batches * num_layers
        self.blocks = []
        for block in layers:
            travel = None if block.is_dense else Travel.of(block)
            way = travel.dispatch_to_combine if travel else 0.0
            self.blocks.append(_Block(block.attention, block.shared, travel, way))

        def following(values: list[float]) -> list[float]:
            """Sums from each position to the end."""
            return list(accumulate(reversed(values), initial=0.0))[::-1]

        self.alone = following([one.attention + self._slower(one.shared, one.way) for one in self.blocks])
        """What a micro-batch takes from each layer to the end, without others."""
        each = [(one, one.travel or Travel(*[0.0] * 6)) for one in self.blocks for _ in range(self._r1)]
        self._attention_left = following([one.attention for one, _ in each])
        self._shared_left = following([one.shared for one, _ in each])
        self._dispatch_left = following([travel.dispatch for _, travel in each])
        self._experts_left = following([travel.experts for _, travel in each])
        self._combine_left = following([travel.combine for _, travel in each])
        # What surely follows the last slice of each stream, and precedes the next slice to be sent from each layer on.
        self._tails, self._heads = (0.0, 0.0, 0.0), [(0.0, 0.0)] * (num_layers + 1)
        sparse = [number for number, block in enumerate(layers) if not block.is_dense]
        if sparse:
            last, rest = layers[sparse[-1]], self.alone[sparse[-1] + 1]
            self._tails = last.experts[-1] + last.combine[-1] + rest, last.combine[-1] + rest, rest
        for number in reversed(range(num_layers)):
            block = layers[number]
            self._heads[number] = self._heads[number + 1]
            if not block.is_dense:
                self._heads[number] = block.dispatch[0], block.dispatch[0] + block.experts[0]

    def _slower(self, shared: float, way: float) -> float:
        return shared + way if self._shared_first else max(shared, way)

    def start(self) -> _Moment:
        return _Moment(0, 0, 0.0, 0.0, 0.0, 0.0, (0.0,) * self._r1)

    def possible(self, moment: _Moment) -> str:
        """The letters that may come next."""
        ahead = moment.attentions - moment.shared
        return "A" * (moment.attentions < self._total and ahead < self._r1) + "S" * (ahead > 0)

    def after(self, moment: _Moment, letter: str) -> _Moment:
        """The schedule with one more task of the attention stream, and all that it sends to the experts."""
        attentions, shared, now, dispatch, experts, combine, arrivals = moment
        if letter == "A":
            block = self.blocks[attentions // self._r1]
            attentions += 1
            now = max(now, arrivals[0]) + block.attention
            arrivals = arrivals[1:]
        else:
            block = self.blocks[shared // self._r1]
            shared += 1
            now += block.shared
        if (letter == "S") == self._shared_first:
            arrival = now
            if (travel := block.travel) is not None:
                start = max(now, dispatch)
                combine = max(
                    combine + travel.combine, experts + travel.experts_to_combine, start + travel.dispatch_to_combine
                )
                experts = max(experts + travel.experts, start + travel.dispatch_to_experts)
                dispatch = start + travel.dispatch
                arrival = combine
            arrivals += (arrival,)
        later = tuple(max(arrival, now) for arrival in arrivals)
        return _Moment(attentions, shared, now, max(dispatch, now), max(experts, now), max(combine, now), later)

    def work_after(self, attentions: int, shared: int) -> float:
        """Seconds that the attention stream works after so many tasks of each kind."""
        return self._attention_left[attentions] + self._shared_left[shared]

    def bound(self, moment: _Moment) -> float:
        """Seconds that no schedule which begins so can be faster than."""
        attentions, r1 = moment.attentions, self._r1
        bounds = [moment.end, moment.now + self.work_after(attentions, moment.shared)]
        for number, arrival in enumerate(moment.arrivals, attentions):
            bounds.append(arrival + self.alone[number // r1])
        sent = moment.shared if self._shared_first else attentions
        if self._dispatch_left[sent] + self._experts_left[sent] + self._combine_left[sent]:
            start = moment.now
            if not self._shared_first:
                start = moment.arrivals[0] + self.blocks[attentions // r1].attention
            to_experts, to_combine = self._heads[sent // r1]
            bounds += [
                max(moment.dispatch, start) + self._dispatch_left[sent] + self._tails[0],
                max(moment.experts, start + to_experts) + self._experts_left[sent] + self._tails[1],
                max(moment.combine, start + to_combine) + self._combine_left[sent] + self._tails[2],
            ]
        return max(bounds)


def _undominated(found: list[tuple[float, _Moment, str]]) -> list[tuple[_Moment, str]]:
    """Schedules of the same tasks without those in which nothing is free earlier than in another; best bounds first."""
    kept: list[tuple[_Moment, str]] = []
    for _, moment, word in sorted(found, key=lambda one: one[0]):
        if not any(other.no_later(moment) for other, _ in kept):
            kept.append((moment, word))
    return kept
