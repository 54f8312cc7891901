"""The experts of a model as its attention worker sees them: rows go out in slices, sums come back and are added.

One call is one layer of one micro-batch. While its rows are with the experts, the micro-batch computes its shared
experts and then gives its turn to another micro-batch.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from laconic.errors import CollectiveError
from laconic.infer.links import ExpertLink
from laconic.infer.messages import Rows
from laconic.infer.recorder import LayerLog, MessageLog, PassClock, PassLog, Recorder, WorkerLog, now_ns
from laconic.schedule.inference import InferencePlan
from laconic.schedule.slices import slice_ranges

Kind = Literal["attention", "shared"]

_KEY_VALUES = 8
"""Values of a row whose bits decide between copies of an expert."""


class ComputeTurns:
    """A lock with two queues: who waits for attention goes before who waits for shared experts, each in order of call.

    The micro-batches of one attention worker, each a thread, share its processor: one computes while it has the turn,
    and gives it away while it waits for experts.

    That is the order greedy. AASS runs so too: it differs only where micro-batches keep step, which nothing makes them
    do here. Under ASAS a micro-batch keeps its turn through its shared experts and does not queue.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[object]] = {"attention": deque(), "shared": deque()}
        self._taken = False

    def take(self, kind: Kind = "attention") -> None:
        """Wait for the turn and take it."""
        ticket, queue = object(), self._waiting[kind]
        with self._changed:
            queue.append(ticket)
            first = self._waiting["attention"]
            self._changed.wait_for(lambda: not self._taken and queue[0] is ticket and (queue is first or not first))
            queue.popleft()
            self._taken = True

    def give(self) -> None:
        """Give the turn to the next who waits."""
        with self._changed:
            self._taken = False
            self._changed.notify_all()


