"""Shared experts of a Hugging Face block, run while rows travel to the routed ones.

[Note: two seams]
The block calls its shared experts itself, before its router or after its routed experts, and its code stays as it is.
The class of the shared experts' module is replaced by a subclass that knows of the layer (as FSDP2 does it), so the
call can be moved:

    after the experts     the layer calls them while rows travel, and the block's call gets the result if it passes the
                          tensor that the layer passed; otherwise they run again there
    before the router     the block's call returns a promise, a tensor that the layer fills while rows travel; reading
                          it earlier fills it at once

Either way a call is one call, with its hooks, packed activations and graph. Where the block calls them first, a moved
backward would add the gradients of the block's input in another order, so their nodes keep their place
(laconic.moe.meanwhile [Note: order of backward]) and only forward overlaps.

`laconic.moe.huggingface.shared_recognition` finds out which of both a block does, if any.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from laconic.errors import ModelError
from laconic.moe.layer import has_active_dropout
from laconic.moe.meanwhile import Meanwhile, ReservedPlace, next_number, nodes_since

Place = Literal["before", "input", "rows", "view"]
"""Where a block calls its shared experts: before its routed ones, or after them with its own input, with what they got
(rows), or with that in the shape of its input."""


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts of a block and what is done with them."""

    name: str
    """Of their module in the block, or of one beside the block."""
    place: Place | None
    """Where the block calls them; None: they are not overlapped."""
    reason: str = ""
    """Why they are not overlapped."""
    num_nodes: int = 0
    """Nodes of autograd to reserve a place for: more than they took in the trial."""

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.name} is not computed while rows travel: {self.reason}"
        if self.place == "before":
            return f"{self.name} is computed while rows travel in forward (in backward after them, as the block has it)"
        return f"{self.name} is computed while rows travel, forward and backward"


_VIEWS = {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.unsqueeze, torch.reshape, torch.flatten}
_SIZES = {Tensor.size, Tensor.dim, Tensor.shape.__get__, Tensor.ndim.__get__}  # type: ignore[attr-defined]


class Promise(Tensor):
    """A tensor whose values come later: views of it are promises as well, anything else fills it first.

    Once it is filled it is an ordinary tensor, of torch's own class, with the graph of its values.
    """

    _meanwhile: Meanwhile
    _views: list[Promise]

    @staticmethod
    def of(x: Tensor, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Promise:
        """Return a promise of compute(), which has to give a tensor in x's shape and in `dtype`."""
        made = torch.Tensor._make_subclass(Promise, torch.empty_like(x, dtype=dtype, requires_grad=False))

        def fill() -> Tensor:
            values = compute()
            if values.shape != x.shape or values.dtype != dtype:
                raise ModelError(
                    f"shared experts returned {values.dtype} {list(values.shape)}, but {dtype} {list(x.shape)} was"
                    " expected of them; pass overlap_shared=False to parallelize"
                )
            with torch._C.DisableTorchFunctionSubclass():
                made.copy_(values)
            views, made._views = made._views, []
            for one in views:
                del one._meanwhile, one._views
                one.__class__ = Tensor  # type: ignore[assignment]
            return values

        made._views = [made]
        made._meanwhile = Meanwhile(fill)
        return made

    @property
    def meanwhile(self) -> Meanwhile:
        """What fills the promise."""
        return self._meanwhile

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fill what is read, unless it is only viewed."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SIZES:
                return func(*args, **kwargs)
            if func in _VIEWS and isinstance(args[0], Promise):
                whole = args[0]
                view: Promise = func(*args, **kwargs).as_subclass(Promise)
                view._meanwhile, view._views = whole._meanwhile, whole._views
                whole._views.append(view)
                return view
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Promise):
                one._meanwhile.run()
        return func(*args, **kwargs)


_PLAIN = (Tensor, FakeTensor)
"""Types of hidden states of which a call can be moved."""


@dataclass
class _Pass:
    """One forward of a block."""

    input: Any
    promise: Meanwhile | None = None
    prefetched: tuple[Tensor, Meanwhile] | None = None


