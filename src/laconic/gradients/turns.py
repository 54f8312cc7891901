"""What may be done with a gradient at this moment: the states of the gradients that a group of ranks reduces.

    none --backward--> LOCAL --reduce()--> REDUCED --zero--> none        (each gradient by itself)
                        ^  \\                 |
                        |   IN_FLIGHT -------+     (last_micro_batch: its bucket has left)
                        +--- backward -------+     (averages only: the mean of equal gradients is that gradient)

Values of LOCAL gradients differ from rank to rank, so nobody may use them: not a norm, not a clip, not an optimizer,
not another reducer. They may be added to, scaled and zeroed. What is IN_FLIGHT may not be touched. A step changes no
state: as in torch, the next backward adds to the gradients until somebody zeroes them.

Without a group gradients are this process's own business and may be used at any time.
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

__all__ = [
    "Owner",
    "Turn",
    "TurnGuard",
    "is_marked_reduced",
    "is_zero",
    "mark_reduced",
    "own",
    "owner_of",
    "release",
    "set_turn",
    "turn_of",
]


class Turn(enum.Enum):
    """Whose values a gradient has."""

    LOCAL = "local"
    """This rank's."""
    IN_FLIGHT = "in flight"
    """Partly replaced: its reduction is under way."""
    REDUCED = "reduced"
    """Those of all ranks together."""


class TurnGuard:
    """Says what may be done with one gradient, and notices what was done."""

    def __init__(self, name: str, average: bool, turn: Turn = Turn.LOCAL) -> None:
        """`name` of the parameter; `average`: whether ranks are averaged (and not added up)."""
        self.name = name
        self.average = average
        self.turn = turn

    def __call__(self, use: Use) -> None:
        """Raises TrainingError for a use that is wrong now."""
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
        """For a copy of the gradient."""
        return TurnGuard(self.name, self.average, self.turn)


class Owner(Protocol):
    """Who keeps a parameter's gradient in codes."""

    def before_step(self, parameter: nn.Parameter) -> None:
        """Called when an optimizer is about to use the parameter's gradient; raises if it must not."""

    def follow(self) -> None:
        """Look for parameters that the model has got since."""

    @property
    def has_group(self) -> bool:
        """Whether gradients are reduced by this owner."""


_owners: dict[int, weakref.ref[Owner]] = {}
"""By id of the parameter, which its owner keeps alive. No weak reference to it: torch swaps only what has none."""
_installed = False


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Note who keeps a parameter's gradient; from now on optimizers' steps are checked."""
    global _installed
    _owners[id(parameter)] = weakref.ref(owner)
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True


def release(parameter: nn.Parameter) -> None:
    """Forget who keeps it."""
    _owners.pop(id(parameter), None)


def owner_of(parameter: Tensor) -> Owner | None:
    """Who keeps this parameter's gradient, None if nobody does."""
    reference = _owners.get(id(parameter))
    return None if reference is None else reference()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step on gradients that differ from rank to rank before it has changed anything.

    A closure makes gradients of its own later; those are checked when they are read. Parameters that nobody owns may
    have joined a model since, so its owner looks.
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
    """The state of a parameter's gradient in codes; None without, or where no group reduces."""
    coded = coded_gradient(parameter)
    return coded.guard.turn if isinstance(coded, CodedGradient) and isinstance(coded.guard, TurnGuard) else None


def set_turn(parameter: Tensor, turn: Turn) -> None:
    """Set the state of a parameter's gradient in codes, if it has one."""
    coded = coded_gradient(parameter)
    if coded is not None and isinstance(coded.guard, TurnGuard):
        coded.guard.turn = turn


_REDUCED_MARK = "_laconic_reduced"


def mark_reduced(gradient: Tensor) -> None:
    """Note on a dense gradient that it was reduced."""
    setattr(gradient, _REDUCED_MARK, True)


def is_marked_reduced(gradient: Tensor) -> bool:
    """Whether a dense gradient is one that was reduced, and nothing else has been assigned since."""
    return bool(getattr(gradient, _REDUCED_MARK, False))


def is_zero(gradient: Tensor) -> bool:
    """Whether there is nothing in a dense gradient."""
    with torch.no_grad():
        return not bool((gradient != 0).any())
