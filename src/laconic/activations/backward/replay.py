"""Runs forward code for its value alone, and runs it again in backward in the state of the first run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from laconic.activations.backward.decisions import Decisions
from laconic.activations.host.cuda_graph import is_captured, without_draws
from laconic.activations.host.modules import modules_of
from laconic.activations.host.patched import RunningCode
from laconic.activations.host.traceable import untraced
from laconic.activations.keep.packer import hooks_around
from laconic.activations.keep.witnesses import check_unchanged, glance
from laconic.errors import ModelError
from laconic.formats.shards import is_deepspeeds


def forgetting() -> AbstractContextManager[Any]:
    """While the block runs, code takes the path of training, but autograd saves nothing.

    Gradients stay enabled: torch picks some of its kernels by whether a gradient is wanted, and their bits differ. In a
    graph of torch.compile, which has bits of its own, they are disabled.
    """
    return torch.no_grad() if torch.compiler.is_compiling() else FORGETTING


def forgets(pack: object) -> bool:
    """Whether the pack function of saved-tensor hooks is that of `forgetting`, or of code that runs twice."""
    return pack is _forget or isinstance(getattr(pack, "__self__", None), Forgetting)


class Forgetting:
    """Base of objects whose saved-tensor hooks hold on to nothing: code under these stays as it is."""

    __slots__ = ()


_forget: Callable[[Tensor], int] = ().count
"""Zero for any tensor, without a frame of Python for each one that code saves."""


def _forgotten(nothing: int) -> Tensor:
    raise RuntimeError("laconic: backward through a value that is computed without keeping anything for it")


@untraced
class _Hooks:
    """torch.autograd.graph.saved_tensors_hooks of two functions, at a fifth of the time."""

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(_forget, _forgotten)

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


FORGETTING = _Hooks()


def swap_parameters(module: nn.Module, others: Mapping[str, Tensor], undo: ExitStack) -> None:
    """Put other tensors in the place of a module's parameters, by qualified name, until `undo` is closed."""
    for name, tensor in others.items():
        owner, _, own_name = name.rpartition(".")
        parameters = module.get_submodule(owner)._parameters
        undo.callback(parameters.__setitem__, own_name, parameters[own_name])
        parameters[own_name] = cast(nn.Parameter, tensor)  # autograd needs leaves here, not parameters


def set_requires_grad(parameters: Sequence[tuple[Tensor, bool]], undo: ExitStack) -> None:
    """Have parameters require a gradient or not, as is said of each, until `undo` is closed."""
    for x, requires_grad in parameters:
        if x.requires_grad != requires_grad and x.is_leaf:
            undo.callback(x.requires_grad_, not requires_grad)
            x.requires_grad_(requires_grad)


