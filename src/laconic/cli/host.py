"""What of this machine and its settings makes laconic slower than it could be, and the machine's links."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from laconic.cost.sizes import format_nbytes
from laconic.installation import source

_TESTED_TORCH = (2, 13)
"""Newest torch that CI runs."""
_MIN_OPEN_FILES = 4096
_MIN_SHARED_NBYTES = 1 << 30
_LOOPBACK_NBYTES = 1 << 25
_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """Readings that `improvements` judges; None where the system does not tell."""

    kernels: str | None
    """Implementation of the ops on the CPU: c++ or reference."""
    num_threads: int
    num_cores: int
    huge_pages: str | None
    """The mode of transparent huge pages: always, madvise or never."""
    torch_version: str
    open_files: int | None
    locked_nbytes: int | None
    """Limit of memory that may be locked, -1 for none; None where nothing here locks memory."""
    shared_nbytes: int | None
    """Size of /dev/shm."""
    gloo_interfaces: tuple[str, ...]
    """What GLOO_SOCKET_IFNAME names."""
    interfaces: tuple[str, ...]
    cuda_without_triton: bool


def read_host(kernels: Mapping[str, Mapping[str, str]]) -> Host:
    """Read the machine; `kernels` are those of `laconic.ops.kernels_in_use`."""
    locks = torch.cuda.is_available() or Path("/sys/class/infiniband").is_dir()
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return Host(
        kernels=kernels.get("cpu", {}).get("implementation"),
        num_threads=torch.get_num_threads(),
        num_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        huge_pages=_huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        torch_version=torch.__version__,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_nbytes=_limit(resource.RLIMIT_MEMLOCK) if locks and hasattr(resource, "RLIMIT_MEMLOCK") else None,
        shared_nbytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        gloo_interfaces=tuple(name for name in named.split(",") if name),
        interfaces=tuple(psutil.net_if_addrs()),
        cuda_without_triton=torch.cuda.is_available() and find_spec("triton") is None,
    )


def improvements(host: Host) -> Iterator[tuple[str, str]]:
    """Yield what of `host` makes laconic slower or stops it under load, and its remedy, the most important first."""
    if host.kernels == "reference":
        yield (
            "the C++ kernels are not in use: ops on the CPU run in plain torch, many times slower",
            f"install a wheel, or build with a C++ compiler: pip install --force-reinstall --no-deps {source()}, "
            "without LACONIC_PURE, and unset LACONIC_KERNELS",
        )
    if host.cuda_without_triton:
        yield "there is a GPU, but no Triton, so ops on it run in plain torch", "pip install triton"
    if host.num_threads < host.num_cores:
        yield (
            f"torch uses {host.num_threads} of {host.num_cores} cores",
            f"unset OMP_NUM_THREADS, or set it to {host.num_cores} divided by the processes on this machine",
        )
    if host.huge_pages == "never":
        yield (
            "transparent huge pages are off, so large tensors on the CPU are mapped 4 KB at a time",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if (version := _numbers(host.torch_version)) < _TESTED_TORCH:
        tested = ".".join(map(str, _TESTED_TORCH))
        yield (
            f"torch {'.'.join(map(str, version))} is older than {tested}, which laconic is tested with",
            f"pip install 'torch>={tested}'",
        )
    if host.open_files is not None and 0 <= host.open_files < _MIN_OPEN_FILES:
        yield (
            f"a process may open {host.open_files} files (ulimit -n): many data files or ranks run into that",
            f"ulimit -n {_MIN_OPEN_FILES}, or LimitNOFILE= of the service",
        )
    if host.locked_nbytes is not None and host.locked_nbytes >= 0:
        yield (
            f"a process may lock {format_nbytes(host.locked_nbytes)} of memory (ulimit -l): pinned buffers and RDMA "
            "need more",
            "ulimit -l unlimited; in a container --ulimit memlock=-1",
        )
    if host.shared_nbytes is not None and host.shared_nbytes < _MIN_SHARED_NBYTES:
        yield (
            f"/dev/shm holds {format_nbytes(host.shared_nbytes)}: data loader workers and NCCL share memory there",
            "in a container: --shm-size=8g or --ipc=host; else mount -o remount,size=8G /dev/shm",
        )
    for name in host.gloo_interfaces:
        if name not in host.interfaces:
            yield (
                f"GLOO_SOCKET_IFNAME names {name}, which this machine does not have",
                f"name one of {', '.join(host.interfaces)}",
            )


def links() -> list[dict[str, Any]]:
    """Describe the network interfaces that are up, and measure a connection over loopback."""
    found: list[dict[str, Any]] = []
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    for name, state in states.items():
        if not state.isup:
            continue
        own = [one.address for one in addresses.get(name, ()) if one.family in (socket.AF_INET, socket.AF_INET6)]
        rate = f"{state.speed / 1000:g} Gbit/s" if state.speed else "rate not told"
        detail = f"{rate}, MTU {state.mtu}, {', '.join(own) or 'no address'}"
        found.append({"name": name, "megabits_per_second": state.speed or None, "mtu": state.mtu, "detail": detail})
    rate_now = _loopback_bytes_per_second()
    if rate_now is not None:
        text = f"{rate_now / 1e9:.2f} GB/s measured, one connection"
        found.append({"name": "loopback", "bytes_per_second": rate_now, "detail": text})
    return found


def _loopback_bytes_per_second() -> float | None:
    """Rate of one TCP connection over 127.0.0.1; None where none can be made."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = socket.create_connection(server.getsockname(), timeout=5)
            receiver, _ = server.accept()
    except OSError:
        return None
    receiver.settimeout(5)

    def send() -> None:
        with sender:
            chunk = bytes(_CHUNK_NBYTES)
            for _ in range(_LOOPBACK_NBYTES // _CHUNK_NBYTES):
                sender.sendall(chunk)

    thread = threading.Thread(target=send, daemon=True)
    started = time.perf_counter()
    thread.start()
    buffer, left = memoryview(bytearray(_CHUNK_NBYTES)), _LOOPBACK_NBYTES
    with receiver:
        try:
            while left and (count := receiver.recv_into(buffer)):
                left -= count
        except OSError:
            return None
    return None if left else _LOOPBACK_NBYTES / (time.perf_counter() - started)


def _huge_pages(file: Path) -> str | None:
    try:
        found = re.search(r"\[(\w+)\]", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
