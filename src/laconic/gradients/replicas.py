"""Checks and broadcasts for ranks that hold the same model: equal settings, equal parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from laconic.collectives.engine.handshake import difference
from laconic.collectives.runtime.group_facts import ranks_of, registered_ranks
from laconic.errors import ConfigError
from laconic.formats.shards import local_part


def check_same_settings(settings: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Compare settings, by name, with those of the other ranks of a group.

    Costs one small all-gather; the settings themselves are exchanged only when they differ.

    Raises:
        ConfigError: settings differ; raised on every rank, naming the first setting that differs.
    """
    text = json.dumps(settings, default=str)
    digests: list[str] = [""] * group.size()
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    texts = [""] * group.size()
    dist.all_gather_object(texts, text, group=group)
    everyones = dict(zip(ranks_of(group), map(json.loads, texts), strict=True))
    found = difference(everyones)
    if found is None:  # numbers of another kind are equal, as 1, 1.0 and True
        written = {rank: {name: json.dumps(one) for name, one in theirs.items()} for rank, theirs in everyones.items()}
        found = difference(written) or "the order of the settings is not the same"
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
