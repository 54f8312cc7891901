"""Who opens connections and says nothing takes nobody's place, no descriptor, no processor and no disk."""

from __future__ import annotations

import errno
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from laconic.errors import ConfigError
from laconic.infer.connection_table import ConnectionTable, SeldomWarning, descriptors_left
from laconic.infer.connections import Admission
from laconic.infer.server.listening import ConnectionLimits
from tests.distributed.forked import ForkedPython
from tests.distributed.processes import wait_until
from tests.patience import patient

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def bounded_server(log: Path, head_seconds: int, max_connections: int = 0) -> Iterator[tuple[int, psutil.Process]]:
    """A server with 256 descriptors; yields its port and its process. What it logs goes to `log`."""
    command = [sys.executable, "-m", "tests.infer.bounded_server", str(log), str(head_seconds), str(max_connections)]
    with ForkedPython(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            wait_until(lambda: _answers(port))
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=patient(5)).status_code == 200
    except httpx.TransportError:
        return False


def half_open(port: int, count: int) -> list[socket.socket]:
    """Connections of which every second has begun a request."""
    opened = [socket.create_connection(("127.0.0.1", port), timeout=patient(5)) for _ in range(count)]
    for one in opened[::2]:
        one.sendall(HEAD)
    return opened


def is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_closed_within(one: socket.socket, seconds: float) -> bool:
    one.settimeout(seconds)
    try:
        while one.recv(1000):  # the rest of an answer
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("count", [300, pytest.param(900, marks=pytest.mark.slow)])
def test_half_open_connections_hold_up_nobody(tmp_path: Path, count: int) -> None:
    with bounded_server(tmp_path / "log", head_seconds=1) as (port, process):
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        opened = half_open(port, count)
        for _ in range(3):
            asked = time.monotonic()
            assert _answers(port)
            assert time.monotonic() - asked < patient(1)
        assert process.num_fds() < 256
        assert sum(map(is_closed, opened)) > count - 256
        wait_until(lambda: all(map(is_closed, opened)), 10)
        assert time.monotonic() - start < patient(10)
        assert _answers(port)
        spent, wall = sum(process.cpu_times()[:2]) - before, time.monotonic() - start
        assert spent < 0.5 * wall
        assert process.num_fds() < 64
        for one in opened:
            one.close()
    log = (tmp_path / "log").read_text()
    assert "closed" in log
    assert "silent connections to make room" in log
    assert len(log) < 2000, log[:4000]


@pytest.mark.slow
def test_without_a_descriptor_connections_are_turned_away_in_one_line(tmp_path: Path) -> None:
    """More connections are wanted than the process may have: nothing spins, and the server comes back by itself."""
    with bounded_server(tmp_path / "log", head_seconds=2, max_connections=5000) as (port, process):
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        opened = half_open(port, 600)
        wait_until(lambda: sum(map(is_closed, opened)) > 300)
        wait_until(lambda: all(map(is_closed, opened)), 10)
        assert _answers(port)
        assert sum(process.cpu_times()[:2]) - before < 0.5 * (time.monotonic() - start)
        for one in opened:
            one.close()
    log = (tmp_path / "log").read_text()
    assert "no descriptor left" in log
    assert len(log) < 2000, log[:4000]


