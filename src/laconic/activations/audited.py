"""How the runs of an audit differ from training: switches of one thread, off but while `laconic.audit` compares.

Three places read them, each where it decides anyway: `is_transformed` (do the original forwards run), `pack` and
`packed_inputs` (is a tensor kept in codes, or as the values that stand in for it).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from laconic.formats import BlockFormat

__all__ = ["AUDITED", "StandIn", "keeping_values", "running_originals"]

StandIn = Callable[[Tensor, BlockFormat, Tensor | None], Tensor]
"""(x, format, center) -> the values that are kept in the place of the codes of x; like x."""


class _Audited(threading.local):
    """Attributes: `originals`: every forward runs its original code; `values`: see `StandIn`; None packs codes."""

    originals: bool = False
    values: StandIn | None = None


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
