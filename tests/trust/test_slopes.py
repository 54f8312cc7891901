"""A leak is found and noise is none: the slopes of tests/trust/slopes.py on made-up and on real processes."""

from __future__ import annotations

import os
import random
import subprocess
import time

import pytest

from tests.trust.loads import Size
from tests.trust.slopes import KINDS, Sample, Sampler, slope_of


def samples(per_minute: float, noise: float, steps: bool = False, pids: int = 2) -> list[Sample]:
    """Two minutes of processes at different levels, whose memory grows in a line or in steps."""
    rng = random.Random(3)
    found = []
    for pid in range(pids):
        for number in range(120):
            grown = per_minute * number / 60
            grown = round(grown) if steps else grown
            value = 100.0 * (pid + 1) + grown + rng.gauss(0, noise)
            found.append(Sample(pid, float(number), value, value, value, value))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_is_found(kind: str) -> None:
    slope = slope_of(kind, samples(3.0, 0.0), bound=1.0)
    assert slope.per_minute == pytest.approx(3.0)
    assert slope.error == pytest.approx(0.0, abs=1e-9)
    assert slope.leaks


@pytest.mark.parametrize(("per_minute", "leaks"), [(0.0, False), (0.5, False), (8.0, True)])
def test_noise_is_no_leak_and_hides_none(per_minute: float, leaks: bool) -> None:
    slope = slope_of("rss_mb", samples(per_minute, noise=2.0), bound=1.0)
    assert abs(slope.per_minute - per_minute) < 4 * slope.error
    assert slope.leaks == leaks


def test_steps_have_a_larger_error_than_as_many_independent_samples() -> None:
    stepwise = slope_of("rss_mb", samples(3.0, 0.0, steps=True), bound=1.0)
    assert stepwise.per_minute == pytest.approx(3.0, rel=0.1)
    assert stepwise.error > 0.05
    assert stepwise.leaks


def test_what_a_process_takes_at_its_start_is_left_out() -> None:
    found = [Sample(1, float(n), *[min(n, 30) * 10.0] * 4) for n in range(100)]
    assert not slope_of("rss_mb", found, bound=1.0).leaks
    assert slope_of("rss_mb", found, bound=1.0, warm_up=0.0).per_minute > 100


def test_processes_that_begin_anew_at_another_level_are_no_slope() -> None:
    found = [Sample(pid, 60.0 * pid + n, *[100.0 * pid] * 4) for pid in range(3) for n in range(20)]
    assert slope_of("fds", found, bound=0.1).per_minute == pytest.approx(0.0)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no process has enough samples"):
        slope_of("fds", [Sample(1, 0.0, 1, 1, 1, 1)], bound=0.1)


def test_a_process_that_has_ended_is_left_out() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its code, so it has an entry
        sampler = Sampler(lambda: [ended.pid, os.getpid()], 1.0)
        sampler.look()
    assert [sample.pid for sample in sampler.samples] == [os.getpid()]


def test_a_shorter_row_may_settle_by_as_much() -> None:
    size = Size(600.0, 10, {"rss_mb": 1.0, "fds": 0.2})
    assert size.lasting(60.0) == Size(60.0, 10, {"rss_mb": 10.0, "fds": 0.2})
    assert size.lasting(1200.0).bounds == size.bounds


def test_this_process_leaks_when_it_does() -> None:
    sampler = Sampler(lambda: [os.getpid(), 2**22 + 1], 1.0)  # the second does not exist
    kept: list[int] = []
    for _ in range(30):
        kept.append(os.open(os.devnull, os.O_RDONLY))
        sampler.look()
        time.sleep(0.005)
    for descriptor in kept:
        os.close(descriptor)
    (fds,) = sampler.slopes({"fds": 1.0})
    assert fds.leaks
    assert {sample.pid for sample in sampler.samples} == {os.getpid()}
