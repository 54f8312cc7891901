"""Dense gradients reduced in idle slots of the backward, as `laconic.schedule.moe_gradients.fill_slots` plans them.

A gradient waits from the moment when autograd has accumulated it. The pipelines of mixture layers
(`laconic.moe.ChunkedSchedule`) ask for work when the link between nodes is idle between their dispatches and their
combines, and get the oldest waiting bytes, as many as the plan has for that slot. The bytes planned for a dense part
are sent over the same link while that part computes. `finish` sends the rest.

Gradients become ready in the order of the backward, which is the same on ranks that run the same model, and the plan
fixes how many bytes go when; so ranks send the same messages in the same order, which the collectives check.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import api
from laconic.collectives.codec import Codec
from laconic.collectives.runtime.device_streams import Ready
from laconic.errors import ModelError, ScheduleError
from laconic.moe.parallel.link_streams import pipeline_streams
from laconic.schedule.execute import Stream, TaskHandle
from laconic.schedule.moe_gradients import GradientPlan
from laconic.schedule.moe_pipeline import INTER

Reduce = Callable[[Tensor], object]
"""Replaces a rank's values, contiguous [n], by their mean over ranks."""


def mean_over(group: dist.ProcessGroup, *, codec: Codec | str = "auto") -> Reduce:
    """Return a reduction that takes the mean over `group`; a Blockwise codec reduces in few bits."""

    def reduce(values: Tensor) -> None:
        api.all_reduce(values, group, op="avg", codec=codec)

    return reduce


@dataclass(frozen=True)
class Sent:
    """Bytes reduced in one slot."""

    slot: str | None
    """The part; None: after the last one."""
    nbytes: int


@dataclass(eq=False)
class _Waiting:
    """Reduction of `num_units` units, such as the elements of one gradient, that can be done in several steps."""

    num_units: int
    unit_nbytes: int
    reduced: nn.Parameter | Callable[[int, int], object]
    ready: Ready
    """What the stream that made the units has been given until then."""
    done: int = 0

    @staticmethod
    def of(parameter: nn.Parameter) -> _Waiting:
        assert parameter.grad is not None
        if not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()  # here, where both belong to the stream that frees them
        return _Waiting(parameter.numel(), parameter.itemsize, parameter, Ready(parameter.device))


@dataclass(eq=False)
class _Batch:
    """Work of one slot: slices of gradients, (parameter, first element, past the last), and deferred actions."""

    pieces: list[tuple[nn.Parameter, int, int]] = field(default_factory=list)
    actions: list[Callable[[], object]] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    nbytes: int = 0


