"""A forward that replaces a module's own and looks like it from outside.

It is stored as the module's `forward`, so parameters, names, hooks and checkpoints of the module stay untouched, and a
model with such forwards can be copied and pickled. Name, documentation, signature and keyword arguments are those of
the original: Hugging Face's Trainer, for one, drops the columns of a data set that the signature does not name.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from laconic.activations.host.modules import forward_of, store_forward
from laconic.activations.host.traceable import is_exporting
from laconic.activations.keep.witnesses import RootForward
from laconic.errors import ModelError
from laconic.formats.shards import is_deepspeeds


class Replacement:
    """Base of the replaced forwards: a callable, `install`ed as the forward of a module until `remove`d.

    Args:
        module: whose forward is replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owner = type(module)
        self.module = module
        self.replaced = forward_of(module)
        self._first_name = _first_name(self._before, is_bound=self.replaced is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that replaces the module's own."""
        raise TypeError(f"{type(self).__name__} has to define __call__")

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward before the replacement."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, with the first one by position also where it was given by name."""
        if args or self._first_name not in kwargs:
            return args, kwargs
        rest = {name: value for name, value in kwargs.items() if name != self._first_name}
        return (kwargs[self._first_name],), rest

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A module leads to its forward and that to the module, so `forward` is asked for before there is a state.
        return _blank, (type(self), self._owner), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    @property
    def _before(self) -> Callable[..., Any]:
        replaced = self.__dict__.get("replaced")
        return self._owner.forward if replaced is None else replaced

    @property
    def forward(self) -> Callable[..., Any]:
        """This callable as a bound method that has the name, the documentation and the signature of the original.

        A bound method and not the object, because torch.compile then guards its code, and layers share a graph. A
        pickled method is looked up under its name, which is that of this property.
        """
        call = cast(FunctionType, type(self).__call__)
        if self.__dict__.get("replaced") is None:
            return MethodType(_like(self._before, call), self)
        forward = _like.__wrapped__(self._before, call)
        signature = _signature(self._before)
        if signature is not None:  # which has no place for what the method is bound to
            this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = signature.replace(parameters=[this, *signature.parameters.values()])
        return MethodType(forward, self)

    @property
    def stored(self) -> Callable[..., Any]:
        """What is stored as the module's `forward`."""
        return self.forward

    def install(self) -> None:
        """Replace the module's forward."""
        store_forward(self.module, self.stored)
        # torch's replicas share the dictionary of the module, and so a forward that computes with its parameters.
        self.module.__dict__[_REPLICATE] = _refuse_replicas
        follow_copies(self.module)

    def remove(self) -> None:
        """Restore the module's forward."""
        store_forward(self.module, self.replaced)
        self._permit_replicas()

    def _permit_replicas(self) -> None:
        if next(replacements_of(self.module), None) is None:
            self.module.__dict__.pop(_REPLICATE, None)
        forget_copies(self.module)


_REPLICATE = "_replicate_for_data_parallel"
"""The method of `nn.Module` by which `nn.DataParallel` copies it."""


def _refuse_replicas() -> nn.Module:
    raise ModelError(
        "a model with compressed activations is in torch.nn.DataParallel, whose replicas would all compute with the "
        "parameters of the first; use torch.nn.parallel.DistributedDataParallel, or call "
        "laconic.decompress_activations(model) first"
    )


_REDUCE = "__reduce_ex__"
"""The method by which objects are copied and pickled; `copy` and `pickle` ask the object for it, not its class.

[Note: shallow copies] A copy by `copy.copy` shares what the module's dictionary holds, and so a forward that runs the
module it was made for: the copy would compute in that one's mode, with that one's attributes. So a module with replaced
forwards is restored by `_restore`, which sees whether they came along as they are, and then gives the copy its own.
"""


class OfModule:
    """Base of objects that a module holds as an attribute and that hold the module."""

    module: nn.Module

    def of(self, module: nn.Module) -> OfModule:
        """The same for a shallow copy of the module."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.module = module
        return twin


def follow_copies(module: nn.Module) -> None:
    """Give copies of the module forwards, and objects of this kind, of their own."""
    module.__dict__[_REDUCE] = MethodType(_reduce, module)


def forget_copies(module: nn.Module) -> None:
    """Copy the module as any other again, if nothing is left in it that holds it."""
    if next(replacements_of(module), None) is None and not any(isinstance(x, OfModule) for x in vars(module).values()):
        module.__dict__.pop(_REDUCE, None)


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """How a module with replaced forwards is copied and pickled (see [Note: shallow copies])."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return cast(tuple[Any, ...], reduced)  # of a class that makes its copies itself
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != _REDUCE}
    return _unrestored, (make, *args), state, *rest


