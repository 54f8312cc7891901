"""The processes of one run, and the few values they exchange outside of DDP and FSDP2.

`World` is the same object for one process and for many; with one process there is no process group and every exchange
is the identity. Objects are exchanged as JSON in byte tensors, so nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from laconic.collectives import agent_store
from laconic.errors import ConfigError, first_line

STORE_VARIABLE = "LACONIC_STORE"
"""Environment variable with the path of the file in which processes that laconic started on this machine meet; without
it they meet at MASTER_ADDR and MASTER_PORT."""


@dataclass(frozen=True)
class RankInfo:
    """The rank and world size that torchrun (or our launcher) gave this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """Rank and world size by RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; None without any of the first three."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    present = [name for name in names if name in environment]
    if not present:
        return None
    remedy = "start the processes with torchrun, or unset these variables to let laconic start its own"
    values: dict[str, int] = {}
    for name in (*names, "LOCAL_WORLD_SIZE"):
        if name not in environment:
            if name in names:
                raise ConfigError(f"{name} is not set in the environment, but {present[0]} is; {remedy}")
            continue
        text = environment[name]
        try:
            values[name] = int(text)
        except ValueError:
            raise ConfigError(f"{name} is {text!r} in the environment, but it must be an integer; {remedy}") from None
    info = RankInfo(
        rank=values["RANK"],
        world_size=values["WORLD_SIZE"],
        local_rank=values["LOCAL_RANK"],
        local_world_size=values.get("LOCAL_WORLD_SIZE", values["WORLD_SIZE"]),
    )
    rules = [
        ("WORLD_SIZE", info.world_size >= 1, "be at least 1"),
        ("RANK", 0 <= info.rank < info.world_size, f"lie in [0, WORLD_SIZE) = [0, {info.world_size})"),
        (
            "LOCAL_WORLD_SIZE",
            1 <= info.local_world_size <= info.world_size,
            f"lie in [1, WORLD_SIZE] = [1, {info.world_size}]",
        ),
        (
            "LOCAL_RANK",
            0 <= info.local_rank < info.local_world_size,
            f"lie in [0, LOCAL_WORLD_SIZE) = [0, {info.local_world_size})",
        ),
        ("LOCAL_RANK", info.local_rank <= info.rank, f"be at most RANK ({info.rank})"),
    ]
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(f"{name} is {environment[name]} in the environment, but it must {rule}; {remedy}")
    if info.world_size > 1 and STORE_VARIABLE not in environment:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise ConfigError(f"{name} is not set in the environment, but WORLD_SIZE is above 1; {remedy}")
        port = environment["MASTER_PORT"]
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"MASTER_PORT is {port!r} in the environment, but it must be a port number; {remedy}")
    return info


@dataclass(frozen=True)
class World:
    """This process among all processes of the run; `size` 1 means there is no process group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all of them."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of `values` (any shape, CPU or `device`) over all processes, the same bits on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The JSON value that each process passed, in rank order, on every process."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([payload.numel()], device="cpu"))
        longest = max(int(length) for length in lengths)
        padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
        rows = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(rows, padded)
        return [json.loads(row[: int(length)].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def first_error(self, error: str | None) -> str | None:
        """The error of the lowest rank that passed one, on every process; None when none did. Also a barrier."""
        return next((other for other in self.gather(error) if other is not None), None)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Raise a ConfigError of the block on all processes, which run it together: the lowest rank's."""
        error = None
        try:
            yield
        except ConfigError as failure:
            error = str(failure)
        if (error := self.first_error(error)) is not None:
            raise ConfigError(error)

    def leave(self) -> None:
        """Destroy the process group, all processes together."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def join_world(info: RankInfo | None, timeout_seconds: float, on_cpu: bool = False) -> World:
    """Find this process's device and, with more than one process, join the process group.

    NCCL carries CUDA tensors and gloo CPU tensors. A collective that waits longer than `timeout_seconds` fails. CPU
    threads are divided between the processes of a machine unless OMP_NUM_THREADS says otherwise; a single process
    keeps the number it has. With `on_cpu`, CUDA devices are left alone.

    Raises:
        ConfigError: the machine has too few GPUs, the master port is taken, or not all processes join in time.
    """
    info = info or RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not on_cpu:
        num_devices = torch.cuda.device_count()
        if info.local_rank >= num_devices:
            raise ConfigError(
                f"LOCAL_RANK is {info.local_rank}, but this machine ({socket.gethostname()}) has {num_devices} GPUs; "
                "start at most one process per GPU"
            )
        device = torch.device("cuda", info.local_rank)
        torch.cuda.set_device(device)
    elif info.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // info.local_world_size))
    if info.world_size > 1:
        _init_process_group(info, device, timeout_seconds)
    return World(rank=info.rank, size=info.world_size, local_rank=info.local_rank, device=device)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _init_process_group(info: RankInfo, device: torch.device, timeout_seconds: float) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    file = os.environ.get(STORE_VARIABLE)
    where = f"in {file}" if file else f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store: Store | None
        if file is None:
            store = agent_store(info.rank, info.world_size, timeout)
        else:
            store = FileStore(file, info.world_size)
            store.set_timeout(timeout)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        text = str(error)
        if file is None and ("EADDRINUSE" in text or "address already in use" in text.lower()):
            address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            raise ConfigError(
                f"MASTER_PORT is {port}, but that port is in use on {address}; give another (torchrun --master-port)"
            ) from error
        raise ConfigError(
            f"WORLD_SIZE is {info.world_size}, but rank {info.rank} on {socket.gethostname()} could not meet that "
            f"many processes {where} within {timeout_seconds:g} s: {first_line(error)}"
        ) from error


# What gloo and NCCL say; the last one is gloo's of a group in which something has timed out before.
_SIGNS = ("gloo/transport", "NCCL", "Application timeout caused pair closure")


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another process: gloo says so in plain RuntimeErrors, which DCP wraps."""
    from torch.distributed.checkpoint.api import CheckpointException  # takes a second to load

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, (RuntimeError, CheckpointException)) and any(sign in str(error) for sign in _SIGNS)
