"""Disaggregated mixture-of-experts inference as a plan on four streams (FinDEP, arXiv 2512.21487).

Attention workers compute attention and shared experts, expert workers the routed experts. The batch is cut into r1
micro-batches, and what a micro-batch sends to its experts into r2 slices. Both directions of the link between the
workers are streams of their own.

                     tasks of layer L, micro-batch M, slice S    start after
    attention        attention L.M                               combine (L-1).M of all slices, shared (L-1).M
    attention        shared L.M                                  attention L.M
    a2e              dispatch L.M.S                              attention L.M (with `shared_first`: shared L.M)
    experts          experts L.M.S                               dispatch L.M.S
    e2a              combine L.M.S                               experts L.M.S

Prefill and decode are the same plan with other times. Steps of decoding follow each other like further layers: layer
numbers count on, so layer l of step k is k * num_layers + l. A dense layer has no dispatch, experts and combine; its
feed-forward block may stand in `shared`, and a dense layer at the end for the output projection.

`inference_plan` is what runs and what is drawn; `inference_seconds` gives its makespan without making its tasks. Tests
hold it against the paper's closed forms.

    >>> times = BlockTimes.uniform(attention=3.0, shared=1.0, dispatch=1.0, experts=2.0, combine=1.0, num_slices=2)
    >>> plan = InferencePlan(num_micro_batches=2, num_slices=2)
    >>> inference_seconds(times, plan, num_layers=4)
    40.0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from laconic.errors import ScheduleError
from laconic.schedule.streams import StreamPlan, Task

ATTENTION, DISPATCH, EXPERTS, COMBINE = "attention", "a2e", "experts", "e2a"
"""The streams: attention workers, link to the experts, expert workers, link back."""

Order = Literal["ASAS", "AASS", "greedy"]
Slicing = Literal["tokens", "experts"]

_SOON = 1e-9
"""Rows that arrive within this part of a micro-batch's seconds are there: rounding must not decide about an order."""

_SAME = 1e-13
"""Two states of the simulation are equal if they differ by less than this part of the time between them."""


