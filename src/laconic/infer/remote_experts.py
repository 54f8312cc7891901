"""The experts of a model as its attention worker sees them: rows go out in slices, sums come back and are added.

One call is one layer of one micro-batch. While its rows are with the experts, the micro-batch computes its shared
experts and then gives its turn to another micro-batch (see compute_turns).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laconic.infer.compute_turns import ComputeTurns
from laconic.infer.links import ExpertLink
from laconic.infer.messages import Rows
from laconic.infer.recorder import LayerLog, MessageLog, PassLog, Recorder, WorkerLog, now_ns
from laconic.schedule.inference import InferencePlan
from laconic.schedule.slices import slice_ranges

__all__ = ["RemoteExperts", "RemoteLayer"]


class RemoteExperts:
    """All layers of experts, on expert workers.

    Args:
        links: to the expert workers, in their order.
        ranges: for each layer, the range of experts of each worker.
        plan: how a micro-batch is cut and in what order it computes. Its number of micro-batches is that of the threads
            that call.
        recorder: that is asked, at the begin of a pass, whether to record it; None records nothing.
    """

    def __init__(
        self,
        links: Sequence[ExpertLink],
        ranges: Sequence[Sequence[range]],
        plan: InferencePlan,
        recorder: Recorder | None = None,
    ) -> None:
        self._links = links
        self._ranges = ranges
        self._plan = plan
        self._turns = ComputeTurns()
        self._local = threading.local()
        self._numbers = itertools.count()
        self._recorder = recorder or Recorder()
        self._num_sent: Counter[int] = Counter()  # messages to each expert worker

    def begin_forward(self, num_rows: int | None) -> None:
        """Take the turn for a forward of the model by the calling thread.

        Args:
            num_rows: rows of the batch that are tokens; what follows is padding, which never travels. None is a plain
                forward, outside of all micro-batches, with which those of the engine are compared: it asks for each
                expert by itself, so that it shares neither slices nor sums with them.
        """
        self._local.is_plain = num_rows is None
        if num_rows is None:
            self._turns.take()
            self._local.has_turn, self._local.passed, self._local.log = True, None, None
            return
        if not hasattr(self._local, "micro_batch"):
            self._local.micro_batch = next(self._numbers)
        self._turns.take()
        self._local.num_rows = num_rows
        self._local.has_turn = True
        self._local.log = self._recorder.log
        self._local.passed = None
        if self._local.log is not None:
            self._local.passed = PassLog(self._local.micro_batch, num_rows, now_ns())

    def end_forward(self) -> None:
        """Give the turn away, if the calling thread has it."""
        if self._local.__dict__.pop("has_turn", False):
            passed: PassLog | None = self._local.passed
            if passed is not None:
                passed.end_ns = now_ns()
            self._turns.give()
            log: WorkerLog | None = self._local.log
            if passed is not None and log is not None and log is self._recorder.log:
                log.add_pass(passed)

    def run(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None = None
    ) -> Tensor:
        """Return the weighted sums of the experts' outputs, [n, M].

        Sums of a row are added in the order of slices, and of workers within a slice, in float32; with one slice and
        one worker the bits are the worker's.

        Args:
            layer: number of the layer, from 0.
            hidden: [n, M], on any device, as the result is.
            experts, weights: [n, k] choices and their weights.
            shared: computes the layer's shared experts, between sending and waiting, or before under `shared_first`.

        Raises:
            CollectiveError: an expert worker is lost.
        """
        if self._local.is_plain:
            return self._ask_each(layer, hidden, experts, weights, shared)
        plan = self._plan
        passed: PassLog | None = self._local.passed
        log = None if passed is None else LayerLog(passed.turn_ns)
        if shared is not None and plan.shared_first:
            _run_shared(shared, log)
            shared = None
        real = min(len(hidden), self._local.num_rows)
        # Messages are in host memory; what is there already is not copied.
        sent = self._send(layer, hidden[:real].cpu(), experts[:real].cpu(), weights[:real].cpu(), log)
        if shared is not None:
            if plan.order != "ASAS":
                self._turns.give()
                self._turns.take("shared")
            _run_shared(shared, log)

        # The other micro-batches compute while this one waits.
        self._turns.give()
        try:
            answers = [link.receive(rows) for link, rows, _ in sent]
        finally:
            self._turns.take()
        if passed is not None and log is not None:
            passed.turn_ns = now_ns()
            passed.layers.append(log)
            for (link, rows, _), message in zip(sent, log.messages, strict=True):
                message.arrived_ns = link.arrived_ns(rows)
        total = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for (_, _, places), sums in zip(sent, answers, strict=True):
            total.index_add_(0, places, sums.to(total.dtype))
        return total.to(hidden.dtype).to(hidden.device)

    def _ask_each(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None
    ) -> Tensor:
        """Do what `run` does with one message for each expert, whose outputs are weighed and added here."""
        if shared is not None:
            shared()
        here, choices, shares = hidden.cpu(), experts.cpu(), weights.float().cpu()
        total = torch.zeros(here.shape, dtype=torch.promote_types(here.dtype, torch.float32))
        for worker, (link, held) in enumerate(zip(self._links, self._ranges[layer], strict=True)):
            for expert in held:
                places, ranks = (choices == expert).nonzero(as_tuple=True)
                if len(places) == 0:
                    continue
                local = torch.full((len(places), 1), expert - held.start, dtype=torch.int32)
                message = Rows(layer, self._plan.num_micro_batches, 0, here[places], local, torch.ones(len(places), 1))
                link.send(message)
                self._num_sent[worker] += 1
                total.index_add_(0, places, link.receive(message).to(total.dtype) * shares[places, ranks, None])
        return total.to(hidden.dtype).to(hidden.device)

    def _send(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, log: LayerLog | None
    ) -> list[tuple[ExpertLink, Rows, Tensor]]:
        """Send every slice to the workers it concerns; return link, rows and the rows' numbers [m] of each message."""
        sent = []
        for number in range(self._plan.num_slices):
            for worker, (link, held) in enumerate(zip(self._links, self._ranges[layer], strict=True)):
                rows, wanted = range(len(hidden)), held
                if self._plan.slicing == "tokens":
                    rows = slice_ranges(len(hidden), self._plan.num_slices)[number]
                else:
                    group = slice_ranges(len(held), self._plan.num_slices)[number]
                    wanted = held[group.start : group.stop]
                choices = experts[rows.start : rows.stop]
                mine = (choices >= wanted.start) & (choices < wanted.stop)
                places = mine.any(1).nonzero().squeeze(1)
                if len(places) == 0:
                    continue
                local = torch.where(mine, choices - held.start, -1)[places].to(torch.int32)
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
        return sent


def _run_shared(shared: Callable[[], None], log: LayerLog | None) -> None:
    if log is None:
        shared()
        return
    log.shared_start_ns = now_ns()
    log.attention_end_ns = log.attention_end_ns or log.shared_start_ns
    shared()
    log.shared_end_ns = now_ns()


class RemoteLayer(nn.Module):
    """Stands where a block has its experts, without their weights."""

    def __init__(self, experts: RemoteExperts, layer: int) -> None:
        """Take the experts of all layers and the number of this one."""
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
