"""Runs a model's forward and restores the model afterwards.

A forward may change what it runs on: running statistics, power iterations, counters, caches, embeddings that are
renormalized in place, a configuration in which the kind of loss is noted. Small state (attributes, containers, flags)
is recorded beforehand and put back. Buffers are copied beforehand, because batch norm does not announce its writes.
Other tensors are copied when an operation is about to write to them, so that memory is paid only for those that change.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.activations.host.storages import place_of, storages_of

CONTAINERS = (list, dict, set, deque)
_LEFT_OUT = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, str, bytes, int, float),
    nn.parameter.UninitializedParameter,
    nn.parameter.UninitializedBuffer,
)
"""What is no state, has none, or is not the model's: our own forwards note in measuring what they keep."""

_DEPTH = 4
"""How far attributes of attributes are followed."""


@contextmanager
def preserved(
    model: nn.Module, inputs: Any = (), *, tensors: Literal["watched", "copied", "left"] = "watched"
) -> Iterator[_State]:
    """After the block, `model`, the tensors in `inputs` and all random generators are as they were before.

    That is: parameters, buffers and other tensors that modules hold, with their values, gradients and requires_grad;
    modules' attributes, containers and plain objects among them (such as a configuration), modes and hooks; and the
    random states of torch, its devices, numpy and Python. Afterwards `has_undone` of what the block gets says whether a
    container, or an attribute of what is no module, was another one.

    Args:
        model: the model, or a part of one.
        inputs: of its forward.
        tensors: "watched" by a mode; "copied" beforehand, all but parameters and their gradients, where a mode would
            keep torch.compile from work; "left" with what is written into them.
    """
    state = _State()
    state.note(inputs, _DEPTH)
    state.note(model, _DEPTH)
    if tensors == "copied":
        state.writes.copy_all()
    elif tensors == "watched":
        for buffer in model.buffers():
            state.writes.copy(buffer)
    try:
        with state.writes if tensors == "watched" else nullcontext():
            yield state
    finally:
        state.put_back()


class _State:
    """The recorded state, as actions that restore it."""

    def __init__(self) -> None:
        self.has_undone = False
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # keeps them, so that no identity is used again
        self.writes = _Writes()
        self._undo.append(noted_random_states())

    def put_back(self) -> None:
        """Run the actions, the last one first."""
        self.writes.put_back()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()  # they hold this object, and with it the model and its copies until a collection

    def note(self, value: Any, depth: int) -> None:
        """Record a value and what it holds."""
        if depth == 0 or id(value) in self._seen or isinstance(value, _LEFT_OUT):
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._note_container(value.__dict__, _DEPTH, of_module=True)
        elif isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, CONTAINERS):
            self._note_container(value, depth)
        elif isinstance(value, tuple):
            for item in value:
                self.note(item, depth - 1)
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._note_container(attributes, depth)

    def _note_container(self, container: Any, depth: int, *, of_module: bool = False) -> None:
        before = _copied(container)

        def undo() -> None:
            if _is_same(container, before):
                return
            self.has_undone |= not of_module
            if isinstance(container, dict | set):
                container.clear()
                container.update(before)
            else:
                container.clear()
                container.extend(before)

        self._undo.append(undo)
        for item in before.values() if isinstance(before, dict) else before:
            self.note(item, depth - 1)

    def _note_tensor(self, tensor: Tensor) -> None:
        data, requires_grad, grad = tensor.data, tensor.requires_grad, tensor.grad if tensor.is_leaf else None
        self.writes.watch(tensor)
        if isinstance(tensor, nn.Parameter):
            self.writes.leave(*(tensor,) if grad is None else (tensor, grad))

        def undo() -> None:
            if place_of(tensor) != place_of(data):
                tensor.data = data
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.grad is not grad:
                    tensor.grad = grad

        self._undo.append(undo)
        if grad is not None:
            self.note(grad, 1)


def noted_random_states() -> Callable[[], None]:
    """What puts the random states of torch, its devices, numpy and Python back to those of now, as often as called."""
    undo = [partial(random.setstate, random.getstate()), partial(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def put_back() -> None:
        for one in undo:
            one()

    return put_back


def _copied(container: Any) -> Any:
    """What a container holds, whatever a subclass makes of `copy`."""
    if isinstance(container, dict):
        return dict.copy(container)
    return set.copy(container) if isinstance(container, set) else list(container)


def _is_same(container: Any, before: Any) -> bool:
    """Whether a container holds the very same objects in the same order."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), before.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return (isinstance(container, set) and container == before) or all(map(lambda a, b: a is b, container, before))


class _Writes(TorchDispatchMode):
    """Copies watched tensors when an operation is about to write to them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._left: set[int] = set()

    def watch(self, tensor: Tensor) -> None:
        """Restore this tensor's bytes at the end."""
        for storage in storages_of(tensor.detach()):
            if _has_memory(storage):
                self._watched[storage._cdata] = storage

    def leave(self, *tensors: Tensor) -> None:
        """Have no copies of these made by `copy_all`: parameters and gradients, to which forwards do not write."""
        self._left.update(key for tensor in tensors for key in place_of(tensor.detach()))

    def copy_all(self) -> None:
        """Copy all watched tensors now, but those left."""
        self._copies = {key: storage.clone() for key, storage in self._watched.items() if key not in self._left}

    def copy(self, tensor: Tensor) -> None:
        """Copy a watched tensor now, unless that has been done."""
        for key in place_of(tensor.detach()):
            if key in self._watched and key not in self._copies:
                self._copies[key] = self._watched[key].clone()

    def put_back(self) -> None:
        """Restore the copied tensors."""
        for key, copy in self._copies.items():
            self._watched[key].copy_(copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            names = [argument.name for argument in schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._about_to_write(given.get(argument.name))
        return func(*args, **kwargs)

    def _about_to_write(self, target: Any) -> None:
        for tensor in target if isinstance(target, list | tuple) else [target]:
            if isinstance(tensor, Tensor):
                self.copy(tensor)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return storage.device.type != "meta" and storage.data_ptr() != 0
    except RuntimeError:  # of a tensor that only stands for others, or for a gradient that is used up
        return False
