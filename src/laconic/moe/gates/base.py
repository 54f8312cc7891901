"""Base classes of gates: fp32 logits, top-k choices, losses, capacity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import RoutingError
from laconic.moe.gates.capacity import DropPolicy, capacity_of, dropped
from laconic.moe.gates.losses import load_balance_loss, sequence_balance_loss, z_loss
from laconic.moe.routing import Routing, SoftRouting
from laconic.moe.row_ops import accumulation_dtype


class Gate(nn.Module):
    """Maps tokens x [n, M] to a Routing or SoftRouting over `num_experts` experts; n may be 0."""

    num_experts: int

    def forward(self, x: Tensor) -> Routing | SoftRouting:
        """Route tokens x [n, M]."""
        raise NotImplementedError


class TokenChoiceGate(Gate):
    """Each token chooses its k experts with the highest scores; a subclass defines the scores.

    Logits and scores are fp32 (fp64 for fp64 tokens), whatever the tokens are.

    Args:
        num_experts, model_dim: E and M.
        top_k: experts per token.
        normalize: divide a token's weights by their sum.
        scale: factor of the weights, applied last.
        num_groups, top_groups: experts are in `num_groups` equal groups of neighbors, and a token chooses only among
            its `top_groups` best groups (group-limited routing, DeepSeek-V2 section 2.1.2).
        capacity_factor: None keeps every assignment; f lets an expert take at most ceil(f * top_k * n / E).
        eval_capacity_factor: the same in evaluation mode; None is capacity_factor, inf keeps every assignment.
        drop_policy: which assignments are dropped then, see laconic.moe.gates.capacity.
        balance_coef, z_coef: of the losses "balance" and "z"; 0 leaves a loss out.
        sequence_coef, sequence_length: of the loss "sequence balance", the balance within each sequence of that many
            neighboring tokens (DeepSeek-V3's complement to its bias). The length may be set anew before a forward.
        balance_group: the ranks over whose tokens the balance loss counts ("global batch"); None counts here only.
        check_logits: refuse NaN and infinite logits, which waits for a GPU once in each forward.

    Raises:
        RoutingError: numbers do not fit together.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        top_k: int,
        *,
        normalize: bool,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        drop_policy: DropPolicy = "position",
        balance_coef: float = 0.0,
        z_coef: float = 0.0,
        sequence_coef: float = 0.0,
        sequence_length: int | None = None,
        balance_group: dist.ProcessGroup | None = None,
        check_logits: bool = True,
    ) -> None:
        super().__init__()
        if sequence_coef and sequence_length is None:
            raise RoutingError(
                f"sequence_coef = {sequence_coef} needs sequence_length, because a gate sees tokens and no sequences;"
                " pass it"
            )
        self.num_experts, self.model_dim, self.top_k = num_experts, model_dim, top_k
        self.normalize, self.scale = normalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.drop_policy = drop_policy
        self.balance_coef, self.z_coef, self.balance_group = balance_coef, z_coef, balance_group
        self.sequence_coef, self.sequence_length = sequence_coef, sequence_length
        self.check_logits = check_logits
        self._check_choice()

    def _check_choice(self) -> None:
        """Refuse numbers that cannot be; they may have been changed since the gate was made."""
        top_k, num_experts, num_groups, top_groups = self.top_k, self.num_experts, self.num_groups, self.top_groups
        if not 1 <= top_k <= num_experts:
            raise RoutingError(f"top_k = {top_k} must be from 1 to num_experts = {num_experts}; change one of them")
        if num_groups < 1 or num_experts % num_groups:
            raise RoutingError(f"num_groups = {num_groups} must divide num_experts = {num_experts}; change one of them")
        if not 1 <= top_groups <= num_groups or top_groups * (num_experts // num_groups) < top_k:
            raise RoutingError(
                f"top_groups = {top_groups} must be from 1 to num_groups = {num_groups} and leave at least "
                f"top_k = {top_k} experts; a group has {num_experts // num_groups}, so change one of them"
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not factor > 0:
                raise RoutingError(f"{name} = {factor} must be positive; None drops nothing")

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [n, E] of tokens x [n, M]."""
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores that weights are taken from: [n, E], differentiable, not negative."""
        raise NotImplementedError

    def preferences(self, scores: Tensor) -> Tensor:
        """Return the values that experts are chosen by: [n, E]; the scores, unless a subclass corrects them."""
        return scores

    def group_preferences(self, grouped: Tensor) -> Tensor:
        """Return by what groups are chosen, [n, groups], of preferences [n, groups, experts of each]: the best."""
        return grouped.amax(-1)

    def choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return the experts of each token, best first: int64 [n, k], of the highest `preferences`."""
        return self._best(self.preferences(scores).detach())

    def chose(self, routing: Routing) -> None:
        """Called with every choice, before losses and capacity; for subclasses that count."""

    def forward(self, x: Tensor) -> Routing:
        """See `Gate.forward`.

        Raises:
            RoutingError: tokens have another width, `top_k`, groups or factors have been changed to what cannot be, or,
                with `check_logits`, a logit is NaN or infinite.
        """
        self._check_choice()
        logits = self.logits(x)
        if self.check_logits:
            checked(logits)
        scores = self.scores(logits)
        chosen = self.choose(logits, scores)
        routing = Routing.of_choices(chosen, self._weights(scores, chosen), self.num_experts)
        self.chose(routing)
        routing = replace(routing, losses=self._losses(logits, scores, chosen, routing))
        factor = self.capacity_factor
        if not self.training and self.eval_capacity_factor is not None:
            factor = self.eval_capacity_factor
        if factor is not None and factor < math.inf:
            capacity = capacity_of(factor * self.top_k, x.shape[0], self.num_experts)
            routing = dropped(routing, capacity, self.drop_policy)
        return routing

    def _best(self, preferences: Tensor) -> Tensor:
        """Return the k highest preferences of each token, within its best groups: int64 [n, k], best first."""
        if self.top_groups < self.num_groups:
            grouped = preferences.unflatten(1, (self.num_groups, -1))
            best = self.group_preferences(grouped).topk(self.top_groups, dim=-1).indices
            open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            preferences = grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(1)
        return preferences.topk(self.top_k, dim=-1).indices

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        weights = scores.gather(1, chosen)
        if self.normalize:
            # The smallest normal number of the dtype: sigmoids of a token may all be 0.
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        return weights * self.scale if self.scale != 1.0 else weights

    def _losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, routing: Routing) -> Mapping[str, Tensor]:
        losses = {}
        if self.balance_coef or self.sequence_coef:
            probabilities = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
            if self.balance_coef:
                loss = load_balance_loss(probabilities, routing.counts(), self.balance_group)
                losses["balance"] = self.balance_coef * loss
            if self.sequence_coef and self.sequence_length is not None:
                loss = sequence_balance_loss(probabilities, chosen, self.sequence_length)
                losses["sequence balance"] = self.sequence_coef * loss
        if self.z_coef:
            losses["z"] = self.z_coef * z_loss(logits)
        return losses

    def extra_repr(self) -> str:
        """Show num_experts, model_dim and top_k."""
        return f"num_experts={self.num_experts}, model_dim={self.model_dim}, top_k={self.top_k}"


class LinearGate(TokenChoiceGate):
    """Logits are x weight^T, weight [E, M]; a subclass defines the scores. Options as in TokenChoiceGate."""

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        top_k: int,
        *,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, model_dim, top_k, normalize=normalize, **options)
        self.weight = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=model_dim**-0.5)

    def logits(self, x: Tensor) -> Tensor:
        return linear_logits(x, self.weight)


def linear_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [n, M] by weight [E, M] transposed, in fp32 (fp64 for fp64), also under autocast.

    Tokens of another width are a RoutingError.
    """
    if x.shape[-1] != weight.shape[1]:
        raise RoutingError(
            f"tokens {list(x.shape)} are {x.shape[-1]} wide, but model_dim of the gate is {weight.shape[1]}; make the"
            " gate as wide as its tokens"
        )
    dtype = accumulation_dtype(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype))


def checked(values: Tensor, name: str = "router logits") -> Tensor:
    """Return `values` [n, E] or [n, k], which messages call `name`; NaN or infinity among them is a RoutingError."""
    with torch.no_grad():
        good = values.isfinite().all(-1)
        if not bool(good.all()):
            bad = (~good).nonzero().squeeze(1)
            what = "NaN" if bool(values[bad[0]].isnan().any()) else "infinite"
            raise RoutingError(
                f"{name} of {len(bad)} of {len(values)} tokens are not finite, the first is token {int(bad[0])} "
                f"({what}); look for the layer in front that overflows, or lower the learning rate"
            )
    return values
