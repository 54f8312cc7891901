"""Names of tensors in pipeline stages that are saved together: one name is one tensor, or the later one would be lost.

torch.distributed.checkpoint keeps one copy of what several ranks call alike, as replicas do. Stages that number their
layers from 0 call different tensors alike. Only tied weights, equal to the bit, may be in two stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.errors import CheckpointError
from laconic.formats.digest import digest
from laconic.formats.shards import local_part, local_runs
from laconic.moe.layer import moe_layers

_MAX_NAMES = 5


def check_stage_names(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Compare names, shapes and bits of what the ranks of different pipeline stages save, nested by name.

    All ranks call it together; it reads every tensor once if there are several stages, else nothing. Different tensors
    of one name in two stages are a CheckpointError on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    world = dist.get_world_size()
    stages = _gathered(max([1, *(getattr(layer, "stages", 1) for layer in moe_layers(model).values())]))
    num_stages = max(stages)  # a stage without experts does not know
    if num_stages == 1:
        return
    mine = {name: _seen(value) for name, value in _leaves(stored, "")}
    held: dict[str, list[dict[str, int]]] = {}
    for rank, theirs in enumerate(_gathered(mine)):
        for name, (part, bits) in theirs.items():
            of_stages = held.setdefault(name, [{} for _ in range(num_stages)])
            of_stages[rank // (world // num_stages)].setdefault(part, bits)
    differing = [name for name, of_stages in held.items() if len({str(sorted(s.items())) for s in of_stages if s}) > 1]
    if differing:
        raise CheckpointError(
            f"{len(differing)} tensors have the same name in several of {num_stages} pipeline stages, but are not the"
            f" same, and only one would be kept: {', '.join(sorted(differing)[:_MAX_NAMES])}"
            f"{', ...' if len(differing) > _MAX_NAMES else ''}; give the modules of each stage the names that they have"
            " in the whole model, or save each stage in a directory and a process group of its own"
        )


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield name, value


@torch.no_grad()
def _seen(value: Any) -> tuple[str, int | str]:
    """Return which part of which shape this rank holds, and a hash of its bits."""
    if not isinstance(value, Tensor):
        return "value", repr(value)
    where = ""
    if isinstance(value, DTensor):
        where = str(local_runs(value.shape, value.device_mesh, value.placements))
    return f"{list(value.shape)} {value.dtype} {where}", int(digest(local_part(value)))
