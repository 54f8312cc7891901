"""Code that a host has put in the place of torch's functions, or of a module's own, and takes away again.

`torch.nn.functional.softmax` hands a mode the function that bears its name at that moment. Where a host has put a
wrapper in its place, that is the wrapper, which is running already: a mode that calls it computes it twice.

Code that runs again in backward runs with the functions of forward, whatever the host has put where in between, and
with torch's settings of forward, such as those of a block of `torch.nn.attention.sdpa_kernel` that has ended.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from laconic.errors import ModelError

NATIVE = frozenset(
    {
        BuiltinFunctionType,
        MethodDescriptorType,
        MethodWrapperType,
        WrapperDescriptorType,
        OpOverload,
        OpOverloadPacket,
    }
)
"""Types of the functions that C++ hands to modes, which are most of them and always the original."""

_ORIGINALS = {name: value for name, value in vars(F).items() if type(value) is FunctionType}
_KNOWN = frozenset(
    value
    for home in (F, torch, torch.functional, torch.Tensor)
    for value in vars(home).values()
    if type(value) is FunctionType
)


def unpatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own function where `function` stands in its place in torch.nn.functional, else `function`."""
    if torch.compiler.is_compiling() or (type(function) is FunctionType and function in _KNOWN):
        return function
    places = vars(F)
    return next((own for name, own in _ORIGINALS.items() if places.get(name) is function), function)


def overrides_functions(x: Tensor) -> bool:
    """Whether the class of a tensor puts code of its own in the place of torch's functions, as quantized weights do."""
    own = type(x).__torch_function__
    return own is not _NONE and getattr(own, "__func__", own) is not _USUAL


_NONE = torch._C._disabled_torch_function_impl
_USUAL = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def mode_of_others() -> TorchFunctionMode | None:
    """A function mode in force that is neither torch's, such as that of a default device, nor one of laconic's."""
    for place in range(torch._C._len_torch_function_stack()):
        mode: TorchFunctionMode = torch._C._get_function_stack_at(place)
        if type(mode).__module__.partition(".")[0] not in ("torch", "laconic"):
            return mode
    return None


_last: tuple[tuple[Any, ...], dict[str, Any]] = (), {}


def _functions() -> dict[str, Any]:
    """What torch.nn.functional holds by name; the same object until that changes."""
    global _last
    last, values = _last, tuple(vars(F).values())  # to look each of 200 names up takes twice as long
    if len(values) != len(last[0]) or not all(map(is_, values, last[0])):  # a tensor has no truth value
        _last = last = values, vars(F).copy()
    return last[1]


@lru_cache(1024)
def called_by(forward: Callable[..., Any]) -> tuple[tuple[Any, str], ...]:
    """Where a forward finds the functions that it calls by name: (module, name) in its own file and in torch."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    homes = (F, sys.modules.get(forward.__module__))
    return tuple(
        [
            (home, name)
            for name in (() if code is None else code.co_names)
            for home in homes
            if isinstance(getattr(home, name, None), FunctionType | BuiltinFunctionType)
        ]
    )


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    *(
        (getattr(torch._C, f"_get_{kernel}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{kernel}"))
        for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
        if hasattr(torch._C, f"_get_{kernel}_sdp_enabled") and hasattr(torch._C, f"_set_sdp_use_{kernel}")
    ),
)
"""Readers and writers of settings that choose kernels, whose dropout and derivatives differ, and new tensors' dtype."""


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


class RunningCode:
    """Functions of torch.nn.functional, forwards of some modules and of their classes, and settings, as they are now.

    Args:
        parts: the modules; of the first one also the functions that it calls by name.
    """

    __slots__ = ("_called", "_forwards", "_functions", "_names", "_own", "_parts", "_settings")

    def __init__(self, parts: Sequence[nn.Module] = ()) -> None:
        self._functions = _functions()
        self._settings = _settings()
        self._parts = parts
        self._forwards = [getattr(type(part), "forward", None) for part in parts]  # torch.jit's has none
        self._own = [part.__dict__.get("forward") for part in parts]
        self._names = called_by(self._forwards[0]) if parts and self._forwards[0] is not None else ()
        self._called = [getattr(home, name, None) for home, name in self._names]

    def again(self, undo: ExitStack) -> None:
        """Until `undo` is closed, what bears a name is what bore it then, and settings are what they were.

        Raises:
            ModelError: torch's attention is another function, or a forward is another one.
        """
        for part, forward in zip(self._parts, self._forwards, strict=True):
            if forward is not None and type(part).forward is not forward:
                raise ModelError(
                    f"the forward of {type(part).__name__} is {type(part).forward.__qualname__} in backward and was "
                    f"{forward.__qualname__} in forward, and code that laconic runs again would compute something "
                    "else; call loss.backward() before another forward is put in its place"
                )
        now = _functions()
        called = [getattr(home, name, None) for home, name in self._names]
        own = [part.__dict__.get("forward") for part in self._parts]
        settings = _settings()
        if now is self._functions and (called, own, settings) == (self._called, self._own, self._settings):
            return
        if now.get(_ATTENTION) is not self._functions[_ATTENTION]:
            raise ModelError(
                "torch.nn.functional.scaled_dot_product_attention is another function in backward than in forward, as "
                "it is when a context_parallel block begins or ends in between, and code that laconic runs again would "
                "compute something else; call loss.backward() inside of the block in which the forward ran"
            )
        for (_, write), setting, first in zip(_SETTINGS, settings, self._settings, strict=True):
            if setting != first:
                undo.callback(write, setting)
                write(first)
        for part, forward, first in zip(self._parts, own, self._own, strict=True):
            if forward is not first:
                undo.callback(_store, part, forward)
                _store(part, first)
        places = (*[(F, name) for name in self._functions], *self._names)
        for (home, name), function in zip(places, (*self._functions.values(), *self._called), strict=True):
            current = getattr(home, name, None)
            if current is not function:
                undo.callback(*((setattr, home, name, current) if hasattr(home, name) else (delattr, home, name)))
                setattr(home, name, function)


_ATTENTION = "scaled_dot_product_attention"


def _store(part: nn.Module, forward: Any) -> None:
    """Make `forward` the module's own, on top of whatever hosts have stored; None: it has none."""
    if forward is None:
        part.__dict__.pop("forward", None)
    else:
        part.__dict__["forward"] = forward
