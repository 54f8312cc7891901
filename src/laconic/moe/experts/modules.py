"""Experts: feed-forward networks of one rank, multiplied by grouped matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import RoutingError
from laconic.moe.experts.grouped_mm import expert_by_expert, grouped_mm, runs_expert_by_expert

Activation = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """Experts of one rank. Parameters that begin with the dimension of the experts can move between ranks."""

    num_experts: int
    """Experts on this rank."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return outputs [q, M] of rows [q, M] sorted by expert; counts, int64 [num_experts], sum to q."""
        raise NotImplementedError


class GptExperts(Experts):
    """Experts of two products: activation(x up + up_bias) down + down_bias.

    Parameters: up [E, M, H], down [E, H, M]; with `bias` also up_bias [E, H] and down_bias [E, M].
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.gelu,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts=num_experts, model_dim=model_dim, hidden_dim=hidden_dim)
        self.num_experts, self.model_dim, self.hidden_dim = num_experts, model_dim, hidden_dim
        self.activation = activation
        self.up = nn.Parameter(torch.empty(num_experts, model_dim, hidden_dim, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim, device=device, dtype=dtype))
        self.up_bias = nn.Parameter(torch.empty(num_experts, hidden_dim, device=device, dtype=dtype)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, model_dim, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as nn.Linear does: uniform within 1 / sqrt(inputs)."""
        _draw(self.up, self.model_dim)
        _draw(self.down, self.hidden_dim)
        if self.up_bias is not None and self.down_bias is not None:
            _draw(self.up_bias, self.model_dim)
            _draw(self.down_bias, self.hidden_dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.up_bias is None and runs_expert_by_expert(rows, self.num_experts):
            return expert_by_expert(rows, counts, lambda part, e: self.activation(part @ self.up[e]), self.down)
        inner = _biased(grouped_mm(rows, self.up, counts), self.up_bias, counts)
        return _biased(grouped_mm(self.activation(inner), self.down, counts), self.down_bias, counts)

    def extra_repr(self) -> str:
        """Show num_experts, model_dim and hidden_dim."""
        return f"num_experts={self.num_experts}, model_dim={self.model_dim}, hidden_dim={self.hidden_dim}"


class GatedExperts(Experts):
    """Experts of three products (SwiGLU with the default activation): (activation(x gate) * (x up)) down.

    Parameters: gate_up [E, M, 2 H], columns of the gate first, so that both are one product; down [E, H, M].
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.silu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_experts=num_experts, model_dim=model_dim, hidden_dim=hidden_dim)
        self.num_experts, self.model_dim, self.hidden_dim = num_experts, model_dim, hidden_dim
        self.activation = activation
        self.gate_up = nn.Parameter(torch.empty(num_experts, model_dim, 2 * hidden_dim, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as nn.Linear does: uniform within 1 / sqrt(inputs)."""
        _draw(self.gate_up, self.model_dim)
        _draw(self.down, self.hidden_dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        if runs_expert_by_expert(rows, self.num_experts):
            return expert_by_expert(rows, counts, lambda part, e: self._gated(part @ self.gate_up[e]), self.down)
        return grouped_mm(self._gated(grouped_mm(rows, self.gate_up, counts)), self.down, counts)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

    def extra_repr(self) -> str:
        """Show num_experts, model_dim and hidden_dim."""
        return f"num_experts={self.num_experts}, model_dim={self.model_dim}, hidden_dim={self.hidden_dim}"


def _biased(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    if bias is None:
        return rows
    return rows + bias.to(rows.dtype).repeat_interleave(counts, dim=0, output_size=rows.shape[0])


def _draw(parameter: Tensor, fan_in: int) -> None:
    nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise RoutingError(f"{name} = {value} of experts must be at least 1")
