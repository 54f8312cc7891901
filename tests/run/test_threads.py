"""`laconic run` over scripts that train several models at once, a thread each."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from laconic.run import savings as run_savings
from laconic.run.models import Wishes
from laconic.run.savings import Savings
from laconic.run.summary import render, summarize
from tests.run.scripts import STEPS, Net, adamw, batch


def train(net: Net, x: Tensor) -> None:
    optimizer = adamw(net)
    for _ in range(STEPS):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_call_waits_for_that_of_another_thread() -> None:
    savings, took, order = Savings(Wishes()), threading.Event(), []

    def take_notes() -> None:
        with savings._noting():
            took.set()
            time.sleep(0.2)
            order.append("first")

    other = threading.Thread(target=take_notes)
    other.start()
    took.wait()
    with savings._noting() as is_free:
        assert is_free
        order.append("second")
        with savings._noting() as is_free_inside:
            assert not is_free_inside
    other.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("flags", [{}, {"activations": 8}])
def test_a_model_that_found_no_turn_is_said_or_refused(flags: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that meet in collectives may wait for each other, so a call does not wait without end."""
    monkeypatch.setattr(run_savings, "_PATIENCE", 0.0)
    net, x = Net(), batch()
    savings = Savings(Wishes(**flags))  # type: ignore[arg-type]
    with savings:
        took, ended = threading.Event(), threading.Event()

        def take_notes() -> None:
            with savings._noting():
                took.set()
                ended.wait()

        other = threading.Thread(target=take_notes)
        other.start()
        took.wait()
        train(net, x)
        ended.set()
        other.join()
    if flags:
        assert "values of parameters were trained exactly, in threads" in str(savings.refusal)
    else:
        assert savings.refusal is None
        assert "8,416 values of parameters are exact, as they trained while another thread" in render(
            summarize(savings)
        )


def test_threads_that_build_and_train_at_once_are_all_compressed() -> None:
    """Nothing holds objects of another thread, whose `tuple(generator)` CPython would refuse with SystemError."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            barrier, ended, savings = threading.Barrier(6), threading.Event(), Savings(Wishes(audit=False))

            def build_and_train(make: Callable[[], Net], barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                net = make()
                train(net, batch())

            def make_tuples(barrier: threading.Barrier = barrier, ended: threading.Event = ended) -> None:
                barrier.wait()
                while not ended.is_set():
                    assert len(tuple(time.sleep(0) for _ in range(9))) == 9  # most of the time one is being made

            with savings:
                makers: list[Callable[[], Net]] = [Net, lambda: copy.deepcopy(Net()), Net]
                trainers = [guarded(partial(build_and_train, make)) for make in makers]
                others = [guarded(make_tuples) for _ in range(3)]
                for thread in trainers:
                    thread.join()
                ended.set()
                for thread in others:
                    thread.join()
            assert not errors
            assert [model.name for model in savings.models] == ["Net"] * 3
            assert all(model.report is not None for model in savings.models)
    finally:
        sys.setswitchinterval(before)


def test_parameters_that_threads_register_while_others_are_met_stay_expected() -> None:
    parameters = [[nn.Parameter(torch.zeros(1)) for _ in range(300)] for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Savings(Wishes(audit=False)) as savings:
            ended = threading.Event()

            def meet() -> None:
                met = [nn.Parameter(torch.zeros(1))]
                while not ended.is_set():
                    savings._no_longer_pending(met)
                    savings._unwatch_if_all_is_met()

            meeting = threading.Thread(target=meet)
            meeting.start()
            registering = [threading.Thread(target=lambda own=own: [SGD([p]) for p in own]) for own in parameters]
            for thread in registering:
                thread.start()
            for thread in registering:
                thread.join()
            ended.set()
            meeting.join()
            assert savings._pending == {id(p) for own in parameters for p in own}
            assert nn.Module.__call__ is not savings._call
    finally:
        sys.setswitchinterval(before)
