"""`laconic serve` as users start it: workers and servers are killed, clients leave, dawdle or stop halfway.

One server bears all of it, one fault after the other; after each it gives the answers it gave before, and at the end
it has the file descriptors and threads of the beginning.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from laconic.infer.bench.demo_model import save_demo_model
from tests.distributed.processes import is_running, wait_until
from tests.patience import patient
from tests.trust.loads import family_of, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BODY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
LONG = BODY | {"max_tokens": 1500}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    save_demo_model(path, hidden_size=32, layers=2, experts=4)
    return path


def answer(url: str) -> str:
    done = httpx.post(f"{url}/completions", json=BODY, timeout=patient(240))
    assert done.status_code == 200, done.text
    return str(done.json()["choices"][0]["text"])


def metrics(url: str) -> str:
    return httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=patient(60)).text


def number(url: str, name: str) -> float:
    """The sum of a metric over its labels; 0 before it is there."""
    lines = [line for line in metrics(url).splitlines() if line.startswith(name) and not line.startswith("#")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def raw(url: str, body: bytes, length: int | None = None, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection on which a request was sent by hand, with a Content-Length that may promise more."""
    address = httpx.URL(url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(240)
        connection.connect((address.host, address.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n"
        )
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        yield connection


def worker(pid: int, role: str) -> int:
    """A worker of the server, by what it holds connections for: attention workers are started first."""
    workers = sorted(child for child in family_of(pid) if child != pid)
    assert len(workers) == 2, workers
    return workers[0 if role == "attention" else 1]


def resources(pid: int) -> tuple[int, int]:
    process = psutil.Process(pid)
    return process.num_fds(), process.num_threads()


def test_a_server_outlives_its_clients_and_its_workers(model: Path) -> None:
    with serving(model, "--experts", "1", "--max-restarts", "2") as (url, pid):
        expected = answer(url)
        for _ in range(10):
            answer(url)
        before = resources(pid)

        # Half a request: its sender goes away, and another waits for ever with it.
        with raw(url, b'{"model":', length=200):
            pass
        wait_until(lambda: number(url, 'laconic_http_answers_total{path="/v1/completions",status="499"') >= 1, 120)
        with raw(url, b"{", length=10):
            assert answer(url) == expected

        # A client that goes away in the middle of its stream, and one that never reads it.
        with raw(url, json.dumps(LONG | {"stream": True}).encode()) as leaving:
            assert leaving.recv(20)
        wait_until(lambda: number(url, "laconic_cancelled_total") >= 1, 120)
        with raw(url, json.dumps(LONG | {"stream": True, "n": 1}).encode(), receive_buffer=2048):
            assert answer(url) == expected
        wait_until(lambda: number(url, "laconic_requests_running") == 0, 120)
        assert answer(url) == expected
        wait_until(lambda: resources(pid)[0] <= before[0] + 1, 120)
        assert resources(pid)[1] <= before[1] + 1

        # A worker that is killed: the request in flight fails by its name, the next one has its answer.
        for role in ("attention", "expert"):
            lost = worker(pid, role)
            with raw(url, json.dumps(LONG).encode()) as waiting:
                wait_until(lambda: number(url, "laconic_requests_running") >= 1, 120)
                os.kill(lost, signal.SIGKILL)
                said = waiting.recv(1 << 16).decode()
                while "}" not in said:  # the body may come by itself
                    said += waiting.recv(1 << 16).decode()
            assert " 500 " in said.splitlines()[0] or " 503 " in said.splitlines()[0], said
            assert f"(pid {lost}) was killed by SIGKILL" in said
            assert answer(url) == expected
            assert not is_running(lost)
        wait_until(lambda: resources(pid)[0] <= before[0] + 1, 120)
        assert resources(pid)[1] <= before[1] + 1


def test_a_server_that_is_killed_leaves_no_worker_and_its_port(model: Path) -> None:
    with serving(model, "--experts", "1") as (url, pid):
        expected, workers = answer(url), family_of(pid)
        port = httpx.URL(url).port
        with raw(url, json.dumps(LONG).encode()) as waiting:
            wait_until(lambda: number(url, "laconic_requests_running") >= 1, 120)
            os.kill(pid, signal.SIGKILL)
            start = time.monotonic()
            with suppress(ConnectionResetError):
                assert waiting.recv(100) == b""
        wait_until(lambda: not any(is_running(each) for each in workers), 60)
        assert time.monotonic() - start < patient(60)
    with serving(model, "--experts", "1", "--port", str(port)) as (again, _):
        assert httpx.URL(again).port == port
        assert answer(again) == expected
