"""Votes of replicas on their bits: finds weights and optimizer state that changed silently on one rank.

Data parallel ranks make the same updates from the same averaged gradients, so what is replicated has the same bits on
all of them. A bit that flips in one rank's memory stays there, unnoticed, and reaches the others through gradients.
`verify_replicas` hashes every tensor where it lies, lets the ranks compare 8 bytes for each, and names tensor and rank.

It sees what differs between replicas. A gradient that was wrong before it was averaged is wrong on all ranks alike, and
what only one rank holds (a shard without a replica) has nothing to be compared with.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.errors import ConfigError, CorruptionError
from laconic.formats.digest import digest
from laconic.formats.shards import local_part

_MAX_NAMES = 3


@dataclass(frozen=True)
class ReplicaReport:
    """What a vote compared; every replica of it had the same bits."""

    num_tensors: int
    """Tensors of this rank that were compared with at least one replica."""
    nbytes: int
    """Their bytes."""
    uncovered: tuple[str, ...]
    """Names of this rank's tensors that no other rank of the group holds, such as shards."""
    uncovered_nbytes: int
    """Their bytes."""

    def __str__(self) -> str:
        compared = f"{self.num_tensors} tensors ({self.nbytes:,} bytes) have the same bits on all their replicas"
        if not self.uncovered:
            return compared
        return (
            f"{compared}; {len(self.uncovered)} ({self.uncovered_nbytes:,} bytes) have no replica and are not covered"
        )


@dataclass(frozen=True)
class _Held:
    """A tensor of this rank and the ranks, of the default group, that have to hold the same bits."""

    name: str
    tensor: Tensor
    ranks: Sequence[int]


@torch.no_grad()
def verify_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    groups: Mapping[nn.Parameter, dist.ProcessGroup | None] | None = None,
    buffers: bool = False,
) -> ReplicaReport:
    """Compare the bits of weights and optimizer state between the ranks that hold the same.

    All ranks of `group` call it together, between two steps. It reads every tensor once and exchanges 16 bytes for
    each; on CUDA the host waits for the device once. Parameters that are DTensors (FSDP2) are compared over the
    dimensions of their mesh on which they are replicated (HSDP); a shard without a replica is reported as uncovered.

    Args:
        model: plain, DDP- or FSDP2-wrapped.
        optimizer: of the model; its state is compared like the parameter that it belongs to.
        group: ranks that hold the model; None: the default group.
        groups: for parameters that not all ranks of `group` hold alike, such as experts: the group that does, or None
            if no other rank does.
        buffers: also compare buffers. Off by default: DDP lets running statistics differ between two forwards.

    Returns:
        What was compared on this rank.

    Raises:
        CorruptionError: on every rank of `group`: bits differ. The message names tensors and ranks; with more than two
            replicas those of which are the odd ones out.
        ConfigError: there is no process group, or the ranks have different tensors.
    """
    if not dist.is_initialized():
        raise ConfigError("no process group exists, but replicas are compared over one; call init_process_group first")
    whole = group or dist.group.WORLD
    assert whole is not None, "a group exists"
    members = registered_ranks(whole)
    if dist.get_rank() not in members:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in group, whose ranks are {[*members]}; call it on these only"
        )
    held = list(_held(model, optimizer, members, groups or {}, buffers))
    report = _report(held)
    if len(members) == 1 or not held:
        return report
    device = next((one.tensor.device for one in held if one.tensor.device.type != "cpu"), torch.device("cpu"))
    _check_names(held, members, group, device)
    digests = torch.stack([digest(one.tensor).to(device) for one in held])
    keys = torch.tensor([min(one.ranks) for one in held], device=device)
    gathered = [torch.empty(2, len(held), dtype=torch.int64, device=device) for _ in members]
    dist.all_gather(gathered, torch.stack([digests, keys]), group=group)
    found = torch.stack(gathered).cpu()
    differing = _differing(held, members, found[:, 0], found[:, 1])
    if differing:
        raise CorruptionError(_message(differing))
    return report


