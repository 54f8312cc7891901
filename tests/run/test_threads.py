"""`laconic run` over scripts that train several models at once, a thread each."""

from __future__ import annotations

import threading
import time

import pytest
from torch import Tensor

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
