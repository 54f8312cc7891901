"""Backward as a plan gives autograd's gradients; dense gradients are reduced in its windows."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import Raw
from laconic.errors import ConfigError
from laconic.moe import FlatDispatcher, GatedExperts, Grid, MoELayer, ShardedDispatcher, SoftmaxGate, thread_streams
from laconic.moe.overlapped import Overlapped, WindowedReduction
from tests.moe.parallel import assert_same_as_whole, make_whole, spread_over
from tests.moe.test_pipelined import DIM, EXPERTS, GATES, whole
from tests.moe.worlds import run_world


def results(layer: MoELayer, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("threads", [False, True])
def test_gradients_are_those_of_autograd(gate: str, threads: bool) -> None:
    plain = whole(gate)
    for num_tokens in (7, 2, 0):
        x = torch.randn(num_tokens, DIM, dtype=torch.float64)
        if gate == "expert choice" and not num_tokens:
            continue
        expected = results(plain, x)
        for degree in (1, 3, 5):
            layer = copy.deepcopy(plain)
            layer.schedule = Overlapped(degree, thread_streams() if threads else None)
            for one, other in zip(results(layer, x), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_experts_learn_where_nothing_before_them_does() -> None:
    layer = whole("top 2")
    layer.gate.requires_grad_(False)
    x = torch.randn(4, DIM, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).sum(), list(layer.experts.parameters()))
    layer.schedule = Overlapped(2)
    layer(x).sum().backward()
    for parameter, grad in zip(layer.experts.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_second_backward_is_refused() -> None:
    layer = whole("top 2")
    layer.schedule = Overlapped(2)
    loss = layer(torch.randn(4, DIM, dtype=torch.float64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_the_window_lies_between_gradients_out_and_back() -> None:
    plan = Overlapped(2, between=int).backward_plan
    wire = [task.name for task in plan.tasks if task.stream == "wire"]
    assert wire == ["dispatch 0", "dispatch 1", "gradients", "combine 0", "combine 1"]
    assert "gradients" not in Overlapped(2).backward_plan


class _Deep(nn.Module):
    """Dense and mixture layers in turn."""

    def __init__(self, mixtures: list[MoELayer]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(len(mixtures) + 1))
        self.mixtures = nn.ModuleList(mixtures)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense[0](x)
        for dense, mixture in zip(self.dense[1:], self.mixtures, strict=True):
            x = dense((x + mixture(x)).tanh())
        return x


def gradients_in_windows_over_two_ranks() -> None:
    """Three mixture layers over two ranks against all experts on each; dense gradients averaged in windows."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    plain = _Deep([MoELayer(SoftmaxGate(EXPERTS, DIM, 2), GatedExperts(EXPERTS, DIM, 8)).double() for _ in range(3)])
    spread = copy.deepcopy(plain)
    mine = slice(2 * rank, 2 * rank + 2)
    for number, layer in enumerate(spread.mixtures):
        assert isinstance(layer, MoELayer)
        whole_experts = layer.experts
        assert isinstance(whole_experts, GatedExperts)
        layer.experts = GatedExperts(EXPERTS // 2, DIM, 8, dtype=torch.float64)
        with torch.no_grad():
            layer.experts.gate_up.copy_(whole_experts.gate_up[mine])
            layer.experts.down.copy_(whole_experts.down[mine])
        layer.dispatcher = FlatDispatcher(dist.group.WORLD, codec=Raw())
        layer.schedule = Overlapped(1 + number, thread_streams())
    dense = [parameter for name, parameter in spread.named_parameters() if "experts" not in name]
    of_linear = 8 * (DIM * DIM + DIM)
    for nbytes in (0.0, float(of_linear), 1e9):
        reduction = WindowedReduction(dense, dist.group.WORLD, nbytes, codec=Raw())
        for layer in spread.mixtures:
            layer.schedule = Overlapped(layer.schedule.degree, layer.schedule.streams, between=reduction)
        for model in (plain, spread):
            model.zero_grad()
            x = torch.randn(3 + 4 * rank, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            model(x).pow(2).sum().backward()
        reduction.finish()
        reduction.remove()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, parameter in spread.named_parameters():
            grad = grads[name]
            assert grad is not None
            expected = grad[mine] if "experts" in name else grad / 2
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-11, atol=1e-12)
        sent = reduction.reduced_nbytes
        assert sum(sent.values()) == sum(8 * parameter.numel() for parameter in dense)
        if nbytes == 0:
            assert sent["windows"] == 0
        elif nbytes == of_linear:
            assert of_linear < sent["windows"] <= 3 * of_linear
        else:
            assert sent["end"] < sum(8 * parameter.numel() for parameter in dense) / 2


def ranks_without_tokens_and_shared_experts() -> None:
    """Over exchanges and over exchanges with gathers; nobody waits for a rank that has nothing."""
    for grid, num_tokens in ((Grid(), (0, 5)), (Grid(), (0,)), (Grid(1, 1, 2), (3, 1)), (Grid(1, 1, 2), (0, 4))):
        whole = make_whole(grid, num_tokens=num_tokens)
        for dispatcher in (
            FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=Raw()),
            ShardedDispatcher(grid.ep, grid.esp, codec=Raw()),
        ):
            layer = spread_over(grid, whole, dispatcher)
            layer.schedule = Overlapped(2, thread_streams())
            assert_same_as_whole(grid, whole, layer, losses=True)


def test_dense_gradients_are_reduced_in_the_windows_and_no_rank_is_waited_for(tmp_path: Path) -> None:
    run_world([gradients_in_windows_over_two_ranks, ranks_without_tokens_and_shared_experts], 2, tmp_path)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="nbytes_per_window is -1"):
        WindowedReduction([], None, -1)  # type: ignore[arg-type]
