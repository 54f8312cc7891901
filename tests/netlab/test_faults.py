"""Peers that are killed, stopped, slow or cut off while tensors are summed: survived, or told by all in seconds."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import pytest

from netlab import Ending, Lab, Program, finish
from tests.distributed.processes import ROOT, environment
from tests.netlab.conftest import MakeLab
from tests.netlab.ranks import Task
from tests.patience import patient

TIMEOUT_SECONDS = 4.0
# From the group's timeout until the interpreter has ended.
PATIENCE_SECONDS = 20.0

Fault = Callable[[Lab, list[Program]], None]


def start(lab: Lab, task: Task) -> list[Program]:
    """Start the ranks and return when all have summed once."""
    ranks = lab.start_ranks(task.as_arguments(), environment(), cwd=ROOT)
    for rank in ranks:
        rank.wait_for("round 1\n", patient(60))
    return ranks


def error_of(ending: Ending) -> str:
    """The error of ours with which a rank ended: the interpreter's last line, without what torch puts before."""
    assert ending.code == 1, ending.err
    last = re.sub(r"^\[rank\d+\]: ?", "", ending.err.strip().splitlines()[-1])
    assert re.match(r"laconic\.errors\.\w+Error: ", last), ending.err
    return last


def assert_told(ending: Ending, culprit: int) -> None:
    """A rank ended with our error about the sum, and named the culprit."""
    last = error_of(ending)
    assert "all_reduce" in last
    assert re.search(rf"rank {culprit}\b", last), last
    assert "terminate called" not in ending.err


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["here", "in-background"])
@pytest.mark.parametrize("after_seconds", [0.0, 0.06], ids=["between", "amid"])
def test_a_killed_peer_is_named_at_once(after_seconds: float, background: bool, make_lab: MakeLab) -> None:
    """Between two messages, or with a part of one received: a round takes 0.12 s and more."""
    ranks = start(make_lab(2, 1e8), Task(rounds=1000, background=background))
    time.sleep(after_seconds)
    ranks[1].signal(signal.SIGKILL)
    # The kernel closes the dead process's connections: nobody waits for the group's timeout of a minute.
    assert_told(ranks[0].wait(patient(PATIENCE_SECONDS)), culprit=1)
    assert ranks[1].wait(patient(1)).code == -signal.SIGKILL


def stop(lab: Lab, ranks: list[Program]) -> None:
    ranks[1].signal(signal.SIGSTOP)


def cut(lab: Lab, ranks: list[Program]) -> None:
    lab.host_links[1].cut()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "background"), [(stop, True), (cut, False)], ids=["stopped", "cut-off"])
def test_a_peer_that_does_not_answer_any_more_is_named(fault: Fault, background: bool, make_lab: MakeLab) -> None:
    lab = make_lab(2, 1e8)
    ranks = start(lab, Task(rounds=1000, timeout_seconds=TIMEOUT_SECONDS, background=background))
    fault(lab, ranks)
    assert_told(ranks[0].wait(TIMEOUT_SECONDS + patient(PATIENCE_SECONDS)), culprit=1)
    if fault is cut:
        assert_told(ranks[1].wait(TIMEOUT_SECONDS + patient(PATIENCE_SECONDS)), culprit=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("culprit", "number"),
    [(2, signal.SIGKILL), (2, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["killed", "stopped", "stopped-with-the-store"],
)
def test_among_four_each_names_the_one_to_blame(culprit: int, number: signal.Signals, make_lab: MakeLab) -> None:
    """Most of them wait for a rank that waits, too; rank 0 holds the store through which they find out."""
    task = Task(rounds=1000, numel=1 << 18, timeout_seconds=TIMEOUT_SECONDS, background=culprit == 2)
    ranks = start(make_lab(4, 1e8), task)
    ranks.pop(culprit).signal(number)
    errors = [error_of(ending) for ending in finish(ranks, TIMEOUT_SECONDS + patient(PATIENCE_SECONDS))]
    blamed = [f"; rank {culprit} ended, stopped, raised an error or took longer" in error for error in errors]
    # Without the store it is a matter of luck whom a rank waited for.
    assert all(blamed) if culprit else any(blamed), errors
    assert all("all_reduce of 262144 bfloat16 broke off on rank" in error for error in errors)


@pytest.mark.slow
def test_a_peer_ten_times_slower_than_the_timeout_allows_is_named(make_lab: MakeLab) -> None:
    lab = make_lab(2, 1e9)
    task = Task(rounds=1000, timeout_seconds=TIMEOUT_SECONDS, pause_seconds=1.0, slow_rank=1)
    ranks = lab.start_ranks(task.as_arguments(), environment(), cwd=ROOT)
    assert_told(ranks[0].wait(patient(60)), culprit=1)
    assert ranks[1].wait(patient(PATIENCE_SECONDS)).code == 1


@pytest.mark.slow
def test_a_peer_ten_times_slower_within_the_timeout_is_waited_for(make_lab: MakeLab) -> None:
    task = Task(rounds=3, numel=1 << 18, pause_seconds=0.1, slow_rank=1)
    endings = finish(make_lab(2, 1e9).start_ranks(task.as_arguments(), environment(), cwd=ROOT), patient(60))
    assert [ending.code for ending in endings] == [0, 0], endings


@pytest.mark.slow
def test_short_troubles_are_survived_with_the_right_sums(make_lab: MakeLab) -> None:
    """A pause of 3 s, a cut of 2 s, and a link that gets ten times slower; the ranks check every sum."""
    lab = make_lab(2, 1e8)
    ranks = start(lab, Task(rounds=40, numel=1 << 19))
    ranks[1].signal(signal.SIGSTOP)
    time.sleep(3)
    assert [rank.code for rank in ranks] == [None, None]
    ranks[1].signal(signal.SIGCONT)
    wait_for_another_round(ranks)
    lab.host_links[0].cut()
    time.sleep(2)
    lab.host_links[0].join()
    wait_for_another_round(ranks)
    lab.host_links[1].limit(1e7)
    wait_for_another_round(ranks)
    lab.host_links[1].limit(1e9)
    endings = finish(ranks, patient(120))
    assert [ending.code for ending in endings] == [0, 0], endings


def wait_for_another_round(ranks: list[Program]) -> None:
    for rank in ranks:
        rank.wait_for(f"round {rank.out.count('round')}\n", patient(60))


@pytest.mark.slow
def test_ranks_with_different_codecs_are_told_at_once(make_lab: MakeLab) -> None:
    task = Task(codecs=("tiered", "window"), numel=1 << 12)
    ranks = make_lab(3, 1e9).start_ranks(task.as_arguments(), environment(), cwd=ROOT)
    for rank in ranks:
        rank.wait_for("ready", patient(60))
    started = time.monotonic()
    for ending in finish(ranks, patient(PATIENCE_SECONDS)):
        last = error_of(ending)
        assert last.startswith("laconic.errors.ConfigError: codec is "), last
        for word in ("rank 0", "rank 1", "tiered", "window", "all_reduce"):
            assert word in last
    # Far from the timeout that would end it otherwise; most of it is the interpreter's end.
    assert time.monotonic() - started < task.timeout_seconds / 2
