"""Layers of experts in chunks on streams, and dense gradients reduced on the link's stream."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import Raw
from laconic.moe import ChunkedSchedule, FlatDispatcher, GatedExperts, MoELayer, SoftmaxGate
from laconic.moe.pipeline.grad_reduce import DenseGradients, mean_over
from laconic.schedule.moe_gradients import GradientPlan, ReductionSlot
from tests.streams.cuda import CUDA, cuda
from tests.streams.echo import echo

DIM = 8


def dense_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)).to(CUDA)


def rows(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(5, DIM).to(CUDA)


def stepped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()


def test_gradients_that_finish_reduces() -> None:
    with cuda() as device, echo() as group:
        model = dense_model()
        gradients = DenseGradients(model.parameters(), mean_over(group, codec=Raw()))
        for step in range(3):
            model(rows(step)).pow(2).mean().backward()
            gradients.finish()
            stepped(model)
    device.check()


def test_gradients_that_are_not_contiguous() -> None:
    with cuda() as device, echo() as group:
        weight = nn.Parameter(torch.randn(3, DIM, device=CUDA).t())  # autograd lays its gradient out alike
        gradients = DenseGradients([weight], mean_over(group, codec=Raw()))
        for _ in range(2):
            weight.square().sum().backward()
            gradients.finish()
            weight.data.sub_(weight.grad, alpha=0.1)
            weight.grad = None
    device.check()


def test_gradients_of_a_side_stream() -> None:
    """Backward runs on the stream of forward, and `finish` is called on another one that waits for neither."""
    with cuda() as device, echo() as group:
        model = dense_model()
        side = torch.cuda.Stream()
        gradients = DenseGradients(model.parameters(), mean_over(group, codec=Raw()))
        for step in range(2):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(rows(step)).pow(2).mean().backward()
            gradients.finish()
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                stepped(model)
            torch.cuda.current_stream().wait_stream(side)
    device.check()


def test_gradients_planned_behind_a_part() -> None:
    with cuda() as device, echo() as group:
        model = dense_model()
        nbytes = DIM * DIM * 4.0
        plan = GradientPlan(
            (ReductionSlot("moe", 2, 0.0, 0.0, 0.0), ReductionSlot("dense", None, nbytes, 0.0, 0.0)), 0.0, 0.0, ()
        )
        gradients = DenseGradients(model.parameters(), mean_over(group, codec=Raw()), plan)
        for step in range(2):
            model(rows(step)).pow(2).mean().backward()
            gradients.after("moe")
            gradients.finish()
            stepped(model)
    device.check()


def layer_of(group: dist.ProcessGroup, schedule: ChunkedSchedule | None) -> MoELayer:
    torch.manual_seed(2)
    gate, experts = SoftmaxGate(2 * group.size(), DIM, 2), GatedExperts(2, DIM, 4)
    layer = MoELayer(gate, experts, dispatcher=FlatDispatcher(group, codec=Raw())).to(CUDA)
    layer.schedule = schedule
    return layer


@pytest.mark.parametrize(
    ("forward", "backward"),
    [pytest.param(1, 1, marks=pytest.mark.ci), pytest.param(2, 2, marks=pytest.mark.ci), (3, 2)],
)
def test_a_layer_in_chunks(forward: int, backward: int) -> None:
    with cuda() as device, echo() as group:
        layer = layer_of(group, ChunkedSchedule(forward, backward))
        for step in range(2):
            x = rows(step).requires_grad_()
            layer(x).pow(2).mean().backward()
            stepped(layer)
    device.check()


def test_a_layer_in_chunks_with_gradients_in_its_slot() -> None:
    with cuda() as device, echo() as group:
        dense = dense_model()
        layer = layer_of(group, None)
        gradients = DenseGradients(dense.parameters(), mean_over(group, codec=Raw()))
        layer.schedule = ChunkedSchedule(2, 2, gradients=gradients)
        model = nn.Sequential(layer, dense)
        for step in range(2):
            model(rows(step).requires_grad_()).pow(2).mean().backward()
            gradients.finish()
            stepped(model)
    device.check()


@pytest.mark.ci
def test_gradients_that_a_plan_leaves_for_the_end() -> None:
    """They were ready before the layer's backward, whose results the caller still reads when they are reduced."""
    with cuda() as device, echo() as group:
        dense = dense_model()
        plan = GradientPlan((ReductionSlot("moe", 2, 0.0, 0.0, 0.0),), 0.0, 0.0, ())
        gradients = DenseGradients(dense.parameters(), mean_over(group, codec=Raw()), plan)
        layer = layer_of(group, ChunkedSchedule(2, 2, gradients=gradients, part="moe"))
        model = nn.Sequential(layer, dense)
        for step in range(2):
            model(rows(step).requires_grad_()).pow(2).mean().backward()
            gradients.finish()
            stepped(model)
    device.check()
