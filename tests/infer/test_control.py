"""Ranks of torchrun as workers: who is let in, who is refused, who is waited for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from laconic.errors import CollectiveError, ConfigError
from laconic.infer import Engine, control, serve_rank
from laconic.infer.control import RankConnections, check_world, master_store
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.shared_secret import enter
from laconic.train.distributed.world import RankInfo
from tests.distributed.processes import ROOT, Ending, environment, finish, free_port, is_running, start, wait_until
from tests.infer.models import generated, make
from tests.patience import patient

HELLO: dict[str, Any] = {"rank": 1, "pid": 77, "host": "other"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("mixtral", tmp_path_factory.mktemp("models"), vocab_size=257)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankConnections, tuple[str, int, str]]]:
    """An engine's end on the loopback interface, and what is in its store: address, port and token."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store = HashStore()
    connections = RankConnections(store)
    address, port, token = json.loads(store.get("laconic-infer-0/laconic-infer/engine"))
    yield connections, (address, port, token)
    connections.close()


def settings_of(*ranks: int) -> dict[int, WorkerSettings]:
    return {rank: WorkerSettings(rank, "/model", "tcp://127.0.0.1:1", EngineSplit(1, 2)) for rank in ranks}


def call(place: tuple[str, int, str], said: bytes, knows_token: bool = True) -> socket.socket:
    connection = socket.create_connection(place[:2], 10)
    if knows_token:
        enter(connection, place[2], "ranks of an engine", 10)
    connection.sendall(said)
    return connection


def test_a_rank_with_the_token_gets_its_settings_and_strangers_get_nothing(
    waiting: tuple[RankConnections, tuple[str, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HELLO_SECONDS", 0.3)
    connections, place = waiting
    strangers = [
        call(place, said, knows_token)
        for said, knows_token in (
            (b"", False),  # says nothing
            (b"GET / HTTP/1.1\r\n\r\n", False),
            (json.dumps(HELLO).encode() + b"\n", False),
            (json.dumps(HELLO | {"rank": 5}).encode() + b"\n", True),
            (json.dumps(HELLO | {"rank": "1"}).encode() + b"\n", True),
            (b"[]\n", True),
            (b"x" * 5000, True),
        )
    ]
    event = json.dumps({"is": "ready"})
    rank = call(place, json.dumps(HELLO).encode() + b"\n" + event.encode() + b"\n")
    found = connections.accept(settings_of(1), 20)
    with rank.makefile() as stream:
        assert WorkerSettings.from_json(stream.readline()) == settings_of(1)[1]
    worker = found[1]
    assert (worker.pid, worker.host) == (77, "other")
    assert next(worker.events) == event + "\n"
    assert not worker.wait(0.01)
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # it said more than was read
            assert len(stranger.makefile("rb").read()) <= 16  # a nonce
        stranger.close()
    rank.close()
    assert list(worker.events) == []
    assert worker.wait(patient(5))
    assert worker.ending() == "(rank 1, pid 77 on other) broke its connection; see its output"
    worker.close()


def test_ranks_that_do_not_come_are_named(waiting: tuple[RankConnections, tuple[str, int, str]]) -> None:
    connections, place = waiting
    rank = call(place, json.dumps(HELLO | {"rank": 2}).encode() + b"\n")
    with pytest.raises(CollectiveError, match=r"^ranks 1, 3 did not connect to the engine within 0\.5 s"):
        connections.accept(settings_of(1, 2, 3), 0.5)
    with rank, rank.makefile() as stream:
        assert len(stream.readlines()) == 1  # its settings, and then the end, so that it ends, too


def test_a_master_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of no machine, RFC 5737
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is '192\.0\.2\.1'.* must be an address of the machine of rank"):
        RankConnections(HashStore())


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=rf"store at 127\.0\.0\.1:{port} .*EADDRINUSE.*; check MASTER_ADDR"):
            master_store(RankInfo(0, 2, 0, 2), 2.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_processes_is_refused(world_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^WORLD_SIZE is {world_size}, but 1 attention and 2 expert .* 3 processes"):
        check_world(RankInfo(0, world_size, 0, world_size), EngineSplit(1, 2))
    check_world(RankInfo(0, 3, 0, 3), EngineSplit(1, 2))


def test_engine_and_serve_rank_are_refused_on_the_wrong_rank(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^launcher is 'torchrun', but RANK is None"):
        Engine(model, launcher="torchrun")
    with pytest.raises(ConfigError, match=r"^RANK is None, but serve_rank is for ranks of torchrun above 0"):
        serve_rank()
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^launcher is 'torchrun', but RANK is 1"):
        Engine(model, launcher="torchrun")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE is 2, but 1 attention and 3 expert workers are 4"):
        Engine(model, experts=3, launcher="torchrun")
    with pytest.raises(ConfigError, match=r"^RANK is 0, but serve_rank"):
        serve_rank()


def torchrun(num_processes: int, model: Path, *flags: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes), "--master-port", str(free_port())]
    command = ["-m", "laconic", "generate", "--model", str(model), "--prompt", "one", "--prompt", "another prompt"]
    return start([*launch, *command, *flags], environment(PYTHONWARNINGS="default"))


@pytest.mark.slow
def test_torchrun_gives_the_tokens_of_generate(model: Path) -> None:
    flags = ("--attention", "2", "--experts", "1", "--slices", "2", "--payload", "lossless", "--max-new-tokens", "6")
    ending: Ending = finish(torchrun(3, model, *flags, "--json"), 120)
    assert ending.code == 0, ending.err
    shown = json.loads(ending.out)["generations"]  # nothing else is on standard output
    wanted = generated(model, [list(text.encode()) for text in ("one", "another prompt")], 6)
    assert [each["tokens"] for each in shown] == wanted


@pytest.mark.slow
def test_torchrun_with_the_wrong_number_of_processes_is_refused_by_name(model: Path) -> None:
    ending = finish(torchrun(2, model, "--experts", "2"), 120)
    assert ending.code != 0
    assert "laconic: error: WORLD_SIZE is 2, but 1 attention and 2 expert workers are 3 processes" in ending.err


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_launch_by_name(model: Path) -> None:
    """The ranks are started here, so that no agent of torchrun ends the others."""
    names = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "3"}
    code = (
        "import os, sys; from laconic.infer import Engine, serve_rank\n"
        "if os.environ['RANK'] != '0': serve_rank()\n"
        "engine = Engine(sys.argv[1], experts=2, launcher='torchrun', cache_tokens=8192)\n"
        "request = engine.submit([1, 2, 3], 8000); print('ready', *(w.pid for w in engine.workers), flush=True)\n"
        "request.result()"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model)],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), PYTHONWARNINGS="default", **names),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    out = ranks[0].stdout
    assert out is not None
    pids = [int(pid) for pid in out.readline().split()[1:]]
    assert pids[1:] == [ranks[1].pid, ranks[2].pid]
    os.kill(pids[1], signal.SIGKILL)
    endings = [finish(rank, 30) for rank in ranks]
    assert endings[0].code == 1
    assert f"expert worker 0 (rank 1, pid {pids[1]} on {socket.gethostname()}) broke its connection" in endings[0].err
    assert endings[1].code == -signal.SIGKILL
    wait_until(lambda: not is_running(pids[0]), 20)
