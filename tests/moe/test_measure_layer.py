"""Samples of cases that take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from laconic.collectives.policy.microbench import Ranks
from laconic.moe.tuning import measure_layer
from laconic.moe.tuning.measure_layer import Timed, samples_in_turn


class _Alone(Ranks):
    """A world of one."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]


def test_repeats_end_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(ranks: Ranks, run: Callable[[], object]) -> tuple[float, object]:
        return 0.5, run()

    monkeypatch.setattr(measure_layer, "_clock", clock)
    case = Timed(lambda: None, lambda out: None)
    assert len(samples_in_turn(_Alone(), [case], 9, longest_seconds=1.5)[0]) == 3
    assert len(samples_in_turn(_Alone(), [case], 9, longest_seconds=4.5)[0]) == 4
    assert len(samples_in_turn(_Alone(), [case], 9)[0]) == 9
