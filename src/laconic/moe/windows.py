"""Dense gradients reduced in windows of the backward, as `laconic.schedule.fill_windows` plans them.

A gradient waits from the moment when autograd has accumulated it. The pipelines of mixture layers
(`laconic.moe.PipelineSchedule`) ask for work when the wire between nodes is idle between their dispatches and their
combines, and get the next bytes that wait, oldest first, as many as the plan has for that window. Dense parts' bytes
go while the dense part computes, on the same wire, behind what it is doing. `finish` sends the rest.

Gradients become ready in the order of the backward, which is the same on ranks that run the same model, and the plan
says how many bytes go when; so ranks send the same messages in the same order, which the collectives check.
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

from laconic.collectives import operations
from laconic.collectives.codec import Codec
from laconic.errors import ModelError, ScheduleError
from laconic.moe.pipeline import pipeline_streams
from laconic.schedule.execute import Stream, Work
from laconic.schedule.moe_gradients import GradientPlan
from laconic.schedule.moe_pipeline import INTER

__all__ = ["DenseGradients", "Reduce", "Sent", "mean_over"]

Reduce = Callable[[Tensor], object]
"""Replaces a rank's values, contiguous [n], by their mean over ranks."""


def mean_over(group: dist.ProcessGroup, *, codec: Codec | str = "auto") -> Reduce:
    """The mean over `group`; a Blockwise codec reduces in few bits."""

    def reduce(values: Tensor) -> None:
        operations.all_reduce(values, group, op="avg", codec=codec)

    return reduce


@dataclass(frozen=True)
class Sent:
    """What one window reduced. window: the part; None: after the last one."""

    window: str | None
    nbytes: int


@dataclass(eq=False)
class _Waiting:
    """Bytes of one gradient, or one thing that can only be done as a whole."""

    nbytes: int
    parameter: nn.Parameter | None = None
    action: Callable[[], object] | None = None
    done_nbytes: int = 0


@dataclass(eq=False)
class _Batch:
    """What one window does: pieces of gradients, (parameter, first element, past the last)."""

    pieces: list[tuple[nn.Parameter, int, int]] = field(default_factory=list)
    actions: list[Callable[[], object]] = field(default_factory=list)
    nbytes: int = 0


