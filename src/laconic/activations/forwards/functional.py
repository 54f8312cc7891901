"""Functions of torch.nn.functional called in a module's own code.

Hand-written modules often call functions where libraries have modules: `F.layer_norm`, `F.gelu`, `F.dropout`,
`F.scaled_dot_product_attention`. While such a module runs, a mode looks at its calls and gives each of these functions
a backward that keeps packed tensors: norms and activations their packed input, dropout a bit per value, attention
packed query, key and value (see [Note: compressed attention]). Products with an activation (GEGLU, ReGLU) pack the
other factor. What moves elements only (transpose, view, chunk) passes the note on, so that the next linear layer finds
that its input can be rebuilt. So does the square of what can be rebuilt (squared relu).

Functions that a child calls are the child's business: the mode asks the frames whose code is calling. Compiled graphs
run the module's own code as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.activations.backward import functions
from laconic.activations.backward.norms import NormSpec
from laconic.activations.backward.replay import forgetting
from laconic.activations.forwards.attention import AttentionCore
from laconic.activations.forwards.base import BlockMode, SiteForward
from laconic.activations.forwards.checkpoint import runs_twice
from laconic.activations.forwards.dropout import dropout
from laconic.activations.forwards.elementwise import activation, is_worth_packing
from laconic.activations.forwards.feedforward import PARTS, PRODUCTS, is_made, kept_arguments, note_parts
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import attach, derive, found
from laconic.activations.recognize.code_scan import TorchCalls
from laconic.activations.recognize.sites import FunctionsSpec, Site


class FunctionsForward(SiteForward):
    """Runs the module's own code; functions of torch that it calls keep packed tensors.

    Args:
        module: whose code calls them.
        site: its description.
        format: how tensors are packed; of a module with attention also query, key and value.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        assert isinstance(site.spec, FunctionsSpec)
        self.core = AttentionCore(module, site, format) if site.kind == "attention" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; with gradients enabled, the functions that it calls keep packed tensors."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.stays_exact():
            return self.original(*args, **kwargs)
        with _Functions(self):
            return self.original(*args, **kwargs)


_NAMES = {function: name for function, name in TorchCalls.FUNCTIONS.items() if name in TorchCalls.PACKED}
_MOVES = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in ("transpose", "permute", "contiguous", "view", "reshape", "flatten", "unflatten")
    if hasattr(home, name)
)


class _Functions(BlockMode):
    """Replaces the functions that the code of one module calls."""

    def __init__(self, forward: FunctionsForward) -> None:
        super().__init__()
        self._forward = forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        kwargs = kwargs or {}
        name = _NAMES.get(func)
        if name is not None and self._is_ours(args):
            return _SERVED[name](self._forward, func, args, kwargs)
        if func in PRODUCTS and not kwargs and _may_multiply(*args) and self._is_ours(args):
            return functions.multiply(args[0], args[1], self._forward.format)
        if func in _SQUARES and _may_square(args, kwargs) and self._is_ours(args):
            return functions.square(args[0], _value(func, args, kwargs), self._forward.format)
        result = func(*args, **kwargs)
        if func in PARTS or func in _MOVES:
            _note_moved(func, args, kwargs, result)
        return result

    def _is_ours(self, args: Any) -> bool:
        """Whether gradients are wanted, and it is the code of the module itself that calls, not that of a child."""
        if not torch.is_grad_enabled() or runs_twice() or not args or not self._forward.serves(args[0]):
            return False
        return _running() is self._forward.module


