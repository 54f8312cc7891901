"""A small network on one Linux machine: hosts in network namespaces, a switch between them, links of a given rate.

Each host is a namespace with one interface, eth0; the switch is one more namespace with a bridge. Token buckets (tbf)
at both ends of each link limit what goes in and what goes out, as on a full-duplex cable. Nothing outside the
namespaces is touched, and deleting them takes everything along. Needs root and the programs ip and tc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count

__all__ = ["Lab", "why_not"]

_TRANSFER = """
import socket, sys, time
role, address, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "receive":
    with socket.create_server((address, 7777)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        left = num_bytes
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b"x")
else:
    with socket.create_connection((address, 7777)) as connection:
        started = time.perf_counter()
        connection.sendall(bytes(num_bytes))
        connection.recv(1)
        print(num_bytes * 8 / (time.perf_counter() - started))
"""

_numbers = count()


def why_not() -> str | None:
    """Why no lab can be built here, None if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed (package iproute2)"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    return None


class Lab:
    """Context manager: `num_hosts` hosts, each with a link of `bits_per_second` in both directions; None: not limited.

    Raises RuntimeError when the system refuses one of the steps; then nothing is left behind.
    """

    def __init__(self, num_hosts: int, bits_per_second: float | None) -> None:
        # Deleting a namespace takes a while after the command has returned, so names are never used twice.
        self._name = f"laconic{os.getpid()}n{next(_numbers)}"
        self.num_hosts = num_hosts
        self.bits_per_second = bits_per_second

    def __enter__(self) -> Lab:
        # A process that is told to end must not leave namespaces behind.
        self._on_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in (self._switch, *map(self._host, range(self.num_hosts))):
            with suppress(RuntimeError):
                _run("ip", "netns", "delete", name)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    @staticmethod
    def address(host: int) -> str:
        """The host's IPv4 address, known inside the lab only."""
        return f"10.77.0.{host + 1}"

    def start(
        self, host: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start this Python on a host with `arguments`, its output in pipes."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._host(host), sys.executable, *arguments],
            env=os.environ | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_ranks(self, arguments: Sequence[str], port: int = 29500) -> list[subprocess.Popen[str]]:
        """Start one process per host with the variables of torchrun, for gloo."""
        fixed = {
            "WORLD_SIZE": str(self.num_hosts),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        return [self.start(rank, arguments, fixed | {"RANK": str(rank)}) for rank in range(self.num_hosts)]

    def sent_nbytes(self, host: int) -> int:
        """Bytes that have left the host so far, headers included."""
        command = ["ip", "netns", "exec", self._host(host), "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(_run(*command))

    def measured_bits_per_second(self, num_bytes: int) -> float:
        """What one TCP connection from host 1 to host 0 really gets: calibrate before quoting a speed-up."""
        receiver = self.start(0, ["-c", _TRANSFER, "receive", self.address(0), str(num_bytes)])
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = self.start(1, ["-c", _TRANSFER, "send", self.address(0), str(num_bytes)])
        out, err = sender.communicate(timeout=120)
        receiver.communicate(timeout=120)
        if sender.returncode:
            raise RuntimeError(f"the calibrating transfer failed: {err}")
        return float(out)

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def _host(self, number: int) -> str:
        return f"{self._name}h{number}"

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number in range(self.num_hosts):
            host, port = self._host(number), f"port{number}"
            _run("ip", "netns", "add", host)
            _run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", host, "link", "set", device, "up")
            if self.bits_per_second is not None:
                self._limit(host, "eth0")
                self._limit(self._switch, port)

    def _limit(self, namespace: str, device: str) -> None:
        assert self.bits_per_second is not None
        # What the link carries in 4 ms may pass at once (timers are no finer); what it carries in 50 ms may queue.
        burst = max(64 * 1024, int(self.bits_per_second / 8 * 0.004))
        _run(
            *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
            *("rate", f"{int(self.bits_per_second)}bit", "burst", f"{burst}b", "latency", "50ms"),
        )


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout
