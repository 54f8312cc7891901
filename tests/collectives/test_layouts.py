"""Two levels give what one gives; what they hold between their exchanges is mapped in huge pages, and only once."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.collectives.engine.layouts import TwoLevelExchange, _turned

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NUMEL = 16 << 20
_FUNCTIONS = pytest.mark.parametrize("function", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])


class _Echo:
    """An exchange of the last of `world` ranks, which all have what it has."""

    def __init__(self, world: int) -> None:
        self.world = world

    def all_gather(self, rows: Tensor, mine: Tensor) -> None:
        rows.copy_(mine.expand_as(rows))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        received.copy_(sent[-1].expand_as(received))

    def reduce_scatter(self, mine: Tensor, rows: Tensor, factor: float) -> None:
        mine.copy_(rows[-1]).mul_(self.world * factor)

    def all_reduce(self, x: Tensor, factor: float) -> None:
        x.mul_(self.world * factor)


def _call(function: str, exchange: Any, world: int, numel: int) -> tuple[Tensor, int]:
    """What a call gives for fp32 [numel] of all ranks together, and its page faults."""
    whole = (torch.arange(numel) % 1021.0).view(world, -1)
    received, part = torch.full_like(whole, torch.nan), torch.full_like(whole[0], torch.nan)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (received, whole[-1].clone()),
        "all_to_all": (received, whole),
        "reduce_scatter": (part, whole, 0.5),
        "all_reduce": (whole[-1].repeat(world), 0.5),  # each rank gathers its own part, which all parts are
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    getattr(exchange, function)(*arguments[function])
    return arguments[function][0], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _two_levels(node: int, cluster: int) -> Any:
    levels: Any = _Echo(node), _Echo(cluster)
    return TwoLevelExchange(*levels)


@_FUNCTIONS
@pytest.mark.parametrize(("node", "cluster"), [(2, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("numel", [0, 60])
def test_two_levels_give_what_one_level_gives(function: str, node: int, cluster: int, numel: int) -> None:
    world = node * cluster
    found, _ = _call(function, _two_levels(node, cluster), world, numel)
    expected, _ = _call(function, _Echo(world), world, numel)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not _THP.exists() or "[never]" in _THP.read_text(), reason="the system gives no huge pages")
@_FUNCTIONS
def test_two_levels_take_few_page_faults(function: str) -> None:
    _, faults = _call(function, _two_levels(2, 2), 4, _NUMEL)
    assert 0 < faults < _NUMEL * 4 // 4096 / 3  # of 4 KiB, what is held takes three times as many


@pytest.mark.parametrize("num", [1, 4])
def test_rows_that_lie_in_order_are_not_copied(num: int) -> None:
    x = torch.ones(4, 3)
    assert _turned(x, num).data_ptr() == x.data_ptr()
