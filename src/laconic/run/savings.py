"""Switches savings on in a script that knows nothing of them.

Optimizers say which parameters are trained: `Optimizer.add_param_group`, which every optimizer calls for every group,
is watched. While some of those parameters have been met in no model, `nn.Module.__call__` is watched too.

1. A training call of a module that holds some of them shows a model (models.py), which is converted before the call
   runs. This call and those that follow until an optimizer has made two steps are measured: one of the model as a
   whole, or one of each module in it that the script calls by itself.
2. Where a model turns out to lie in a larger one that trains, to have got new modules, or to be trained in evaluation
   mode, it is converted (again) before the next step, when no backward of its calls is left.
3. Before the first step of an optimizer, its parameters that have a gradient and lie in no model yet are looked for
   once more, and what flags asked for is held against what was done.

When all parameters have been met and all models are measured, `nn.Module.__call__` is torch's own again, so that
neither torch.compile nor later steps see anything of it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.whole_model.suspended import unwrapped
from laconic.optim import OPTIMIZER_CLASSES, AdamW8bit
from laconic.run.models import Model, Refusal, Wishes, holders_of, model_of
from laconic.run.modules_alive import ModulesAlive
from laconic.run.tcp import tcp_sent_nbytes

_PATIENCE = 60.0
"""Seconds that a call waits for another thread's, which is converted, measured and audited."""


