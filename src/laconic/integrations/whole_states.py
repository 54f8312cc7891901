"""States of optimizers whose parameters are cut over processes, as one process would save and load them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laconic.formats.shards import local_runs, sharded_like, taken
from laconic.optim.moments import new_state

__all__ = ["take_whole_states", "whole", "whole_states"]


def whole(tree: Any) -> Any:
    """Return dicts and lists with whole tensors in place of DTensors: on the CPU of rank 0, and None elsewhere.

    All processes call it together.
    """
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    if not isinstance(tree, DTensor):
        return tree
    tensor = tree.full_tensor()
    return tensor.detach().cpu() if dist.get_rank() == 0 else None


@contextmanager
def whole_states(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let `state_dict` of optimizers return whole tensors inside; all processes call it together."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_state_dict_post_hook(lambda _, state: whole(state)).remove)
        yield


def take_whole_states(optimizer: Optimizer) -> None:
    """Let `load_state_dict` take this process's parts of whole tensors, from now on; DTensors are loaded as ever."""
    if not any(hook is _cut for hook in optimizer._optimizer_load_state_dict_pre_hooks.values()):
        optimizer.register_load_state_dict_pre_hook(_cut)


def _cut(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):  # torch checks them
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            if isinstance(parameter, DTensor) and key in states:
                states[key] = {name: _part(name, value, parameter, group) for name, value in states[key].items()}
    return {**state_dict, "state": states}


def _part(name: str, value: Any, parameter: DTensor, group: dict[str, Any]) -> Any:
    """Return this process's part of an entry of a parameter's state."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    like: Any = parameter
    if value.shape != parameter.shape:  # scales of AdamW8bit
        like = new_state(parameter, group.get("min_8bit_numel", 0)).get(name)
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value  # which the optimizer refuses
    part = taken(value, local_runs(like.shape, like.device_mesh, like.placements))
    return sharded_like(part.to(like.device, copy=True).contiguous(), like)