def _held(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    members: Sequence[int],
    groups: Mapping[nn.Parameter, dist.ProcessGroup | None],
    buffers: bool,
) -> Iterator[_Held]:
    """Parameters, their optimizer state and buffers, in an order that is the same on all ranks."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    own = [dist.get_rank()]
    names: dict[nn.Parameter, str] = {}

    def holders(tensor: Tensor, parameter: nn.Parameter | None) -> Sequence[int]:
        if isinstance(tensor, DTensor):
            return [
                rank
                for rank in _holders(tensor, groups.get(parameter) if parameter is not None else None)
                if rank in members
            ]
        if parameter is not None and isinstance(parameter, DTensor):
            return own if tensor.dim() else members  # state that a shard's rank made for itself; the step is everyone's
        if parameter is not None and parameter in groups:
            group = groups[parameter]
            return own if group is None else [r for r in registered_ranks(group) if r in members]
        return members

    for name, parameter in plain.named_parameters():
        names[parameter] = name
        yield _Held(name, local_part(parameter), holders(parameter, parameter))
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            assert optimizer is not None
            name = names.get(parameter, f"parameter {index} of group {number}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    yield _Held(f"{key} of {name}", local_part(value), holders(value, parameter))
    for name, buffer in plain.named_buffers() if buffers else ():
        yield _Held(name, local_part(buffer), holders(buffer, None))


def _holders(tensor: DTensor, group: dist.ProcessGroup | None) -> Sequence[int]:
    """`_replicas`, and where a mesh lies once on each other rank of `group`, those: its shards have replicas there.

    FSDP2 that shards over the group has a mesh with all its ranks.
    """
    found = _replicas(tensor)
    outside = [] if group is None else [rank for rank in registered_ranks(group) if rank != dist.get_rank()]
    if found != [dist.get_rank()] or {*outside} & {*tensor.device_mesh.mesh.flatten().tolist()}:
        return found
    return sorted([*outside, dist.get_rank()])


def _replicas(tensor: DTensor) -> Sequence[int]:
    """The ranks that hold the same part of a DTensor as this one."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return [dist.get_rank()]
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate
        for placement, coordinate in zip(tensor.placements, here, strict=True)
    )
    found: list[int] = mesh.mesh[place].flatten().tolist()
    return found


def _report(held: Sequence[_Held]) -> ReplicaReport:
    covered = [one for one in held if len(one.ranks) > 1]
    alone = [one for one in held if len(one.ranks) == 1]
    return ReplicaReport(
        len(covered),
        sum(one.tensor.nbytes for one in covered),
        tuple(one.name for one in alone),
        sum(one.tensor.nbytes for one in alone),
    )


def _check_names(
    held: Sequence[_Held], members: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Check that all ranks have tensors of the same names, so that the exchange has the same size everywhere.

    Raises:
        ConfigError: they have not.
    """
    names = hashlib.sha256("\0".join(one.name for one in held).encode()).digest()
    own = torch.tensor([len(held), int.from_bytes(names[:8], "little", signed=True)], device=device)
    gathered = [torch.empty_like(own) for _ in members]
    dist.all_gather(gathered, own, group=group)
    for rank, other in zip(members, torch.stack(gathered).tolist(), strict=True):
        if other != gathered[0].tolist():
            raise ConfigError(
                f"rank {rank} has {other[0]} tensors and rank {members[0]} has {int(gathered[0][0])}, or they have "
                "other names, but replicas must have the same; call verify_replicas after the same step on all ranks"
            )


def _differing(
    held: Sequence[_Held], members: Sequence[int], digests: Tensor, keys: Tensor
) -> list[tuple[str, dict[int, int]]]:
    """Names of tensors whose replicas differ, with the hash on each rank of the replicas; [rank, tensor] each."""
    found = []
    for number, one in enumerate(held):
        by_replicas: dict[int, dict[int, int]] = {}
        for rank, value, key in zip(members, digests[:, number].tolist(), keys[:, number].tolist(), strict=True):
            by_replicas.setdefault(key, {})[rank] = value
        found += [(one.name, hashes) for hashes in by_replicas.values() if len(set(hashes.values())) > 1]
    return found


def _message(differing: Sequence[tuple[str, dict[int, int]]]) -> str:
    """Names the ranks and the tensors; tensors with the same verdict share a sentence."""
    verdicts: dict[str, list[str]] = {}
    for name, hashes in differing:
        (value, count), *_ = Counter(hashes.values()).most_common(1)
        odd = [rank for rank, other in hashes.items() if other != value]
        if 2 * count > len(hashes):
            others = [rank for rank in hashes if rank not in odd]
            verdict = f"{_ranks(odd)} {'has' if len(odd) == 1 else 'have'} other bits than {_ranks(others)} in"
        else:
            why = "two replicas do" if len(hashes) == 2 else "replicas without a majority do"
            verdict = f"{_ranks(list(hashes))} have different bits, and {why} not tell which is right, in"
        verdicts.setdefault(verdict, []).append(name)
    sentences = []
    for verdict, names in verdicts.items():
        more = f" and {len(names) - _MAX_NAMES} more tensors" if len(names) > _MAX_NAMES else ""
        sentences.append(f"{verdict} {', '.join(names[:_MAX_NAMES])}{more}")
    return "replicas differ: " + "; ".join(sentences)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
