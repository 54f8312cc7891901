"""How the runs of an audit differ from training: switches of one thread, off but while `laconic.audit` compares.

They are read where something is decided anyway: `is_transformed` (do the original forwards run), `pack` and
`packed_inputs` (is a tensor kept in codes, or as the values that stand in for it), witnesses (is a tensor watched), and
hooks that wait for a host's first call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from laconic.formats import BlockFormat

StandIn = Callable[[Tensor, BlockFormat], Tensor]
"""(x, format) -> the values that are kept in the place of the codes of x; like x."""


class _Audited(threading.local):
    """What differs from training.

    Attributes:
        originals: every forward runs its original code.
        values: see `StandIn`; None packs codes.
        stand_ins: storages of such values by address, which hooks around the model that packs have to leave alone: they
            are codes in training.
        is_running: the forward and backward are an audit's: no tensor is watched, and no hook takes it for training.
    """

    originals: bool = False
    is_running: bool = False
    values: StandIn | None = None

    def __init__(self) -> None:
        self.stand_ins: dict[int, StorageWeakRef] = {}

    def is_stand_in(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage holds values that stand in for codes."""
        found = self.stand_ins.get(storage._cdata) if self.values is not None else None
        return found is not None and not found.expired()


AUDITED = _Audited()


@contextmanager
def running_originals() -> Iterator[None]:
    """While the block runs, compressed models run the forwards that they had before, exactly, in this thread."""
    before, AUDITED.originals = AUDITED.originals, True
    try:
        yield
    finally:
        AUDITED.originals = before


@contextmanager
def keeping_values(values: StandIn) -> Iterator[None]:
    """While the block runs, what would be kept in codes is kept as `values` of it, in this thread."""
    before, AUDITED.values = AUDITED.values, values
    try:
        yield
    finally:
        AUDITED.values = before
        AUDITED.stand_ins.clear()


@contextmanager
def in_an_audit() -> Iterator[None]:
    """While the block runs, what is packed gets no witnesses, and hooks wait for another call, in this thread.

    An audit compares whole gradients, and says more. A witness stops a backward, for which the ranks of a sharded model
    would wait.
    """
    before, AUDITED.is_running = AUDITED.is_running, True
    try:
        yield
    finally:
        AUDITED.is_running = before
