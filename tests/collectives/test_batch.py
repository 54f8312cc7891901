"""Sends and receives that start together, over a group that writes down what it is told."""

from __future__ import annotations

from typing import Any

import torch

from laconic.collectives.process_group.p2p import Batches


class Done:
    """A work that is over."""

    def wait(self, timeout: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Scribe:
    """Stands in for a group."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.said.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.said.append("end")
        return Done()

    def say(self, what: str) -> Any:
        return lambda: self.said.append(what)


def test_what_is_put_off_starts_as_one_when_any_of_it_is_waited_for() -> None:
    group = Scribe()
    batches = Batches(group)  # type: ignore[arg-type]
    tensor = torch.zeros(2)
    works = [batches.add(tensor, group.say(what)) for what in ("send", "receive")]
    assert group.said == []
    assert works[1].wait()
    assert group.said == ["start", "send", "receive", "end"]
    assert works[0].wait()
    assert works[0].is_completed()
    assert len(group.said) == 4


def test_the_group_starts_what_was_put_off_before_it_does_something_else() -> None:
    group = Scribe()
    batches = Batches(group)  # type: ignore[arg-type]
    first = batches.add(torch.zeros(2), group.say("send"))
    batches.start()
    batches.start()
    second = batches.add(torch.zeros(2), group.say("receive"))
    assert group.said == ["start", "send", "end"]
    assert first.wait()
    assert group.said == ["start", "send", "end"]
    assert second.is_completed()
    assert group.said == ["start", "send", "end", "start", "receive", "end"]


def test_devices_do_not_share_a_batch() -> None:
    group = Scribe()
    batches = Batches(group)  # type: ignore[arg-type]
    works = [batches.add(torch.zeros(2, device=device), group.say(device)) for device in ("cpu", "meta")]
    assert group.said == ["start", "cpu", "end"]
    for work in works:
        work.wait()
    assert group.said == ["start", "cpu", "end", "start", "meta", "end"]