class RemoteExperts:
    """All layers of experts, on expert workers, to which `links` are in their order.

    `held` has for each layer the experts of each worker, in the order in which it has them; one that several hold is
    asked for at one of them, row by row. The plan's number of micro-batches is that of the threads that call. The
    recorder is asked, at the begin of a pass, whether to record it. Rows leave from `device`, and sums come to it: on a
    CUDA device no host looks at routes, and all rows of a slice go to every expert worker, with the choices that are
    there.
    """

    def __init__(
        self,
        links: Sequence[ExpertLink],
        held: Sequence[Sequence[Sequence[int]]],
        plan: InferencePlan,
        recorder: Recorder | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._links = links
        self._device = device or torch.device("cpu")
        self._sends_all = self._device.type == "cuda"
        self._places = [_Places(workers, self._device) for workers in held]
        self._plan = plan
        self._turns = ComputeTurns()
        self._local = threading.local()
        self._numbers = itertools.count()
        self._recorder = recorder or Recorder()
        self._num_sent: Counter[int] = Counter()  # messages to each expert worker

    @property
    def loads(self) -> list[list[int]]:
        """Rows that each expert of each layer was chosen for, by micro-batches."""
        return [places.loads.tolist() for places in self._places]

    def forget_loads(self) -> None:
        """Count rows from here on."""
        for places in self._places:
            places.loads.zero_()

    def begin_forward(self, num_rows: int | None) -> None:
        """Take the turn for a forward of the model by the calling thread.

        Of the batch `num_rows` rows are tokens; what follows is padding, which never travels. None is a plain forward,
        outside of all micro-batches, with which those of the engine are compared: it asks for each expert by itself, so
        that it shares neither slices nor sums with them.
        """
        self._local.is_plain = num_rows is None
        if num_rows is None:
            self._turns.take()
            self._local.has_turn, self._local.passed = True, None
            return
        if not hasattr(self._local, "micro_batch"):
            self._local.micro_batch = next(self._numbers)
        self._turns.take()
        self._local.num_rows = num_rows
        self._local.has_turn = True
        self._local.log, self._local.clock = self._recorder.log, self._recorder.clock()
        self._local.passed = None
        if self._local.log is not None:
            self._local.passed = PassLog(self._local.micro_batch, num_rows, self._local.clock.now())

    def end_forward(self) -> None:
        """Give the turn away, if the calling thread has it."""
        if self._local.__dict__.pop("has_turn", False):
            passed: PassLog | None = self._local.passed
            if passed is not None:
                passed.end_ns = self._local.clock.now()
            self._turns.give()
            if passed is not None:
                log: WorkerLog = self._local.log
                self._recorder.add_pass(log, passed, self._local.clock)

    def run(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None = None
    ) -> Tensor:
        """Return the weighted sums of the experts' outputs, [n, M]; CollectiveError if an expert worker is lost.

        Sums of a row are added in the order of slices, and of workers within a slice, in float32; with one slice and
        one worker the bits are the worker's. `hidden` [n, M] is on any device, as the result is; `experts` and
        `weights` are choices [n, k]. `shared` computes the layer's shared experts, between sending and waiting, or
        before under `shared_first`.
        """
        if self._local.is_plain:
            return self._ask_each(layer, hidden, experts, weights, shared)
        plan, clock = self._plan, self._local.clock
        passed: PassLog | None = self._local.passed
        log = None if passed is None else LayerLog(passed.turn_ns)
        if shared is not None and plan.shared_first:
            _run_shared(shared, log, clock)
            shared = None
        real = min(len(hidden), self._local.num_rows)
        # What is where messages leave already is not copied.
        here, choices, shares = (x[:real].to(self._device) for x in (hidden, experts, weights))
        if log is not None:
            clock.meet()
        sent: list[tuple[ExpertLink, Rows, Tensor]] = []
        try:
            self._send(layer, here, choices, shares, log, sent)
            if shared is not None:
                if plan.order != "ASAS":
                    self._turns.give()
                    self._turns.take("shared")
                _run_shared(shared, log, clock)
        except BaseException:
            # The forward is tried again, and must not take these answers for its own.
            for link, rows, _ in sent:
                with contextlib.suppress(Exception):  # nor may one that fails leave the others unanswered
                    link.receive(rows)
            raise

        # The other micro-batches compute while this one waits. On a GPU it is the stream that waits, in its turn.
        answers: list[Tensor] = []
        self._turns.give()
        try:
            if not self._sends_all:
                answers = _receive(sent)
        finally:
            self._turns.take()
        if self._sends_all:
            answers = _receive(sent)
        if passed is not None and log is not None:
            passed.turn_ns = clock.now()
            passed.layers.append(log)
            for (link, rows, _), message in zip(sent, log.messages, strict=True):
                message.arrived_ns = link.arrived_ns(rows)
        total = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=self._device)
        for (_, _, places), sums in zip(sent, answers, strict=True):
            total.index_add_(0, places, sums.to(total.dtype))
        return total.to(hidden.dtype).to(hidden.device)

    def _ask_each(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None
    ) -> Tensor:
        """Do what `run` does with one message for each expert, whose outputs are weighed and added here."""
        if shared is not None:
            shared()
        here, choices, shares = (x.to(self._device) for x in (hidden, experts, weights.float()))
        total = torch.zeros(here.shape, dtype=torch.promote_types(here.dtype, torch.float32), device=self._device)
        for worker, link in enumerate(self._links):
            for number, expert in enumerate(self._places[layer].held[worker]):
                places, ranks = (choices == expert).nonzero(as_tuple=True)
                if len(places) == 0 or self._places[layer].owners[0, expert] != worker:
                    continue
                local = torch.full((len(places), 1), number, dtype=torch.int32, device=self._device)
                message = Rows(
                    layer,
                    self._plan.num_micro_batches,
                    0,
                    here[places],
                    local,
                    torch.ones(len(places), 1, dtype=torch.float32, device=self._device),
                )
                link.send(message)
                self._num_sent[worker] += 1
                total.index_add_(0, places, link.receive(message).to(total.dtype) * shares[places, ranks, None])
        return total.to(hidden.dtype).to(hidden.device)

    def _send(
        self,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        log: LayerLog | None,
        sent: list[tuple[ExpertLink, Rows, Tensor]],
    ) -> None:
        """Send every slice to the workers it concerns; `sent` takes each message's link, rows and their numbers [m]."""
        layer_places = self._places[layer]
        num_experts = layer_places.num_experts
        experts = torch.where((experts < 0) | (experts > num_experts), num_experts, experts)  # no expert: sent nowhere
        owners = layer_places.owners_of(hidden, experts)
        layer_places.count(experts)
        for number in range(self._plan.num_slices):
            for worker, link in enumerate(self._links):
                rows = range(len(hidden))
                if self._plan.slicing == "tokens":
                    rows = slice_ranges(len(hidden), self._plan.num_slices)[number]
                mine = owners[rows.start : rows.stop] == worker
                local = layer_places.local[worker][experts[rows.start : rows.stop]]
                if self._plan.slicing == "experts":
                    group = slice_ranges(len(layer_places.held[worker]), self._plan.num_slices)[number]
                    mine &= (local >= group.start) & (local < group.stop)
                if self._sends_all:
                    places = torch.arange(len(mine), device=self._device)
                else:
                    places = mine.any(1).nonzero().squeeze(1)
                if len(places) == 0:
                    continue
                local = torch.where(mine, local, -1)[places]
                places = places + rows.start
                message = Rows(layer, self._local.micro_batch, number, hidden[places], local, weights[places])
                if log is not None:
                    entry = MessageLog(worker, self._num_sent[worker], number, len(places), now_ns())
                    log.attention_end_ns = log.attention_end_ns or entry.posted_ns
                    log.messages.append(entry)
                link.send(message)
                self._num_sent[worker] += 1  # by the thread that has the turn
                sent.append((link, message, places))
        if log is not None:
            log.sent_ns = now_ns()
            log.attention_end_ns = log.attention_end_ns or log.sent_ns
            log.shared_start_ns = log.shared_start_ns or log.attention_end_ns
            log.shared_end_ns = log.shared_end_ns or log.attention_end_ns


