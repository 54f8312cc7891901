"""Routing: the gate's decision which token goes to which expert, and with what weight.

[Note: assignments]
A routing is a list of assignments. Entry i sends token `tokens[i]` to expert `experts[i]`, and the expert's output
counts `weights[i]` in the token's sum. The list is sorted by token and, within a token, by choice; sums over a token's
experts follow that order. Top-k gates make k entries for every token, expert choice any number, and dropping takes
entries away: all of them are the same list, so orders, dispatchers and experts need no case distinctions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from laconic.errors import RoutingError


@dataclass(frozen=True, eq=False)
class Routing:
    """A list of assignments of tokens to experts, sorted by token, then by choice; see [Note: assignments].

    Tensors are on one device. `check` validates values, which waits for a GPU; construction does not.

    Raises:
        RoutingError: shapes and dtypes do not fit.
    """

    tokens: Tensor
    """int64 [a], ascending, each in [0, num_tokens)."""
    experts: Tensor
    """int64 [a], each in [0, num_experts)."""
    weights: Tensor
    """Floating [a], differentiable."""
    num_tokens: int
    num_experts: int
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars to be added to the training loss, already times their coefficients, by name."""
    choices: int | None = None
    """k where every token has exactly k entries (sums over a token are then faster), None where that is not known."""
    num_dropped: int = 0
    """Assignments dropped by a capacity."""

    def __post_init__(self) -> None:
        entries = self.tokens.shape
        if len(entries) != 1 or self.experts.shape != entries or self.weights.shape != entries:
            raise RoutingError(
                f"tokens {list(entries)}, experts {list(self.experts.shape)} and weights {list(self.weights.shape)} "
                "of a routing must be three vectors of one length; flatten [n, k] choices, or use Routing.of_choices"
            )
        if self.tokens.dtype != torch.int64 or self.experts.dtype != torch.int64:
            raise RoutingError(
                f"tokens and experts of a routing must be int64, not {self.tokens.dtype} and {self.experts.dtype}; "
                "convert them with .long()"
            )
        if not self.weights.is_floating_point():
            raise RoutingError(f"weights of a routing must be floating, not {self.weights.dtype}")
        if self.choices is not None and entries[0] != self.num_tokens * self.choices:
            raise RoutingError(
                f"choices = {self.choices} needs {self.num_tokens} x {self.choices} entries, not {entries[0]}; "
                "give None where tokens differ in their number of experts"
            )

    @classmethod
    def of_choices(
        cls, experts: Tensor, weights: Tensor, num_experts: int, losses: Mapping[str, Tensor] | None = None
    ) -> Routing:
        """Make the routing where token t goes to experts[t, 0], ..., experts[t, k-1].

        Args:
            experts: int64 [n, k].
            weights: floating [n, k].
            num_experts: E.
            losses: see `Routing.losses`.
        """
        num_tokens, k = experts.shape
        tokens = torch.arange(num_tokens, device=experts.device).repeat_interleave(k)
        return cls(tokens, experts.flatten(), weights.flatten(), num_tokens, num_experts, losses or {}, k)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def counts(self) -> Tensor:
        """Count the entries of each expert, int64 [num_experts]."""
        # Not bincount: on GPUs it is not deterministic and waits for the largest value.
        ones = torch.ones_like(self.experts)
        return ones.new_zeros(self.num_experts).scatter_add_(0, self.experts, ones)

    @cached_property
    def by_expert(self) -> Tensor:
        """int64 [a]: the entries in the order of their experts, stable; entry by_expert[j] is row j."""
        return torch.argsort(self.experts, stable=True)

    @cached_property
    def row_of_entry(self) -> Tensor:
        """int64 [a]: the inverse of `by_expert`; entry i is row row_of_entry[i] of the rows sorted by expert."""
        inverse = torch.empty_like(self.by_expert)
        return inverse.scatter_(0, self.by_expert, torch.arange(len(self), device=inverse.device))

    def keep(self, kept: Tensor) -> Routing:
        """Keep only the entries where `kept`, bool [a], is true; the others count as dropped."""
        index = kept.nonzero().squeeze(1)
        return replace(
            self,
            tokens=self.tokens[index],
            experts=self.experts[index],
            weights=self.weights[index],
            choices=self.choices if len(index) == len(self) else None,
            num_dropped=self.num_dropped + len(self) - len(index),
        )

    def check(self) -> None:
        """Validate the values; waits for a GPU.

        Raises:
            RoutingError: an entry is out of range or out of order.
        """
        if not len(self):
            return
        for name, values, limit in (
            ("tokens", self.tokens, self.num_tokens),
            ("experts", self.experts, self.num_experts),
        ):
            lowest, highest = int(values.min()), int(values.max())
            if lowest < 0 or highest >= limit:
                raise RoutingError(f"{name} of a routing go from {lowest} to {highest}, but must be in [0, {limit})")
        if bool((self.tokens[1:] < self.tokens[:-1]).any()):
            raise RoutingError("tokens of a routing must ascend; sort the entries by token, stably")


@dataclass(frozen=True, eq=False)
class SoftRouting:
    """Mixtures instead of assignments (SoftMoE): each expert has s slots, each slot takes a mixture of all tokens.

    Soft Mixture of Experts (Puigcerver et al., 2024), section 2: slots = dispatch^T x, outputs = combine slots.

    Raises:
        RoutingError: shapes do not fit.
    """

    dispatch: Tensor
    """Floating [n, E, s]: the weights of tokens in slots; each column sums to 1."""
    combine: Tensor
    """Floating [n, E, s]: the weights of slots in tokens; each token's sum to 1."""
    losses: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dispatch.dim() != 3 or self.combine.shape != self.dispatch.shape:
            raise RoutingError(
                f"dispatch {list(self.dispatch.shape)} and combine {list(self.combine.shape)} of a soft routing must "
                "both be [tokens, experts, slots]"
            )

    @property
    def num_tokens(self) -> int:
        """n."""
        return self.dispatch.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.dispatch.shape[1]

    def slots(self) -> Routing:
        """Return the E * s slots as tokens that each go to their own expert, so that any dispatcher can send them."""
        _, num_experts, num_slots = self.dispatch.shape
        experts = torch.arange(num_experts, device=self.dispatch.device).repeat_interleave(num_slots)
        ones = self.dispatch.new_ones(len(experts), 1)
        return Routing.of_choices(experts[:, None], ones, num_experts, self.losses)

    def mix(self, x: Tensor) -> Tensor:
        """Return slots [E * s, M] of tokens x [n, M], in x's dtype; sums in the routing's dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return (self.dispatch.flatten(1).T @ x.to(self.dispatch.dtype)).to(x.dtype)

    def unmix(self, slots: Tensor) -> Tensor:
        """Return tokens [n, M] of the experts' outputs for slots [E * s, M], in the slots' dtype."""
        with torch.autocast(slots.device.type, enabled=False):
            return (self.combine.flatten(1) @ slots.to(self.combine.dtype)).to(slots.dtype)


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """A layer's tokens and their routing."""

    x: Tensor
    """[n, M]."""
    routing: Routing | SoftRouting
    """Of these n tokens."""