def _exactly(module: nn.Module) -> None:
    """Give a copy that a host has made attribute by attribute the forwards that it had without the conversion.

    [Note: copied attributes] Meta-learning copies what a module's dictionary holds into a new module and puts other
    weights there (learn2learn's `clone_module`, higher's `monkeypatch`). The forwards that come along compute with the
    weights of the converted model, and some of them with layers of it. Nothing asks for them when they are copied, so
    the forward of the whole model looks who calls it. Such a copy computes as its class is written, exactly.
    """
    for part in module.modules():
        owners = list(_owners(forward_of(part)))
        if any(owner.module is not part for owner in owners):
            store_forward(part, owners[-1].replaced)
            part.__dict__.pop(_REPLICATE, None)
            part.__dict__.pop(_REDUCE, None)
        for name, value in list(vars(part).items()):
            if isinstance(value, OfModule) and value.module is not part:
                del part.__dict__[name]
    logging.getLogger("laconic").warning(
        "%s is a copy of a converted model that was made by copying its attributes (as learn2learn and higher do); it "
        "computes exactly and keeps what the unconverted model does",
        type(module).__name__,
    )


def _owners(forward: Callable[..., Any] | None) -> Iterator[Replacement]:
    """A replaced forward and those right below it."""
    while (owner := owner_of(forward)) is not None:
        yield owner
        forward = owner.replaced


def owner_of(forward: Any) -> Replacement | None:
    """The replacement that a forward is, or is a method of."""
    owner = forward if isinstance(forward, Replacement) else getattr(forward, "__self__", None)
    return owner if isinstance(owner, Replacement) else None


