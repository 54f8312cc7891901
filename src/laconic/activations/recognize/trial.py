"""Tries modules on a few numbers: a twin runs that shares nothing but opaque objects, so the module stays unchanged.

Values alone do not identify a module. Its gradient may be another one (a detached statistic, a backward of its own); it
may draw random numbers, or compute something else in training than in evaluation, or do so later, when somebody sets an
attribute that was zero at the trial. So a formula stands for a module only if the gradients agree (`alike`) and both
modes do and nothing is drawn (`settled`), and only as long as its plain attributes and its code stay the same
(`PlainAttributes`): a host may put code of its own in the place of a class or its forward, or of a function of
torch, at any time.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.host.modules import forward_of
from laconic.activations.host.patched import called_by

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def usual_numbers() -> Iterator[None]:
    """Make differentiable tensors in fp32 on the CPU inside, whatever the defaults: models are built under meta."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    # The mode of a device calls Python in each function of torch, so it is entered only where another may be in force.
    is_usual = torch._C._len_torch_function_stack() == 0 and torch.get_default_device().type == "cpu"
    device = nullcontext() if is_usual else torch.device("cpu")
    hidden_from_trackers = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
    try:
        with device, torch.inference_mode(False), torch.enable_grad(), hidden_from_trackers:
            yield
    finally:
        torch.set_default_dtype(dtype)


def outcome(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *args: Tensor,
    training: bool | None = None,
    attributes: Mapping[str, Any] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> Any:
    """The output of the module, run without gradients; None if it cannot be called like this.

    Args:
        module: the module to try; its hooks do not run, and nothing in it changes.
        tensors: other parameters and buffers for it, by qualified name.
        args: of its forward.
        training: the mode of the module and of all that is in it; None leaves that.
        attributes: of the module itself, set for the trial.
        children: other modules in place of its own.
    """
    with torch.no_grad():
        return _tried(module, tensors, args, training, attributes, children)[0]


def settled(
    module: nn.Module, tensors: Mapping[str, Tensor], *args: Tensor, attributes: Mapping[str, Any] | None = None
) -> Tensor | None:
    """The tensor that the module returns in training and in evaluation alike, without randomness or writes to `args`.

    It has the graph of its derivatives.

    None if there is no such tensor. Arguments are those of `outcome`.
    """
    found: list[Tensor] = []
    for training in (True, False):
        given = tuple(x.clone() for x in args)
        result, drew = _tried(module, tensors, given, training, attributes, None)
        if not isinstance(result, Tensor) or drew or not all(map(torch.equal, given, args)):
            return None
        found.append(result)
    return found[0] if torch.equal(*found) else None


def are_close(got: Tensor, expected: Tensor) -> bool:
    """Whether tensors have the same shape and, but for rounding, the same values."""
    return got.shape == expected.shape and torch.allclose(got.float(), expected.float(), rtol=1e-4, atol=1e-5)


def alike(got: Tensor | None, expected: Tensor, *inputs: Tensor | None) -> bool:
    """Whether a result is the expected one, and has its gradients by the inputs."""
    if got is None or not are_close(got, expected):
        return False
    leaves = [x for x in inputs if x is not None]
    places = torch.arange(1, got.numel() + 1, dtype=torch.float32, device=expected.device)
    along = places.sin().view(got.shape)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    try:
        ours, theirs = (torch.autograd.grad(y, leaves, along, **options) for y in (expected, got.float()))
    except Exception:  # it has no backward, or one that fails
        return False
    return all((a - b).norm() <= 1e-3 * a.norm() for a, b in zip(ours, theirs, strict=True))


def _tried(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Tensor, ...],
    training: bool | None,
    attributes: Mapping[str, Any] | None,
    children: Mapping[str, nn.Module] | None,
) -> tuple[Any, bool]:
    """What a twin returns, and whether it drew random numbers."""
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            before = torch.get_rng_state()
            result = _twin(module, tensors, training, "", attributes, children).forward(*args)
            return result, not torch.equal(torch.get_rng_state(), before)
    except Exception:  # whatever it is, it is not a module of the kind looked for
        return None, False


