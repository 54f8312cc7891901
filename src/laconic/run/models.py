"""The models of a script: which module is one, and what became of it.

A script calls what it likes first: an embedding, a tower, a critic. What it calls shows that a model trains; which
module is the model, all that the script has made shows: the smallest module that holds what is called and the most of
the parameters that optimizers train (modules_alive.py).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from laconic.activations import compress_activations, decompress_activations
from laconic.activations.forwards.checkpoint import runs_twice
from laconic.activations.recognize.largest_parts import numel_of
from laconic.activations.whole_model.head import has_chunked_loss
from laconic.activations.whole_model.report import UNMEASURED, Measurement, Report, TrainingCall, measure
from laconic.activations.whole_model.suspended import is_compressed, measure_both, unwrapped
from laconic.auditing import audit_now, say_left_out
from laconic.errors import ConfigError, LaconicError, ModelError
from laconic.options import ACTIVATION_BITS, ATTENTIONS, LOSSES, OPTIMIZERS, Loss, Optimizer, refused, takes


class Refusal(LaconicError):
    """Something that was asked for by name cannot be done in this script."""


@dataclass(frozen=True)
class Wishes:
    """What to switch on. None is what `laconic run` does without the flag; anything else was asked for by name.

    Attributes:
        activations: bits of saved activations; None is 4 wherever a model allows it, 16 leaves all exact.
        attention: as in `compress_activations`.
        loss: "exact" or "chunked", as in `compress_activations`; None is "exact".
        optimizer: "adamw8bit" or "adamw4bit" makes every `torch.optim.AdamW` an `AdamW8bit` or `AdamW4bit`.
        audit: whether the first training call of a model is compared with the exact computation.
    """

    activations: int | None = None
    attention: str | None = None
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    audit: bool = True

    def __post_init__(self) -> None:
        for flag, value, allowed in (
            ("--activations", self.activations, ACTIVATION_BITS),
            ("--attention", self.attention, ATTENTIONS),
            ("--loss", self.loss, LOSSES),
            ("--optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value is not None and not takes(allowed, value):
                raise ConfigError(refused(flag, value, allowed))
        if self.activations == 16 and self.attention not in (None, "exact"):
            raise ConfigError(
                f"--attention is {self.attention!r}, but --activations is 16, which leaves all of them exact; change "
                "one of the two, or leave --attention out"
            )

    @property
    def converts(self) -> bool:
        """Whether models are converted."""
        return self.activations != 16 or self.loss == "chunked"

    @property
    def of_models(self) -> bool:
        """Whether something was asked for that a model may refuse."""
        return self.activations not in (None, 16) or self.attention not in (None, "exact") or self.loss == "chunked"


@dataclass(frozen=True)
class _Part:
    module: weakref.ref[nn.Module]
    is_whole: bool
    before: Measurement
    after: Measurement


@dataclass(eq=False)
class Model:
    """A model of the script that trains, and what became of it.

    Attributes:
        module: weakly held; None once the script has dropped it.
        name: its class.
        wishes: what to switch on.
        since_step: of its first optimizer, in which it is converted.
        is_scripts: whether the script compresses it itself.
        left_exact: why the whole model is as it was; None where it is converted.
        unchunked: why its loss is not chunked though that was asked for.
        unmeasured: why the bytes of a call are not known, and so those of the model.
        was_called: whether a call was to be measured.
        is_measured: whether no further call is to be.
    """

    module: weakref.ref[nn.Module]
    name: str
    wishes: Wishes
    since_step: int
    is_scripts: bool = False
    left_exact: str | None = None
    unchunked: str | None = None
    unmeasured: str | None = None
    was_called: bool = False
    is_measured: bool = False
    _exact_nbytes: int | None = None
    _report: Report | None = None
    _parts: list[_Part] = field(default_factory=list)
    _known: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    @classmethod
    def of(cls, module: nn.Module, wishes: Wishes, since_step: int = 1) -> Model:
        """A model, converted if it can be."""
        model = cls(weakref.ref(module), type(module).__name__, wishes, since_step)
        model._known.update(module.modules())
        model._convert(module)
        return model

    @classmethod
    def left(cls, module: nn.Module, wishes: Wishes, reason: str) -> Model:
        """A model that is left as it is."""
        model = cls(weakref.ref(module), type(module).__name__, wishes, 1, left_exact=reason, is_measured=True)
        model._known.update(module.modules())
        return model

    @property
    def report(self) -> Report | None:
        """Of a converted model, with what its calls kept."""
        if self._report is None:
            return None
        before, after = (None, None) if self.unmeasured is not None else self.measured
        return self._report.measured(before, after, self.unmeasured)

    @property
    def measured(self) -> tuple[Measurement | None, Measurement | None]:
        """Exact and converted, all measured calls together; None if there are none."""
        before, after = None, None
        for part in self._parts:
            before = part.before if before is None else before + part.before
            after = part.after if after is None else after + part.after
        return before, after

    @property
    def num_part_calls(self) -> int:
        """Of how many modules in the model, called by themselves, a call was measured; 0 if it was one of the model."""
        return 0 if any(part.is_whole for part in self._parts) else len(self._parts)

    @property
    def exact_nbytes(self) -> int | None:
        """What the measured calls keep without the conversion."""
        before, _ = self.measured
        return self._exact_nbytes if before is None else before.nbytes

    @property
    def num_values(self) -> int:
        """Of its parameters."""
        module = self.module()
        return 0 if module is None else sum(map(numel_of, module.parameters()))

    def has_any(self, parameters: Collection[int]) -> bool:
        """Whether one of these is a parameter of the model; by identity."""
        module = self.module()
        return module is not None and any(id(parameter) in parameters for parameter in module.parameters())

    def holds(self, module: nn.Module) -> bool:
        """Whether a module was in the model when that was converted."""
        return module in self._known

    def known_parameters(self) -> set[int]:
        """Identities of the parameters of the modules that were in the model when that was converted."""
        return {id(parameter) for module in self._known for parameter in module._parameters.values()}

    def is_chunked(self) -> bool:
        """Whether its loss is computed without its logits."""
        module = self.module()
        return module is not None and has_chunked_loss(module)

    def has_attention(self) -> bool:
        """Whether attention is recognized in it."""
        return self._report is not None and any(row.kind == "attention" and row.is_site for row in self._report.rows)

    def undo(self) -> None:
        """Give the module the forwards it had before."""
        module = self.module()
        if self._report is not None and module is not None:
            decompress_activations(module)

    def redo(self) -> None:
        """Convert the module again."""
        module = self.module()
        if self._report is not None and module is not None:
            self._convert(module)

    def leave(self, reason: str) -> None:
        """Leave the model, which may be converted, as it was."""
        self.undo()
        self.left_exact, self._report, self._parts = reason, None, []

    def note(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure a training call of the model, or of a module in it, that is about to be made."""
        module = self.module()
        if module is None or self.is_measured or self.is_scripts:
            return
        self.was_called, self.is_measured = True, called is module
        if runs_twice():
            if self.wishes.audit and self.left_exact is None and self.unmeasured is None:
                say_left_out(f"all, as {_CHECKPOINTED}")
            self.unmeasured = _CHECKPOINTED
            return
        call = TrainingCall(called, args, kwargs, is_hosts=True)
        with _interpreted(module):
            if self.left_exact is not None:
                self._note_exact(module, call)
                return
            try:
                before, after, unmeasured = measure_both(module, call)
            except ModelError as error:
                self.leave(str(error))
                self._note_exact(module, call)
                return
        if self.wishes.audit:
            audit_now(called, args, kwargs, agrees=False)
        if before is None or after is None:
            self.unmeasured = unmeasured
            return
        inside = set(called.modules())
        self._parts = [part for part in self._parts if part.module() not in inside]
        self._parts.append(_Part(weakref.ref(called), self.is_measured, before, after))

    def _note_exact(self, module: nn.Module, call: TrainingCall) -> None:
        if not self.wishes.of_models:  # nobody asks
            return
        try:
            kept = measure(module, call).nbytes
        except Exception:  # a model may ask for anything
            return
        self._exact_nbytes = kept if self.is_measured else (self._exact_nbytes or 0) + kept

    def _convert(self, module: nn.Module) -> None:
        self.is_scripts = is_compressed(module)
        if self.is_scripts:
            return
        self.left_exact = _unsupported(module)
        if self.left_exact is not None:
            return
        with _interpreted(module):
            if self.wishes.loss == "chunked":
                try:
                    self._report = self._compress(module, "chunked")
                    return
                except ModelError as error:
                    self.unchunked = str(error)
            try:
                if self.wishes.activations != 16:
                    self._report = self._compress(module, "exact")
                else:
                    self.left_exact = self.unchunked
            except ModelError as error:
                self.left_exact = str(error)

    def _compress(self, module: nn.Module, loss: Loss) -> Report:
        bits = 4 if self.wishes.activations is None else self.wishes.activations
        return compress_activations(module, bits, attention=self.wishes.attention, loss=loss, example_inputs=UNMEASURED)


