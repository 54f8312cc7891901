"""Which modules `laconic run` knows, however they were made."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from laconic.run.modules_alive import ModulesAlive
from tests.run.scripts import Net


class RestoresItself(nn.Module):
    """Does without nn.Module's `__setstate__`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def inserted() -> nn.Module:
    layers = nn.ModuleList()
    layers.insert(0, Net())
    return nn.ModuleDict({"layers": layers})


WAYS: dict[str, Callable[[], nn.Module]] = {
    "built": Net,
    "in a container": lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()),
    "inserted into a list": inserted,
    "copied": lambda: copy.deepcopy(Net()),
    "copied, shallow": lambda: copy.copy(Net()),
    "unpickled": lambda: pickle.loads(pickle.dumps(Net())),
    "layers of torch's, which it copies": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8), 2),
}


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the collector was asked for its objects; it gives none."""
    asked: list[int] = []
    monkeypatch.setattr(gc, "get_objects", lambda: asked.append(1) or [])
    return asked


@pytest.mark.parametrize("way", WAYS)
def test_modules_are_known_without_the_collector(way: str, no_collector: list[int]) -> None:
    with ModulesAlive() as alive:
        module = WAYS[way]()
        found = alive.all(module)
    assert len(no_collector) == 1  # at the beginning
    assert {id(part) for part in module.modules()} <= {id(part) for part in found}
    assert len({id(part) for part in found}) == len(found)


def test_the_collector_knows_what_was_made_before_and_what_restores_itself() -> None:
    before = Net()
    with ModulesAlive() as alive:
        assert any(found is before for found in alive.all())
        copied = copy.deepcopy(RestoresItself())
        assert all(found is not copied for found in alive.all(copied.net.up))  # which is known
        assert any(found is copied for found in alive.all(copied))


def test_what_the_script_drops_is_dropped() -> None:
    with ModulesAlive() as alive:
        net = Net()
        known = {id(part) for part in net.modules()}
        assert known <= {id(found) for found in alive.all()}
        del net
        gc.collect()
        assert known.isdisjoint(alive._known.keys())


def test_torch_is_as_it_was_afterwards() -> None:
    before = nn.Module.__setstate__
    with ModulesAlive() as alive:
        pass
    assert nn.Module.__setstate__ is before
    net = Net()
    assert all(found is not net for found in alive.all())


def test_threads_may_make_modules_meanwhile() -> None:
    ended, errors = threading.Event(), []
    grown = nn.ModuleList()

    def make() -> None:
        try:
            while not ended.is_set():
                grown.append(nn.Linear(1, 1))
                del grown[: max(0, len(grown) - 50)]
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    try:
        with ModulesAlive() as alive:
            grown.append(nn.Linear(1, 1))
            thread.start()
            for _ in range(50):
                assert any(found is grown for found in alive.all())
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