class DenseGradients:
    """Averages gradients of dense parameters over ranks inside of backward.

        gradients = DenseGradients(dense_parameters, mean_over(grid.dp), plan)
        layer.schedule = PipelineSchedule(2, 4, gradients=gradients, part="moe 3")     for every layer
        loss.backward()
        gradients.finish()

    Attributes:
        sent: what every window of the last backward reduced, in order, up to `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reduce: Reduce,
        plan: GradientPlan | None = None,
        *,
        stream: Stream | None = None,
    ) -> None:
        """All ranks must say the same, and make the same parameters' gradients in every backward.

        Arguments:
            parameters: whose gradients are reduced, and nobody else reduces; each is used in one backward once.
            reduce: called with slices of gradients in their dtype, in the stream's thread. What it does to one slice
                must not depend on others (`mean_over`, with or without a codec of few bits).
            plan: bytes by window. None: every window takes all that waits, which needs no measuring.
            stream: the wire between nodes; None: the one of `pipeline_streams`.

        Raises ModelError if there are no parameters that need gradients.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ModelError("no parameter needs a gradient, so there is nothing to reduce; pass the dense parameters")
        self._reduce, self.plan, self._stream = reduce, plan, stream
        self._waiting: deque[_Waiting] = deque()
        self._seen: set[nn.Parameter] = set()
        self._works: list[Work] = []
        self._enabled = True
        self.sent: list[Sent] = []
        self._fresh = True
        self._hooks = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate: for all micro-batches but the last."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def defer(self, nbytes: int, action: Callable[[], object]) -> None:
        """Put a reduction that can only be done as a whole at the end of what waits, such as that of an FSDP2 module.

        It runs in the stream's thread, in the first window that has room for it, or in `finish`.
        """
        self._begin()
        self._waiting.append(_Waiting(nbytes, action=action))

    def window(self, part: str) -> Callable[[], object] | None:
        """See `GradientWindows.window`: reduces what is planned for this part and there already."""
        self._begin()
        batch = self._take(self._budget(part))
        if batch is None:
            return None
        self.sent.append(Sent(part, batch.nbytes))
        return partial(self._run, batch)

    def after(self, part: str) -> None:
        """See `GradientWindows.after`: dense parts that follow reduce theirs while they compute."""
        if self.plan is None:
            return
        names = [window.part for window in self.plan.windows]
        for window in self.plan.windows[names.index(part) + 1 :]:
            if window.degree is not None:
                break
            batch = self._take(window.nbytes)
            if batch is not None:
                self.sent.append(Sent(window.part, batch.nbytes))
                self._works.append(self._wire().submit(partial(self._run, batch), ()))

    def finish(self) -> None:
        """Reduce what is left and wait for all of it; gradients may be used afterwards. Once after every backward.

        A parameter without a gradient counts as zero on this rank. Raises what a reduction raised.
        """
        self._begin()
        for parameter in self._parameters:
            if parameter not in self._seen:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._waiting.append(_Waiting(parameter.grad.nbytes, parameter))
        batch = self._take(None)
        if batch is not None:
            self.sent.append(Sent(None, batch.nbytes))
            self._works.append(self._wire().submit(partial(self._run, batch), ()))
        works, self._works = self._works, []
        self._seen.clear()
        self._fresh = True
        for work in works:
            work.wait()
        for work in works:
            work.result()

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
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
        self._waiting.append(_Waiting(parameter.grad.nbytes, parameter))

    def _budget(self, part: str) -> float | None:
        """Bytes; None: no limit."""
        if self.plan is None:
            return None
        found = [window.nbytes for window in self.plan.windows if window.part == part]
        if not found:
            raise ScheduleError(
                f"part is {part!r}, but the plan has {[window.part for window in self.plan.windows]}; give the schedule"
                " the name that its layer has in the plan"
            )
        return found[0]

    def _take(self, budget: float | None) -> _Batch | None:
        """The oldest bytes that wait, at most `budget`; whole elements and whole actions only."""
        if not self._enabled:
            return None
        batch = _Batch()
        while self._waiting and (budget is None or batch.nbytes < budget):
            one = self._waiting[0]
            left = one.nbytes - one.done_nbytes
            room = left if budget is None else min(left, int(budget) - batch.nbytes)
            if one.action is not None:
                if room < left:
                    break
                batch.actions.append(one.action)
            else:
                assert one.parameter is not None
                itemsize = one.parameter.itemsize
                room -= room % itemsize
                if not room and left:
                    break
                first = one.done_nbytes // itemsize
                batch.pieces.append((one.parameter, first, first + room // itemsize))
            batch.nbytes += room
            one.done_nbytes += room
            if one.done_nbytes == one.nbytes:
                self._waiting.popleft()
        return batch if batch.pieces or batch.actions else None

    @torch.no_grad()
    def _run(self, batch: _Batch) -> None:
        """One message for the pieces of each dtype, in the order of their first piece."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter, first, last in batch.pieces:
            assert parameter.grad is not None
            if not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            part = parameter.grad.view(-1)[first:last]
            by_dtype.setdefault(part.dtype, []).append(part)
        for parts in by_dtype.values():
            if len(parts) == 1:
                self._reduce(parts[0])
                continue
            values = torch.cat(parts)
            self._reduce(values)
            for part, reduced in zip(parts, values.split([len(part) for part in parts]), strict=True):
                part.copy_(reduced)
        for action in batch.actions:
            action()

    def _wire(self) -> Stream:
        if self._stream is None:
            streams: Mapping[str, Stream] = pipeline_streams(self._parameters[0].device)
            self._stream = streams[INTER]
        return self._stream
