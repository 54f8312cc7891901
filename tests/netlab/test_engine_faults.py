"""An engine on two hosts amid an answer: the cable is cut, cut for a while, slow, flickers; a worker stands still.

Rank 0 has the engine and the attention worker, rank 1 the expert worker.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlab import Lab, Program, finish
from tests.distributed.processes import ROOT, environment
from tests.infer.models import generated, make
from tests.netlab.conftest import MakeLab
from tests.netlab.engine_ranks import Task
from tests.patience import patient

pytestmark = pytest.mark.usefixtures("forked_ranks")

Fault = Callable[[Lab, list[Program]], None]
SILENCE_SECONDS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("mixtral", tmp_path_factory.mktemp("models"), num_hidden_layers=2)


def begun(lab: Lab, task: Task) -> list[Program]:
    """Start the ranks and return amid the answers."""
    ranks = lab.start_ranks(task.as_arguments(), environment(PYTHONWARNINGS="default"), cwd=ROOT)
    ranks[0].wait_for("begun\n", patient(60))
    return ranks


def found_by(rank: Program, timeout_seconds: float) -> dict[str, Any]:
    """What the engine says at its end."""
    ending = rank.wait(timeout_seconds)
    assert ending.code == 0, ending.err
    return dict(json.loads(ending.out.splitlines()[-1]))


def cut(lab: Lab, ranks: list[Program]) -> None:
    lab.host_links[1].cut()


def stop(lab: Lab, ranks: list[Program]) -> None:
    ranks[1].signal(signal.SIGSTOP)


@pytest.mark.slow
def test_a_cable_that_is_cut_for_good_fails_requests_by_the_name_of_the_worker(make_lab: MakeLab, model: Path) -> None:
    """Noticed after SILENCE_SECONDS by the connection that has rows to send; nothing waits for the answer's timeout."""
    lab = make_lab(2, 1e9)
    ranks = begun(lab, Task(str(model), 4000, silence_seconds=SILENCE_SECONDS))
    cut(lab, ranks)
    start = time.monotonic()
    found = found_by(ranks[0], patient(40))
    assert time.monotonic() - start < SILENCE_SECONDS + patient(20)  # of which at most 10 s are close's
    assert all(0 < len(tokens) < 4000 for tokens in found["tokens"])
    for error in [*found["errors"], found["refusal"]]:
        assert "expert worker 0" in error
        assert "rank 1" in error
    assert found["close_seconds"] < 10 + patient(2)
    # The other end is told by its own connection, and ends.
    assert ranks[1].wait(SILENCE_SECONDS + patient(20)).code is not None


@pytest.mark.slow
def test_a_rank_that_stands_still_fails_requests_after_the_timeout_of_answers(make_lab: MakeLab, model: Path) -> None:
    lab = make_lab(2, 1e9)
    ranks = begun(lab, Task(str(model), 4000, answer_timeout_seconds=3))
    stop(lab, ranks)
    start = time.monotonic()
    found = found_by(ranks[0], patient(40))
    assert time.monotonic() - start < patient(25)
    assert found["seconds"] < 3 + patient(10)
    assert found["close_seconds"] < 10 + patient(2)  # of which it has 10 s to stop by itself
    for error in found["errors"]:
        assert "expert worker 0 is lost: it did not answer within 3 s" in error
    ranks[1].signal(signal.SIGCONT)
    assert ranks[1].wait(patient(20)).code is not None


def cut_for_a_while(lab: Lab, ranks: list[Program]) -> None:
    lab.host_links[1].cut()
    time.sleep(3)
    lab.host_links[1].join()


def slow_down(lab: Lab, ranks: list[Program]) -> None:
    lab.host_links[1].limit(1e6)


def flicker(lab: Lab, ranks: list[Program]) -> None:
    """Lose whatever is sent in 50 ms of every second, in both directions: 5 % of the time, in bursts."""
    for _ in range(5):
        lab.host_links[1].cut()
        time.sleep(0.05)
        lab.host_links[1].join()
        time.sleep(0.95)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut_for_a_while, slow_down, flicker])
def test_what_passes_only_delays_the_same_tokens(fault: Fault, make_lab: MakeLab, model: Path) -> None:
    lab = make_lab(2, 1e9)
    task = Task(str(model), 300)
    ranks = begun(lab, task)
    fault(lab, ranks)
    for ending in (endings := finish(ranks, patient(60))):
        assert ending.code == 0, ending.err
    found = json.loads(endings[0].out.splitlines()[-1])
    assert found["errors"] == [None] * task.num_requests
    assert found["tokens"] == generated(model, [[number + 1, 5, 9] for number in range(3)], task.new_tokens)
    print(f"{fault.__name__}: {found['seconds']:.1f} s for {found['sent_nbytes']} bytes")
    if fault is cut_for_a_while:
        assert found["seconds"] > 3
    if fault is slow_down:
        assert found["seconds"] > 0.5 * max(found["sent_nbytes"]) * 8 / 1e6
