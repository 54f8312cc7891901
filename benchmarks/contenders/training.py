"""A contender is a training step changed in some way; here it is built, and its memory and time are measured."""

from __future__ import annotations

import copy
import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.allocated import allocated_nbytes, peak_nbytes
from benchmarks.kit.timing import UNUSUAL_ROUNDS, Timing, seconds_of
from laconic.activations import SavedTensorTracker
from laconic.activations.whole_model.report import brief
from laconic.train.config.schema import PRETRAINING_RATE

EXACT = "exact"


class Training:
    """A model, its loss and its optimizer; changes of a contender replace these.

    Attributes:
        loss_of: token ids [n, s] -> loss.
        around_forward: makes the context in which forward runs.
        make_optimizer: (model, learning rate) -> optimizer. The rate is AdamW's; an optimizer whose documentation
            names another one scales it.
        gradients: of `laconic.compress_gradients`, None where gradients are exact.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.loss_of: Callable[[Tensor], Tensor] = lambda ids: self.model(input_ids=ids, labels=ids).loss
        self.around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.make_optimizer: Callable[[Any, float], torch.optim.Optimizer] = exact_optimizer
        self.gradients: Any = None
        self.optimizer: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        with self.around_forward():
            return self.loss_of(ids)

    def step(self, ids: Tensor) -> Tensor:
        """Forward, backward, update; gradients are gone afterwards, as by default in torch."""
        loss = self.forward(ids)
        loss.backward()
        if self.gradients is not None:
            self.gradients.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def exact_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """torch's fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


LEARNING_RATE = PRETRAINING_RATE
"""In training on text, of exact AdamW and of all that are documented to take AdamW's rate; the trainer's default."""

Change = Callable[[Training, Tensor], None]
"""Changes a training in place; gets token ids as an example."""


@dataclass(frozen=True)
class Contender:
    """One row of a table.

    Attributes:
        package: module of the peer's package; without it the row says so.
        optional: a missing package is no failure of the run, for this reason.
        cannot: why it must fail here, which is then no failure of the run.
        own_weights: it changes the parameters themselves, and gets copies of them.
        compiled: what it is compiled by takes long; losses are not trained.
    """

    name: str
    changes: Sequence[Change] = ()
    package: str = ""
    optional: str = ""
    cannot: str = ""
    own_weights: bool = False
    compiled: bool = False

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return bool(self.package) and importlib.util.find_spec(self.package) is None


@dataclass
class Measured:
    """What was found out about a contender (by name); `failure` says why it is not all."""

    name: str
    compiled: bool = False
    failure: str = ""
    expected: bool = False
    """Whether it must fail here."""
    saved_nbytes: int = 0
    """Bytes autograd saved, as hooks see them; 0: they cannot see them."""
    held_nbytes: int = 0
    """Bytes in use after forward that were not before."""
    peak_nbytes: int = 0
    """The most bytes in use during a step beside weights, optimizer state and lasting gradient stores."""
    state_nbytes: int = 0
    """Optimizer state."""
    gradient_nbytes: int = 0
    """Gradients at the end of backward."""
    lasting_gradient_nbytes: int = 0
    """Gradient stores that stay from step to step."""
    first_seconds: float = 0.0
    """The first step: compiling, and whatever is made once."""
    seconds: Timing | None = None
    losses: list[float] = field(default_factory=list)
    """Held-out loss after training, a seed each."""
    same_bits: bool = False
    """Whether loss and gradients were found to be those of exact training, bit for bit, so that training is too."""

    @property
    def total_nbytes(self) -> int:
        """The most bytes in use during a step beside the weights."""
        return self.peak_nbytes + self.state_nbytes + self.lasting_gradient_nbytes


def built(contender: Contender, model: nn.Module, ids: Tensor, lr: float) -> Training:
    """The training of a contender on a model of its own."""
    training = Training(model)
    for change in contender.changes:
        change(training, ids)
    training.optimizer = training.make_optimizer(training.model, lr)
    return training


def why(contender: Contender, error: Exception) -> tuple[str, bool]:
    """What a table says about a failure, and whether it is expected."""
    if contender.cannot:
        return f"{contender.cannot} ({brief(error)})", True
    return f"failed: {brief(error)}", False


def not_installed(contender: Contender) -> Measured | None:
    """The row of a contender whose package is not here."""
    if not contender.missing:
        return None
    reason = f"; {contender.optional}" if contender.optional else ""
    return Measured(
        contender.name, contender.compiled, f"{contender.package} is not installed{reason}", bool(contender.optional)
    )


def measured(contenders: Sequence[Contender], base: nn.Module, ids: Tensor, rounds: int) -> list[Measured]:
    """Memory of each contender on the model, one after the other, then the time of their steps in turns.

    Contenders share one set of weights, and those with exact AdamW its state, so that all fit into memory at once.
    """
    found, steps = {}, {}
    shared: Any = None
    rate = 1e-6  # the shared weights hardly move
    for contender in contenders:
        row = found[contender.name] = not_installed(contender) or Measured(contender.name, contender.compiled)
        if row.failure:
            continue
        weights = {} if contender.own_weights else {id(p): p for p in base.parameters()}
        try:
            training = built(contender, copy.deepcopy(base, weights).train(), ids, rate)
            _measure_memory(training, row, ids)
        except Exception as error:
            row.failure, row.expected = why(contender, error)
            base.zero_grad()
            gc.collect()
            continue
        if training.make_optimizer is exact_optimizer and not contender.own_weights:
            shared = shared or training.optimizer
            training.optimizer = shared
        steps[contender.name] = lambda training=training: training.step(ids)
    seconds = seconds_of(steps, rounds, warm_up_rounds=UNUSUAL_ROUNDS, shuffle=True)
    for name, timing in seconds.items():
        found[name].seconds = timing
    return list(found.values())


def _measure_memory(training: Training, row: Measured, ids: Tensor) -> None:
    started = time.perf_counter()
    training.step(ids)
    row.first_seconds = time.perf_counter() - started
    training.step(ids)
    if training.around_forward is nullcontext:
        with SavedTensorTracker(training.model) as tracker:
            loss = training.forward(ids)
        row.saved_nbytes = tracker.nbytes
        loss.backward()
        del loss
        training.optimizer.zero_grad()
    gc.collect()
    before = allocated_nbytes()
    loss = training.forward(ids)
    row.held_nbytes = allocated_nbytes() - before
    loss.backward()
    del loss
    if training.gradients is None:
        # An update in backward leaves a subclass without values.
        row.gradient_nbytes = sum(p.grad.nbytes for p in training.model.parameters() if type(p.grad) is Tensor)
    else:
        row.gradient_nbytes = row.lasting_gradient_nbytes = training.gradients.nbytes
    training.optimizer.zero_grad()
    row.state_nbytes = tensor_nbytes(training.optimizer.state)
    # On a busy machine the thread that watches may sleep through a peak.
    row.peak_nbytes = max(peak_nbytes(lambda: training.step(ids)) for _ in range(3))


def tensor_nbytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts, lists, tensor subclasses and objects, each storage once."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if hasattr(value, "__tensor_flatten__"):
                names, _ = value.__tensor_flatten__()
                for name in names:
                    visit(getattr(value, name))
            else:
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                visit(inner)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            visit(vars(value))

    visit(dict(state))
    return sum(storages.values())