@dataclass(frozen=True)
class InferencePlan:
    """How a batch passes through the layers.

    MegaScale-Infer's ping-pong (PPPipe in FinDEP) is `InferencePlan(r1, shared_first=True)`; without any overlap
    it is `InferencePlan(shared_first=True)`.

    Attributes:
        num_micro_batches: r1, the parts into which an attention worker's batch is cut.
        num_slices: r2, the parts in which a micro-batch travels to its experts and back.
        order: of tasks on the attention stream. "ASAS": attention and shared experts of each micro-batch in turn;
            "AASS": attention of all micro-batches, then their shared experts; "greedy": the next attention as soon as
            its rows are back, shared experts while it waits for them, by the times that are expected.
        slicing: a slice is a range of the micro-batch's rows ("tokens"), or all rows of a group of experts ("experts").
        shared_first: rows leave for their experts only after the shared experts, which then count as attention.

    Raises:
        ScheduleError: a number is no integer of at least 1, an order or slicing is unknown, or the order is greedy with
            `shared_first`.
    """

    num_micro_batches: int = 1
    num_slices: int = 1
    order: Order = "ASAS"
    slicing: Slicing = "tokens"
    shared_first: bool = False

    def __post_init__(self) -> None:
        _check_count("num_micro_batches", self.num_micro_batches)
        _check_count("num_slices", self.num_slices)
        _check_choice("order", self.order, get_args(Order))
        _check_choice("slicing", self.slicing, get_args(Slicing))
        if not isinstance(self.shared_first, bool):
            raise ScheduleError(f"shared_first is {self.shared_first!r}, but must be True or False")
        if self.shared_first and self.order == "greedy":
            raise ScheduleError(
                "order is 'greedy' with shared_first, but rows that wait for shared experts must not wait: use 'ASAS'"
            )


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one micro-batch in one layer, on the slowest worker.

    Attributes:
        attention: all that has to end before rows can leave: attention, norms, gate.
        shared: shared experts, or the feed-forward block of a dense layer; 0 without.
        dispatch: sending one slice to the experts; one entry per slice, none in a dense layer.
        experts: routed experts of one slice; as many entries.
        combine: sending one slice back; as many entries.

    Raises:
        ScheduleError: seconds are negative or not finite, or the three tuples differ in length.
    """

    attention: float
    shared: float
    dispatch: tuple[float, ...]
    experts: tuple[float, ...]
    combine: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.dispatch) == len(self.experts) == len(self.combine):
            counts = f"{len(self.dispatch)}, {len(self.experts)} and {len(self.combine)}"
            raise ScheduleError(
                f"dispatch, experts and combine have {counts} entries, but each needs one per slice (none if dense)"
            )
        for seconds in (self.attention, self.shared, *self.dispatch, *self.experts, *self.combine):
            if not 0 <= seconds < math.inf:
                raise ScheduleError(f"{self} has seconds of {seconds!r}, but all must be finite and >= 0")

    @classmethod
    def uniform(
        cls, attention: float, shared: float, dispatch: float, experts: float, combine: float, num_slices: int = 1
    ) -> BlockTimes:
        """Times of a layer whose num_slices slices are all alike: dispatch, experts and combine are seconds of one."""
        return cls(attention, shared, (dispatch,) * num_slices, (experts,) * num_slices, (combine,) * num_slices)

    @property
    def is_dense(self) -> bool:
        """Whether the layer has no routed experts."""
        return not self.dispatch


Times = BlockTimes | Sequence[BlockTimes]


def order_word(times: Times, plan: InferencePlan, num_layers: int, num_steps: int = 1) -> str:
    """Return the order of tasks on the attention stream as a word of A's (attention) and S's (shared experts).

    The n-th A, and the n-th S, are those of micro-batch n modulo r1 in layer n // r1, both counted from 0. A word can
    run if every prefix has at least as many A's as S's, and at most r1 more: attention precedes the shared experts
    of the same rows, which precede attention of the next layer. Only the greedy order depends on times.
    """
    layers = layers_of(times, plan, num_layers, num_steps)
    r1 = plan.num_micro_batches
    if plan.order == "ASAS":
        return "AS" * r1 * len(layers)
    if plan.order == "AASS":
        return ("A" * r1 + "S" * r1) * len(layers)
    word: list[str] = []
    state = _start(r1)
    for block in layers:
        _, state = _layer(block, None if block.is_dense else Travel.of(block), plan, state, word)
    return "".join(word) + "S" * state.pending


def inference_plan(
    times: Times, plan: InferencePlan, num_layers: int, num_steps: int = 1, *, word: str | None = None
) -> StreamPlan:
    """Plan a pass of a batch through all layers, or several steps of decoding.

    A micro-batch's slices are issued right after the task that they wait for, so an executor may run the attention
    stream in its own thread: no row waits for shared experts that it does not need.

    Args:
        times: of every layer, or one for each; with as many slices as the plan.
        plan: micro-batches, slices and their order.
        num_layers: T, of the model.
        num_steps: passes, each of which starts a micro-batch when its own previous one has ended.
        word: order on the attention stream in place of `plan.order`, as by `order_word`.

    Raises:
        ScheduleError: times do not fit the plan or the layers, a number is below 1, or the word cannot run.
    """
    layers = layers_of(times, plan, num_layers, num_steps)
    r1 = plan.num_micro_batches
    tasks = []
    issued = dict.fromkeys("AS", 0)
    word = order_word(layers, plan, len(layers)) if word is None else checked_word(word, r1, len(layers))
    for letter in word:
        layer, micro_batch = divmod(issued[letter], r1)
        issued[letter] += 1
        block, here = layers[layer], f"{layer}.{micro_batch}"
        if letter == "A":
            after: tuple[str, ...] = ()
            if layer:
                before = f"{layer - 1}.{micro_batch}"
                after = (f"shared {before}", *(f"combine {before}.{i}" for i in range(len(layers[layer - 1].combine))))
            tasks.append(Task(f"attention {here}", ATTENTION, block.attention, after))
        else:
            tasks.append(Task(f"shared {here}", ATTENTION, block.shared, (f"attention {here}",)))
        if (letter == "S") == plan.shared_first:
            tasks += _travel(block, here, tasks[-1].name)
    return StreamPlan(tuple(tasks))


def _travel(block: BlockTimes, here: str, after: str) -> Iterator[Task]:
    """Yield the tasks of a micro-batch's slices: to the experts, through them, and back."""
    for i, (dispatch, experts, combine) in enumerate(zip(block.dispatch, block.experts, block.combine, strict=True)):
        yield Task(f"dispatch {here}.{i}", DISPATCH, dispatch, (after,))
        yield Task(f"experts {here}.{i}", EXPERTS, experts, (f"dispatch {here}.{i}",))
        yield Task(f"combine {here}.{i}", COMBINE, combine, (f"experts {here}.{i}",))