def put_back(own: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Make the attributes of a module, `own`, those that they were `before`."""
    own.update(before)
    if len(own) != len(before):
        for name in own.keys() - before.keys():
            del own[name]


Place = tuple[int, str]
"""The number of a module and the name of one of its attributes."""

_Found = tuple[dict[Place, tuple[Any, int | None, Any]], list[set[str]]]


class Attributes:
    """What code that runs twice finds in plain attributes of modules: its second run finds what its first run found.

    Outer code writes masks, merged weights or None there for each forward, and statistics in place at any time. So
    small tensors are kept as copies; large ones are not, and may not be changed in place. A large tensor that the first
    run itself has written to, or put another one in the place of (its probabilities), is found as it is by then.

    Made where `hooks` on saved tensors are those around the code: what is kept is given to them.

    Args:
        parts: the modules.
        name: of the code, for errors.
        numbers: keep numbers and strings, too.
    """

    def __init__(self, parts: Sequence[nn.Module], name: str, *, numbers: bool = False) -> None:
        self._parts, self._name = parts, name
        self._kinds = (Tensor, bool, int, float, str) if numbers else Tensor
        self.hooks = hooks_around()
        self._plain: dict[Place, Any] = {}
        self._tensors: dict[Place, tuple[Any, bool, Callable[[], Tensor | None] | None, int | None]] = {}
        self._names: list[Collection[str]] | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """While the block runs for the first time, note what it finds; after that, have it find the same.

        Raises:
            ModelError: a large tensor was changed in place.
        """
        if self._names is None:
            found = self.look()
            yield
            self.note(found)
            return
        before = self.put()
        try:
            yield
        finally:
            for (number, name), (value, put) in before.items():
                own = self._parts[number].__dict__
                # What the run itself has put there stays, as hosts expect of a layer's.
                if own.get(name, _ABSENT) is put:
                    own.pop(name, None)
                    if value is not _ABSENT:
                        own[name] = value

    def look(self) -> _Found:
        """What is there before the first run, for `note`."""
        found = {
            (number, name): (value, _version(value), _copy(value)) if isinstance(value, Tensor) else (value, None, None)
            for number, part in enumerate(self._parts)
            for name, value in part.__dict__.items()
            if (value is None or issubclass(type(value), self._kinds)) and name != "training"
        }
        return found, [set(part.__dict__) for part in self._parts]

    def note(self, before: _Found) -> None:
        """Note what the first run found, after it."""
        found, names = before
        self._names = [was.union(part.__dict__) for was, part in zip(names, self._parts, strict=True)]
        for place, (value, version, copy) in found.items():
            number, name = place
            now = self._parts[number].__dict__.get(name)
            if not isinstance(value, Tensor):
                if now is value:
                    self._plain[place] = value
            elif copy is not None:
                self._tensors[place] = self._held(copy), value.requires_grad, None, None
            elif now is None or (now is value and version == _version(value)):
                self._tensors[place] = self._held(value), value.requires_grad, weakref.ref(value), version

    def _held(self, x: Tensor) -> Any:
        x = x.detach() if x.requires_grad else x  # with the node that made it, the graph would hold itself
        return x if self.hooks is None else self.hooks[0](x)

    def put(self) -> dict[Place, tuple[Any, Any]]:
        """Put in its place what the first run found.

        Returns:
            Of each place that held something else, what it held and what it holds now.

        Raises:
            ModelError: a large tensor was changed in place.
        """
        given = dict(self._plain)
        for place, (held, requires_grad, original, version) in self._tensors.items():
            # First, as hooks around that find a change do not know whose it is.
            if original is not None and version != _version(held if self.hooks is None else original(), version):
                number, name = place
                raise _changed(self._name, f"{type(self._parts[number]).__name__}.{name} was changed in place")
            x: Tensor = held if self.hooks is None else self.hooks[1](held)
            if original is None:
                x = x.detach().clone()  # backward may run again, with retain_graph
            given[place] = x.detach().requires_grad_() if requires_grad else x
        assert self._names is not None
        before: dict[Place, tuple[Any, Any]] = {}
        for number, (part, names) in enumerate(zip(self._parts, self._names, strict=True)):
            for name in [n for n, x in part.__dict__.items() if issubclass(type(x), Tensor) and n not in names]:
                before[number, name] = part.__dict__.pop(name), _ABSENT
        for (number, name), value in given.items():
            own = self._parts[number].__dict__
            if (now := own.get(name, _ABSENT)) is not value:
                before[number, name] = now, value
                own[name] = value
        return before


_ABSENT = object()

SMALL_NUMEL = 1 << 12
"""Values of a tensor in an attribute that is copied for a second run: more than statistics have, less than masks."""


def _copy(x: Any) -> Any:
    """The values of a small tensor; None of anything else."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.numel() > SMALL_NUMEL:
        return None
    if x.numel() and not x.untyped_storage().nbytes():  # memory that FSDP has given back for a while
        return None
    with no_dispatch():  # of FakeTensorMode, which takes no real tensor
        return x.detach().clone()


def _version(x: Any, otherwise: int | None = None) -> int | None:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else otherwise


class ReadState:
    """What code that runs twice reads of modules: parameters, buffers, numbers in attributes and modes.

    Code that autograd does not save tensors of reads them again in its second run, where they have to be what the first
    run read. What the first run itself changes, such as running statistics and counts, may be anything later.

    Args:
        parts: the modules.
        name: of the code, for errors.
    """

    def __init__(self, parts: Sequence[nn.Module], name: str) -> None:
        self._parts, self._name = parts, name
        self._read: dict[Place, tuple[Any, ...]] | None = None
        self._modes: list[bool] = []
        self._trained: dict[Place, bool] = {}

    @contextmanager
    def run(self) -> Iterator[None]:
        """While the block runs for the first time, note what it reads; after that, have it be the same.

        Raises:
            ModelError: a parameter, a buffer or an attribute is another one by now.
        """
        if self._read is None:
            before = self._now()
            self._modes = [part.training for part in self._parts]
            self._trained = {place: x.requires_grad for place, x in self._parameters()}
            yield
            after = self._now()
            self._read = {place: read for place, read in before.items() if _is_same(read, after.get(place, read))}
            return
        self._check(self._read)
        with ExitStack() as stack:
            for part, training in zip(self._parts, self._modes, strict=True):
                if part.training != training:
                    stack.callback(setattr, part, "training", part.training)
                    part.training = training
            now = self._parameters()
            set_requires_grad([(x, self._trained.get(at, x.requires_grad)) for at, x in now], stack)
            yield

    def _parameters(self) -> list[tuple[Place, Tensor]]:
        numbered = enumerate(self._parts)
        return [((i, name), x) for i, part in numbered for name, x in part._parameters.items() if x is not None]

    def _now(self) -> dict[Place, tuple[Any, ...]]:
        found: dict[Place, tuple[Any, ...]] = {}
        for number, part in enumerate(self._parts):
            for name, value in part.__dict__.items():
                if isinstance(value, int | float | str) and name != "training":
                    found[number, name] = (value,)
            for name, x in part._parameters.items():
                if x is not None and not is_deepspeeds(x):  # which gathers and partitions in between
                    found[number, name] = glance(x), weakref.ref(x), None if x.is_inference() else x._version
            # Hosts write the same values into buffers again, as DDP does before each forward.
            found.update(
                {(number, name): (glance(x), None, None) for name, x in part._buffers.items() if x is not None}
            )
        return found

    def _check(self, read: Mapping[Place, tuple[Any, ...]]) -> None:
        for (number, name), before in read.items():
            part = self._parts[number]
            if len(before) == 1:
                now = part.__dict__.get(name)
                if isinstance(now, Tensor) or (now,) != before:  # in a tuple, in which a NaN equals itself
                    raise _changed(self._name, f"{type(part).__name__}.{name} changed")
                continue
            x = part._parameters.get(name, part._buffers.get(name))
            if x is None:
                raise _changed(self._name, f"{type(part).__name__}.{name} was taken away")
            values, same_object, version = before
            check_unchanged((values,), (x,))
            if same_object is not None and same_object() is x and version is not None and x._version != version:
                raise _changed(self._name, f"{type(part).__name__}.{name} {list(x.shape)} was changed in place")


def _changed(name: str, what: str) -> ModelError:
    return ModelError(
        f"{name} runs again in backward, but {what} since its forward, so the gradient would be wrong; call backward "
        "before the change, or leave this out of what runs again in the plan"
    )


def _is_same(read: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether the first run has left alone what it read; a look at a CUDA device's values would wait for it."""
    if len(read) != len(after):  # a number where a parameter was
        return False
    if len(read) == 1:
        return read == after
    values, now = read[0], after[0]
    alike = isinstance(now, Tensor) if isinstance(values, Tensor) else not isinstance(now, Tensor) and now == values
    return alike and read[1] is after[1] and read[2] == after[2]


def _check_batches(*, draws: bool) -> None:
    """Check that the code that runs again may run for several gradients at once.

    Raises:
        ModelError: it may not.
    """
    rule = "call backward once per gradient, or call laconic.decompress_activations(model) for such steps"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ModelError(
            "torch.func.vmap runs a backward in which compressed attention or experts run again under autograd, which "
            f"it does not allow; pass is_grads_batched=True to torch.autograd.grad in its place, {rule}"
        )
    if not draws:
        return
    level = torch._C._vmapmode_increment_nesting()  # torch has no other way to ask
    torch._C._vmapmode_decrement_nesting()
    if level > 1:
        raise ModelError(
            "batched gradients (is_grads_batched, vectorize=True) reach compressed attention or experts that draw "
            f"random numbers (dropout), which vmap does not allow when they run again; set the dropout to 0, {rule}"
        )


class Replay:
    """The environment of a computation: its random state, decisions, autocast, and the mode of a module.

    `run` calls a function for the first time. `again` wants its state back: the states of the random generators (uint8,
    on the CPU), or none if the function drew nothing; then what it decided by values. Whoever saves tensors for
    backward saves them too, so that they are counted and freed like any of those. While a CUDA graph is captured, a
    function that draws on the device is refused (see laconic.activations.host.cuda_graph).

    Args:
        device: where the computation runs.
        module: whose code runs, in training or in evaluation.
        decisions: where the code's decisions are noted; None if it makes none.
        calls_forward: whether the code is the module's forward, and not a function that its forward calls.
    """

    def __init__(
        self,
        device: torch.device,
        module: nn.Module,
        decisions: Decisions | None = None,
        *,
        calls_forward: bool = True,
    ) -> None:
        self._decisions = decisions
        self._num_decided = 0
        self._device = device
        self._parts = tuple(modules_of(module))
        self._modes = tuple([part.training for part in self._parts])
        self._autocast = _autocast(device.type) if torch._C._is_any_autocast_enabled() else None
        self._cache = torch.is_autocast_cache_enabled()
        self._code = RunningCode(self._parts if calls_forward else ())

    def run(self, function: Callable[[], Any]) -> tuple[Any, tuple[Tensor, ...]]:
        """The value of `function()`, and the state for `again`.

        Raises:
            ModelError: a CUDA graph is captured, and the function draws on the device.
        """
        before = self.generators()
        decisions = self._decisions
        if is_captured(self._device):
            function = without_draws()(function)
        if decisions is None:
            value = function()
        else:
            with decisions.first_run():
                value = function()
        state = before if list(map(_bytes, before)) != list(map(_bytes, self.generators())) else ()
        if decisions is not None:
            state = (*state, *decisions.tensors)
            self._num_decided = len(decisions.tensors)
            decisions.tensors = []  # or what was saved would outlive backward
        return value, state

    def again(self, state: tuple[Tensor, ...], undo: ExitStack) -> None:
        """Until `undo` is closed, code draws, decides and casts as in `run`; then the random state is as before.

        Raises:
            ModelError: torch's attention or the forward of a part is another one than in `run`, or vmap runs this
                backward and code draws; later, code decides by values in another order.
        """
        num_draws = len(state) - self._num_decided
        draws, decided = state[:num_draws], state[num_draws:]
        _check_batches(draws=bool(draws))
        self._code.again(undo)
        if draws:
            devices = [self._device] if len(draws) > 1 else []
            undo.enter_context(torch.random.fork_rng(devices=devices))
            torch.set_rng_state(draws[0])
            if devices:
                torch.cuda.set_rng_state(draws[1], self._device)
        if self._autocast is not None or torch._C._is_any_autocast_enabled():
            for kind, enabled, dtype in self._autocast or _autocast(self._device.type, enabled=False):
                if enabled or torch.is_autocast_enabled(kind):
                    undo.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
        for part, training in zip(self._parts, self._modes, strict=True):
            if part.training != training:
                undo.callback(setattr, part, "training", part.training)
                part.training = training
        if self._decisions is not None and self._decisions.calls:
            undo.enter_context(self._decisions.again(decided))

    def generators(self) -> tuple[Tensor, ...]:
        """States of the random generators that code on the device may draw from, uint8 on the CPU.

        Without that of a CUDA device while a graph is captured, or if there is none and its tensors are fake.
        """
        host = torch.get_rng_state()
        if self._device.type != "cuda" or not torch.cuda.is_initialized() or is_captured(self._device):
            return (host,)
        return host, torch.cuda.get_rng_state(self._device)


def _autocast(device: str, *, enabled: bool = True) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """(kind of device, whether autocast is on for it, its dtype) of this one and the CPU; all off if not `enabled`."""
    kinds = [kind for kind in {device, "cpu"} if torch.amp.is_autocast_available(kind)]  # on the meta device it is not
    return tuple(
        [(kind, enabled and torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    )


def _bytes(state: Tensor) -> bytes:
    # Not by torch, which under FakeTensorMode would ask a fake tensor.
    return ctypes.string_at(state.data_ptr(), state.numel())
