"""Capacity: a limit of tokens per expert, and which assignments are dropped. The default of all gates drops nothing."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe.routing import Routing

DropPolicy = Literal["position", "probability"]
"""Assignments that stay: an expert's first entries in token order, or those with its highest weights."""


def capacity_of(factor: float, num_tokens: int, num_experts: int) -> int:
    """Return ceil(factor * num_tokens / num_experts); `factor` is capacity factor times top-k."""
    # Rounded to nine digits: 1.2 * 10 / 3 is 4, but not in floating point.
    return math.ceil(round(factor * num_tokens / num_experts, 9))


def dropped(routing: Routing, capacity: int, policy: DropPolicy) -> Routing:
    """Return `routing` with at most `capacity` entries for each expert; weights of the others stay as they are.

    Ties of probability go to the earlier entry.
    """
    if policy == "position":
        order = routing.by_expert
    elif policy == "probability":
        by_weight = torch.argsort(routing.weights.detach(), descending=True, stable=True)
        order = by_weight[torch.argsort(routing.experts[by_weight], stable=True)]
    else:
        raise RoutingError(f'drop_policy = {policy!r} must be "position" or "probability"')
    counts = routing.counts()
    start = counts.cumsum(0) - counts
    place = torch.arange(len(routing), device=order.device) - start[routing.experts[order]]
    kept: Tensor = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, place < capacity)
    return routing.keep(kept)
