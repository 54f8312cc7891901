r"""States of the gradients that a group of ranks reduces, and the uses that each state allows.

    none --backward--> LOCAL --reduce()--> REDUCED --zero--> none        (each gradient by itself)
                        ^  \                 |
                        |   IN_FLIGHT -------+     (last_micro_batch: its bucket is launched)
                        +--- backward -------+     (averages only: the mean of equal gradients is that gradient)

Values of LOCAL gradients differ from rank to rank, so any use is refused: a norm, a clip, an optimizer, another
reducer. They may be added to, scaled and zeroed. A gradient IN_FLIGHT may not be touched. An optimizer's step changes
no state: as in torch, the next backward adds to the gradients until they are zeroed.

Without a group a gradient belongs to this process alone and may be used at any time.
"""

from __future__ import annotations

import enum
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.errors import TrainingError
from laconic.formats import CodedGradient
from laconic.formats.coded_gradient import Use, coded_gradient


class Turn(enum.Enum):
    """State of a gradient: whose values it holds."""

    LOCAL = "local"
    """This rank's values."""
    IN_FLIGHT = "in flight"
    """Values that are partly replaced: the reduction is under way."""
    REDUCED = "reduced"
    """The values of all ranks together."""


class TurnGuard:
    """Checks each use of one gradient, the parameter `name`'s, against its state, and records the next one."""

    def __init__(self, name: str, average: bool, turn: Turn = Turn.LOCAL) -> None:
        self.name = name
        self.average = average
        self.turn = turn

    def __call__(self, use: Use) -> None:
        """Check a use of the gradient; TrainingError if its state does not allow it."""
        if self.turn is Turn.IN_FLIGHT:
            raise TrainingError(
                f"the gradient of {self.name} is being reduced; call reduce(), on every rank, first, or zero_() of"
                " compress_gradients' result to give the step up"
            )
        if use == "read":
            if self.turn is Turn.LOCAL:
                raise TrainingError(
                    f"the gradient of {self.name} holds only this rank's share, not reduced yet; call reduce() of"
                    " compress_gradients' result first, on every rank (or give compress_gradients no group, if"
                    " DistributedDataParallel reduces this model)"
                )
        elif use == "zero":
            self.turn = Turn.LOCAL
        elif use == "add":
            if self.turn is Turn.REDUCED and not self.average:
                raise TrainingError(
                    f"a gradient was added to that of {self.name} after reduce() had added up all ranks', which the"
                    " next reduce() would add up once more; zero gradients before the next backward"
                )
            self.turn = Turn.LOCAL

    def copy(self) -> TurnGuard:
        """A guard in the same state, for a copy of the gradient."""
        return TurnGuard(self.name, self.average, self.turn)


class Owner(Protocol):
    """Store that keeps a parameter's gradient in codes."""

    def before_step(self, parameter: nn.Parameter) -> None:
        """Check that an optimizer may use the parameter's gradient; raises if it must not."""

    def follow(self) -> None:
        """Take in parameters that joined the model."""

    @property
    def has_group(self) -> bool:
        """Whether gradients are reduced by this owner."""


_owners: dict[int, weakref.ref[Owner]] = {}
"""By id of the parameter, which its owner keeps alive. No weak reference to the parameter: torch swaps only tensors
that have none."""
_installed = False


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Register the owner of a parameter's gradient; from now on optimizers' steps are checked."""
    global _installed
    _owners[id(parameter)] = weakref.ref(owner)
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True


def release(parameter: nn.Parameter) -> None:
    """Unregister the owner of a parameter's gradient."""
    _owners.pop(id(parameter), None)


def owner_of(parameter: Tensor) -> Owner | None:
    """The owner of this parameter's gradient; None if it has none."""
    reference = _owners.get(id(parameter))
    return None if reference is None else reference()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step on gradients that differ from rank to rank before it has changed anything.

    A closure makes gradients of its own later; those are checked when they are read. A parameter without owner may have
    joined a model since, so all owners take in new parameters first.
    """
    if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
        return
    present = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(owner_of(parameter) is None for parameter in present):
        for owner in _all_owners():
            owner.follow()
    for parameter in present:
        found = owner_of(parameter)
        if found is not None:
            found.before_step(parameter)


def _all_owners() -> list[Owner]:
    alive = (reference() for reference in list(_owners.values()))
    return list({id(owner): owner for owner in alive if owner is not None}.values())


def turn_of(parameter: Tensor) -> Turn | None:
    """The state of a parameter's gradient in codes; None without codes, or where no group reduces."""
    coded = coded_gradient(parameter)
    return coded.guard.turn if isinstance(coded, CodedGradient) and isinstance(coded.guard, TurnGuard) else None


def set_turn(parameter: Tensor, turn: Turn) -> None:
    """Set the state of a parameter's gradient in codes, if it has one."""
    coded = coded_gradient(parameter)
    if coded is not None and isinstance(coded.guard, TurnGuard):
        coded.guard.turn = turn


_REDUCED_MARK = "_laconic_reduced"


def mark_reduced(gradient: Tensor) -> None:
    """Mark a dense gradient as reduced."""
    setattr(gradient, _REDUCED_MARK, True)


def is_marked_reduced(gradient: Tensor) -> bool:
    """Whether a dense gradient is marked as reduced, and nothing else has been assigned since."""
    return bool(getattr(gradient, _REDUCED_MARK, False))


def is_zero(gradient: Tensor) -> bool:
    """Whether all elements of a dense gradient are zero."""
    with torch.no_grad():
        return not bool((gradient != 0).any())
