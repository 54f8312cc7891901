"""Backend group of a `ProcessGroupLaconic`: torch's own group that carries the bytes, and comparison of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import DebugLevel, _create_process_group_wrapper, _world, get_debug_level

from laconic.collectives.engine.handshake import difference
from laconic.collectives.runtime.group_facts import register_group
from laconic.errors import ConfigError
from laconic.shared_secret import seal, unseal

Backends = dict[torch.device, tuple[Any, Any]]
"""Kind and backend that carry the tensors of a device."""


def compare(settings: Mapping[str, object], arguments: Any) -> None:
    """Compare `settings` with those of the other ranks; ConfigError on all ranks if they or shared secrets differ.

    They are exchanged through the store, as JSON: no connection exists yet that could hang.
    """
    store, key = arguments.store, "laconic/settings/{}".format
    store.set(key(arguments.group_rank), seal(key(arguments.group_rank), json.dumps(settings)))
    everyones = {
        rank: json.loads(unseal(key(group_rank), store.get(key(group_rank))))
        for group_rank, rank in enumerate(global_ranks(arguments))
    }
    found = difference(everyones)
    if found is not None:
        raise ConfigError(f"{found}, but all ranks must make a process group with the same settings; none was made")


def connect(name: str, arguments: Any) -> tuple[dist.ProcessGroup, Backends]:
    """Make a group that torch does not list, of a name in `laconic.autoload.NAMES`, and its backends by device.

    `arguments` are torch's DistributedBackendOptions. ConfigError if NCCL is asked for, but this torch has none.
    """
    kinds = dist.ProcessGroup.BackendType
    has_nccl = name == "laconic:nccl" or (name == "laconic" and torch.cuda.is_available())
    backends: Backends = {}
    if name != "laconic:nccl":
        backends[torch.device("cpu")] = kinds.GLOO, _gloo(arguments)
    if has_nccl:
        backends[torch.device("cuda")] = kinds.NCCL, _nccl(arguments)
    elif torch.cuda.is_available():
        backends[torch.device("cuda")] = backends[torch.device("cpu")]
    group = dist.ProcessGroup(arguments.store, arguments.group_rank, arguments.group_size)
    group._set_default_backend(kinds.NCCL if has_nccl else kinds.GLOO)
    for device, (kind, backend) in backends.items():
        group._register_backend(device, kind, backend)
    register_group(group, global_ranks(arguments))
    # torch's own functions that take global ranks, of sends and receives in a batch, ask its registry.
    _world.pg_group_ranks[group] = {rank: group_rank for group_rank, rank in enumerate(global_ranks(arguments))}
    return group, backends


def forget(group: dist.ProcessGroup) -> None:
    """Remove the group that `connect` registered with torch."""
    _world.pg_group_ranks.pop(group, None)


def global_ranks(arguments: Any) -> list[int]:
    """Global ranks of the group's members, also for the default group, for which torch has none."""
    return list(arguments.global_ranks_in_group) or list(range(arguments.group_size))


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
    """Prepare a backend as torch prepares its own before it uses them."""
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