def _unrestored(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A module without its state, which `_restore` is going to set."""
    module = make(*args)
    module.__dict__["__setstate__"] = MethodType(_restore, module)
    return module


def _restore(module: nn.Module, state: Any) -> None:
    """Set the state of a copy, and give it forwards of its own where it has those of the module it is a copy of."""
    del module.__dict__["__setstate__"]
    module.__setstate__(state)
    forward = module.__dict__.get("forward")
    if forward is not None:
        module.__dict__["forward"] = _bound_to(module, forward)
    for name, value in list(vars(module).items()):
        if isinstance(value, OfModule) and value.__dict__.get("module", module) is not module:
            module.__dict__[name] = value.of(module)
    follow_copies(module)


def _bound_to(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A replaced forward, and those below it, for `module`; the same if they are already."""
    owner = owner_of(forward)
    # One that is being unpickled has no state yet; it is of a deep copy, and so its module is this one.
    if owner is None or owner.__dict__.get("module", module) is module:
        return forward
    twin = _blank(type(owner), owner._owner)
    twin.__dict__.update(owner.__dict__)
    twin.module = module
    twin.replaced = None if owner.replaced is None else _bound_to(module, owner.replaced)
    return twin.stored


def _blank(cls: type[Replacement], owner: type[nn.Module]) -> Replacement:
    """A replacement that is being unpickled or copied, without its state."""
    blank = cls.__new__(cls)
    blank._owner = owner
    return blank


class _NoSourceError(ModelError, AttributeError):
    """A forward has no source code that torch.jit.script could compile. Who only asks whether it has gets a no."""


class ModelReplacement(Replacement, RootForward):
    """Base of the forwards of whole models, which hosts wrap and rebind.

    Accelerate takes the function of a bound method and binds it to the model instead, so here the object itself is
    stored. Where a host has put something around it, it cannot be taken out; `remove` then turns it off.
    """

    enabled = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._resemble()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run` while this forward is enabled, else the original one."""
        if args and args[0] is self.module:  # bound to the model by a host
            args = args[1:]
        if not torch.compiler.is_compiling():
            # `self` of the frame that calls this: the module, or a copy that shares the dictionary's values.
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and self._is_copied_to(caller):
                _exactly(caller)
                return caller.forward(*args, **kwargs)
        # Here and not in `run`, which may be one that torch.export cannot enter.
        if not self.enabled or is_exporting():
            return self.original(*args, **kwargs)
        return self.run_root(self.run, args, kwargs)

    def _is_copied_to(self, caller: nn.Module) -> bool:
        """Whether a module that calls this as its own forward is a copy of the model, and does not wrap it.

        PEFT's adaption prompts take the forward of the model that they hold.
        """
        if caller is self.module or vars(caller).get("forward") is not self:
            return False
        has_own = type(caller).forward is not nn.Module.forward
        return has_own and all(part is not self.module for part in caller.modules())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while it is enabled."""
        raise TypeError(f"{type(self).__name__} has to define run")

    @property
    def stored(self) -> Callable[..., Any]:
        """This object itself."""
        return self

    @property
    def __code__(self) -> CodeType:
        """That of the original forward, whose names of arguments torch.export reads."""
        code: CodeType = inspect.unwrap(self._before).__code__
        return code

    @property
    def __globals__(self) -> dict[str, Any]:
        raise _NoSourceError(
            "torch.jit.script compiles the source code of a forward, and compressed activations have one of their own; "
            "use torch.jit.trace or torch.export, or call laconic.decompress_activations(model) first"
        )

    def remove(self) -> None:
        """Restore the module's forward, or turn this one off where a host has wrapped it."""
        if forward_of(self.module) is self:
            super().remove()
        else:
            self.enabled = False
            self._permit_replicas()

    def _resemble(self) -> None:
        functools.update_wrapper(self, self._before, updated=())
        self.__dict__.pop("__qualname__", None)  # pickle would take the object for a function and look it up
        signature = _signature(self._before)
        if signature is not None:
            parameters = list(signature.parameters.values())[0 if self.replaced is not None else 1 :]
            self.__signature__ = signature.replace(parameters=parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("__")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._resemble()


def replacements_of(module: nn.Module) -> Iterator[Replacement]:
    """The replaced forwards of a module, the outermost first, also below wrappers of hosts."""
    forward = forward_of(module)
    while forward is not None:
        owner = owner_of(forward)
        if owner is not None:
            if not isinstance(owner, ModelReplacement) or owner.enabled:
                yield owner
            forward = owner.replaced
        else:
            forward = getattr(forward, "__wrapped__", None)


def check_module(model: object) -> None:
    """Check that `model` is a module and not, for example, its name.

    Raises:
        ModelError: it is none.
    """
    if not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, str) else f"of type {type(model).__name__}"
        raise ModelError(
            f"model is {given}, but it must be a torch.nn.Module; load it first, for example with "
            f"transformers.AutoModelForCausalLM.from_pretrained"
        )


def check_whole(model: nn.Module) -> None:
    """Check that a model's code is Python, and its weights are there, not in parts on other processes.

    Raises:
        ModelError: torch.jit has compiled it, or DeepSpeed's ZeRO 3 has partitioned them.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"the model is a {type(model).__name__}, compiled by torch.jit, whose forward cannot be replaced; convert "
            "the module that it was made of, and train that or compile it with torch.compile"
        )
    for name, parameter in model.named_parameters():
        if is_deepspeeds(parameter) and parameter.numel() == 0:
            raise ModelError(
                f"{name} is partitioned by DeepSpeed's ZeRO 3, so the model cannot be tried; convert it before "
                "deepspeed.initialize, one made under deepspeed.zero.Init by laconic.integrations.deepspeed.attach"
            )


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # not written in Python
        return None


def _first_name(forward: Callable[..., Any], is_bound: bool) -> str | None:
    """The name under which a forward takes its first argument; None if that has to be given by position."""
    signature = _signature(forward)
    parameters = [] if signature is None else list(signature.parameters.values())[0 if is_bound else 1 :]
    by_name = parameters and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return parameters[0].name if by_name else None


@functools.lru_cache(maxsize=1024)
def _like(original: Callable[..., Any], call: FunctionType) -> Any:
    """The code of `call` in a function that looks like `original`; one for all modules of a class."""
    forward = FunctionType(call.__code__, call.__globals__, "forward", call.__defaults__, call.__closure__)
    functools.update_wrapper(forward, original, updated=())
    forward.__name__ = "forward"  # under which a pickled method is looked up
    return forward
