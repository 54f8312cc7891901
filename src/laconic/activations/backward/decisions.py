"""Decisions of code that runs twice: made once, from exact values, and handed to the second run.

[Note: decisions] What backward runs again starts from rounded values. A gradient there is off by the rounding. A choice
is another one: an expert, a key, a dropped token, a branch. So whatever turns floating-point values into integers,
booleans or numbers of Python (top-k, argmax, sorts, comparisons, casts, `item`) is noted in the first run, in the order
of its calls, and the second run gets what the first one got. Values that come with it, those of a top-k, are picked
from the second run's own tensor at the places of the first, so that they have its gradients. What is computed from
integers only follows from these and is not noted, nor is what reads nothing but parameters: both runs have the same.

Rounding that stays in floating point (`round`, `floor`, `sign`) is computed again: it is off by a level where its input
is, and its gradient is none. Code compiled by torch.compile inside of the region decides for itself.

Looking at every call of torch costs the host about a microsecond a call. Nearly all layers decide nothing, and `Habit`
knows after the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from laconic.activations.host.modules import FLAGS, plain_attributes
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.host.tracker import observe
from laconic.errors import ModelError
from laconic.ops import pack_bits, unpack_bits


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    homes = (torch, Tensor, F)
    return frozenset(getattr(home, name) for home in homes for name in names.split() if hasattr(home, name))


_NUMBERS = _functions("item tolist equal allclose is_nonzero __bool__ __int__ __float__ __index__ __contains__")
"""Functions that make numbers of Python."""

_IN_FLOATS = _functions("bernoulli bernoulli_ histc gumbel_softmax")
"""Functions whose results are discrete, though floating-point."""

_NO_DECISIONS = _functions(
    """view zeros_like ones_like empty_like full_like rand_like randint_like new_zeros new_ones new_empty new_full
    new_tensor data_ptr"""
)
"""Functions whose integers say nothing about the values: new tensors, and the same bits under another dtype."""

_CASTS = _functions("to type float double half bfloat16 histc bincount")
"""Functions that make floating-point numbers of integers."""

_SPECIAL = _IN_FLOATS | _CASTS

_NEVER = (torch.Size, torch.device, torch.dtype, type(None))
"""Types of results that say nothing about values."""

_OF_INTEGERS = "_laconic_of_integers"
"""Attribute of tensors that are integers in a floating-point dtype: their version when they were made."""

_DIMENSIONS = {
    **dict.fromkeys(_functions("topk kthvalue"), 2),
    **dict.fromkeys(_functions("sort argsort max min median nanmedian mode cummax cummin argmax argmin"), 1),
}
"""Functions that return places along a dimension, and where that dimension stands among their arguments."""


@dataclass(frozen=True)
class _Call:
    """One call that decided: the function, the shapes of its results, and what is kept of each.

    Attributes:
        function: what was called.
        number: the result, if that is a number of Python or a list of them.
        shapes, dtypes: of the tensors among the results.
        places: where the kept ones among these begin in the tensors of `Decisions`; None for those computed again.
    """

    function: Callable[..., Any]
    number: Any
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    places: tuple[int | None, ...]


class Decisions:
    """What one run of some code decided, for its later runs.

    `tensors` holds the integers and booleans: integers as narrow as their range is known to be, booleans eight in a
    byte. Who saves them for backward by other means takes them out, and gives them to `again`.

    Args:
        name: of what runs, for errors.
        decided_nothing: called after a first run in which there was nothing to note.
    """

    def __init__(self, name: str, decided_nothing: Callable[[], object] | None = None) -> None:
        self.name = name
        self.decided_nothing = decided_nothing
        self.calls: list[_Call] = []
        self.tensors: list[Tensor] = []

    def first_run(self) -> TorchFunctionMode:
        """While the block runs, decisions are noted."""
        return _FirstRun(self)

    def again(self, tensors: Sequence[Tensor] | None = None) -> TorchFunctionMode:
        """While the block runs, code decides as in the first run.

        Args:
            tensors: those of the first run; None for `self.tensors`.

        Raises:
            ModelError: in the block, where code decides something else than in the first run, or in another order.
        """
        return _SecondRun(self, self.tensors if tensors is None else tensors)

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Note a call of the first run."""
        results = _tensors_of(result)
        if not results:
            self.calls.append(_Call(function, result, (), (), ()))
            return
        places: list[int | None] = []
        for tensor in results:
            if tensor.is_floating_point() and function not in _IN_FLOATS:
                places.append(None)
                continue
            places.append(len(self.tensors))
            # A copy always: code may write to its own.
            kept = _narrow(tensor.detach(), _bound(function, args, kwargs))
            observe(kept)
            self.tensors.append(kept)
        shapes, dtypes = tuple(x.shape for x in results), tuple(x.dtype for x in results)
        self.calls.append(_Call(function, None, shapes, dtypes, tuple(places)))


