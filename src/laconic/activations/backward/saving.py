"""What torch's own functions save while they run: codes of a tensor, or nothing but a place in a second run.

[Note: torch's own backward] In eager mode, code that torch differentiates runs as it is written, under hooks that see
each tensor which autograd saves. Its backward is torch's own on other tensors, so whatever can be asked of exact code
can be asked of it: the gradient of everything it reads, hooks, derivatives of any order. `Instead` saves, in the place
of one tensor, what rebuilds it. `SecondRun` saves nothing: the first tensor that backward asks for runs the code again
on rebuilt inputs, and each is the one that was saved at the same place of that run.

torch does not look for changes in place of what hooks save, so these do. What they hold is given to the hooks around
them, such as `save_on_cpu` or a tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from laconic.activations.backward.replay import (
    Attributes,
    Forgetting,
    Replay,
    put_back,
    set_requires_grad,
    swap_parameters,
)
from laconic.activations.host.storages import laid_out, overlaps
from laconic.activations.host.traceable import untraced
from laconic.activations.keep.exact_codes import MemoryLayout
from laconic.activations.keep.kept import Kept, Memo, take_all
from laconic.activations.keep.packer import hooks_around
from laconic.activations.keep.witnesses import check_unchanged, glance, glances
from laconic.errors import ModelError

_push: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
_innermost_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_pop: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


@untraced
class Held:
    """Tensors that a graph holds for backward, as the hooks around want them held, and unchanged.

    Args:
        tensors: what is held.
        outer: pack and unpack of the hooks around, or None.
    """

    __slots__ = ("_tensors", "_unpack", "_versions")

    def __init__(self, tensors: tuple[Tensor, ...], outer: tuple[Any, Any] | None) -> None:
        self._tensors: Any = tensors if outer is None else tuple([outer[0](x) for x in tensors])
        self._unpack: Any = None if outer is None else outer[1]
        versions = 0
        for x in tensors:  # no list: this runs for whatever is saved
            versions += x._version
        self._versions = versions  # they only grow, so one of them has where their sum has

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors.

        Raises:
            RuntimeError: one was changed in place.
        """
        if self._unpack is not None:  # these may be copies, whose versions say nothing
            return tuple([self._unpack(x) for x in self._tensors])
        held: tuple[Tensor, ...] = self._tensors
        versions = 0
        for x in held:
            versions += x._version
        if versions != self._versions:
            raise _changed(held)
        return held


def _changed(tensors: tuple[Tensor, ...]) -> RuntimeError:
    shapes = ", ".join(str(list(x.shape)) for x in tensors)
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: one of those "
        f"saved in forward, {shapes}, is at another version in backward"
    )