class DenseGradients:
    """Averages gradients of dense parameters over ranks during backward.

        gradients = DenseGradients(dense_parameters, mean_over(grid.dp), plan)
        layer.schedule = ChunkedSchedule(2, 4, gradients=gradients, part="moe 3")     for every layer
        loss.backward()
        gradients.finish()

    Attributes:
        sent: what every slot of the last backward reduced, in order, up to `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reduce: Reduce | None,
        plan: GradientPlan | None = None,
        *,
        stream: Stream | None = None,
    ) -> None:
        """Hook the parameters; all ranks pass the same, and compute the same parameters' gradients in every backward.

        Args:
            parameters: whose gradients are reduced here and nowhere else; each is used in one backward once.
            reduce: called with slices of gradients in their dtype, in the stream's thread. Its result for one slice
                must not depend on others (`mean_over`, with or without a codec of few bits).
                None, with no parameters: only what is deferred is reduced (`reduce_in_slots`).
            plan: bytes by slot. None: every slot takes all that waits, which needs no measuring.
            stream: the link between nodes; None: the one of `pipeline_streams`.

        Raises:
            ModelError: no parameter needs gradients but there is a `reduce`, or the other way round.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if bool(self._parameters) != (reduce is not None):
            raise ModelError(
                f"{len(self._parameters)} parameters need gradients, and reduce is {'not ' * (reduce is not None)}None;"
                " pass the dense parameters with who reduces them, or no parameters and None if others are deferred"
            )
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._reduce, self.plan, self._stream = reduce, plan, stream
        self._waiting: deque[_Waiting] = deque()
        self._seen: set[nn.Parameter] = set()
        self._works: list[TaskHandle] = []
        self._enabled = True
        self.sent: list[Sent] = []
        self._held: list[Tensor] = []
        self._fresh = True
        self._hooks = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in backwards inside: for all micro-batches but the last."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def defer(self, nbytes: int, action: Callable[[], object]) -> None:
        """Queue a reduction that can only be done as a whole.

        It runs in the stream's thread, in the first slot that has room for it, or in `finish`.
        """
        self._begin()
        self._waiting.append(_Waiting(1, nbytes, lambda first, last: action(), Ready(self._device)))

    def defer_slices(
        self, num_units: int, unit_nbytes: int, action: Callable[[int, int], object], device: torch.device
    ) -> None:
        """Queue a reduction that can be done in slices of whole units.

        Args:
            num_units: units to reduce.
            unit_nbytes: bytes of a unit.
            action: action(first, last) reduces the units from `first` to before `last`, in the stream's thread; called
                once for each slot that has room for some.
            device: of the units.
        """
        self._begin()
        self._device = device
        self._waiting.append(_Waiting(num_units, unit_nbytes, action, Ready(device)))

    def hold(self, *tensors: Tensor) -> None:
        """Keep tensors until `finish` has waited for the reductions that use them."""
        self._held += tensors

    def slot(self, part: str) -> Callable[[], object] | None:
        """See `GradientSlots.slot`: reduces what is ready of this part's plan; a ScheduleError without such a part."""
        self._begin()
        batch = self._take(self._budget(part))
        if batch is None:
            return None
        self.sent.append(Sent(part, batch.nbytes))
        return partial(self._run, batch)

    def after(self, part: str) -> None:
        """See `GradientSlots.after`: reduces the bytes of the dense parts that follow while they compute."""
        if self.plan is None:
            return
        names = [slot.part for slot in self.plan.slots]
        for slot in self.plan.slots[names.index(part) + 1 :]:
            if slot.degree is not None:
                break
            batch = self._take(slot.nbytes)
            if batch is not None:
                self.sent.append(Sent(slot.part, batch.nbytes))
                self._submit(batch)

    def finish(self) -> None:
        """Reduce what is left and wait for all of it; gradients may be used then. Call it once after every backward.

        A parameter without a gradient counts as zero on this rank. Raises what a reduction raised.
        """
        self._begin()
        for parameter in self._parameters:
            if parameter not in self._seen:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._waiting.append(_Waiting.of(parameter))
        batch = self._take(None)
        if batch is not None:
            self.sent.append(Sent(None, batch.nbytes))
            self._submit(batch)
        works, self._works = self._works, []
        self._seen.clear()
        self._fresh = True
        for work in works:
            work.wait()
        self._held.clear()
        for work in works:
            work.result()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        if self._fresh:
            self.sent, self._fresh = [], False

    def _arrived(self, parameter: Tensor) -> None:
        if not self._enabled:
            return
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self._seen:
            raise ScheduleError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient before finish(); call finish"
                " after every backward, and wrap those that only accumulate in no_sync()"
            )
        self._begin()
        self._seen.add(parameter)
        self._waiting.append(_Waiting.of(parameter))

    def _budget(self, part: str) -> float | None:
        """Return the bytes planned for a part; None: no limit."""
        if self.plan is None:
            return None
        found = [slot.nbytes for slot in self.plan.slots if slot.part == part]
        if not found:
            raise ScheduleError(
                f"part is {part!r}, but the plan has {[slot.part for slot in self.plan.slots]}; give the schedule"
                " the name that its layer has in the plan"
            )
        return found[0]

    def _take(self, budget: float | None) -> _Batch | None:
        """Take the oldest waiting bytes, at most `budget`; whole units only."""
        if not self._enabled:
            return None
        batch = _Batch()
        while self._waiting and (budget is None or batch.nbytes < budget):
            one = self._waiting[0]
            last = one.num_units
            if budget is not None:
                last = min(last, one.done + (int(budget) - batch.nbytes) // max(1, one.unit_nbytes))
            if last == one.done and one.num_units:
                break
            if isinstance(one.reduced, nn.Parameter):
                batch.pieces.append((one.reduced, one.done, last))
            else:
                batch.actions.append(partial(one.reduced, one.done, last))
            batch.ready.append(one.ready)
            batch.nbytes += (last - one.done) * one.unit_nbytes
            one.done = last
            if last == one.num_units:
                self._waiting.popleft()
        return batch if batch.pieces or batch.actions else None

    @torch.no_grad()
    def _run(self, batch: _Batch) -> None:
        """Reduce a batch: one message for the slices of each dtype, in the order of their first slice, then actions."""
        for ready in batch.ready:
            ready.wait()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter, first, last in batch.pieces:
            assert parameter.grad is not None
            part = parameter.grad.view(-1)[first:last]
            by_dtype.setdefault(part.dtype, []).append(part)
        for parts in by_dtype.values():
            assert self._reduce is not None, "there are parameters"
            if len(parts) == 1:
                self._reduce(parts[0])
                continue
            values = torch.cat(parts)
            self._reduce(values)
            for part, reduced in zip(parts, values.split([len(part) for part in parts]), strict=True):
                part.copy_(reduced)
        for action in batch.actions:
            action()

    def _submit(self, batch: _Batch) -> None:
        """Run a batch outside of a plan, but behind the caller's stream, which may still read memory of the stream."""
        self._wire().start()
        self._works.append(self._wire().submit(partial(self._run, batch), ()))

    def _wire(self) -> Stream:
        if self._stream is None:
            streams: Mapping[str, Stream] = pipeline_streams(self._device)
            self._stream = streams[INTER]
        return self._stream
