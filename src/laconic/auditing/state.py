"""What a forward and a backward may change, noted before an audit and put back after each of its runs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.forwards.attention import attention_core_of
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.keep.preserve import noted_random_states
from laconic.activations.keep.rounding import seeds_restored

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that nn.Module keeps itself (parameters, hooks); those of a model are beside them."""


class ModelState:
    """The state of a model and of its process but for parameters, which no forward or backward writes.

    Buffers and other tensors that modules hold, by their bits; numbers, strings, lists, dicts, sets and deques that
    modules and their compressed forwards hold (what lies in a list is not looked into); whether modules are in
    training; what layers of experts, their dispatchers and hooks (meters, balancers) hold; random states of torch on
    the CPU and all CUDA devices, of NumPy and of Python; numbers of rounding.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._owners: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for hook in _hooks_of_layers(model):
            self._contents[id(hook)] = (hook, dict(hook))
            for value in hook.values():
                self._note(value)
                for inside in value.values() if type(value) is dict else value if type(value) in (list, tuple) else ():
                    self._note(inside)
        for owner in _owners(model):
            kept = {name: value for name, value in owner.items() if _is_kept(name, value)}
            self._owners.append((owner, kept))
            for name, value in owner.items():
                if name not in _OF_TORCH:
                    self._note(value)
        for module in model.modules():
            for buffer in module._buffers.values():
                self._note(buffer)
            self._contents[id(module._buffers)] = (module._buffers, dict(module._buffers))
        self._put_back_random_states = noted_random_states()
        self._numbers = seeds_restored()
        self._numbers.__enter__()

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor) and not value.requires_grad and not value.is_meta:
            self._tensors.setdefault(id(value), (value, value.detach().clone()))
        elif type(value) in (list, set, deque, dict):
            self._contents.setdefault(id(value), (value, value.copy()))

    def restore(self) -> None:
        """Put back what has changed; it can be called again and again."""
        for value, before in self._contents.values():
            _refill(value, before)
        for owner, before in self._owners:
            for name, value in list(owner.items()):
                # An attribute that is new is left: lazily made constants are as good as before.
                if name in before and (type(value) is not type(before[name]) or value is not before[name]):
                    owner[name] = before[name]
        with torch.no_grad():
            for value, copy in self._tensors.values():
                if not _same_bits(value, copy):
                    value.copy_(copy)
        self._put_back_random_states()
        self._numbers.__exit__(None, None, None)
        self._numbers = seeds_restored()
        self._numbers.__enter__()


def _is_kept(name: str, value: Any) -> bool:
    """Whether an attribute is to be the same object afterwards."""
    return type(value) in _PLAIN or (name not in _OF_TORCH and isinstance(value, Tensor | list | set | deque | dict))


def _owners(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries of the modules and of what stands in the place of their forwards."""
    for module in model.modules():
        yield module.__dict__
        for forward in replacements_of(module):
            yield forward.__dict__
        core = attention_core_of(module)
        if core is not None:
            yield core.__dict__
    for layer in _layers_of_experts(model):
        yield layer.__dict__
        if hasattr(layer.dispatcher, "__dict__"):
            yield layer.dispatcher.__dict__


def _layers_of_experts(model: nn.Module) -> Iterator[Any]:
    """Layers of laconic.moe; whoever has some has imported it, which takes seconds."""
    moe = sys.modules.get("laconic.moe.layer")
    yield from () if moe is None else moe.moe_layers(model).values()


def _hooks_of_layers(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries of the objects that layers of experts call in every forward."""
    for layer in _layers_of_experts(model):
        for hook in layer.hooks:
            if hasattr(hook, "__dict__"):
                yield hook.__dict__


def _refill(value: Any, before: Any) -> None:
    if isinstance(value, list):
        if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
            value[:] = before
    elif isinstance(value, dict):
        if value.keys() != before.keys() or any(value[name] is not before[name] for name in before):
            value.clear()
            value.update(before)
    elif value != before:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(before)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        a, b = a.contiguous().view(torch.uint8) if a.dim() else a, b.contiguous().view(torch.uint8) if b.dim() else b
        if not a.dim():
            return bool((a == b) | (a.isnan() & b.isnan()))
    return torch.equal(a, b)