def _twin(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    training: bool | None,
    prefix: str,
    attributes: Mapping[str, Any] | None = None,
    children: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A copy of a module down to its containers and buffers, without hooks, with some tensors replaced."""
    twin = module.__class__.__new__(module.__class__)
    own = twin.__dict__
    for name, value in module.__dict__.items():
        if isinstance(value, _CONTAINERS):
            own[name] = copy.copy(value)
        elif isinstance(value, Tensor):
            own[name] = value.detach().clone()
        else:
            own[name] = value
    own["_parameters"] = {
        name: p if p is None else tensors.get(prefix + name, p) for name, p in module._parameters.items()
    }
    own["_buffers"] = {
        name: b if b is None else tensors[prefix + name] if prefix + name in tensors else b.clone()
        for name, b in module._buffers.items()
    }
    own.update({name: OrderedDict() for name in _HOOKS})
    own["training"] = module.training if training is None else training
    forward = own_forward(module)
    if forward is None:
        own.pop("forward", None)
    elif isinstance(forward, MethodType) and forward.__self__ is module:
        own["forward"] = MethodType(forward.__func__, twin)
    else:
        own["forward"] = forward
    own["_modules"] = {
        name: (children or {}).get(name) or (child and _twin(child, tensors, training, f"{prefix}{name}."))
        for name, child in module._modules.items()
    }
    own.update(attributes or {})
    return twin


def own_forward(module: nn.Module) -> Any:
    """The forward set on this very module, None if it has that of its class."""
    forward: Any = forward_of(module)
    while hasattr(getattr(forward, "__self__", forward), "replaced"):
        forward = getattr(forward, "__self__", forward).replaced
    return forward


def has_plain_attributes(module: nn.Module) -> bool:
    """Whether `PlainAttributes` can tell that this module still computes what was recognized."""
    try:
        PlainAttributes(module)
    except TypeError:
        return False
    return own_forward(module) is None


_NEVER = object()
_INTERNAL = vars(nn.Module()).keys() | {"forward", "training", "_is_hf_initialized"}


class ForwardCode:
    """The forward of a module's class, and the functions that it calls by name, as they are now."""

    __slots__ = ("_owner", "called", "forward")

    def __init__(self, owner: type[nn.Module]) -> None:
        self._owner = owner
        self.forward = owner.forward
        self.called = [(home, name, getattr(home, name)) for home, name in called_by(owner.forward)]

    def unchanged(self, module: nn.Module) -> bool:
        """Whether a call of the module runs this code."""
        if type(module).forward is not self.forward:
            return False
        for home, name, value in self.called:  # noqa: SIM110  no generator, which takes twice as long
            if getattr(home, name, None) is not value:
                return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCode:
        return self

    def __reduce__(self) -> tuple[type[ForwardCode], tuple[type[nn.Module]]]:
        return ForwardCode, (self._owner,)


class PlainAttributes:
    """The code and the plain attributes of a module: numbers, strings, booleans, functions; its own and its objects'.

    Args:
        module: the recognized module; it has no children.

    Raises:
        TypeError: it holds something else that its forward may depend on, and that forward is not torch's or
            transformers'.
    """

    def __init__(self, module: nn.Module) -> None:
        self._code = ForwardCode(type(module))
        self._seen: list[tuple[str, Any]] = []
        self._inside: list[tuple[str, str, Any]] = []
        # A subclass of torch's linear layer or norm that adds no forward of its own adds nothing that it depends on.
        home = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        known = home.__module__.startswith(("torch.", "transformers."))
        for name, value in vars(module).items():
            if name in _INTERNAL:
                continue
            if _is_plain(value) or isinstance(value, FunctionType | BuiltinFunctionType):
                self._seen.append((name, list(value) if isinstance(value, list) else value))
            elif known or callable(value) or isinstance(value, torch.dtype | torch.device):
                continue
            elif isinstance(value, Tensor | nn.Module | list | dict | set | deque):
                raise TypeError(f"{type(module).__name__}.{name} is {type(value).__name__}")
            else:
                inside = getattr(value, "__dict__", {})
                self._inside += [(name, key, item) for key, item in inside.items() if _is_plain(item)]

    def unchanged(self, module: nn.Module) -> bool:
        """Whether the module's code and plain attributes are still the same."""
        code = self._code
        if type(module).forward is not code.forward:
            return False
        for home, name, value in code.called:  # no generators, which take twice as long
            if getattr(home, name, None) is not value:
                return False
        for name, value in self._seen:
            if getattr(module, name, _NEVER) != value:
                return False
        return not self._inside or all(
            getattr(getattr(module, name, None), key, _NEVER) == value for name, key, value in self._inside
        )


def kind_of(module: nn.Module) -> Hashable | None:
    """Equal for modules whose trials read equal things; None for one that holds more than this can tell.

    A trial reads the class, plain attributes, and names and shapes of parameters, which it replaces.
    """
    if module._buffers or module._modules or own_forward(module) is not None:
        return None
    attributes = [(name, _exactly(value)) for name, value in vars(module).items() if name not in _INTERNAL]
    if any(value is None for _, value in attributes):
        return None
    parameters = [
        (name, p if p is None else (type(p), p.shape, p.dtype, p.requires_grad))
        for name, p in module._parameters.items()
    ]
    return type(module), tuple(attributes), tuple(parameters)


def _exactly(value: Any) -> Hashable | None:
    """What is equal for the same function, or for plain values of one type and all their bits; None for others."""
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return id(value)
    kind = type(value)
    if kind in (tuple, list):
        items = tuple(map(_exactly, value))
        return None if None in items else (kind, items)
    return (kind, repr(value)) if kind in (type(None), bool, int, float, str) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
