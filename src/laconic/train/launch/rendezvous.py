"""Rendezvous of the processes of one machine, without a port that anybody else could connect to.

torch's own rendezvous and its TCPStore listen on all interfaces, and the rendezvous unpickles what it reads from its
store: whoever can connect can run code. A local run needs neither. The elastic agent keeps its notes in a store in its
own memory, the processes meet in a file that only this user can open, and gloo and NCCL listen on the loopback
interface.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from laconic.errors import ConfigError
from laconic.train.distributed.world import STORE_VARIABLE

BACKEND = "laconic-local"
"""Name of the rendezvous that torch's elastic agent is to use for processes of one machine."""
LOOPBACK = "127.0.0.1"


class _Local(RendezvousHandler):
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # Nothing reads MASTER_ADDR and MASTER_PORT: the processes meet in a file.
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Local(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make)


@contextmanager
def local_rendezvous(folder: Path) -> Iterator[None]:
    """While the block runs, processes started from here meet in a file in `folder`, on the loopback interface only.

    Only this user may be able to enter `folder`. Environment variables about interfaces are for runs on several
    machines, and ignored.

    Raises:
        ConfigError: there is no loopback interface.
    """
    interface = _loopback_interface()
    wanted = {
        STORE_VARIABLE: str(folder / "store"),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    raise ConfigError(f"this machine has no network interface with address {LOOPBACK}, where local processes meet")
