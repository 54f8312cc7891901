"""What a run on one machine lets other machines, and other users of this one, do to it: nothing."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from laconic.train.config.toml import save_config
from laconic.train.launch.launcher import _exposure
from tests.distributed.processes import ForkedCommand, environment, num_steps, wait_until
from tests.train.runs import tiny_config

# The elastic agent of a rendezvous over the network reads its state again every five seconds.
_READ_AGAIN_SECONDS = 7


@dataclass(frozen=True)
class Running:
    """A run of two processes in the middle of its steps."""

    run_dir: Path
    scratch: Path
    """Where the launcher makes its folder of temporary files."""
    processes: list[psutil.Process]

    def listening(self) -> list[tuple[str, int]]:
        """Address and port of every listening TCP socket, and every bound UDP socket, of all its processes."""
        pids = {process.pid for process in self.processes}
        return [
            (found.laddr.ip, found.laddr.port)
            for found in psutil.net_connections(kind="inet")
            if found.pid in pids and found.laddr and (found.status == psutil.CONN_LISTEN or not found.raddr)
        ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("running")
    config = tiny_config(folder, "run", {"steps": 1_000_000, "nproc": 2, "zip": "auto", "eval_every": 0})
    save_config(config, folder / "config.toml")
    outward = _outward_interface()  # what a cluster's profile may demand, for other runs than this
    changes = {} if outward is None else {"GLOO_SOCKET_IFNAME": outward}
    scratch = folder / "scratch"
    scratch.mkdir()
    arguments = ["train", "--config", str(folder / "config.toml")]
    launcher = ForkedCommand(arguments, folder / "launcher", environment(TMPDIR=str(scratch), **changes))
    try:
        wait_until(lambda: num_steps(config.run_dir) >= 3 or launcher.poll() is not None, timeout_seconds=200)
        assert launcher.poll() is None, launcher.finish().err
        parent = psutil.Process(launcher.pid)
        processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            process.nice(19)  # its steps leave the processors to whoever else has work
        yield Running(folder / "run", scratch, processes)
    finally:
        launcher.kill()  # its processes leave by themselves
        launcher.finish()


def _outward_interface() -> str | None:
    """Of this machine, the first interface with an IPv4 address that is not of the loopback; None without any."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET" and not ipaddress.ip_address(address.address).is_loopback:
                return name
    return None


@pytest.mark.ci
def test_nothing_listens_beyond_the_loopback(running: Running) -> None:
    assert len(running.processes) >= 3
    found = running.listening()
    assert found, "gloo's own listeners should have been seen"
    beyond = [place for place in found if not ipaddress.ip_address(place[0]).is_loopback]
    assert not beyond, beyond


class _MakesFile:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.ci
def test_what_somebody_writes_to_a_listening_socket_is_not_run(running: Running, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    poison = base64.b64encode(pickle.dumps(_MakesFile(executed)))
    run_ids = {logs.name.partition("_")[0] for logs in running.scratch.glob("laconic-*/logs/*")}
    assert run_ids

    def attack(host: str, port: int) -> None:
        with contextlib.suppress(RuntimeError):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
            for run_id in run_ids:
                store.set(f"torch.rendezvous.{run_id}", poison)

    # In threads, because a client of a store waits for ever for the answer of a socket that is none's.
    hosts = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    for ip, port in running.listening():
        threading.Thread(target=attack, args=(hosts.get(ip, ip), port), daemon=True).start()
    before = num_steps(running.run_dir)
    time.sleep(_READ_AGAIN_SECONDS)
    assert not executed.exists()
    wait_until(lambda: num_steps(running.run_dir) > before)  # and the run goes on


@pytest.mark.ci
def test_the_meeting_place_is_private(running: Running) -> None:
    (store,) = running.scratch.glob("laconic-*/store")
    folder = store.parent.stat()
    assert folder.st_uid == os.getuid()
    assert folder.st_mode & 0o077 == 0


def test_under_torchrun_it_is_said_what_is_exposed() -> None:
    told = _exposure({"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"})
    assert "node0:29500" in told
    assert "on eth0" in told
    assert "run code as this user" in told
    assert "host name" in _exposure({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