_CHECKPOINTED = (
    "the script calls it inside of torch.utils.checkpoint, which keeps no more than the inputs of the call, and these "
    "exact"
)


def model_of(called: nn.Module, trained: Collection[int], alive: Iterable[nn.Module]) -> nn.Module:
    """The smallest module that holds `called` and the most of the parameters that are trained."""
    parents: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for module in alive:
        for child in list(module._modules.values()):  # another thread may be adding some
            if child is not None:
                parents[id(child)].append(module)
    found, ancestors = {id(called)}, [called]
    for module in ancestors:  # which grows
        for parent in parents[id(module)]:
            if id(parent) not in found:
                found.add(id(parent))
                ancestors.append(parent)

    def rank(module: nn.Module) -> tuple[int, int]:
        held = sum(numel_of(parameter) for parameter in module.parameters() if id(parameter) in trained)
        return -held, sum(1 for _ in module.modules())

    return unwrapped(min(ancestors, key=rank))


def holders_of(parameters: Iterable[Tensor], alive: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that have one of these parameters themselves."""
    wanted = {id(parameter) for parameter in parameters}
    return [m for m in alive if any(p is not None and id(p) in wanted for p in list(m._parameters.values()))]


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


def _unsupported(model: nn.Module) -> str | None:
    for module in model.modules():
        if isinstance(module, DataParallel):
            return "DataParallel copies modules in every step; use DistributedDataParallel"
        if type(module).__name__ == "FullyShardedDataParallel":
            return "it is in FSDP1, which flattens parameters; use FSDP2, or compress_activations before it is wrapped"
    return None