def _running() -> nn.Module | None:
    """The innermost module whose code is running, found by the first arguments of the frames above."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount > 0 and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None


def _bound(names: tuple[str, ...], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _dropout(forward: FunctionsForward, func: Any, args: Any, kwargs: Any) -> Tensor:
    names = ("input", "p", "training", "inplace") if func is F.dropout else ("input", "p", "train")
    given = _bound(names, args, kwargs)
    x, p = given["input"], given.get("p", 0.5)
    draws = given.get("training", given.get("train", True)) and 0 < p < 1 and not given.get("inplace", False)
    if not draws or not x.requires_grad:
        return func(*args, **kwargs)
    return dropout(x, p, lambda: func(*args, **kwargs))


def _activation(forward: FunctionsForward, func: Any, args: Any, kwargs: Any) -> Tensor:
    x, name = args[0], TorchCalls.FUNCTIONS[func]
    if name == "gelu" and kwargs.get("approximate", args[1] if len(args) > 1 else "none") == "tanh":
        name = "gelu_tanh"
    in_place = kwargs.get("inplace", False) or (func in (F.silu, F.relu) and len(args) > 1 and args[1])
    if in_place or not x.requires_grad or not is_worth_packing(x, name):
        return func(*args, **kwargs)
    return activation(x, _value(func, args, kwargs), name, forward.format)


def _norm(forward: FunctionsForward, func: Any, args: Any, kwargs: Any) -> Tensor:
    layer = TorchCalls.FUNCTIONS[func] == "layer_norm"
    names = ("input", "normalized_shape", "weight", *(("bias",) if layer else ()), "eps")
    given = _bound(names, args, kwargs)
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    eps = given.get("eps", 1e-5 if layer else None)
    if eps is None and not layer:
        eps = torch.finfo(torch.float32).eps  # of the dtype in which torch computes all three dtypes that are packed
    wanted = any(isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias))
    if not wanted or not isinstance(eps, float) or len(given["normalized_shape"]) != 1:
        return func(*args, **kwargs)
    spec = NormSpec("layer" if layer else "rms", eps)
    return functions.norm(x, _value(func, args, kwargs), spec, forward.format, weight=weight, bias=bias)


def _attention(forward: FunctionsForward, func: Any, args: Any, kwargs: Any) -> Tensor:
    if forward.core is None:
        return func(*args, **kwargs)
    # Only query, key and value: the module's own parameters have no part in the function.
    results: tuple[Tensor] = forward.core(_attends(func), _NO_PARAMETERS, *args, **kwargs)
    return results[0]


@lru_cache(16)  # the same object in each forward, as `Habit` compares them
def _attends(func: Any) -> Callable[..., tuple[Tensor]]:
    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        return (func(*args, **kwargs),)

    return attend


_NO_PARAMETERS = nn.Module()

_SERVED: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "gelu": _activation,
    "silu": _activation,
    "relu": _activation,
    "layer_norm": _norm,
    "rms_norm": _norm,
    TorchCalls.ATTENTION: _attention,
}


def _value(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    with forgetting():
        value: Tensor = func(*args, **kwargs)
    return value.detach()


def _may_multiply(a: Any, b: Any) -> bool:
    ours = SiteForward.ours(a) and SiteForward.ours(b)
    if not ours or a.shape != b.shape or a.dtype != b.dtype or not all(is_made(x) for x in (a, b)):
        return False
    return found(a) is not None or found(b) is not None


_SQUARES = frozenset({torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__})


def _may_square(args: Any, kwargs: Any) -> bool:
    """Whether a call squares a tensor of which something else keeps what rebuilds it, such as a relu."""
    if not args:
        return False
    x, *exponent = args
    is_square = not kwargs and (not exponent or (exponent == [2] and isinstance(exponent[0], int | float)))
    return is_square and SiteForward.ours(x) and is_made(x) and found(x) is not None


def _note_moved(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    """Note on a tensor of the same elements in another shape or order that it can be rebuilt, if its source can be."""
    if func in PARTS:
        note_parts(func, args, kwargs, result)
        return
    whole = found(args[0]) if args and isinstance(args[0], Tensor) else None
    if whole is None or result is args[0] or not isinstance(result, Tensor):
        return
    rest, kwargs = kept_arguments(args[1:], kwargs)
    attach(result, derive(lambda value: func(value, *rest, **kwargs), (whole,), (), whole.origin))