@untraced
class Instead:
    """What autograd saves while a function runs: in the place of `x` what rebuilds it, any other tensor as it is.

    Args:
        x: plain; of a contiguous one a view of all of it is saved likewise.
        kept: rebuilds it.
        weight: see `InsteadOfCasts`.
    """

    __slots__ = ("_address", "_dtype", "_gaps", "_kept", "_numel", "_outer")

    def __init__(self, x: Tensor, kept: Kept, weight: Tensor | None = None) -> None:
        self._address, self._numel, self._dtype = x.data_ptr(), x.numel(), x.dtype
        self._gaps = None if x.is_contiguous() else (x.size(), x.stride())
        self._kept = kept
        self._outer = None if _innermost_hooks(False) is None else hooks_around()

    def around(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which saves that."""
        _push(self, call)
        try:
            return function(*args)
        finally:
            _pop()
            del self._kept  # torch holds this object, whose codes hooks around may hold elsewhere

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """What is saved for `x`."""
        is_it = x.data_ptr() == self._address and x.numel() == self._numel and x.dtype is self._dtype
        if is_it and (self._gaps is None or self._gaps == (x.size(), x.stride())):
            return _Rebuilt(self._kept, self._outer, None, x if self._gaps is None else None)
        return _AsItIs(x, self._outer)


@untraced
class InsteadOfImage(Instead):
    """The same for a layer of images."""

    __slots__ = ()

    def __init__(self, x: Tensor, kept: Kept) -> None:
        self._address, self._numel, self._kept = x.data_ptr(), x.numel(), kept
        self._outer = None if _innermost_hooks(False) is None else hooks_around()

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """What is saved for `x`."""
        if x.data_ptr() == self._address and x.numel() == self._numel:
            return _Rebuilt(self._kept, self._outer, None, None)
        return _AsItIs(x, self._outer)


@untraced
class InsteadOfNormed:
    """What a batch norm in training saves: in the place of its input what `keep` is given afterwards.

    Beside weight and input it saves the buffers that it changes itself, which its backward does not read, and
    statistics that nobody else has: means, then reciprocal standard deviations. cuDNN saves a contiguous copy of an
    input with gaps.

    Args:
        x: its input, of more values than channels.
        weight: of the norm, or None.
        buffers: running mean and variance, or None.
    """

    __slots__ = ("_numel", "_outer", "_rebuilt", "_running", "_weight", "_x", "statistics")

    def __init__(self, x: Tensor, weight: Tensor | None, *buffers: Tensor | None) -> None:
        self._x, self._numel, self._weight = x, x.numel(), weight
        self._running = tuple(map(id, buffers))
        self._outer = None if _innermost_hooks(False) is None else hooks_around()
        self._rebuilt: _Rebuilt | None = None
        self.statistics: list[Tensor] = []

    def around(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which saves that."""
        _push(self, call)
        try:
            return function(*args)
        finally:
            _pop()

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """What is saved for `x`."""
        if x.numel() == self._numel and self._rebuilt is None and self._is_rebuilt_as(x):
            self._rebuilt = saved = _Rebuilt.__new__(_Rebuilt)
            return saved
        if x is self._weight:
            return _AsItIs(x, self._outer)
        if x.dim() == 1 and x.numel() == self._x.shape[1] and id(x) not in self._running:
            self.statistics.append(x)
        # Nothing of ours runs for what torch itself gives back.
        return x.detach if self._outer is None else _AsItIs(x, self._outer, looks=False)

    def _is_rebuilt_as(self, x: Tensor) -> bool:
        given = self._x
        if x.data_ptr() == given.data_ptr():
            return True
        return x.shape == given.shape and x.dtype is given.dtype and x.stride() == MemoryLayout.of(given).stride

    def keep(self, kept: Kept) -> None:
        """Have `kept` rebuild the input; torch holds this object, which holds no more then."""
        if self._rebuilt is not None:
            self._rebuilt.__init__(kept, self._outer, None, None)  # type: ignore[misc]
        del self._rebuilt, self.statistics, self._x


@untraced
class InsteadOfCasts(Instead):
    """The same for a linear layer under autocast, which saves casts of `x` and of its weight: both are cast again.

    Args:
        x, kept: see `Instead`.
        weight: of the layer; not of as many values as x.
    """

    __slots__ = ("_weight",)

    def __init__(self, x: Tensor, kept: Kept, weight: Tensor | None = None) -> None:
        super().__init__(x, kept)
        assert weight is not None
        # One that is computed anew in each forward is not there anyway, and its cast is the smaller of the two.
        self._weight = weight.detach() if weight.is_leaf else None

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """What is saved for `x`."""
        if x.numel() == self._numel and x.dtype is not self._dtype and x.is_contiguous():
            return _Rebuilt(self._kept, self._outer, x.dtype, x)
        weight = self._weight
        if weight is not None and x.numel() == weight.numel() and x.dtype is not weight.dtype:
            is_transposed = not x.is_contiguous()
            if (x.t() if is_transposed else x).shape == weight.shape:
                return _Cast(weight, x.dtype, is_transposed)
        return super().__call__(x)


@untraced
class _Rebuilt(Held):
    """What rebuilds a tensor, in another dtype where there is one, and the view of it that was saved: `x`.

    A dense view is one in rows of so many values, or has a size and a stride; None is the tensor as it is.
    """

    __slots__ = ("_dtype", "_memo", "_view")

    def __init__(self, kept: Kept, outer: tuple[Any, Any] | None, dtype: torch.dtype | None, x: Tensor | None) -> None:
        super().__init__(kept.tensors, outer)
        kept.memo.announce()
        self._memo, self._dtype = kept.memo, dtype
        self._view: int | tuple[torch.Size, tuple[int, ...]] | None = None
        if x is not None:
            is_rows = x.dim() == 2 and x.numel() and x.is_contiguous()
            self._view = x.shape[1] if is_rows else (x.size(), x.stride())

    def __call__(self) -> Tensor:
        """The value that is rebuilt."""
        if torch.is_grad_enabled():  # where backward makes a graph of the gradients
            with torch.no_grad():
                return self()
        value = self._memo.take(self.tensors())
        if self._dtype is not None:
            value = value.to(self._dtype)
        if self._view is None:
            return value
        return value.view(-1, self._view) if isinstance(self._view, int) else value.as_strided(*self._view)


@untraced
class _AsItIs:
    """A tensor that is saved itself."""

    __slots__ = ("_seen", "_unpack", "_version", "_x")

    def __init__(self, x: Tensor, outer: tuple[Any, Any] | None, looks: bool = True) -> None:
        self._seen = glance(x) if looks and x.is_floating_point() else None
        self._version = x._version
        x = x.detach() if x.requires_grad else x  # an output, with whose node the graph would hold itself
        self._x: Any = x if outer is None else outer[0](x)
        self._unpack: Any = None if outer is None else outer[1]

    def __call__(self) -> Tensor:
        """The tensor, if it holds what it held."""
        x: Tensor = self._x if self._unpack is None else self._unpack(self._x)
        if self._unpack is None and x._version != self._version:
            raise _changed((x,))
        seen = self._seen
        if seen is not None and (type(seen) is not bytes or x.is_cuda or glance(x) != seen):
            check_unchanged((seen,), (x,))
        return x


@untraced
class _Cast(_AsItIs):
    """A weight, whose cast is made again."""

    __slots__ = ("_dtype", "_is_transposed")

    def __init__(self, weight: Tensor, dtype: torch.dtype, is_transposed: bool) -> None:
        super().__init__(weight, None)
        self._dtype, self._is_transposed = dtype, is_transposed

    def __call__(self) -> Tensor:
        """A weight in the dtype of autocast."""
        with torch.no_grad():
            cast = super().__call__().to(self._dtype)
        return cast.t() if self._is_transposed else cast


def hooks_of_linear(x: Tensor, weight: Tensor) -> type[Instead] | None:
    """What lets a linear layer keep its input in codes with torch's own backward; None where that may not be.

    On the CPU torch's backward holds an fp32 copy of the gradient of a 16-bit weight: at the output projection that is
    the peak of a step.

    Args:
        x: [..., in_features].
        weight: of the layer, as its module holds it.
    """
    if type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor) or not x.is_contiguous():
        return None
    is_cast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)
    if x.is_cpu and weight.numel() > LARGE_NUMEL and (is_cast or x.element_size() <= 2):
        return None
    if not is_cast:
        return Instead if x.dtype is weight.dtype else None
    return None if x.numel() == weight.numel() else InsteadOfCasts


