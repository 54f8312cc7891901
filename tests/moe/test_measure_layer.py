"""A race: what is clearly slower leaves, what is close is run most, and no race takes too long."""

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


class _Way:
    """Takes what it says, without taking it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, 0

    def timed(self) -> Timed[None]:
        return Timed(self.forward, lambda out: None)

    def forward(self) -> None:
        self.runs += 1


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(ranks: Ranks, run: Callable[[], object]) -> tuple[float, object]:
        out = run()
        return getattr(getattr(run, "__self__", None), "seconds", 0.0), out

    monkeypatch.setattr(measure_layer, "_clock", clock)


def test_most_repeats_go_to_what_is_close() -> None:
    ways = [_Way(0.1), _Way(0.102), _Way(0.115), _Way(0.2)]
    found = measure_layer._heats(_Alone(), [way.timed() for way in ways])
    assert [sum(both) for both in found] == pytest.approx([0.1, 0.102, 0.115, 0.2])
    assert [way.runs for way in ways] == [1 + 3 + 4 + 8, 1 + 3 + 4 + 8, 1 + 3 + 4, 1 + 3]


def test_who_has_won_runs_alone_no_more() -> None:
    ways = [_Way(0.1), _Way(0.2)]
    measure_layer._heats(_Alone(), [way.timed() for way in ways])
    assert [way.runs for way in ways] == [4, 4]


def test_a_long_race_ends_after_the_first_heat() -> None:
    ways = [_Way(3.0), _Way(3.1)]
    measure_layer._heats(_Alone(), [way.timed() for way in ways])
    assert [way.runs for way in ways] == [4, 4]


def test_repeats_end_after_a_time() -> None:
    way = _Way(1.0)
    assert len(samples_in_turn(_Alone(), [way.timed()], 9, longest_seconds=1.5)[0]) == 3
    assert len(samples_in_turn(_Alone(), [way.timed()], 9, longest_seconds=4.5)[0]) == 4
    assert len(samples_in_turn(_Alone(), [way.timed()], 9)[0]) == 9
