"""A store for the processes of one start, where torchrun's agent lends the same store to every start.

torch 2.13 takes for granted that each start gets a store of its own, but over c10d rendezvous (`--standalone`, too) a
restart gets the one before, with the addresses of processes that are gone: a rank that reads one of them tries to
connect to it until it fails. Neither the number of restarts nor the number of processes tells starts apart, because
agents that joined later count from 0. So the processes agree on a name themselves: each writes an id that no other
start has, rank 0 publishes the ids that it found, and again when one changes, until every rank has found its own.

`laconic train` does this by itself; a loop of your own hands the store to `init_process_group` (docs/reliability.md).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from laconic.errors import ConfigError

_POLL_SECONDS = 0.02
_KEYS = "laconic/start"


def agent_store(
    rank: int | None = None, world_size: int | None = None, timeout: timedelta = timedelta(minutes=30)
) -> Store | None:
    """Make a store of this start of the processes alone, for `init_process_group` under torchrun with --max-restarts.

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=agent_store(), rank=rank, world_size=world_size)

    All processes call it. Without it a process that torchrun starts again may read addresses of processes that are
    gone, and wait for them until the group's timeout.

    Args:
        rank: of this process; None is RANK of the environment.
        world_size: number of processes; None is WORLD_SIZE of the environment.
        timeout: how long to wait for the others.

    Returns:
        The store; None where no agent lends one (the processes were not started by torchrun, or it makes one for each
        start), which `init_process_group` takes for its own default.

    Raises:
        ConfigError: an agent lends a store, and a variable that it sets is missing or no number.
        RuntimeError: the others did not come within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    rank = _number("RANK") if rank is None else rank
    world_size = _number("WORLD_SIZE") if world_size is None else world_size
    address, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT")
    store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    return PrefixStore(agree_on_start(store, rank, world_size, timeout), store)


def agree_on_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks of this start alone have; all call it, or after `timeout` a RuntimeError names the rank."""
    own = secrets.token_hex(8)
    store.set(f"{_KEYS}/id/{rank}", own)
    deadline = time.monotonic() + timeout.total_seconds()
    published: list[str | None] = []
    name = ""
    while True:
        if rank == 0:
            ids = [_read(store, f"id/{other}") for other in range(world_size)]
            if ids != published:
                name, published = secrets.token_hex(8), ids
                store.set(f"{_KEYS}/round", json.dumps([name, ids]))
        name, ids = json.loads(_read(store, "round") or '["", []]')
        if len(ids) == world_size and ids[rank] == own:
            store.set(f"{_KEYS}/ready/{rank}", f"{name} {own}")
            if rank == 0:
                ready = [_read(store, f"ready/{other}") for other in range(world_size)]
                if ready == [f"{name} {other}" for other in ids]:
                    store.set(f"{_KEYS}/begin", name)
            if _read(store, "begin") == name:
                return f"laconic-{name}"
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank} has waited {timeout.total_seconds():g} s for all to be there")
        time.sleep(_POLL_SECONDS)


def _number(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment, but it must be a number where TORCHELASTIC_USE_AGENT_STORE is "
            "True; start the processes with torchrun, or unset that variable"
        )
    return int(text)


def _read(store: Store, key: str) -> str | None:
    """What is written under a key; None if nothing is."""
    full = f"{_KEYS}/{key}"
    return store.get(full).decode() if store.check([full]) else None