class _State(NamedTuple):
    """Where a simulation is after a layer, in seconds after the last task of the attention stream; never below 0.

    A stream that is free earlier than that cannot be used earlier either. `arrivals` are when the micro-batches may
    start their next attention; `pending` of them have shared experts of this layer that are not done.
    """

    dispatch: float
    experts: float
    combine: float
    arrivals: tuple[float, ...]
    pending: int
    pending_seconds: float


def _start(num_micro_batches: int) -> _State:
    return _State(0.0, 0.0, 0.0, (0.0,) * num_micro_batches, 0, 0.0)


class Travel(NamedTuple):
    """The longest ways of one micro-batch's slices through a layer.

    A stream is a chain of slices, and each slice goes from one stream to the next: `dispatch_to_combine` is the longest
    path from the first slice's dispatch to the last slice's combine, and so on.
    """

    dispatch: float
    experts: float
    combine: float
    dispatch_to_experts: float
    dispatch_to_combine: float
    experts_to_combine: float

    @classmethod
    def of(cls, block: BlockTimes) -> Travel:
        """The longest ways through a layer with these times of its slices."""
        to_combine = to_experts = dispatched = worked = combined = from_experts = 0.0
        for dispatch, experts, combine in zip(block.dispatch, block.experts, block.combine, strict=True):
            dispatched += dispatch
            to_experts = (to_experts if to_experts > dispatched else dispatched) + experts
            to_combine = (to_combine if to_combine > to_experts else to_experts) + combine
            worked += experts
            from_experts = (from_experts if from_experts > worked else worked) + combine
            combined += combine
        return cls(dispatched, worked, combined, to_experts, to_combine, from_experts)


def inference_seconds(times: Times, plan: InferencePlan, num_layers: int, num_steps: int = 1) -> float:
    """Makespan of `inference_plan` with these arguments, and its errors, without making its tasks.

    Equal to the simulation of the plan but for rounding, less than 1e-12 of the result. A micro-batch passes a layer in
    a fixed number of operations, whatever the number of slices. When all streams and micro-batches are as far behind
    the attention stream as one or two equal layers before, all equal layers that follow repeat the time in between.
    """
    if isinstance(times, BlockTimes):
        _check_layers((times,), plan, num_layers, num_steps)
        runs: Iterator[tuple[BlockTimes, int]] = iter([(times, num_layers * num_steps)])
    else:
        layers = layers_of(times, plan, num_layers, num_steps)
        runs = ((block, sum(1 for _ in equal)) for block, equal in groupby(layers))
    passed, state = 0.0, _start(plan.num_micro_batches)
    for block, count in runs:
        seconds, state = _equal_layers(block, count, plan, state)
        passed += seconds
    return passed + max(*state.arrivals, state.pending * state.pending_seconds)


def _equal_layers(block: BlockTimes, count: int, plan: InferencePlan, state: _State) -> tuple[float, _State]:
    """Simulate `count` equal layers; returns the seconds that the attention stream advances and the state then."""
    travel = None if block.is_dense else Travel.of(block)
    seen = [(0.0, state)]  # after the last two layers
    passed = 0.0
    while count:
        seconds, state = _layer(block, travel, plan, state)
        passed += seconds
        count -= 1
        for period, (then, before) in enumerate(reversed(seen), 1):
            if count >= period and _repeats(before, state, _SAME * (passed - then)):
                rounds, count = divmod(count, period)
                passed += rounds * (passed - then)
                break
        seen = [seen[-1], (passed, state)]
    return passed, state


def _repeats(before: _State, state: _State, tolerance: float) -> bool:
    """Whether two states are equal within a tolerance in seconds, which is then also that of all that follows."""
    return (
        (before.pending, before.pending_seconds) == (state.pending, state.pending_seconds)
        and abs(before.dispatch - state.dispatch) <= tolerance
        and abs(before.experts - state.experts) <= tolerance
        and abs(before.combine - state.combine) <= tolerance
        and all(abs(a - b) <= tolerance for a, b in zip(before.arrivals, state.arrivals, strict=True))
    )