@dataclass
class Savings:
    """Context manager in which models and optimizers are converted as they turn up.

    Attributes:
        wishes: what to switch on.
        models: in the order in which they were met.
        optimizers: names of the classes of optimizers that made steps -> number of steps.
        step_seconds: between the ends of two steps of the same optimizer, wall clock.
        step_nbytes: that TCP sent for this process meanwhile, where it is in a process group of torch.distributed.
        outside: how many values of parameters get gradients and lie in no module.
        refusal: what ended the script, or should have, if it has caught it.
    """

    wishes: Wishes
    models: list[Model] = field(default_factory=list)
    optimizers: dict[str, int] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    step_nbytes: list[int] = field(default_factory=list)
    outside: int = 0
    refusal: Refusal | None = None

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._changing = threading.RLock()
        """Held while one of `_trained`, `_pending` and what `nn.Module.__call__` is changes, by any thread."""
        self._noted_by: int | None = None
        self._trained: dict[int, weakref.ref[Tensor]] = {}
        self._pending: set[int] = set()
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._in_evaluation: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._due: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._missed: dict[int, int] = {}
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._ends: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()
        self._sent: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._add_param_group = Optimizer.add_param_group
        self._call = nn.Module.__call__
        self._adamw = torch.optim.AdamW
        self._alive = ModulesAlive()
        self._handles: list[Any] = []

    def __enter__(self) -> Savings:
        savings, original = self, self._add_param_group

        def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            savings._expect(optimizer, optimizer.param_groups[-1]["params"])

        Optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]
        if self.wishes.optimizer is not None:
            self._name_adamw(OPTIMIZER_CLASSES[self.wishes.optimizer])
        self._alive.__enter__()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.refusal is None and self._missed and self.wishes.of_models:
            self.refusal = Refusal(
                f"{self.missed:,} values of parameters were trained exactly, in threads that ran while a model of "
                f"another thread was converted and measured; train one model after the other"
            )
        Optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        self._name_adamw(self._adamw)
        self._unwatch()
        self._alive.__exit__()
        for handle in self._handles:
            handle.remove()

    @property
    def missed(self) -> int:
        """How many values of parameters trained only while another thread took notes, and are in no model."""
        return sum(self._missed.values())

    @property
    def is_forked(self) -> bool:
        """Whether this is a process that the script forked."""
        return os.getpid() != self._process

    @staticmethod
    def _name_adamw(optimizer: Any) -> None:
        # torch.optim takes its submodule's name away, but scripts may import it all the same.
        for holder in (torch.optim, import_module("torch.optim.adamw")):
            holder.AdamW = optimizer  # type: ignore[attr-defined]

    # Calls of modules

    def _expect(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Look for the model of these parameters from now on."""
        if not self.wishes.converts:
            return
        new = {id(parameter): weakref.ref(parameter) for parameter in parameters}
        with self._changing:
            # New objects, since other threads may be reading the old ones.
            self._trained = {key: ref for key, ref in self._trained.items() if ref() is not None} | new
            pending = self._pending & self._trained.keys() | new.keys()
            self._pending = pending.difference(*(model.known_parameters() for model in self.models))
            self._judged.discard(optimizer)
            self._watch()

    def _watch(self) -> None:
        self._checked.clear()
        savings, original = self, self._call

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and torch.is_grad_enabled():
                savings._meet(module, args, kwargs)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _unwatch(self) -> None:
        nn.Module.__call__ = self._call  # type: ignore[method-assign]

    def _unwatch_if_all_is_met(self) -> None:
        with self._changing:
            if not self._pending and all(model.is_measured for model in self.models):
                self._unwatch()

    def _no_longer_pending(self, parameters: Iterable[Tensor]) -> None:
        with self._changing:
            self._pending = self._pending - {id(parameter) for parameter in parameters}

    @contextmanager
    def _noting(self) -> Iterator[bool]:
        """In the block no other thread takes notes; yields False where that is not so, or we are called by ourselves.

        A call that another thread makes meanwhile waits for its turn, or its model would stay exact unnoticed. Not
        inside of a backward, for which the thread that takes notes may be waiting; nor without end, as threads that
        meet in collectives may wait for each other.
        """
        is_free = self._noted_by != (thread := threading.get_ident()) and self._busy.acquire(
            timeout=0 if torch._C._current_graph_task_id() != -1 else _PATIENCE
        )
        if not is_free:
            yield False
            return
        self._noted_by = thread
        try:
            yield True
        finally:
            self._noted_by = None
            self._busy.release()

    @torch.compiler.disable
    def _meet(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a module that is called with gradients, the outermost first."""
        if module in self._checked or torch._C._current_graph_task_id() != -1:  # a second run of a checkpoint
            return
        if is_transformed():  # in which it computes exactly, and cannot be tried; another call may follow
            return
        with self._noting() as is_free:
            if is_free:
                self._take_note(module, args, kwargs)

    def _take_note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called = unwrapped(module)
        if self._is_frozen(called):
            return  # a training call may follow: a GAN freezes one network while the other one trains
        model = self._model_with(called)
        if not {id(parameter) for parameter in called.parameters()}.isdisjoint(self._pending):
            if model is None and not module.training:
                self._in_evaluation.update(module.modules())
                return  # a training call may follow
            if model is None:
                model = self._found(called)
            else:
                self._due.update(found for found in [model.module()] if found is not None)
        self._checked.update(module.modules())
        if model is not None:
            model.note(called, args, kwargs)
        self._unwatch_if_all_is_met()

    def _is_frozen(self, module: nn.Module) -> bool:
        parameters = list(module.parameters())
        return not any(p.requires_grad for p in parameters) and any(id(p) in self._trained for p in parameters)

    def _model_with(self, module: nn.Module) -> Model | None:
        return next((model for model in self.models if model.holds(module)), None)

    def _found(self, called: nn.Module) -> Model | None:
        """The model that a call shows, converted; None if it is to be converted before the next step."""
        module = model_of(called, self._trained.keys(), self._alive.all(called))
        parts = set(module.modules())
        if any(model.module() in parts for model in self.models):
            self._due.add(module)
            return None
        model = Model.of(module, self.wishes, self._num_steps(module) + 1)
        self.models.append(model)
        self._no_longer_pending(module.parameters())
        return model

    def _num_steps(self, module: nn.Module) -> int:
        held = {id(parameter) for parameter in module.parameters()}
        return max(
            (
                count
                for optimizer, count in self._steps.items()
                if any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"])
            ),
            default=0,
        )

    # Steps of optimizers

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.refusal is not None:  # which the script has caught
            raise self.refusal
        if self.wishes.optimizer is not None and not self.optimizers and not isinstance(optimizer, AdamW8bit):
            self._refuse(
                f"--optimizer is {self.wishes.optimizer}, but the script's first step is of "
                f"{type(optimizer).__name__}; only torch.optim.AdamW is replaced: use it in the script, or leave out "
                f"--optimizer"
            )
        if not self.wishes.converts:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._judge(optimizer)
            return None

        def judged() -> Any:  # the model is called in here
            loss = closure()
            self._judge(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], judged, *args[2:]), kwargs
        return args, {**kwargs, "closure": judged}

    def _judge(self, optimizer: Optimizer) -> None:
        """Before a step: find what trains and is in no model yet, convert what is due, and see to the flags."""
        is_first = optimizer not in self._judged
        if not (is_first or self._due):
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with self._noting() as is_free:
            if not trained or not is_free:
                if is_first and trained and self._noted_by != threading.get_ident():
                    self._missed[id(optimizer)] = sum(p.numel() for p in trained if id(p) in self._pending)
                return
            self._judged.add(optimizer)
            self._missed.pop(id(optimizer), None)
            step = self._steps.get(optimizer, 0) + 2
            if is_first:
                self._look_for([parameter for parameter in trained if id(parameter) in self._pending], step)
            for module in list(self._due):
                self._extend(module, step)
            if self._due:
                self._due.clear()
                self._watch()
        if is_first and self.wishes.of_models:
            self._check_flags(optimizer, {id(parameter) for parameter in trained})

    def _look_for(self, parameters: list[Tensor], step: int) -> None:
        """Find the models of parameters that train, though no training call has shown them."""
        holders = holders_of(parameters, alive := self._alive.all())
        in_modules = {id(p) for holder in holders for p in holder._parameters.values()}
        outside = [parameter for parameter in parameters if id(parameter) not in in_modules]
        self.outside += sum(parameter.numel() for parameter in outside)
        self._no_longer_pending(outside)
        for holder in holders:
            if self._model_with(holder) is not None:
                continue
            module = model_of(holder, self._trained.keys(), alive)
            parts = set(module.modules())
            if any(model.module() in parts for model in self.models) or not parts.isdisjoint(self._in_evaluation):
                self._due.add(module)
            elif module not in self._due:
                self.models.append(Model.left(module, self.wishes, _UNCALLED))
                self._no_longer_pending(module.parameters())

    def _extend(self, module: nn.Module, step: int) -> None:
        """Convert a model in which other models lie that were converted before, or that has grown."""
        parts = set(module.modules())
        inside = [model for model in self.models if model.module() in parts]
        for model in inside:
            model.undo()
        found = Model.of(module, self.wishes, step)
        self._no_longer_pending(module.parameters())
        if found.left_exact is None and not found.is_scripts:
            self.models = [model for model in self.models if model not in inside] + [found]
            return
        for model in inside:
            model.redo()
        self.models = [model for model in self.models if model.module() is not module] + [found]

    def _check_flags(self, optimizer: Optimizer, trained: set[int]) -> None:
        """Hold what the flags ask for against what was done with the models that an optimizer trains."""
        models = [model for model in self.models if model.has_any(trained)]
        done = [model for model in models if model.left_exact is None]
        left = [model for model in models if model.left_exact is not None]
        why = "; ".join(f"{model.name}: {model.left_exact}" for model in left)
        name = type(optimizer).__name__
        if not done or _share(left, done) > 0.5:
            what = why or "its parameters lie in no module that was called with gradients before the first step"
            self._refuse(
                f"what {name} trains cannot be trained with what the flags ask for: {what}; without --activations, "
                f"--attention and --loss it is left exact"
            )
        ours = [model for model in done if not model.is_scripts]
        names = ", ".join(model.name for model in ours)
        if not ours:
            return
        if self.wishes.attention not in (None, "exact") and not any(model.has_attention() for model in ours):
            self._refuse(
                f"--attention is {self.wishes.attention}, but no attention is recognized in {names}; leave --attention "
                f"out"
            )
        if self.wishes.loss == "chunked" and not any(model.is_chunked() for model in ours):
            reasons = "; ".join(f"{model.name}: {model.unchunked}" for model in ours)
            self._refuse(f"what {name} trains cannot be trained with --loss chunked: {reasons}; leave --loss out")

    def _refuse(self, message: str) -> None:
        self.refusal = Refusal(message)
        raise self.refusal

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
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] > 1 and not all(model.is_measured for model in self.models):
            for model in self.models:
                model.is_measured |= model.was_called
            self._unwatch_if_all_is_met()


_UNCALLED = (
    "no module with its parameters was called with gradients before the first step, but other code computes with them "
    "(torch.func.grad, torch.func.functional_call, a reentrant checkpoint, weights that are used by themselves)"
)


def _share(left: list[Model], done: list[Model]) -> float:
    """How much of what the models keep is of those that are left exact; of their parameters where that is not known."""
    kept = [(model.exact_nbytes, model in left) for model in (*left, *done)]
    if any(nbytes is None for nbytes, _ in kept):
        kept = [(model.num_values, model in left) for model in (*left, *done)]
    total = sum(count or 0 for count, _ in kept)
    return sum(count or 0 for count, is_left in kept if is_left) / max(1, total)