@pytest.mark.slow
def test_slow_heads_are_closed_and_answers_are_not(tmp_path: Path) -> None:
    with bounded_server(tmp_path / "log", head_seconds=1, max_connections=4) as (port, _):
        url = f"http://127.0.0.1:{port}"
        found: list[int] = []

        def ask() -> None:
            body = {"model": "fake", "prompt": "x", "max_tokens": 200}  # two seconds
            found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=patient(20)).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        # A byte now and then does not make a head.
        slow = socket.create_connection(("127.0.0.1", port))
        with httpx.Client(base_url=url) as kept:
            assert kept.get("/health").status_code == 200
            start = time.monotonic()
            while not is_closed(slow):
                assert time.monotonic() - start < patient(3)
                slow.setblocking(True)
                try:
                    slow.sendall(HEAD[:1])
                except OSError:
                    break
                time.sleep(0.1)
            # A connection that is kept has its time again for each head.
            assert kept.get("/health").status_code == 200
        # The second head of a connection has no longer than the first.
        again = socket.create_connection(("127.0.0.1", port))
        again.settimeout(patient(5))
        again.sendall(HEAD + b"\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(HEAD)
        assert is_closed_within(again, patient(4))
        again.close()
        slow.close()
        for one in half_open(port, 12):
            one.close()
        asking.join()
        assert found == [200]


def test_a_table_closes_who_has_been_silent_for_longest() -> None:
    closed: list[str] = []
    table = ConnectionTable("the test", 4, 3)

    def enter(key: str) -> bool:
        return table.enter(key, key[0], lambda: closed.append(key))

    assert all(enter(key) for key in ("a1", "a2", "a3", "b1"))
    table.busy("a1")
    assert enter("a4")  # of its own address
    assert closed == ["a2"]
    assert enter("b2")  # of any
    assert closed == ["a2", "a3"]
    table.silent("a1", lambda: closed.append("a1 idle"))
    for key in ("a4", "b1", "b2"):
        table.busy(key)
    assert enter("c1")
    assert closed[2:] == ["a1 idle"]
    table.busy("c1")
    assert not enter("c2")
    assert len(table) == 4
    table.leave("c2")
    table.leave("b1")
    assert enter("c3")
    table.silent("gone", lambda: None)
    assert len(table) == 4


@pytest.mark.parametrize("values", [(0, 1), (1, 0)])
def test_a_table_has_room_for_one(values: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="of the test is 0, but there must be room"):
        ConnectionTable("the test", *values)


@pytest.mark.parametrize("name", ["max_connections", "max_connections_per_address", "head_seconds"])
def test_limits_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0, but it must be at least 1"):
        ConnectionLimits(**{name: 0})


def test_warnings_are_seldom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    warning = SeldomWarning("%d of them")
    with caplog.at_level(logging.WARNING, "laconic"):
        for _ in range(50):
            warning.add()
        now[0] += 11
        warning.add()
    assert caplog.messages == ["1 of them", "50 of them"]


def test_descriptors_that_are_left_are_counted() -> None:
    process = psutil.Process()
    assert descriptors_left(10) in range(8, max(9, process.rlimit(psutil.RLIMIT_NOFILE)[0]))
    assert descriptors_left(1 << 40) == 8


def _greeting(connected: socket.socket) -> bytes | None:
    connected.settimeout(patient(30))
    try:
        return connected.recv(5, socket.MSG_WAITALL) or None
    except OSError:
        return None


def test_strangers_hold_no_listener_of_workers_up() -> None:
    """300 of them keep 8 threads, and one who takes part is heard at once."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    admission = Admission(listening, _greeting, most=8)
    before = threading.active_count()
    strangers = half_open(listening.getsockname()[1], 0)
    for _ in range(300):
        strangers.append(socket.create_connection(listening.getsockname()))
    with socket.create_connection(listening.getsockname()) as known:
        known.sendall(b"hello")
        connected, said = admission.next(patient(5))
        assert said == b"hello"
        connected.close()
    wait_until(lambda: threading.active_count() <= before + 8)
    wait_until(lambda: sum(map(is_closed, strangers)) >= 290)
    admission.close()
    for stranger in strangers:
        stranger.close()


class _Short:
    """A listening socket for which no descriptor is left for a while."""

    def __init__(self, listening: socket.socket, times: int) -> None:
        self._listening, self.times = listening, times

    def accept(self) -> tuple[socket.socket, object]:
        if self.times > 0:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listening, name)


def test_a_listener_of_workers_outlives_a_shortage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.infer.connections._SHORTAGE_SECONDS", 0.01)
    listening = _Short(socket.create_server(("127.0.0.1", 0)), 20)
    with caplog.at_level(logging.WARNING, "laconic"):
        admission = Admission(listening, _greeting)  # type: ignore[arg-type]
        with socket.create_connection(listening.getsockname()) as known:  # type: ignore[operator]
            known.sendall(b"hello")
            connected, said = admission.next(patient(5))
            assert said == b"hello"
            connected.close()
    admission.close()
    assert listening.times == 0
    assert len(caplog.messages) == 1
    assert "no descriptor is left" in caplog.messages[0]