def _layer(
    block: BlockTimes, travel: Travel | None, plan: InferencePlan, state: _State, word: list[str] | None = None
) -> tuple[float, _State]:
    """Simulate one layer; returns the seconds that the attention stream advances and the state then.

    With the greedy order, shared experts may stay pending, and `word` gets the letters of the tasks that were done.
    """
    now, pending = 0.0, 0
    leaves: list[float] = []
    if plan.order == "greedy":
        now, pending = _greedy(block, state, leaves, [] if word is None else word)
    elif plan.order == "ASAS":
        for arrival in state.arrivals:
            now = (arrival if arrival > now else now) + block.attention
            attended = now
            now += block.shared
            leaves.append(now if plan.shared_first else attended)
    else:
        for arrival in state.arrivals:
            now = (arrival if arrival > now else now) + block.attention
            leaves.append(now)
        first = now
        now += block.shared * plan.num_micro_batches
        if plan.shared_first:
            leaves = [first + number * block.shared for number in range(1, plan.num_micro_batches + 1)]
    dispatch, experts, combine = state.dispatch, state.experts, state.combine
    if travel is not None:
        for number, leave in enumerate(leaves):
            start = leave if leave > dispatch else dispatch
            dispatch = start + travel.dispatch
            # The last slice back follows those before it, or its experts, or its dispatch: what ends last decides.
            combine += travel.combine
            if (end := experts + travel.experts_to_combine) > combine:
                combine = end
            if (end := start + travel.dispatch_to_combine) > combine:
                combine = end
            experts += travel.experts
            if (end := start + travel.dispatch_to_experts) > experts:
                experts = end
            leaves[number] = combine
    later = _State(
        dispatch - now if dispatch > now else 0.0,
        experts - now if experts > now else 0.0,
        combine - now if combine > now else 0.0,
        tuple([arrival - now if arrival > now else 0.0 for arrival in leaves]),
        pending,
        block.shared,
    )
    return now, later


def _greedy(block: BlockTimes, state: _State, leaves: list[float], word: list[str]) -> tuple[float, int]:
    """Do a layer's attentions, and shared experts while rows are on their way or where the next attention needs them.

    Appends to `leaves` when each attention ended; returns when the last did, and how many shared experts are pending.
    """
    r1 = len(state.arrivals)
    soon = _SOON * (block.attention + block.shared)
    now, before, own = 0.0, state.pending, 0
    for arrival in state.arrivals:
        while before + own and (arrival > now + soon or before + own == r1):
            if before:
                before -= 1
                now += state.pending_seconds
            else:
                own -= 1
                now += block.shared
            word.append("S")
        now = (arrival if arrival > now else now) + block.attention
        word.append("A")
        own += 1
        leaves.append(now)
    return now, own


def layers_of(times: Times, plan: InferencePlan, num_layers: int, num_steps: int = 1) -> tuple[BlockTimes, ...]:
    """Times of every layer of every step."""
    given = (times,) if isinstance(times, BlockTimes) else tuple(times)
    _check_layers(given, plan, num_layers, num_steps)
    if isinstance(times, BlockTimes):
        given *= num_layers
    if len(given) != num_layers:
        raise ScheduleError(f"times has {len(given)} entries, but there are {num_layers} layers: give one for each")
    return given * num_steps


def _check_layers(layers: Sequence[BlockTimes], plan: InferencePlan, num_layers: int, num_steps: int) -> None:
    _check_count("num_layers", num_layers)
    _check_count("num_steps", num_steps)
    checked = None
    for number, block in enumerate(layers):
        if block is not checked and not block.is_dense and len(block.dispatch) != plan.num_slices:
            raise ScheduleError(
                f"times of layer {number} have {len(block.dispatch)} slices, but the plan has num_slices = "
                f"{plan.num_slices}: give times of as many slices, or none for a dense layer"
            )
        checked = block


def checked_word(word: str, r1: int, num_layers: int) -> str:
    """Return a word in which the attention stream can do its tasks, or raise ScheduleError."""
    ahead = 0
    for at, letter in enumerate(word):
        ahead += {"A": 1, "S": -1}.get(letter, r1 + 1)
        if not 0 <= ahead <= r1:
            raise ScheduleError(
                f"word begins with {word[: at + 1]!r}, but must always have as many A's as S's, or up to {r1} more"
            )
    if ahead or len(word) != 2 * r1 * num_layers:
        raise ScheduleError(
            f"word has {word.count('A')} A's and {word.count('S')} S's, but must have {r1 * num_layers} of each: "
            f"one per micro-batch and layer"
        )
    return word


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{name} is {value!r}, but must be an integer of at least 1")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ScheduleError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}")
