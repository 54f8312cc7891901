"""Placement of experts: the map from logical expert to slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laconic.errors import CheckpointError, ConfigError, RoutingError

if TYPE_CHECKING:
    from laconic.moe.layer import MoELayer
    from laconic.moe.placement.copies import ExpertCopies


class Placement(nn.Module):
    """Maps experts as the gate numbers them to the slots that hold their weights.

    Slot s is local expert s % c of expert-parallel rank s // c, where c = ceil(E / N_EP); the last ranks may have fewer
    slots. A new placement is the identity;
    `laconic.moe.ExpertMover` changes it together with the weights.

    Experts that `laconic.moe.copy_hot_experts` holds on further ranks have their own slot here, where their parameters
    are.

    State dicts are in logical order, so the placement is not part of them: taking one while experts are elsewhere
    raises CheckpointError (`ExpertMover.logical_order` moves them home for a while), and loading one makes the
    placement the identity again, if it has the experts; one without leaves them where they are.

    Attributes:
        slots: int64 [E], a permutation; not saved.
        copies: of hot experts on further ranks; not saved. None: there are none.
        num_loads: times that loaded weights have brought experts home from elsewhere.
    """

    slots: Tensor

    def __init__(self, num_experts: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("slots", torch.arange(num_experts, device=device), persistent=False)
        self.copies: ExpertCopies | None = None
        self.num_loads = 0
        self._is_bound = False
        self.register_state_dict_pre_hook(self._refuse_unless_home)

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.slots)

    @property
    def logical(self) -> Tensor:
        """Return int64 [E]: the expert in each slot, the inverse of `slots`."""
        return torch.argsort(self.slots)

    @property
    def is_identity(self) -> bool:
        """Return whether every expert is in the slot of its own number."""
        return torch.equal(self.slots, torch.arange(self.num_experts, device=self.slots.device))

    def forward(self, experts: Tensor) -> Tensor:
        """Return the slots, int64, of experts, int64 of any shape."""
        return self.slots[experts]

    def put(self, slots: Tensor) -> None:
        """Take slots that weights have moved to, int64 [E], a permutation."""
        self.slots.copy_(slots)
        if self.copies is not None:
            self.copies = self.copies.at(self.slots.tolist())

    def bind(self, experts: nn.Module) -> None:
        """Watch the state dicts of the experts whose slots these are."""
        if not self._is_bound:
            self._is_bound = True
            experts.register_state_dict_pre_hook(self._refuse_unless_home)
            experts.register_load_state_dict_pre_hook(self._go_home)

    def _refuse_unless_home(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.is_identity:
            raise CheckpointError(
                f"the experts of {prefix.rstrip('.') or 'this layer'} have changed places, but a state dict has them in"
                " logical order; take it inside of ExpertMover.logical_order()"
            )

    def _go_home(self, experts: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        names = [prefix + name for name, _ in experts.named_parameters()]
        given = [name for name in names if name in state]
        if not given or self.is_identity:
            return
        if len(given) < len(names):
            rest[-1].append(
                f"a state dict has {', '.join(given)} without {', '.join(sorted({*names} - {*given}))}, but the experts"
                " have changed places, and the two would be of different ones; load it inside of"
                " ExpertMover.logical_order()"
            )
            return
        self.num_loads += 1
        self.put(torch.arange(self.num_experts, device="cpu"))

    def swapped(self, a: int, b: int) -> Tensor:
        """Return the slots, int64 [E], after exchanging experts a and b (logical).

        Raises:
            RoutingError: an expert does not exist.
        """
        for name, expert in (("a", a), ("b", b)):
            if not 0 <= expert < self.num_experts:
                raise RoutingError(f"{name} is {expert}, but experts are numbered from 0 to {self.num_experts - 1}")
        slots = self.slots.clone()
        slots[[a, b]] = slots[[b, a]]
        return slots

    def check(self, slots: Tensor) -> None:
        """Check that `slots` is a permutation of the slots here; a RoutingError if not."""
        expected = torch.arange(self.num_experts, device="cpu")
        if slots.dtype != torch.int64 or not torch.equal(slots.detach().cpu().flatten().sort().values, expected):
            raise RoutingError(
                f"slots are {slots.tolist()}, but they must be a permutation of 0 ... {self.num_experts - 1} as int64:"
                " one slot for each expert"
            )

    def extra_repr(self) -> str:
        """Show num_experts."""
        return f"num_experts={self.num_experts}"


def placement_of(layer: MoELayer, number: int) -> Placement:
    """Return the placement of layer `number`; one without gets a Placement, another kind is a ConfigError."""
    if layer.placement is None:
        layer.placement = Placement(layer.gate.num_experts, next(layer.experts.parameters()).device)
    if not isinstance(layer.placement, Placement):
        raise ConfigError(
            f"layer {number} has the placement {layer.placement!r}, but experts that move need a laconic.moe.Placement;"
            " leave it out"
        )
    layer.placement.bind(layer.experts)
    return layer.placement
