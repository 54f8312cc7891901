"""Timeouts grow with how busy the machine is, those of pytest's items, too."""

from __future__ import annotations

import os

import pytest

from tests import patience
from tests.conftest import stretched_timeout
from tests.patience import patient, slowness


def test_a_timeout_is_never_shorter_and_grows_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("LACONIC_TESTS_SLOWNESS", "1.50")
    for load, expected in ((0.0, 1.5), (1.0 * cores, 1.5), (10.0 * cores, 10.0), (1e6, 30.0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert slowness() == expected
        assert patient(20) == 20 * expected


def test_the_first_process_measures_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_TESTS_SLOWNESS", raising=False)
    ticks = iter([0.0, 0.75])
    monkeypatch.setattr(patience.time, "perf_counter", lambda: next(ticks))
    assert patience.measure() == pytest.approx(7.5)
    assert os.environ["LACONIC_TESTS_SLOWNESS"] == "7.50"
    assert patience.measure() == 7.5


@pytest.mark.timeout(7)
def test_timeouts_of_items_are_stretched(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert marker.args[0] >= 7 * min(float(os.environ["LACONIC_TESTS_SLOWNESS"]), 30.0)


def test_an_item_without_a_timeout_of_its_own_has_the_suites(request: pytest.FixtureRequest) -> None:
    node = request.node
    assert node.get_closest_marker("timeout").args[0] >= float(request.config.getini("timeout"))
    node.own_markers = [marker for marker in node.own_markers if marker.name != "timeout"]
    assert stretched_timeout(node, 3.0) == 3.0 * float(request.config.getini("timeout"))
