"""Checks of received messages that the host makes late: not where a CUDA call starts, but where its values are used.

Whether a lossless message arrived intact, and whether it fit the capacity of its codec, is known on the device when it
has been decoded. Reading that makes the host wait for all that the call waits for, and a host that waits where a call
starts cannot give the device the computation that the call should travel behind. So the device copies what it found to
pinned memory, and the host reads it in the work's `wait`, or before the next coded call on the group: by then a message
that was prefetched is there, and the host waits for that call's stream alone.

It cannot wait later than that: NCCL has to know lengths on the host, so values that did not fit can be sent again only
by a host that knows, and nobody may use them before. A thread that looks in the background would not change that, and
would need a communicator of its own, because ranks have to send again at the same place in the order of messages. That
place is the same on all ranks here, wherever each of them waits: behind the call, before the group's next coded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.runtime.device_streams import Ready
from laconic.collectives.runtime.thread_state import as_here


class LateCheck:
    """What the host has to look at before the values of one call are used: 0-d integers `found` on its device.

    `check` is called once with them, on the stream that is current now; it sends again what did not fit and returns
    whether there was any, or raises the call's error. What it closes over is held until then.
    """

    def __init__(self, found: Sequence[Tensor], check: Callable[[list[int]], bool], device: torch.device) -> None:
        self._check: Callable[[list[int]], bool] | None = as_here(check)
        self._device = device
        self._error: BaseException | None = None
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._numbers = torch.empty(len(found), dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        self._numbers.copy_(torch.stack([x.to(torch.int32) for x in found]), non_blocking=True)
        self._ready = Ready(device)

    @property
    def is_made(self) -> bool:
        """Whether the check was made, with whatever outcome."""
        return self._check is None

    @property
    def is_over(self) -> bool:
        """Whether `make` would not make the host wait, unless something has to be sent again."""
        return self.is_made or self._ready.is_over

    def make(self) -> None:
        """Make the check, waiting for what it needs; then values may be used, or each call raises what is wrong."""
        check, self._check = self._check, None
        if check is not None:
            try:
                if not self._ready.is_over:
                    self._ready.synchronize()
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    if check(self._numbers.tolist()):
                        # Rare. Afterwards no stream has anything to wait for, and no memory is in use.
                        Ready(self._device).synchronize()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error


_left: WeakKeyDictionary[dist.ProcessGroup, LateCheck] = WeakKeyDictionary()
"""Of each group the check of its newest call, if that was not made yet."""


def leave(group: dist.ProcessGroup, check: LateCheck) -> None:
    """Leave a check of the newest call on `group` for later."""
    make_checks(group)
    _left[group] = check


def left_on(*groups: dist.ProcessGroup) -> list[LateCheck]:
    """The checks that are left on groups."""
    return [check for group in groups if (check := _left.get(group)) is not None]


def make_checks(*groups: dist.ProcessGroup) -> None:
    """Make the checks that are left on groups: before anything else is sent there, and where a call has to be done."""
    for group in groups if _left else ():
        check = _left.pop(group, None)
        if check is not None and not check.is_made:
            check.make()
