"""Makes the functions of this package traceable by torch.compile.

[Note: functions under torch.compile] Dynamo puts a call of a `traceable` function into its graph without looking
inside, and AOTAutograd runs this very Python code on its tracing tensors: notes on tensors, memos, autograd functions
and their backward included. So a compiled graph computes and saves what the eager code does. A traceable function has
to keep to these rules:

- Tensors are arguments (parameters too; never looked up on a module), alone or in tuples and dictionaries.
- Everything else is a number, a string, a dtype, or an object of a dataclass given to `argument_class`, guarded by
  value, so that layers which are alike share one graph. An optional argument is a keyword whose default is None.
- It returns tensors and changes nothing outside of itself but notes on tensors.
- Backward rebuilds with `after=grad` (see keep.kept): what a graph could compute before backward starts
  it may compute in forward and save in place of the codes.

The module's own code is called outside of it, under no_grad, where Dynamo traces it like any other code.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch._dynamo.decorators
from torch import Tensor
from torch._dynamo.utils import get_optimize_ddp_mode
from torch.nn.parallel import DistributedDataParallel

from laconic.ops.codebooks import AFFINE

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=Callable[..., Any])


_LOSES_GRADIENTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@torch.compiler.assume_constant_result
def graphs_are_exact() -> bool:
    """Whether compiled graphs keep everything, which is said once.

    Before torch 2.13 AOTAutograd gives a view that a graph returns no gradient if an autograd function made its base.
    """
    if _LOSES_GRADIENTS:
        _warn_of_exact_graphs()
    return _LOSES_GRADIENTS


@functools.cache
def _warn_of_exact_graphs() -> None:
    logging.getLogger("laconic").warning(
        "torch %s: compiled layers keep their activations exactly, as if they were not converted; torch 2.13 or later "
        "packs them in compiled graphs, and layers that are not compiled are packed here, too",
        torch.__version__,
    )


def is_exporting() -> bool:
    """Whether torch.export traces. Dynamo of torch 2.11 takes torch.compiler.is_exporting() for True in every graph."""
    return torch.compiler._is_exporting_flag


def is_traced_by_make_fx() -> bool:
    """Whether make_fx traces, where nothing may depend on a value."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def traceable(function: F) -> F:
    """Make calls of `function` traceable by torch.compile (see the note above)."""

    # Not `nonstrict_trace`, which takes objects as they are, but puts their structure into the graph as a constant that
    # torch's optimizer for DDP cannot cut the graph at (2.13, 2.14).
    @torch._dynamo.allow_in_graph
    def in_graph(args: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and get_optimize_ddp_mode() == "ddp_optimizer":
            _warn_of_cuts()
        return function(*map(_object, args), **dict(zip(names, map(_object, values), strict=True)))

    alone = torch.compiler.disable(function, reason="laconic: two bits are rounded with other numbers in each step")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo, also between the graphs that it breaks, takes the other way and does not look into `function`.
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if any([_is_random(x) for x in args]):
            return alone(*args, **kwargs)
        # None is no argument that a graph could hold.
        names = tuple([name for name, value in kwargs.items() if value is not None])
        return in_graph(tuple([_fields(x) for x in args]), names, tuple([_fields(kwargs[name]) for name in names]))

    untraced(function)  # so plain tensors that it is given are no graph's
    return call  # type: ignore[return-value]  # it has the signature of `function`


@functools.cache
def _warn_of_cuts() -> None:
    """Say once what DDP's optimizer costs: what is packed of a tensor is known on its side of a cut only."""
    logging.getLogger("laconic").warning(
        "below DDP torch cuts compiled graphs at about every 25 MB of parameters, and what crosses a cut is kept "
        "exactly or packed twice; compile layers one by one and set torch._dynamo.config.optimize_ddp = False before"
    )


_OBJECT = "object"
_CLASSES: dict[str, type] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}


def _is_random(value: Any) -> bool:
    """Whether a format, or what offloads in it, rounds at random, which a graph would repeat in every step."""
    return type(value) in _FIELDS and getattr(getattr(value, "format", value), "code", None) in AFFINE


def _fields(value: Any) -> Any:
    """`value`, or the fields of an object of an `argument_class`, in a tuple that says so; Dynamo traces this."""
    names = _FIELDS.get(type(value))
    return value if names is None else (_OBJECT, type(value).__name__, *[_fields(getattr(value, n)) for n in names])


def _object(value: Any) -> Any:
    """The inverse of `_fields`."""
    if isinstance(value, tuple) and value and isinstance(value[0], str) and value[0] == _OBJECT:
        return _CLASSES[value[1]](*map(_object, value[2:]))
    return value


def untraced(code: C) -> C:
    """Let Dynamo leave alone a function, or a class's methods, where it looks into ours between graphs it breaks."""
    for function in vars(code).values() if isinstance(code, type) else (code,):
        if isinstance(function, FunctionType):
            torch._dynamo.decorators.skip(function)
    return code


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` in eager mode, past torch's search for the wrappers of transforms, under which no site runs."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def argument_class(cls: type) -> None:
    """Allow objects of a dataclass as arguments of traceable functions.

    Args:
        cls: a dataclass whose fields are numbers, strings or dtypes.
    """
    _CLASSES[cls.__name__] = cls
    _FIELDS[cls] = tuple([field.name for field in dataclasses.fields(cls)])


def as_result(value: Tensor) -> Tensor:
    """What the forward of an autograd function returns for a value that it was given: the same memory, not a view.

    A view that a compiled graph returns is made again outside of it, by repeating on another of its outputs what led
    from a tensor inside to the view (AOTAutograd, torch 2.13). A detach among these steps would cut the gradient off;
    an unsafe view begins them anew.
    """
    is_traced = type(value) is not Tensor and torch.compiler.is_compiling()
    return torch.ops.aten._unsafe_view(value, value.shape) if is_traced else value.detach()
