"""Switches savings on in a script that knows nothing of them.

Optimizers say which parameters are trained: `Optimizer.add_param_group`, which every optimizer calls for every group,
is watched. While some of those parameters have not been met in a model, `nn.Module.__call__` is watched too: the first
training call of a module that holds some is the call of a root model, which is converted before it runs. When all have
been met, `nn.Module.__call__` is torch's own again, so that neither torch.compile nor later steps see anything of it.
"""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from laconic.activations import compress_activations
from laconic.activations.attention import attention_core_of
from laconic.activations.replacement import replacements_of
from laconic.activations.report import Report, tensors_in
from laconic.errors import LaconicError, ModelError
from laconic.optim import AdamW8bit
from laconic.run.tcp import tcp_sent_nbytes

__all__ = ["ModelOutcome", "Refusal", "Savings", "Wishes"]


class Refusal(LaconicError):
    """Something that was asked for by name cannot be done in this script."""


@dataclass(frozen=True)
class Wishes:
    """What to switch on. None is what `laconic run` does without the flag; anything else was asked for by name.

    Attributes:
        activations: bits of saved activations; None is 4 wherever a model allows it, 16 leaves all exact.
        attention: as in `compress_activations`.
        loss: "exact" or "chunked", as in `compress_activations`; None is "exact".
        optimizer: "adamw8bit" makes every `torch.optim.AdamW` an `AdamW8bit`.
    """

    activations: int | None = None
    attention: str | None = None
    loss: Literal["exact", "chunked"] | None = None
    optimizer: Literal["adamw8bit"] | None = None

    @property
    def of_models(self) -> bool:
        """Whether something was asked for that a model may refuse."""
        return self.activations not in (None, 16) or self.attention is not None or self.loss == "chunked"


@dataclass(frozen=True)
class ModelOutcome:
    """What became of one root model: a report, or the reason why it was left as it was."""

    model: str
    report: Report | None
    left_exact: str | None


@dataclass
class Savings:
    """Context manager in which models and optimizers are converted as they turn up.

    Attributes:
        wishes: what to switch on.
        models: outcomes, in the order in which models were first called.
        optimizers: names of the classes of optimizers that made steps -> number of steps.
        step_seconds: between the ends of two steps of the same optimizer, wall clock.
        step_nbytes: that TCP sent for this process meanwhile, where it is in a process group of torch.distributed.
    """

    wishes: Wishes
    models: list[ModelOutcome] = field(default_factory=list)
    optimizers: dict[str, int] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    step_nbytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._pending: dict[int, weakref.ref[Tensor]] = {}
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._converted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._converting = False
        self._ends: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()
        self._sent: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._add_param_group = Optimizer.add_param_group
        self._call = nn.Module.__call__
        self._adamw = torch.optim.AdamW
        self._handles: list[Any] = []

    def __enter__(self) -> Savings:
        savings, original = self, self._add_param_group

        def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            savings._expect(optimizer.param_groups[-1]["params"])

        Optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]
        if self.wishes.optimizer is not None:
            self._name_adamw(AdamW8bit)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        Optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        self._name_adamw(self._adamw)
        self._unwatch()
        for handle in self._handles:
            handle.remove()

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the script forked."""
        return os.getpid() != self._process

    @staticmethod
    def _name_adamw(optimizer: Any) -> None:
        # torch.optim takes its submodule's name away, but scripts may import it all the same.
        for holder in (torch.optim, import_module("torch.optim.adamw")):
            holder.AdamW = optimizer  # type: ignore[attr-defined]

    def _expect(self, parameters: list[Tensor]) -> None:
        """Look for the model of these parameters from now on."""
        if self.wishes.activations == 16 and self.wishes.loss != "chunked":
            return
        self._pending.update((id(parameter), weakref.ref(parameter)) for parameter in parameters)
        self._checked.clear()
        savings, original = self, self._call

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not savings._converting and module.training and torch.is_grad_enabled():
                savings._meet(module, args, kwargs)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _unwatch(self) -> None:
        nn.Module.__call__ = self._call  # type: ignore[method-assign]

    @torch.compiler.disable
    def _meet(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Convert a module that is called in training, if it holds parameters that were not met before."""
        if module in self._checked:
            return
        self._checked.update(module.modules())
        held = {id(parameter) for parameter in module.parameters()}
        if not any(self._pending[key]() is not None for key in held & self._pending.keys()):
            return
        self._converting = True
        try:
            self._convert(module, args, kwargs)
        finally:
            self._converting = False
        self._pending = {key: ref for key, ref in self._pending.items() if key not in held and ref() is not None}
        if not self._pending:
            self._unwatch()

    def _convert(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        model, reason = _unwrap(module), None
        name, report = type(model).__name__, None
        if _is_compressed(model):
            ours = any(part in self._converted for part in model.modules())
            reason = "parts of it were called, and compressed, before it" if ours else "the script compresses it itself"
        else:
            reason = _unsupported(model)
            try:
                if reason is None:
                    with _interpreted(model):
                        report = compress_activations(
                            model,
                            4 if self.wishes.activations is None else self.wishes.activations,
                            attention=self.wishes.attention,
                            loss=self.wishes.loss or "exact",
                            example_inputs=_named(model, args, kwargs),
                        )
            except ModelError as error:
                reason = str(error)
            if reason is not None and self.wishes.of_models:
                raise Refusal(
                    f"{name} cannot be trained with what the flags ask for: {reason}; without --activations, "
                    f"--attention and --loss the model is left exact"
                )
        if report is not None:
            self._converted.add(model)
        self.models.append(ModelOutcome(name, report, reason))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.wishes.optimizer is not None and not self.optimizers and not isinstance(optimizer, AdamW8bit):
            raise Refusal(
                f"--optimizer is adamw8bit, but the script's first step is of {type(optimizer).__name__}; only "
                f"torch.optim.AdamW is replaced: use it in the script, or leave out --optimizer"
            )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now, before = time.perf_counter(), self._ends.get(optimizer)
        if before is not None:
            self.step_seconds.append(now - before)
        self._ends[optimizer] = now
        if dist.is_available() and dist.is_initialized() and (sent := tcp_sent_nbytes()) is not None:
            if (sent_before := self._sent.get(optimizer)) is not None and sent >= sent_before:  # no connection closed
                self.step_nbytes.append(sent - sent_before)
            self._sent[optimizer] = sent
        name = type(optimizer).__name__
        self.optimizers[name] = self.optimizers.get(name, 0) + 1


def _unwrap(module: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


@contextmanager
def _interpreted(model: nn.Module) -> Iterator[None]:
    """Measure what `nn.Module.compile` compiled in place as it is written; it is compiled when the script calls it."""
    compiled = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def _is_compressed(model: nn.Module) -> bool:
    return any([*replacements_of(module)] or attention_core_of(module) is not None for module in model.modules())


def _unsupported(model: nn.Module) -> str | None:
    """Why a model must not be converted at its first call; None if it may be."""
    if isinstance(model, DataParallel):
        return "DataParallel copies modules in every step; use DistributedDataParallel"
    if type(model).__name__ == "FullyShardedDataParallel":
        return "it is in FSDP1, which flattens parameters; use FSDP2, or compress_activations before it is wrapped"
    return None


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's arguments by name; None if some have none, or no tensor is among them."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    has_tensor = any(value.dim() > 0 for value in tensors_in(named))
    return named if has_tensor else None
