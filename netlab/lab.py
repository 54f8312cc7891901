"""The lab: builds the network, starts programs on its hosts, and leaves nothing behind.

Each host is a network namespace with one interface, eth0. One more namespace holds the switches: a bridge `core`, and
one bridge per node when hosts are grouped in nodes. Nothing outside the namespaces is changed, and deleting them
removes everything. Needs root and the programs ip and tc.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from laconic.errors import ConfigError
from netlab import transfer
from netlab.link import End, Link, Traffic, check_rate, run_tool
from netlab.program import OnLine, Program, finish

__all__ = ["Lab", "why_not"]

_MOST_HOSTS = 250
_numbers = count()


def why_not() -> str | None:
    """Return the reason why no lab can be built on this machine; None if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"the programs {', '.join(missing)} are not installed (package iproute2)"
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    return None


class Lab:
    """Context manager: a network of hosts behind one switch, or in nodes of equally many hosts.

    Args:
        num_hosts: from 1 to 250.
        bits_per_second: rate, in each direction, of every host's link; with nodes, of every node's uplink. None: no
            limit.
        num_nodes: number of nodes, which divides `num_hosts`; None: no nodes.
        node_bits_per_second: rate, in each direction, of the hosts' links inside the nodes. None: no limit.

    Attributes:
        host_links: one Link per host.
        uplinks: one Link per node; empty without nodes.

    Raises:
        ConfigError: the numbers do not fit.
        RuntimeError: on entry, the system refuses a step; nothing is left behind then.
    """

    def __init__(
        self,
        num_hosts: int,
        bits_per_second: float | None = None,
        *,
        num_nodes: int | None = None,
        node_bits_per_second: float | None = None,
    ) -> None:
        if not 1 <= num_hosts <= _MOST_HOSTS:
            raise ConfigError(f"num_hosts is {num_hosts}, but it must lie in [1, {_MOST_HOSTS}]")
        if num_nodes is not None and (num_nodes < 1 or num_hosts % num_nodes):
            raise ConfigError(f"num_nodes is {num_nodes}, but it must divide num_hosts, which is {num_hosts}")
        if num_nodes is None and node_bits_per_second is not None:
            raise ConfigError("node_bits_per_second is given, but num_nodes is not; say how many nodes there are")
        for name, rate in (("bits_per_second", bits_per_second), ("node_bits_per_second", node_bits_per_second)):
            if rate is not None:
                check_rate(name, rate)
        # Deleting a namespace takes a while after the command has returned, so names are never used twice.
        self._name = f"laconic{os.getpid()}n{next(_numbers)}"
        self.num_hosts = num_hosts
        self.num_nodes = num_nodes
        self.bits_per_second = bits_per_second
        self.node_bits_per_second = node_bits_per_second
        self.host_links: list[Link] = []
        self.uplinks: list[Link] = []
        self._programs: list[Program] = []
        self._on_sigterm: Any = None

    # --- the network ---

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(f"a lab cannot be built here: {reason}")
        # SIGTERM must not leave namespaces behind.
        if threading.current_thread() is threading.main_thread():
            self._on_sigterm = signal.signal(signal.SIGTERM, _exit)
        try:
            _remove_abandoned()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        handled = threading.current_thread() is threading.main_thread() and self._on_sigterm is not None
        if handled:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for host in range(self.num_hosts):
            _kill_inside(self._host(host))  # children that left their program's session, too
        for program in self._programs:
            program.kill()
        for name in (*map(self._host, range(self.num_hosts)), self._switch):
            _remove(name)
        if handled:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    @staticmethod
    def address(host: int) -> str:
        """Return the host's IPv4 address, valid inside the lab only."""
        return f"10.77.0.{host + 1}"

    def node_of(self, host: int) -> int:
        """Return the node of a host; without nodes, each host is a node of its own."""
        return host if self.num_nodes is None else host * self.num_nodes // self.num_hosts

    def traffic(self) -> dict[str, Traffic]:
        """Read the bytes that have passed every link so far, by its name: "host 0", ..., "node 0", ..."""
        return {link.name: link.traffic() for link in (*self.host_links, *self.uplinks)}

    def measured_bits_per_second(self, num_bytes: int, sender: int = 1, receiver: int = 0) -> float:
        """Measure the rate of one TCP connection between two hosts: calibrate before quoting a speed-up.

        Args:
            num_bytes: bytes to transfer.
            sender, receiver: hosts.

        Raises:
            RuntimeError: the transfer fails.
            TimeoutError: it takes more than 120 seconds.
        """
        arguments = [self.address(receiver), str(num_bytes)]
        command = [sys.executable, "-S", transfer.__file__]
        receiving = self.start(receiver, [*command, "receive", *arguments])
        receiving.wait_for("ready")
        sending = self.start(sender, [*command, "send", *arguments])
        endings = finish([sending, receiving], timeout_seconds=120)
        for ending in endings:
            if ending.code:
                raise RuntimeError(f"the calibrating transfer failed: {ending.err}")
        return float(endings[0].out)

    # --- programs ---

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        name: str | None = None,
        on_line: OnLine | None = None,
    ) -> Program:
        """Start a command on a host.

        Args:
            host: number of the host.
            command: program and arguments.
            environment: changes to this process's environment.
            cwd: working directory; None: this process's.
            name: of the program in messages; None: "host" and its number.
            on_line: called with every line that the program prints.

        Raises:
            ConfigError: there is no such host.
        """
        program = Program(
            self._host(host),
            command,
            os.environ | dict(environment or {}),
            name=name or f"host {host}",
            cwd=cwd,
            on_line=on_line,
        )
        self._programs.append(program)
        return program

    def start_ranks(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        ranks_per_host: int = 1,
        port: int = 29500,
        cwd: Path | None = None,
        on_line: OnLine | None = None,
    ) -> list[Program]:
        """Start a command `ranks_per_host` times on each host with the variables that torchrun sets, for gloo.

        LOCAL_RANK counts the ranks of one node (of one host, without nodes); OMP_NUM_THREADS is 1 unless set.

        Args:
            command: program and arguments.
            environment: changes to this process's environment and to the variables that are set here.
            ranks_per_host: processes on each host.
            port: MASTER_PORT, on host 0.
            cwd: working directory; None: this process's.
            on_line: called with every line that the programs print.

        Returns:
            The programs by rank, each named "rank" and its number.

        Raises:
            ConfigError: `ranks_per_host` is below 1.
        """
        if ranks_per_host < 1:
            raise ConfigError(f"ranks_per_host is {ranks_per_host}, but it must be at least 1")
        local_world_size = ranks_per_host * (1 if self.num_nodes is None else self.num_hosts // self.num_nodes)
        world_size = ranks_per_host * self.num_hosts
        fixed = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "GROUP_WORLD_SIZE": str(world_size // local_world_size),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        programs = []
        for rank in range(world_size):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local_world_size),
                "GROUP_RANK": str(rank // local_world_size),
            }
            changed = fixed | own | dict(environment or {})
            host = rank // ranks_per_host
            programs.append(self.start(host, command, changed, cwd=cwd, name=f"rank {rank}", on_line=on_line))
        return programs

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to the programs that still run on a host, and to their children."""
        namespace = self._host(host)
        for program in self._programs:
            if program.namespace == namespace:
                program.signal(number)

    # --- building ---

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def _host(self, number: int) -> str:
        """Name of a host's namespace."""
        if not 0 <= number < self.num_hosts:
            raise ConfigError(f"there is no host {number}; hosts are numbered from 0 to {self.num_hosts - 1}")
        return f"{self._name}h{number}"

    def _build(self) -> None:
        """Make namespaces, bridges and cables, and limit the links."""
        run_tool("ip", "netns", "add", self._switch)
        self._add_bridge("core")
        for node in range(self.num_nodes or 0):
            self._add_bridge(f"node{node}")
            near, far = End(self._switch, f"up{node}"), End(self._switch, f"down{node}")
            _add_cable(near, far)
            run_tool("ip", "-n", self._switch, "link", "set", near.device, "master", f"node{node}", "up")
            run_tool("ip", "-n", self._switch, "link", "set", far.device, "master", "core", "up")
            self.uplinks.append(Link(f"node {node}", near, far))
        for number in range(self.num_hosts):
            host = self._host(number)
            bridge = "core" if self.num_nodes is None else f"node{self.node_of(number)}"
            run_tool("ip", "netns", "add", host)
            near, far = End(host, "eth0"), End(self._switch, f"port{number}")
            _add_cable(near, far)
            run_tool("ip", "-n", self._switch, "link", "set", far.device, "master", bridge, "up")
            run_tool("ip", "-n", host, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_tool("ip", "-n", host, "link", "set", device, "up")
            self.host_links.append(Link(f"host {number}", near, far))
        slow, fast = (self.host_links, []) if self.num_nodes is None else (self.uplinks, self.host_links)
        for link in slow:
            link.limit(self.bits_per_second)
        for link in fast:
            link.limit(self.node_bits_per_second)

    def _add_bridge(self, name: str) -> None:
        run_tool("ip", "-n", self._switch, "link", "add", name, "type", "bridge")
        run_tool("ip", "-n", self._switch, "link", "set", name, "up")


def _add_cable(near: End, far: End) -> None:
    run_tool(
        *("ip", "link", "add", near.device, "netns", near.namespace),
        *("type", "veth", "peer", far.device, "netns", far.namespace),
    )


def _kill_inside(namespace: str) -> None:
    """Kill all processes of a namespace, which may not exist."""
    with suppress(RuntimeError):
        for pid in run_tool("ip", "netns", "pids", namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(namespace: str) -> None:
    """Kill the processes that are left in a namespace, and delete it."""
    _kill_inside(namespace)
    with suppress(RuntimeError):
        run_tool("ip", "netns", "delete", namespace)


def _remove_abandoned() -> None:
    """Remove the namespaces of labs whose process was killed before it could remove them."""
    for line in run_tool("ip", "netns", "list").splitlines():
        found = re.match(r"laconic([0-9]+)n[0-9]+(?:s|h[0-9]+)\b", line)
        if found is not None and not Path("/proc", found[1]).exists():
            _remove(found[0])


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
