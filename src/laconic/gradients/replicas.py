"""Checks and broadcasts for ranks that hold the same model: equal settings, equal parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from laconic.collectives.engine.handshake import difference_in_group
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.errors import ConfigError
from laconic.formats.shards import local_part


def check_same_settings(settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Compare settings, by name, with the other ranks'; a ConfigError on every rank names the first that differs."""
    found = difference_in_group(settings, group)
    if found is not None:
        raise ConfigError(f"{found}, but all ranks of a group must agree; start every rank with the same settings")


def settings_digest(settings: Mapping[str, object]) -> int:
    """Hash settings to a number below 2**62 that differs where they do."""
    return int.from_bytes(hashlib.sha256(json.dumps(settings, default=str).encode()).digest()[:8], "big") >> 2


def largest_of_ranks(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Find the largest value of each number over the ranks of a group: one small all-reduce."""
    values = torch.tensor(list(numbers), dtype=torch.int64, device="cpu").to(device)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    found: list[int] = values.tolist()
    return found


@torch.no_grad()
def broadcast_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the parameters and buffers of a group's first rank to all its ranks, in place."""
    source = registered_ranks(group)[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        local = local_part(tensor)
        if local.numel() == 0:
            continue
        whole = local.contiguous()
        dist.broadcast(whole, source, group=group)
        if whole is not local:
            local.copy_(whole)