LARGE_NUMEL = 1 << 22
"""Values of a weight whose gradient is 16 MiB in fp32: up to here it raised no peak of a step that was measured."""


@untraced
class SecondRun(Forgetting):
    """Code of which nothing is saved: backward runs it again, once, on inputs that are rebuilt.

    What attributes of the module held in the first run they hold in the second: outer code may write a mask there for
    each forward.

    Args:
        name: of the site, for errors.
        function: the code, given the inputs.
        kept: rebuilds each of the first inputs; the others are held as they are.
        module: whose parameters the code reads.
        own: these, by name.
        replay: repeats the random state, the decisions and the modes of the first run.
    """

    __slots__ = (
        "_attributes",
        "_counts",
        "_function",
        "_glances",
        "_held",
        "_kept",
        "_memos",
        "_module",
        "_name",
        "_output",
        "_own",
        "_parameters",
        "_replay",
        "_requires_grad",
        "_saved",
        "_strides",
        "_values",
        "_wanted",
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        kept: tuple[Kept, ...],
        module: nn.Module,
        own: Mapping[str, Tensor],
        replay: Replay,
    ) -> None:
        self._name, self._function, self._replay = name, function, replay
        self._kept, self._module, self._own = kept, module, own
        self._memos, self._counts = tuple([x.memo for x in kept]), tuple([len(x.tensors) for x in kept])
        parameters = tuple(own.values())
        self._parameters, self._glances = Held(parameters, None), glances(parameters)
        self._saved: list[int] = []
        self._values: list[Tensor | None] = []
        self._output: Tensor | None = None
        self._wanted = [(x, x.requires_grad) for x in parameters]
        self._attributes = Attributes((module,), name, numbers=True)

    def first(self, *inputs: Tensor) -> Any:
        """The value of the code, differentiable."""
        for memo in self._memos:
            memo.announce()
        found = self._attributes.look()
        _push(self._note, self._give)
        try:
            value, state = self._replay.run(partial(self._function, *inputs))
        finally:
            _pop()
        self._attributes.note(found)
        codes = [x for kept in self._kept for x in kept.tensors]
        self._kept = ()  # hooks around may hold the codes elsewhere
        others = [x.detach() for x in inputs[len(self._memos) :]]
        self._requires_grad = tuple([x.requires_grad for x in inputs])
        self._strides = tuple([None if overlaps(x) else x.stride() for x in inputs])
        self._held = Held((*codes, *others, *state), self._attributes.hooks)
        return value

    def output(self, origin: str) -> Kept:
        """Rebuilds the first tensor of the value: that of the second run."""
        return Kept((), Memo(self._take_output), origin)

    def _note(self, x: Tensor) -> int:
        self._saved.append(hash((x.shape, x.dtype)))
        return len(self._saved) - 1

    def _give(self, place: int) -> Tensor:
        if not self._values or self._values[place] is None:
            self._run()
        value, self._values[place] = self._values[place], None
        assert value is not None
        return value

    def _take_output(self, tensors: tuple[Tensor, ...], after: Tensor | None) -> Tensor:
        if self._output is None:
            self._run()
        output, self._output = self._output, None
        assert output is not None
        return output

    def _run(self) -> None:
        if self._own:
            check_unchanged(self._glances, self._parameters.tensors())
        saved = iter(self._held.tensors())
        codes = tuple(islice(saved, sum(self._counts)))
        others = tuple(islice(saved, len(self._strides) - len(self._memos)))
        state = tuple(saved)
        collecting = _Collecting()
        is_differentiated = torch.is_grad_enabled()
        with ExitStack() as undo:
            self._replay.again(state, undo)
            if self._own:
                swap_parameters(self._module, self._own, undo)
                set_requires_grad(self._wanted, undo)
            attributes = vars(self._module)
            before = attributes.copy()
            try:
                self._attributes.put()
                _set_grad_enabled(False)
                inputs = self._rebuilt(codes, others)
                _set_grad_enabled(True)
                _push(collecting.collect, collecting.give)
                try:
                    result = self._function(*inputs)
                finally:
                    _pop()
            finally:
                _set_grad_enabled(is_differentiated)
                put_back(attributes, before)
        if [hash((x.shape, x.dtype)) for x in collecting.values] != self._saved:
            raise ModelError(
                f"{self._name} runs again in backward and saves {len(collecting.values)} tensors that are not like the "
                f"{len(self._saved)} of its first run; keep this site exact: None for it in the plan"
            )
        self._values = list(collecting.values)
        self._output = first_tensor(result).detach()

    def _rebuilt(self, codes: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> list[Tensor]:
        values = take_all(self._memos, self._counts, codes)
        return [
            (x if stride is None else laid_out(x, stride)).detach().requires_grad_(requires_grad)
            for x, stride, requires_grad in zip((*values, *others), self._strides, self._requires_grad, strict=True)
        ]


@untraced
class _Collecting(Forgetting):
    """Hooks of the second run: what it saves goes to a list."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def collect(self, x: Tensor) -> None:
        # An output comes with the node that made it, which holds these hooks: the graph would hold itself.
        self.values.append(x.detach())

    def give(self, nothing: None) -> Tensor:
        raise RuntimeError("laconic: backward through a value of a second run")


class BoundFunction:
    """A function of tensors: `function` of the first ones, then of other arguments with the rest in their places.

    Holds none of the tensors. Those inside of objects, which are no nests, stay where they are.
    """

    __slots__ = ("_function", "_leaves", "_names", "_num_first", "_spec")

    def __init__(
        self,
        function: Callable[..., Any],
        num_first: int,
        leaves: Sequence[Any],
        spec: TreeSpec | None,
        names: tuple[str, ...],
    ) -> None:
        self._function, self._num_first, self._spec, self._names = function, num_first, spec, names
        self._leaves = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]

    @classmethod
    def of(
        cls, function: Callable[..., Any], num_first: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[BoundFunction, list[Tensor]]:
        """The call, and the tensors among the other arguments.

        Args:
            function: what is called.
            num_first: how many tensors come before the other arguments.
            args, kwargs: these, nests of tuples, lists and dicts with tensors among them.
        """
        leaves: Sequence[Any] = (*args, *kwargs.values())
        spec = None
        if not _NESTS.isdisjoint(map(type, leaves)):  # which is rare, and takes long
            leaves, spec = tree_flatten(leaves, is_leaf=is_no_nest)
        return cls(function, num_first, leaves, spec, tuple(kwargs)), [x for x in leaves if isinstance(x, Tensor)]

    def __call__(self, *tensors: Tensor) -> Any:
        """The result."""
        given = iter(tensors[self._num_first :])
        values = [next(given) if x is _TENSOR else x for x in self._leaves]
        if self._spec is not None:
            values = tree_unflatten(values, self._spec)
        num_args = len(values) - len(self._names)
        kwargs = dict(zip(self._names, values[num_args:], strict=True))
        return self._function(*tensors[: self._num_first], *values[:num_args], **kwargs)


def is_no_nest(value: Any) -> bool:
    """Whether an argument stays the very object that it is, as caches and outputs of models must, registered or not."""
    return type(value) not in _NESTS


_NESTS = frozenset({tuple, list, dict})


_TENSOR = object()


def first_tensor(value: Any) -> Tensor:
    """The first tensor of what code returns: a tensor, or a tuple or list that begins with one."""
    first: Tensor = value if isinstance(value, Tensor) else value[0]
    return first
