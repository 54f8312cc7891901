"""How an engine holds its workers: processes that it starts, or ranks that torchrun has started, on any machine.

Under torchrun rank 0 is the engine, which starts attention worker 0 as a process of its own; every other rank is the
worker of that rank. Ranks find the engine in the TCPStore at MASTER_ADDR and MASTER_PORT and connect to it; what passes
over that connection is what passes over the pipes of a local worker. When a process ends, its connection breaks. Rows
and sums never pass here: for those the workers meet in the same store.

The connection is not encrypted. A rank proves that it knows the token that rank 0 has put into the store, and a shared
secret where there is one (shared_secret.py). Without one, whoever can reach the store can take part, as with torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, ClassVar

from laconic.errors import CollectiveError, ConfigError, first_line
from laconic.infer.connections import Admission, keep_alive
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.installation import safe_path
from laconic.json_text import parse_json
from laconic.shared_secret import admit, enter, seal, unseal
from laconic.train.distributed.world import RankInfo, read_environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LAST_WORDS_SECONDS = 1.0
_HELLO_SECONDS = 5.0
_HELLO_NBYTES = 4096
_KEY = "laconic-infer/engine"
_PURPOSE = "ranks of an engine"
_TCP = "tcp://"


class LocalWorker:
    """A process that this one starts, with an interface for gloo unless GLOO_SOCKET_IFNAME names one.

    Attributes:
        program: arguments of the interpreter, before the settings.
        pid, host: of the process and its machine; None is this one.
        commands: takes lines for the worker.
        events: lines of the worker, until its end.
    """

    program: ClassVar[tuple[str, ...]] = ("-m", "laconic.infer.worker")
    host: str | None = None

    def __init__(self, settings: WorkerSettings, interface: str | None) -> None:
        environment = dict(os.environ)
        if interface is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._process = subprocess.Popen(
            [sys.executable, *safe_path(), *self.program, settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is for the engine, which then stops them
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.commands: IO[str] = self._process.stdin
        self.events: Iterator[str] = self._process.stdout
        self.pid = self._process.pid
        _held.add(self)

    def ending(self) -> str:
        """Return what became of it, after its last event."""
        try:
            code = self._process.wait(_LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            return f"(pid {self.pid}) closed its output"
        if code >= 0:
            return f"(pid {self.pid}) ended with exit code {code}"
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"(pid {self.pid}) was killed by {signal.Signals(-code).name}{hint}"

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for its end; False if it takes longer."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Free what is held of a worker that has ended."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was buffered for a process that has ended
                    stream.close()

    def descriptors(self) -> list[int]:
        """Return the numbers of the pipes that are open."""
        streams = (self._process.stdin, self._process.stdout)
        return [stream.fileno() for stream in streams if stream is not None and not stream.closed]


class RemoteWorker:
    """A rank that torchrun has started, behind its connection."""

    def __init__(self, connection: socket.socket, rank: int, pid: int, host: str) -> None:
        self._connection, self._rank = connection, rank
        self.pid, self.host = pid, host
        self.commands: IO[str] = connection.makefile("w", encoding="utf-8")
        self._lines: IO[str] = connection.makefile("r", encoding="utf-8")
        self._ended = threading.Event()
        self.events: Iterator[str] = self._read()
        _held.add(self)

    def _read(self) -> Iterator[str]:
        try:
            yield from self._lines
        except (OSError, ValueError):
            return  # reset by the machine, or not heard of for too long
        finally:
            self._ended.set()

    def ending(self) -> str:
        return f"(rank {self._rank}, pid {self.pid} on {self.host}) broke its connection; see its output"

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return self._ended.wait(timeout_seconds)

    def kill(self) -> None:
        """End the connection, at which the worker ends itself."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for stream in (self.commands, self._lines, self._connection):
            with contextlib.suppress(OSError):
                stream.close()

    def descriptors(self) -> list[int]:
        """Return the number of the connection, if it is open."""
        number = self._connection.fileno()
        return [] if number < 0 else [number]


Worker = LocalWorker | RemoteWorker
"""A worker's process, as the engine sees it."""

_held: weakref.WeakSet[Worker] = weakref.WeakSet()
"""Workers of all engines of this process."""


def _let_go() -> None:
    """In a process that was forked from an engine's: hold no worker.

    Workers end when the engine's ends of their pipes and connections have closed, and a copy would keep them open. The
    numbers stay taken, so that the objects that know them do no harm.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for worker in list(_held):
        for number in worker.descriptors():
            os.dup2(null, number, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def check_world(info: RankInfo, split: EngineSplit) -> None:
    """Check that torchrun has started one process per worker; more or fewer are a ConfigError."""
    if info.world_size != split.num_workers:
        raise ConfigError(
            f"WORLD_SIZE is {info.world_size}, but {split.attention} attention and {split.experts} expert workers are"
            f" {split.num_workers} processes; start torchrun with that many, change attention and experts, or unset"
            " RANK and WORLD_SIZE to let the engine start its workers"
        )


def master_store(info: RankInfo, timeout_seconds: float) -> tuple[str, Store]:
    """Open the TCPStore at MASTER_ADDR and MASTER_PORT, which rank 0 hosts unless torchrun does.

    Returns what WorkerSettings.store says of it, and the store; a ConfigError if it cannot be opened in time.
    """
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(address, port, None, hosts, timedelta(seconds=timeout_seconds), wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(
            f"rank {info.rank} on {socket.gethostname()} could not reach the store at {address}:{port} within"
            f" {timeout_seconds:g} s ({first_line(error).rstrip('.')}); check MASTER_ADDR and MASTER_PORT"
        ) from error
    return f"{_TCP}{address}:{port}", store


def open_store(place: str, num_workers: int) -> Store:
    """Open the store of a WorkerSettings in a worker."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    if not place.startswith(_TCP):
        return FileStore(place, num_workers)
    address, _, port = place.removeprefix(_TCP).rpartition(":")
    return PrefixStore(_attempt(), TCPStore(address, int(port), None, False, wait_for_workers=False))


