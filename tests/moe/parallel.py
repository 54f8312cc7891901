"""What a layer spread over a grid must give: the slow truth of the whole, computed on every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.moe import Dispatcher, Gate, GatedExperts, GptExperts, MoELayer, Routing, SoftmaxGate
from laconic.moe.experts.shard import expert_shard
from laconic.moe.parallel.grid import Grid
from tests.moe.reference import layer_output

DIM, HIDDEN, TOP_K = 6, 8, 2


@dataclass
class Whole:
    """A layer as if there were one process: its gate, all experts, the tokens of every dp rank and their gradients."""

    gate: Gate
    experts: GptExperts | GatedExperts
    tokens: list[Tensor]
    grads: list[Tensor]

    def routing(self, x: Tensor) -> Routing:
        routing = self.gate(x)
        assert isinstance(routing, Routing)
        return routing


def make_whole(
    grid: Grid,
    kind: str = "gated",
    num_tokens: Sequence[int] = (5, 3, 4, 7),
    num_experts: int | None = None,
    gate: Gate | None = None,
) -> Whole:
    """The same on all ranks; dp rank i has num_tokens[i % len(num_tokens)] tokens."""
    torch.manual_seed(7)
    number = num_experts or 2 * grid.layout.ep
    if gate is None:
        gate = SoftmaxGate(number, DIM, TOP_K, balance_coef=0.3, z_coef=0.1).double()
    experts = (
        GatedExperts(number, DIM, HIDDEN, dtype=torch.float64)
        if kind == "gated"
        else GptExperts(number, DIM, HIDDEN, bias=True, dtype=torch.float64)
    )
    sizes = [num_tokens[place % len(num_tokens)] for place in range(grid.layout.dp)]
    tokens = [torch.randn(size, DIM, dtype=torch.float64) for size in sizes]
    return Whole(gate, experts, tokens, [torch.randn_like(x) for x in tokens])


def spread_over(grid: Grid, whole: Whole, dispatcher: Dispatcher) -> MoELayer:
    return MoELayer(copy.deepcopy(whole.gate), expert_shard(whole.experts, grid), dispatcher=dispatcher)


def assert_same_as_whole(grid: Grid, whole: Whole, layer: MoELayer, *, losses: bool = False) -> None:
    """Outputs and all gradients in float64; with `losses` the gate's auxiliary losses take part."""
    place = grid.dp.rank()
    x = whole.tokens[place].clone().requires_grad_()
    out = layer(x)
    truth_of_all, objective = [], x.new_zeros(())
    inputs = [tokens.clone().requires_grad_() for tokens in whole.tokens]
    for tokens, grad in zip(inputs, whole.grads, strict=True):
        routing = whole.routing(tokens)
        truth_of_all.append(layer_output(whole.experts, tokens, routing))
        objective = objective + (truth_of_all[-1] * grad).sum()
        if losses:
            objective = objective + sum(routing.losses.values(), x.new_zeros(()))
    close(out, truth_of_all[place], "out")
    loss = (out * whole.grads[place]).sum()
    if losses:
        loss = loss + sum(layer.losses.values(), x.new_zeros(()))
    loss.backward()

    everything = [*inputs, *whole.gate.parameters(), *whole.experts.parameters()]
    found = torch.autograd.grad(objective, everything, allow_unused=True, materialize_grads=True)
    close(x.grad, found[place], "input")
    gate_grads = found[len(inputs) :]
    for (name, parameter), expected in zip(layer.gate.named_parameters(), gate_grads, strict=False):
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad, group=grid.dp)
        close(parameter.grad, expected, f"gate {name}")
    of_experts = copy.deepcopy(whole.experts)
    with torch.no_grad():
        for parameter, grad in zip(of_experts.parameters(), found[-len(list(of_experts.parameters())) :], strict=True):
            parameter.copy_(grad)
    expected_grads = dict(expert_shard(of_experts, grid).named_parameters())
    for name, parameter in layer.experts.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad, group=grid.edp)
        close(grad, expected_grads[name], f"experts {name}")


def close(found: Tensor | None, expected: Tensor, what: str) -> None:
    assert found is not None, what
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11, msg=lambda text: f"{what}: {text}")
