"""One thread computes at a time; attention goes before shared experts, each in order of call."""

from __future__ import annotations

import threading
import time

from laconic.infer.compute_turns import ComputeTurns, Kind
from tests.patience import patient


def waiting(turns: ComputeTurns) -> int:
    return sum(len(queue) for queue in turns._waiting.values())


def test_attention_goes_before_shared_experts_each_in_order_of_call() -> None:
    turns, ran = ComputeTurns(), []
    turns.take()

    def work(name: str, kind: Kind) -> None:
        turns.take(kind)
        ran.append(name)
        turns.give()

    calls: list[tuple[str, Kind]] = [
        ("S1", "shared"),
        ("A1", "attention"),
        ("S2", "shared"),
        ("A2", "attention"),
        ("A3", "attention"),
    ]
    threads = []
    for number, call in enumerate(calls):
        threads.append(threading.Thread(target=work, args=call))
        threads[-1].start()
        while waiting(turns) <= number:
            time.sleep(0.001)
    assert ran == []
    turns.give()
    for thread in threads:
        thread.join(patient(10))
    assert ran == ["A1", "A2", "A3", "S1", "S2"]


def test_only_one_computes_at_a_time() -> None:
    turns, inside, most = ComputeTurns(), [0], [0]

    def work(kind: Kind) -> None:
        for _ in range(50):
            turns.take(kind)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            turns.give()

    kinds: list[Kind] = ["attention", "shared", "attention", "shared"]
    threads = [threading.Thread(target=work, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(10))
        assert not thread.is_alive()
    assert most == [1]