@dataclass(eq=False)
class SharedCall:
    """Moves the calls of one block's shared experts; see [Note: two seams]."""

    block: nn.Module
    child: str
    """Name of the shared experts in the block."""
    place: Place
    num_nodes: int
    """Nodes of autograd to reserve a place for."""
    groups: Callable[[], tuple[dist.ProcessGroup, ...]] = tuple
    """Returns the groups that rows travel in now, where shared experts must not communicate meanwhile."""
    _pass: _Pass | None = field(default=None, repr=False)
    _is_on: bool = True

    def __post_init__(self) -> None:
        self.module = self.block.get_submodule(self.child)

    def attach(self) -> None:
        """Let the block and its shared experts know of this."""
        kinds: tuple[tuple[nn.Module, Any], ...] = ((self.block, _Block), (self.module, _Shared))
        for module, kind in kinds:
            module.__dict__["_shared_call"] = self
            base: Any = type(module)
            module.__class__ = _subclass(kind, base)

    def window(self, rows: Tensor) -> Meanwhile | None:
        """Return what the layer shall compute while its rows [n, M] travel, in the block's forward."""
        current = self._pass
        if current is None:
            return None
        if self.place == "before":
            return None if current.promise is None or current.promise.has_run else current.promise
        x = current.input if self.place == "input" else rows
        if self.place == "view" and isinstance(current.input, Tensor):
            x = rows.view(current.input.shape)
        if not self._may_move(x):
            return None
        shared: Any = self.module
        found = Meanwhile(functools.partial(shared.called, x))
        current.prefetched = (x, found)
        return found

    def call(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return compute(*args, **kwargs), or a promise of it, or what the layer has computed already."""
        current = self._pass
        if current is None or torch.compiler.is_compiling():
            return compute(*args, **kwargs)
        plain = len(args) == 1 and not kwargs
        if self.place != "before":
            prefetched, current.prefetched = current.prefetched, None
            if prefetched is None or not prefetched[1].has_run:
                return compute(*args, **kwargs)
            if plain and _same(prefetched[0], args[0]):
                return prefetched[1].run()
            self._turn_off(
                "is called with another tensor than its block's input, as after a hook that replaces it; it has run"
                " twice in this forward, and will no longer be computed while rows travel"
            )
            return compute(*args, **kwargs)
        if not plain or current.promise is not None or type(args[0]) is not Tensor or not self._may_move(args[0]):
            return compute(*args, **kwargs)
        promise = self._promised(args[0], compute)
        current.promise = promise.meanwhile
        return promise

    @contextmanager
    def forward_of_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Mark a forward of the block with these arguments."""
        before = self._pass
        self._pass = _Pass(args[0] if args else next(iter(kwargs.values()), None))
        try:
            yield
        finally:
            self._pass = before

    def _promised(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Promise:
        dtype, device = x.dtype, x.device.type
        if dtype in (torch.float32, torch.bfloat16, torch.float16) and torch.amp.is_autocast_available(device):
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        place = ReservedPlace(self.num_nodes)

        def in_place() -> Tensor:
            first = next_number()
            out = compute(x)
            nodes = nodes_since(out, first, next_number())
            if not place.take(nodes):
                self.num_nodes = 2 * len(nodes)
                warnings.warn(
                    f"{type(self.module).__name__} has a larger graph than when its model was parallelized; in this"
                    " step a sum of gradients may be rounded in another order",
                    stacklevel=2,
                )
            return out

        return Promise.of(x, dtype, in_place)

    def _may_move(self, x: object) -> bool:
        """Return whether moving the call changes neither random numbers nor the order of what a group sends."""
        if not self._is_on or type(x) not in _PLAIN or torch.compiler.is_compiling():
            return False
        if self.block._modules.get(self.child) is not self.module:
            self._turn_off("has been replaced in its block, and what took its place is not computed while rows travel")
            return False
        if has_active_dropout(self.module):
            return False
        cut_over = [*_groups_of(self.module)]
        return not cut_over or not any(group in cut_over for group in self.groups())

    def _turn_off(self, reason: str) -> None:
        self._is_on = False
        warnings.warn(f"{type(self.module).__name__} {reason}", stacklevel=3)


def _same(prefetched: Tensor, x: object) -> bool:
    """Return whether x is the tensor that was passed before, or the same view of the same values."""
    if prefetched is x:
        return True
    return (
        isinstance(x, Tensor)
        and type(x) in _PLAIN
        and prefetched._base is not None
        and x._base is prefetched._base
        and (x.shape, x.stride(), x.storage_offset(), x.dtype, x._version)
        == (prefetched.shape, prefetched.stride(), prefetched.storage_offset(), prefetched.dtype, prefetched._version)
    )


def _groups_of(module: nn.Module) -> Iterator[dist.ProcessGroup]:
    """List the groups over which parameters of a module are cut."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            for dim in range(parameter.device_mesh.ndim):
                yield parameter.device_mesh.get_group(dim)


class _Shared(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_shared_call"].call(super().__call__, args, kwargs)

    def called(self, x: Tensor) -> Any:
        """Call the module as if its class had not been replaced."""
        return super().__call__(x)


class _Block(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self.__dict__["_shared_call"].forward_of_block(args, kwargs):
            return super().forward(*args, **kwargs)


@functools.cache
def _subclass(kind: Any, base: Any) -> Any:
    """Return `base` with the methods of `kind` in front, under its own name."""
    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    if kind is _Block:
        # What asks for the arguments of forward gets those of the original.
        own = _Block.forward

        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        members["forward"] = forward
    return type(base.__name__, (kind, base), members)