class Habit:
    """Whether code decides anything, which its first call in each mode shows, as long as nothing tells it to.

    The mode is that of the module, which of its arguments are there, and how long they are, as sparse attention may
    begin at some length. What tells it are the code, flags among its arguments, numbers, strings and None in its
    attributes, and which attention a configuration of Hugging Face names. Code that asks a tensor for a number is
    looked at in every call, as that may be a switch. Branches on anything else hardly ever make code decide later.

    Args:
        name: of the code, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._idle: dict[Any, list[Any]] = {}
        self._last: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_idle": {}, "_last": []}  # what it saw holds functions, which cannot all be pickled

    def decisions(self, parts: Sequence[nn.Module], args: Any, kwargs: Any, code: object = None) -> Decisions | None:
        """Where a call with these arguments notes what it decides; None if it decides nothing in this mode.

        Args:
            parts: the module, and those inside of it that the code reads.
            args, kwargs: of the call.
            code: what is called, if it is no forward.
        """
        there = tuple([x.shape if type(x) is Tensor else x is None for x in args])
        mode = (parts[0].training, there, *[(name, x is None) for name, x in kwargs.items()])
        told = [code, *[x for x in (*args, *kwargs.values()) if type(x) in FLAGS], *plain_attributes(parts, _PLAIN)]
        configs = [] if code else [part.__dict__["config"] for part in parts if "config" in part.__dict__]
        told += [getattr(config, "_attn_implementation", None) for config in configs]
        return None if self._idle.get(mode) == told else Decisions(self.name, partial(self._learn, mode, told))

    def _learn(self, mode: Any, told: list[Any]) -> None:
        if self._last != told:  # modes share equal lists: there may be one for each length of a sequence
            self._last = told
        self._idle[mode] = self._last


_PLAIN: frozenset[type] = frozenset({*FLAGS, int, float, type(None)})


class _Run(TorchFunctionMode):
    """Hands calls that decide something, and their results, to `_decided`."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        result = func(*args, **kwargs) if kwargs else func(*args)  # also where it is replaced: it may draw
        if torch.compiler.is_compiling():  # a graph inside of the region has to be the same in both runs
            return result
        if type(result) in _NEVER or (type(result) is Tensor and result.is_floating_point() and func not in _SPECIAL):
            return result  # nearly all calls
        kwargs = kwargs or {}
        return self._decided(func, args, kwargs, result) if _decides(func, args, kwargs, result) else result

    def _decided(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        raise NotImplementedError


class _FirstRun(_Run):
    def __init__(self, decisions: Decisions) -> None:
        super().__init__(decisions)
        self._asks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NUMBERS:  # also of integers, which a host may set: a switch in a buffer
            self._asks = True
        return super().__torch_function__(func, types, args, kwargs)

    def _decided(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        self._decisions.note(func, args, kwargs, result)
        # As in the second run: checkpoints compare what both runs save.
        return _with_picked(func, args, kwargs, result, result) if isinstance(result, tuple) else result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        decisions = self._decisions
        if error is None and not (decisions.calls or self._asks) and decisions.decided_nothing is not None:
            decisions.decided_nothing()


class _SecondRun(_Run):
    def __init__(self, decisions: Decisions, tensors: Sequence[Tensor]) -> None:
        super().__init__(decisions)
        self._tensors = tensors
        self._calls = iter(decisions.calls)

    def _decided(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        call = next(self._calls, None)
        found = _tensors_of(result)
        if call is None or call.function is not func or call.dtypes != tuple(x.dtype for x in found):
            self._refuse(func, call)
        assert call is not None
        if not found:
            return call.number
        for x, shape, place in zip(found, call.shapes, call.places, strict=True):
            # How many values a mask leaves is a decision, too.
            if x.shape != shape and (place is None or x.dim() != len(shape) or func not in _SHAPED):
                self._refuse(func, call)
        return self._replaced(call, args, kwargs, result, found)

    def _replaced(self, call: _Call, args: Any, kwargs: Any, result: Any, found: Sequence[Tensor]) -> Any:
        """The results of the first run, and what the second run's own tensor has at these places."""
        taken = []
        for x, shape, place in zip(found, call.shapes, call.places, strict=True):
            kept = x if place is None else _widened(self._tensors[place], shape, x)
            if place is not None and (x.is_floating_point() or _is_written(x, args, kwargs)):
                # The graph of a floating-point result stays: its gradient is zero, but code may ask for it.
                kept = _overwritten(x, kept)
            taken.append(kept)
        if isinstance(result, Tensor):
            return taken[0]
        return _with_picked(call.function, args, kwargs, result, taken)

    def _refuse(self, func: Any, call: _Call | None) -> None:
        name = getattr(func, "__name__", str(func))
        first = "nothing more" if call is None else f"{call.function.__name__} {[list(s) for s in call.shapes]}"
        raise ModelError(
            f"{self._decisions.name} runs again in backward and calls {name}, which decides by values, where its "
            f"first run decided by {first}; it has to decide the same in the same order, as its input is rounded in "
            f"between: keep that exact, with checkpoint='exact', or None for it in the plan"
        )


def _decides(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a call made integers, booleans or numbers of floating-point values."""
    if isinstance(result, Tensor):
        if func in _CASTS and result.is_floating_point() and not any(map(_is_computed, args)):
            setattr(result, _OF_INTEGERS, result._version)
            return False
        if (result.is_floating_point() or result.is_complex()) and func not in _IN_FLOATS:
            return False
    elif isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        if all(not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() for x in result):
            return False
    elif func not in _NUMBERS:
        return False
    if func in _NO_DECISIONS or getattr(func, "namespace", None) == "laconic":
        return False
    return any(map(_is_computed, args)) or any(map(_is_computed, kwargs.values()))


def _is_computed(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_computed, value))
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.dtype.is_floating_point:
        return False
    return getattr(value, _OF_INTEGERS, None) != value._version


def _tensors_of(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return tuple(result) if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor) else ()


def _is_written(x: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether a result is one of the arguments: a function in place, or `out=`."""
    out = kwargs.get("out")
    return any(x is arg for arg in (*args[:1], *(out if isinstance(out, tuple | list) else (out,))))


_SHAPED = _functions("nonzero argwhere where unique unique_consecutive")
"""Functions that choose the shape of their result."""


def _dimension(function: Any, args: Any, kwargs: Any) -> int | None:
    """The dimension along which a function of `_DIMENSIONS` looks for places; None for all of them at once."""
    place = _DIMENSIONS[function]
    whole = function.__name__ in ("argmax", "argmin")
    dim = kwargs.get("dim", args[place] if len(args) > place else None if whole else -1)
    return None if dim is None or isinstance(dim, bool) else int(dim)


def _bound(function: Any, args: Any, kwargs: Any) -> int | None:
    """A number that all results of a call are below; None if its arguments do not tell."""
    if function not in _DIMENSIONS or not args or args[0].dim() == 0:
        return None
    dim = _dimension(function, args, kwargs)
    return int(args[0].numel() if dim is None else args[0].shape[dim])


def _narrow(x: Tensor, bound: int | None) -> Tensor:
    """A copy of `x` in as few bytes as hold it."""
    if isinstance(x, DTensor) or x.layout != torch.strided or x.dtype.is_floating_point:
        return x.clone()
    if x.dtype == torch.bool:
        return pack_bits(x.contiguous())
    for dtype, size in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31)):
        if bound is not None and bound <= size and dtype.itemsize < x.dtype.itemsize:
            return x.to(dtype)
    return x.clone()


def _widened(kept: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """What `_narrow` has kept, in a tensor of its own, with the strides of `like` if that has its shape."""
    if isinstance(kept, DTensor) or kept.layout != torch.strided:
        return kept.clone()
    packed = like.dtype == torch.bool
    values = unpack_bits(kept, length=shape.numel()).view(shape) if packed else kept
    if like.shape != shape:
        return values if packed else values.to(like.dtype, copy=True)
    return torch.empty_like(like, requires_grad=False).copy_(values)


def _overwritten(x: Tensor, kept: Tensor) -> Tensor:
    x.detach().copy_(kept)
    return x


def _with_picked(function: Any, args: Any, kwargs: Any, result: Any, taken: Sequence[Tensor]) -> Any:
    """Several tensors, as a call returns them; of values and their places, the values that are at the places."""
    x: Tensor = args[0] if args else kwargs["input"]
    if function in _DIMENSIONS and x.dim() > 0:
        dim = _dimension(function, args, kwargs)
        assert dim is not None
        index = taken[1]
        if index.dim() == x.dim():
            taken = (x.gather(dim, index), index)
        else:
            taken = (x.gather(dim, index.unsqueeze(dim)).squeeze(dim), index)
    return type(result)(taken)