class _Places:
    """Where the experts of a layer are."""

    def __init__(self, held: Sequence[Sequence[int]], device: torch.device) -> None:
        self.held = held
        self.num_experts = 1 + max(expert for worker in held for expert in worker)
        owners: list[list[int]] = [[] for _ in range(self.num_experts)]
        local = torch.full((len(held), self.num_experts + 1), -1, dtype=torch.int32, device="cpu")
        for worker, experts in enumerate(held):
            local[worker, list(experts)] = torch.arange(len(experts), dtype=torch.int32, device="cpu")
            for expert in experts:
                owners[expert].append(worker)
        owners.append([-1])
        self.local = local.to(device)
        """Number of an expert at a worker, [workers, E + 1]; -1 where it is not. The last one is nobody's."""
        copies = [len(workers) for workers in owners]
        self.copies = torch.tensor(copies, device=device)
        padded = [[*workers, *[-1] * (max(copies) - len(workers))] for workers in owners]
        self.owners = torch.tensor(padded, device=device).T
        """Workers that hold an expert, [most copies, E + 1]; the first row has one of each."""
        self._counted = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device)
        self.loads = self._counted[:-1]

    def count(self, experts: Tensor) -> None:
        """Add choices [n, k] to `loads`; bincount would make the host of a GPU wait."""
        self._counted.index_add_(0, experts.flatten(), torch.ones_like(experts).flatten().long())

    def owners_of(self, hidden: Tensor, experts: Tensor) -> Tensor:
        """Return the worker that is asked for each choice, [n, k].

        Which copy a row takes follows from the bits of the row alone, so that its sums do not depend on the batch.
        """
        if len(self.owners) == 1:
            return self.owners[0][experts]
        bits = hidden[:, :_KEY_VALUES].contiguous().view(torch.uint8).sum(1, keepdim=True, dtype=torch.int64)
        return self.owners[bits % self.copies[experts], experts]


def _receive(sent: Sequence[tuple[ExpertLink, Rows, Tensor]]) -> list[Tensor]:
    """Receive the answers to all rows; an error is raised behind the last, since the forward is tried again.

    A CollectiveError, of an expert worker that is lost, is raised at once: no forward follows.
    """
    answers: list[Tensor] = []
    failed: Exception | None = None
    for link, rows, _ in sent:
        try:
            answers.append(link.receive(rows))
        except CollectiveError:
            raise
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return answers


def _run_shared(shared: Callable[[], None], log: LayerLog | None, clock: PassClock) -> None:
    if log is None:
        shared()
        return
    log.shared_start_ns = clock.now()
    log.attention_end_ns = log.attention_end_ns or log.shared_start_ns
    shared()
    log.shared_end_ns = clock.now()


class RemoteLayer(nn.Module):
    """Stands where a block has its experts, without their weights."""

    def __init__(self, experts: RemoteExperts, layer: int) -> None:
        super().__init__()
        self.__dict__["_experts"] = experts
        self.layer = layer
        self.shared: Callable[[Tensor], Callable[[], None] | None] | None = None
        """Returns what computes the shared experts for hidden states [n, M], if this layer has any."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs, [n, M]; see RemoteExperts.run."""
        shared = None if self.shared is None else self.shared(hidden_states)
        experts: RemoteExperts = self.__dict__["_experts"]
        return experts.run(self.layer, hidden_states, top_k_index, top_k_weights, shared)
