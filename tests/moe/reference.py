"""The slow truth: every expert on its own for every token on its own, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.moe import GatedExperts, GptExperts, Routing


def expert_output(experts: nn.Module, number: int, row: Tensor) -> Tensor:
    """Expert `number` on one row [M]."""
    if isinstance(experts, GatedExperts):
        gate, up = (row @ experts.gate_up[number]).chunk(2)
        return (experts.activation(gate) * up) @ experts.down[number]
    assert isinstance(experts, GptExperts)
    inner = row @ experts.up[number]
    if experts.up_bias is not None:
        inner = inner + experts.up_bias[number]
    out = experts.activation(inner) @ experts.down[number]
    return out if experts.down_bias is None else out + experts.down_bias[number]


def layer_output(experts: nn.Module, x: Tensor, routing: Routing) -> Tensor:
    """What a layer must give for tokens x [n, M]."""
    rows = [torch.zeros_like(x[0]) for _ in x]
    entries = zip(routing.tokens.tolist(), routing.experts.tolist(), routing.weights, strict=True)
    for token, expert, weight in entries:
        rows[token] = rows[token] + weight * expert_output(experts, expert, x[token])
    return torch.stack(rows) if rows else x.clone()
