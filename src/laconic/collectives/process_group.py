"""A process group of torch's own kind over gloo and NCCL.

    import laconic.collectives.process_group  # not needed where laconic is installed: torch finds it by itself
    torch.distributed.init_process_group("laconic")

DDP, FSDP2, DeviceMesh, functional collectives, torch.compile and checkpoints run over it unchanged. A
`ProcessGroupLaconic` holds a gloo group for CPU tensors and an NCCL group for CUDA tensors and hands every call to
them.

torch 2.13 renamed the methods of process groups; both sets of names are here, since torch's C++ looks for either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import DebugLevel, _create_process_group_wrapper, get_debug_level

from laconic.autoload import register
from laconic.collectives.agreement import first_difference
from laconic.errors import ConfigError

__all__ = ["ProcessGroupLaconic", "ProcessGroupOptions", "create"]

register()


@dataclass(frozen=True)
class ProcessGroupOptions:
    """What `init_process_group("laconic", pg_options=...)` and `new_group(backend="laconic", pg_options=...)` take.

    A group that is made without options has those of the default group, if that is laconic's too.
    """

    # DeviceMesh asks the options of any backend for this.
    _timeout: timedelta | None = None


def create(name: str, arguments: Any, options: ProcessGroupOptions | None) -> ProcessGroupLaconic:
    """What torch calls to make a group: `name` is one of `autoload.NAMES`, `arguments` torch's record of the group.

    Raises ConfigError for options of another backend, and on all ranks alike if two ranks' options differ.
    """
    if options is None:
        default = dist.group.WORLD
        options = default.options if isinstance(default, ProcessGroupLaconic) else ProcessGroupOptions()
    if not isinstance(options, ProcessGroupOptions):
        raise ConfigError(
            f"pg_options is a {type(options).__name__}, but backend {name!r} takes"
            " laconic.collectives.ProcessGroupOptions; pass that, or None"
        )
    return ProcessGroupLaconic(name, arguments, options)


class ProcessGroupLaconic(dist.ProcessGroup):
    """The processes of a group; see the module's text. Made by torch, through `create`."""

    options: ProcessGroupOptions

    def __init__(self, name: str, arguments: Any, options: ProcessGroupOptions) -> None:
        rank, size = arguments.group_rank, arguments.group_size
        # Of the base's constructors only this one makes an object whose methods C++ finds; it knows no store.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = options
        self._name = name
        self._store = arguments.store
        self._agree(rank, size)
        self._inner = dist.ProcessGroup(self._store, rank, size)
        self._connect(arguments)

    # --- what it is ---

    def getBackendName(self) -> str:
        return self._name

    def get_group_store(self) -> Store:
        return self._store

    @property
    def bound_device_id(self) -> torch.device | None:
        """None, so that DeviceMesh makes its groups anew: those split from a bound NCCL group would be torch's own."""
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        pass

    def shutdown(self) -> None:
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    # --- collectives ---
    #
    # Each is overridden, for C++ calls the base's own while it holds Python's lock, and a thread of gloo that frees a
    # tensor may want that lock while it holds gloo's: a deadlock, once in a hundred programs.

    def broadcast(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.broadcast(*args, **kwargs)

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce(*args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allreduce_coalesced(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.reduce(*args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allgather(*args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.allgather_coalesced(*args, **kwargs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _named(self._inner, "all_gather_single", "_allgather_base")(*args, **kwargs)

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        method = _named(self._inner, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return method(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.gather(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.scatter(*args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.reduce_scatter(*args, **kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _named(self._inner, "reduce_scatter_single", "_reduce_scatter_base")(*args, **kwargs)

    def reduce_scatter_single_coalesced(self, *args: Any, **kwargs: Any) -> dist.Work:
        method = _named(self._inner, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return method(*args, **kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> dist.Work:
        return _named(self._inner, "all_to_all_single", "alltoall_base")(*args, **kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.alltoall(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.barrier(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.send(*args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.recv(*args, **kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._inner.recv_anysource(*args, **kwargs)

    # What torch 2.12 and older call, and other code may still.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- making it ---

    def _agree(self, rank: int, size: int) -> None:
        """Compare the options of all ranks, through the store: before there is a connection that could hang."""
        mine = {"backend": self._name}
        self._store.set(f"laconic/settings/{rank}", json.dumps(mine))
        settings = [json.loads(self._store.get(f"laconic/settings/{other}")) for other in range(size)]
        found = first_difference(settings)
        if found is not None:
            key, place = found
            raise ConfigError(
                f"{key} is {settings[0].get(key)!r} on rank 0 and {settings[place].get(key)!r} on rank {place} of the"
                " group, but all ranks must make a group with the same options; no group was made"
            )

    def _connect(self, arguments: Any) -> None:
        """Make the groups that carry the bytes, and let this one and the inner one find them by device."""
        kinds = dist.ProcessGroup.BackendType
        has_nccl = self._name == "laconic:nccl" or (self._name == "laconic" and torch.cuda.is_available())
        backends: dict[str, tuple[Any, Any]] = {}
        if self._name != "laconic:nccl":
            backends["cpu"] = kinds.GLOO, _gloo(arguments)
        if has_nccl:
            backends["cuda"] = kinds.NCCL, _nccl(arguments)
        elif torch.cuda.is_available():
            backends["cuda"] = backends["cpu"]
        for group in (self, self._inner):
            group._set_default_backend(kinds.NCCL if has_nccl else kinds.GLOO)
            for device, (kind, backend) in backends.items():
                group._register_backend(torch.device(device), kind, backend)


def _named(group: dist.ProcessGroup, new: str, old: str) -> Callable[..., dist.Work]:
    return getattr(group, new, None) or getattr(group, old)


def _gloo(arguments: Any) -> Any:
    rank, size, timeout = arguments.group_rank, arguments.group_size, arguments.timeout
    backend = dist.ProcessGroupGloo(PrefixStore("cpu/", arguments.store), rank, size, timeout=timeout)
    return _prepared(backend, arguments)


def _nccl(arguments: Any) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("backend is 'laconic:nccl', but this torch has no NCCL; use 'laconic:gloo'")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = arguments.timeout
    rank, size, store = arguments.group_rank, arguments.group_size, PrefixStore("cuda/", arguments.store)
    return _prepared(dist.ProcessGroupNCCL(store, rank, size, options), arguments)


def _prepared(backend: Any, arguments: Any) -> Any:
    """What torch does with its own backends before it uses them."""
    backend.options.global_ranks_in_group = arguments.global_ranks_in_group
    backend.options.group_name = arguments.group_id
    backend._set_sequence_number_for_group()
    if get_debug_level() != DebugLevel.DETAIL:
        return backend
    rank, size = arguments.group_rank, arguments.group_size
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares the arguments of all ranks before each collective.
    return _create_process_group_wrapper(
        backend, arguments.group_id, arguments.store, rank, size, timeout=arguments.timeout
    )