class RankConnections:
    """The engine's end: waits for the ranks above 0 at an address that it puts into the store of `master_store`.

    A MASTER_ADDR that is no address of this machine is a ConfigError.
    """

    def __init__(self, store: Store) -> None:
        address = os.environ["MASTER_ADDR"]
        try:
            family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            self._listening = socket.create_server(place[:2], family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR is {address!r}, at which rank 0 on {socket.gethostname()} cannot listen"
                f" ({error.strerror}); it must be an address of the machine of rank 0"
            ) from None
        self._token = secrets.token_hex(16)
        where = [address, self._listening.getsockname()[1], self._token]
        store.set(_place(), seal(_place(), json.dumps(where)))
        self._store = store  # the one that hosts it must live
        self._admission = Admission(self._listening, self._read_hello)

    def accept(self, settings: dict[int, WorkerSettings], timeout_seconds: float) -> dict[int, RemoteWorker]:
        """Wait for each rank of `settings` and tell it its own; a rank that comes too late is a CollectiveError."""
        deadline = time.monotonic() + timeout_seconds
        found: dict[int, RemoteWorker] = {}
        while missing := sorted(set(settings) - set(found)):
            try:
                connection, hello = self._admission.next(deadline - time.monotonic())
            except TimeoutError:
                for worker in found.values():
                    worker.kill()
                    worker.close()
                raise CollectiveError(
                    f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not connect to the engine"
                    f" within {timeout_seconds:g} s; see their output, or give start_timeout_seconds"
                ) from None
            if hello["rank"] not in missing:
                connection.close()
                continue
            worker = RemoteWorker(connection, hello["rank"], hello["pid"], hello["host"])
            worker.commands.write(settings[hello["rank"]].to_json() + "\n")
            worker.commands.flush()
            found[hello["rank"]] = worker
        return found

    def close(self) -> None:
        """Listen no more."""
        self._admission.close()

    def _read_hello(self, connection: socket.socket) -> dict[str, Any] | None:
        if not admit(connection, self._token, _PURPOSE, _HELLO_SECONDS):
            return None
        keep_alive(connection, reads_at_once=True)
        line, deadline = b"", time.monotonic() + _HELLO_SECONDS
        try:
            # Byte by byte: what follows belongs to the worker's events.
            while not line.endswith(b"\n") and len(line) < _HELLO_NBYTES:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                if not (byte := connection.recv(1)):
                    return None
                line += byte
            hello = parse_json(line)
            fits = isinstance(hello["rank"], int) and isinstance(hello["pid"], int) and isinstance(hello["host"], str)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        connection.settimeout(None)
        return hello if fits else None


def connect_rank(timeout_seconds: float) -> tuple[WorkerSettings, IO[str], IO[str]]:
    """Connect this rank of torchrun to the engine on rank 0; return what it is to be, commands, and where events go.

    A ConfigError if this is no rank above 0, or rank 0 cannot be reached within `timeout_seconds`.
    """
    info = read_environment(os.environ)
    if info is None or info.rank == 0:
        raise ConfigError(
            f"RANK is {None if info is None else info.rank}, but serve_rank is for ranks of torchrun above 0; rank 0"
            " runs the engine"
        )
    _, store = master_store(info, timeout_seconds)
    try:
        address, port, token = parse_json(unseal(_place(), store.get(_place())))
        connection = socket.create_connection((address, port), timeout_seconds)
        enter(connection, token, _PURPOSE, timeout_seconds)
    except ConfigError:
        raise
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"rank {info.rank} on {socket.gethostname()} found no engine on rank 0 within {timeout_seconds:g} s"
            f" ({first_line(error).rstrip('.')}); see the output of rank 0"
        ) from error
    connection.settimeout(None)
    keep_alive(connection, reads_at_once=True)
    events, commands = connection.makefile("w", encoding="utf-8"), connection.makefile("r", encoding="utf-8")
    hello = {"rank": info.rank, "pid": os.getpid(), "host": socket.gethostname()}
    events.write(json.dumps(hello) + "\n")
    events.flush()
    line = commands.readline()
    if not line:
        raise ConfigError(f"the engine on rank 0 did not take rank {info.rank}; see the output of rank 0")
    if info.local_world_size == info.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return WorkerSettings.from_json(line), commands, events


def _place() -> str:
    """The key under which ranks find the engine."""
    return f"{_attempt()}/{_KEY}"


def _attempt() -> str:
    """Prefix of keys: torchrun's store stays when it starts all processes again."""
    return f"laconic-infer-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
