"""Which functions of torch a module's own code calls, read from its bytecode.

A function of torch.nn.functional is its own proof: `F.layer_norm` computes a layer norm wherever it is called. What has
to be found out is only where modules call one, and that their code says: names are followed from `forward` through
globals, attributes of modules (`torch.nn.functional.dropout`), helper functions, and methods of the module itself.
Children are modules of their own and do not count.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchCalls:
    """Names for the functions of torch that matter here."""

    PRODUCT = "multiply"
    ATTENTION = "scaled_dot_product_attention"
    FUNCTIONS: ClassVar[dict[Any, str]] = {
        F.dropout: "dropout",
        torch.dropout: "dropout",
        F.layer_norm: "layer_norm",
        torch.layer_norm: "layer_norm",
        F.rms_norm: "rms_norm",
        torch.rms_norm: "rms_norm",
        F.gelu: "gelu",
        F.silu: "silu",
        F.relu: "relu",
        torch.relu: "relu",
        Tensor.relu: "relu",
        F.scaled_dot_product_attention: ATTENTION,
        F.softmax: "softmax",
        torch.softmax: "softmax",
        Tensor.softmax: "softmax",
        nn.Softmax: "softmax",
    }
    ACTIVATIONS = frozenset({"gelu", "silu", "relu"})
    KERNELS: ClassVar[dict[tuple[str, str], str]] = {
        ("torch.nn.attention.flex_attention", "flex_attention"): "flex_attention",
        ("torch.nn.attention.varlen", "varlen_attn"): "varlen_attn",
    }
    """Those of attention in modules of torch that take long to import."""
    ATTENTIONS = frozenset({ATTENTION, *("flex_attention", "varlen_attn")})
    PACKED = frozenset({"dropout", "layer_norm", "rms_norm", ATTENTION}) | ACTIVATIONS
    """Those that can save something smaller for backward (see functional.py)."""


_METHODS = {"softmax": "softmax", "relu": "relu"}
"""Methods of tensors; a name alone, since code does not say what it is called on."""

_DEPTH = 4


def calls_of(module: nn.Module) -> frozenset[str]:
    """The names in `TorchCalls` that the forward of a module's class calls itself."""
    cls: Any = type(module)
    return _calls_of_class(cls)


@functools.cache
def _calls_of_class(cls: Any) -> frozenset[str]:
    found: set[str] = set()
    if cls.__module__.startswith("torch.") or any(base.__name__ == "PreTrainedModel" for base in cls.__mro__):
        return frozenset()  # torch's own modules are sites or none; whole models call functions outside of their layers
    _scan(inspect.unwrap(cls.forward), cls, found, set(), _DEPTH)
    return frozenset(found)


def _scan(function: Callable[..., Any], cls: type, found: set[str], seen: set[CodeType], depth: int) -> None:
    code = getattr(function, "__code__", None)
    if code is None or depth == 0:
        return
    _scan_code(code, getattr(function, "__globals__", {}), cls, found, seen, depth)


def _scan_code(
    code: CodeType, scope: dict[str, Any], cls: type, found: set[str], seen: set[CodeType], depth: int
) -> None:
    if code in seen:
        return
    seen.add(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _scan_code(inner, scope, cls, found, seen, depth)
    value: Any = None  # what the chain of names read so far stands for
    itself = code.co_varnames[0] if code.co_argcount > 0 else None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            value = scope.get(step.argval, getattr(builtins, step.argval, None))
        elif step.opname.startswith("LOAD_FAST") and step.argval == itself == "self":
            value = cls
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            known = value if isinstance(value, ModuleType | type) else None
            if known is None and step.argval in _METHODS:
                found.add(_METHODS[step.argval])
            value = None if known is None else getattr(known, step.argval, None)
        else:
            value = None
            if step.opname == "BINARY_MULTIPLY" or (step.opname == "BINARY_OP" and step.argrepr == "*"):
                found.add(TorchCalls.PRODUCT)
        _note(value, cls, found, seen, depth)


def _note(value: Any, cls: type, found: set[str], seen: set[CodeType], depth: int) -> None:
    name = TorchCalls.FUNCTIONS.get(value) if callable(value) and getattr(value, "__hash__", None) else None
    if name is None and isinstance(value, FunctionType):
        kernel = inspect.unwrap(value)  # which may be compiled
        name = TorchCalls.KERNELS.get((kernel.__module__, kernel.__qualname__))
    if name is not None:
        found.add(name)
    elif isinstance(value, FunctionType) and value.__module__.partition(".")[0] != "torch":
        _scan(inspect.unwrap(value), cls, found, seen, depth - 1)
