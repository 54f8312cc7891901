"""Ranks of one start agree on a name in a store that is full of what earlier starts have left."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from laconic.collectives import agent_store
from laconic.collectives.runtime.agent_store import agree_on_start
from laconic.errors import ConfigError

TIMEOUT = timedelta(seconds=30)


def start(store: HashStore, ranks: list[int], world_size: int, rng: random.Random) -> dict[int, str]:
    """The names that these ranks of a start find, each begun at a time of its own."""
    found: dict[int, str] = {}

    def join(rank: int, pause: float) -> None:
        time.sleep(pause)
        found[rank] = agree_on_start(store, rank, world_size, TIMEOUT)

    threads = [threading.Thread(target=join, args=(rank, rng.uniform(0, 0.1))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_start_has_a_name_of_its_own_whatever_was_there_before() -> None:
    rng, store = random.Random(0), HashStore()
    names = []
    for world_size in (3, 3, 2, 4, 4, 1, 3):
        found = start(store, list(range(world_size)), world_size, rng)
        assert len(found) == world_size
        assert len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == len(names)


def test_a_start_of_which_a_rank_is_missing_does_not_spoil_the_next() -> None:
    store = HashStore()
    for alone in (0, 1):
        with pytest.raises(RuntimeError, match=f"rank {alone} has waited 0.1 s"):
            agree_on_start(store, alone, 2, timedelta(seconds=0.1))
    found = start(store, [0, 1], 2, random.Random(1))
    assert found[0] == found[1]


def test_without_an_agent_there_is_no_store_and_with_one_its_variables_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert agent_store() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match="RANK is None in the environment, but it must be a number"):
        agent_store()
    monkeypatch.setenv("MASTER_PORT", "a port")
    with pytest.raises(ConfigError, match="MASTER_PORT is 'a port' in the environment"):
        agent_store(0, 1)
