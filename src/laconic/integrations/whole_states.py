"""States of optimizers whose parameters are cut over processes, as one process would save and load them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from laconic.formats.shards import local_runs, sharded_like, taken
from laconic.optim.moments import new_state


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


@contextmanager
def groups_of_one_process(
    optimizer: Optimizer, scheduler: Any, wanted: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
) -> Iterator[None]:
    """Let the states of an optimizer and its scheduler be saved and loaded with other groups inside.

    Args:
        optimizer: whose groups are parts of the wanted ones, as where each mesh has a group of its own.
        scheduler: of this optimizer; its lists with an entry for each group follow.
        wanted: options of a group where the optimizer has none for it, and its parameters in order.
    """
    own = [group["params"] for group in optimizer.param_groups]
    wanted_of = {id(p): number for number, (_, parameters) in enumerate(wanted) for p in parameters}
    part_of = [wanted_of[id(parameters[0])] for parameters in own]
    number = {id(p): key for key, p in enumerate(p for parameters in own for p in parameters)}
    keys = [[number[id(p)] for p in parameters] for _, parameters in wanted]  # the optimizer's, in the wanted order
    renumbered = {key: place for place, key in enumerate(key for one in keys for key in one)}

    def joined(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = []
        for place, (options, _parameters) in enumerate(wanted):
            like = state["param_groups"][part_of.index(place) if place in part_of else 0]
            more = {} if place in part_of else options
            groups.append({**like, **more, "params": [renumbered[key] for key in keys[place]]})
        return {
            **state,
            "state": {renumbered[key]: value for key, value in state["state"].items()},
            "param_groups": groups,
        }

    def parted(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if [len(group["params"]) for group in state["param_groups"]] != [len(one) for one in keys]:
            return state  # which the optimizer looks at
        saved = [key for group in state["param_groups"] for key in group["params"]]
        moments = {
            key: state["state"][saved[place]] for key, place in renumbered.items() if saved[place] in state["state"]
        }
        groups = [
            {**state["param_groups"][place], "params": [number[id(p)] for p in parameters]}
            for place, parameters in zip(part_of, own, strict=True)
        ]
        return {**state, "state": moments, "param_groups": groups}

    def picked(state: dict[str, Any], size: int, places: Sequence[int]) -> dict[str, Any]:
        lists = {key: value for key, value in state.items() if isinstance(value, list) and len(value) == size}
        return state | {key: [value[place] for place in places] for key, value in lists.items()}

    firsts = [part_of.index(place) if place in part_of else 0 for place in range(len(wanted))]
    state, load = picked(scheduler.state_dict(), len(own), firsts), scheduler.load_state_dict
    scheduler.state_dict = lambda: state
    scheduler.load_state_dict = lambda saved: load(picked(saved, len(wanted), part_of))
    with ExitStack() as stack:
        stack.callback(delattr, scheduler, "state_dict")
        stack.callback(delattr, scheduler, "load_state_dict")
        stack.callback(optimizer.register_state_dict_post_hook(joined).remove)
        stack.callback(optimizer.register_load_state_dict_pre_hook(parted, prepend=True).remove)
        yield


def _cut(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):  # torch checks them
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            if isinstance(parameter, DTensor) and key in states:
                whole, bits = states[key], getattr(optimizer, "bits", 8)
                states[key] = {name: _part(name, value, parameter, group, bits) for name, value in whole.items()}
    return {**state_dict, "state": states}


def _part(name: str, value: Any, parameter: DTensor, group: dict[str, Any], bits: int) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    like: Any = parameter
    if value.shape != parameter.shape:  # codes and scales of AdamW8bit
        like = new_state(parameter, group.get("min_8bit_numel", 0), bits).get(name)
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value  # which the optimizer refuses
    part = taken(value, local_runs(like.shape, like.device_mesh, like.placements))
    return sharded_like(part.to(like.device, copy=True).contiguous(), like)
