"""What two levels hold between their exchanges is mapped in huge pages."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.collectives.engine.layouts import TwoLevelExchange

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NUMEL = 16 << 20


class _Echo:
    """An exchange of two ranks, of which the other one has what this one has."""

    world = 2

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        for row in rows:
            row.copy_(mine)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        received.copy_(sent)

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        mine.copy_(rows[0])

    def all_reduce(self, x: Tensor, factor: float) -> None:
        pass


def _call(function: str, numel: int) -> int:
    """The page faults of a call on two levels of two ranks each, fp32 [numel] of all ranks together."""
    whole, part = torch.ones(4, numel // 4), torch.ones(numel // 4)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (whole, part),
        "all_to_all": (torch.zeros_like(whole), whole),
        "reduce_scatter": (part, whole, 1.0),
        "all_reduce": (whole.view(-1), 1.0),
    }
    echo: Any = _Echo()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    getattr(TwoLevelExchange(echo, echo), function)(*arguments[function])
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert bool((arguments[function][0] == 1).all())
    return faults


@pytest.mark.skipif(not _THP.exists() or "[never]" in _THP.read_text(), reason="the system gives no huge pages")
@pytest.mark.parametrize("function", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
def test_two_levels_take_few_page_faults(function: str) -> None:
    assert _call(function, _NUMEL) < _NUMEL * 4 // 4096 / 3  # of 4 KiB, what is held takes three times as many


@pytest.mark.parametrize("function", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
def test_two_levels_take_tensors_without_elements(function: str) -> None:
    _call(function, 0)
