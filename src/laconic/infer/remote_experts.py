"""The experts of a model as its attention worker sees them: rows go out in slices, sums come back and are added.

One call is one layer of one micro-batch. While its rows are with the experts, the micro-batch computes its shared
experts and then gives its turn to another micro-batch (see compute_turns).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laconic.infer.compute_turns import ComputeTurns
from laconic.infer.links import ExpertLink
from laconic.infer.messages import Rows
from laconic.infer.split import slice_ranges
from laconic.schedule.inference import InferencePlan

__all__ = ["RemoteExperts", "RemoteLayer"]


class RemoteExperts:
    """All layers of experts, on expert workers.

    Args:
        links: to the expert workers, in their order.
        ranges: for each layer, the range of experts of each worker.
        plan: how a micro-batch is cut and in what order it computes. Its number of micro-batches is that of the threads
            that call.
    """

    def __init__(self, links: Sequence[ExpertLink], ranges: Sequence[Sequence[range]], plan: InferencePlan) -> None:
        self._links = links
        self._ranges = ranges
        self._plan = plan
        self._turns = ComputeTurns()
        self._local = threading.local()
        self._numbers = itertools.count()

    def begin_forward(self, num_rows: int) -> None:
        """Take the turn for a forward of the model by the calling thread.

        Args:
            num_rows: rows of the batch that are tokens; what follows is padding, which never travels.
        """
        if not hasattr(self._local, "micro_batch"):
            self._local.micro_batch = next(self._numbers)
        self._turns.take()
        self._local.num_rows = num_rows
        self._local.has_turn = True

    def end_forward(self) -> None:
        """Give the turn away, if the calling thread has it."""
        if self._local.__dict__.pop("has_turn", False):
            self._turns.give()

    def run(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None = None
    ) -> Tensor:
        """Return the weighted sums of the experts' outputs, [n, M].

        Sums of a row are added in the order of slices, and of workers within a slice, in float32; with one slice and
        one worker the bits are the worker's.

        Args:
            layer: number of the layer, from 0.
            hidden: [n, M].
            experts, weights: [n, k] choices and their weights.
            shared: computes the layer's shared experts, between sending and waiting, or before under `shared_first`.

        Raises:
            CollectiveError: an expert worker is lost.
        """
        plan = self._plan
        if shared is not None and plan.shared_first:
            shared()
            shared = None
        real = min(len(hidden), self._local.num_rows)
        sent = self._send(layer, hidden[:real], experts[:real], weights[:real])
        if shared is not None:
            if plan.order != "ASAS":
                self._turns.give()
                self._turns.take("shared")
            shared()

        # The other micro-batches compute while this one waits.
        self._turns.give()
        try:
            answers = [link.receive(rows) for link, rows, _ in sent]
        finally:
            self._turns.take()
        total = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for (_, _, places), sums in zip(sent, answers, strict=True):
            total.index_add_(0, places, sums.to(total.dtype))
        return total.to(hidden.dtype)

    def _send(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor
    ) -> list[tuple[ExpertLink, Rows, Tensor]]:
        """Send every slice to the workers it concerns; return link, rows and the rows' numbers [m] of each message."""
        sent = []
        for number in range(self._plan.num_slices):
            for link, held in zip(self._links, self._ranges[layer], strict=True):
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
                link.send(message)
                sent.append((link, message, places))
        return sent


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
