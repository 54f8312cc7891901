"""Dense gradients in windows of the backward, on real processes: averaged as if at the end, when the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import Blockwise, Raw
from laconic.errors import ModelError, ScheduleError
from laconic.formats import BlockFormat
from laconic.moe import ChunkedSchedule, FlatDispatcher, GatedExperts, Grid, MoELayer, SoftmaxGate
from laconic.moe.pipeline.grad_reduce import DenseGradients, Sent, mean_over
from laconic.schedule.moe_gradients import BackwardPart, GradientPlan, ReductionSlot, fill_slots
from laconic.schedule.moe_pipeline import GRADIENTS, ChunkTime, LayerTimes
from tests.moe.worlds import run_world

DIM = 16
RAW = Raw()


class Line:
    alpha_seconds = 1e-4
    seconds_per_byte = 1e-6


class Block(nn.Module):
    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))
        gate, experts = SoftmaxGate(2 * grid.layout.ep, DIM, 2), GatedExperts(2, DIM, 8)
        self.moe = MoELayer(gate, experts, dispatcher=FlatDispatcher(grid.ep, codec=RAW))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        out: Tensor = x + self.moe(x)
        return out


def model_of(grid: Grid) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[Block(grid) for _ in range(3)])


def dense(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".experts." not in name}


def parts_of(model: nn.Sequential) -> list[BackwardPart]:
    """Backward goes through block 2's layer, its dense part, block 1's layer and so on."""
    times = LayerTimes(ChunkTime(1e-4, 1e-3), ChunkTime(1e-4, 4e-3), ChunkTime(1e-4, 1e-3))
    parts = []
    for number in (2, 1, 0):
        block = model[number]
        nbytes = sum(p.nbytes for module in (block.moe.gate, block.dense) for p in module.parameters())
        parts.append(BackwardPart(f"moe {number}", 0.0, times))
        parts.append(BackwardPart(f"dense {number}", float(nbytes), None, 2e-3))
    return parts


def plan_of(model: nn.Sequential) -> GradientPlan:
    return fill_slots(parts_of(model), Line(), [2])


def scheduled(model: nn.Sequential, gradients: DenseGradients) -> None:
    for number, block in enumerate(model):
        block.moe.schedule = ChunkedSchedule(1, 2, gradients=gradients, part=f"moe {number}")


def batch() -> Tensor:
    torch.manual_seed(10 + dist.get_rank())
    return torch.randn(9 + dist.get_rank(), DIM)


def truth(grid: Grid) -> dict[str, Tensor]:
    """All gradients averaged after backward."""
    model = model_of(grid)
    model(batch()).pow(2).mean().backward()
    grads = {}
    for name, parameter in dense(model).items():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=grid.dp)
        grads[name] = parameter.grad / grid.layout.dp
    return grads


def assert_averaged(model: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, parameter in dense(model).items():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def gradients_are_averaged_in_the_windows_of_the_plan() -> None:
    grid = Grid()
    expected, model = truth(grid), model_of(grid)
    plan = plan_of(model)
    kinds = [slot.degree for slot in plan.slots if slot.nbytes]
    assert None in kinds, "a dense part reduces"
    assert 2 in kinds, "a mixture layer reduces"
    gradients = DenseGradients(dense(model).values(), mean_over(grid.dp, codec=RAW), plan)
    scheduled(model, gradients)
    for _ in range(2):
        model.zero_grad()
        model(batch()).pow(2).mean().backward()
        gradients.finish()
        assert_averaged(model, expected)
        planned = {slot.part: slot.nbytes for slot in plan.slots if slot.nbytes}
        reduced = {one.slot: one.nbytes for one in gradients.sent}
        # What is there is sent in whole elements, and never more than planned so far.
        for part, nbytes in planned.items():
            assert nbytes - 8 <= reduced[part] <= nbytes, (part, planned, reduced)
        assert sum(reduced.values()) == sum(p.nbytes for p in dense(model).values())
    for block, name in zip(model, ("moe 0", "moe 1"), strict=False):
        execution = block.moe.schedule.executions["backward"]
        assert (GRADIENTS in execution.plan) == (name in reduced)
        if GRADIENTS in execution.plan:
            spans = execution.timeline.spans
            assert spans["dispatch 1"].end_seconds <= spans[GRADIENTS].start_seconds
            assert spans[GRADIENTS].end_seconds <= spans["combine 0"].start_seconds


def without_a_plan_every_window_takes_what_waits() -> None:
    grid = Grid()
    expected, model = truth(grid), model_of(grid)
    gradients = DenseGradients(dense(model).values(), mean_over(grid.dp, codec=RAW))
    scheduled(model, gradients)
    model(batch()).pow(2).mean().backward()
    gradients.finish()
    assert_averaged(model, expected)
    assert [one.slot for one in gradients.sent] == ["moe 1", "moe 0", None]


def few_bits_travel_where_asked() -> None:
    grid = Grid()
    expected, model = truth(grid), model_of(grid)
    reduce = mean_over(grid.dp, codec=Blockwise(BlockFormat("int8")))
    gradients = DenseGradients(dense(model).values(), reduce)
    scheduled(model, gradients)
    model(batch()).pow(2).mean().backward()
    gradients.finish()
    exact = torch.cat([expected[name].flatten() for name in dense(model)])
    found = torch.cat([p.grad.flatten() for p in dense(model).values() if p.grad is not None])
    assert 0 < (found - exact).norm() / exact.norm() < 0.03


def micro_batches_accumulate_and_missing_gradients_are_zero() -> None:
    grid = Grid()
    expected, model = truth(grid), model_of(grid)
    unused = nn.Parameter(torch.zeros(3))
    gradients = DenseGradients([*dense(model).values(), unused], mean_over(grid.dp, codec=RAW))
    scheduled(model, gradients)
    with gradients.no_sync():
        (model(batch()).pow(2).mean() / 2).backward()
    assert gradients.sent == []
    (model(batch()).pow(2).mean() / 2).backward()
    with pytest.raises(ScheduleError, match="second gradient"):
        gradients._arrived(model[0].dense[0].weight)
    gradients.finish()
    assert_averaged(model, expected)
    assert torch.equal(unused.grad, torch.zeros(3))  # type: ignore[arg-type]


def what_is_deferred_runs_whole_where_it_fits() -> None:
    """Such as reductions of others: in a window with room for it, in order with the rest."""
    grid = Grid()
    parameter = nn.Parameter(torch.zeros(4))
    slots = [ReductionSlot("moe 1", 1, 8.0, 0.0, 0.0), ReductionSlot("moe 0", 1, 100.0, 0.0, 0.0)]
    plan = GradientPlan(tuple(slots), 0.0, 0.0, ())
    gradients = DenseGradients([parameter], mean_over(grid.dp, codec=RAW), plan)
    values = torch.full((3,), float(dist.get_rank()))
    gradients.defer(12, lambda: dist.all_reduce(values, group=grid.dp))
    (parameter.sum() * (1.0 + dist.get_rank())).backward()
    assert gradients.slot("moe 1") is None, "8 bytes are too few"
    action = gradients.slot("moe 0")
    assert action is not None
    action()
    gradients.finish()
    assert gradients.sent == [Sent("moe 0", 12 + 16)]
    world = dist.get_world_size()
    assert values.tolist() == [sum(range(world))] * 3
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [(1 + world) / 2] * 4
    with pytest.raises(ScheduleError, match="'moe 7'"):
        gradients.slot("moe 7")


SCENARIOS: list[Callable[[], None]] = [
    gradients_are_averaged_in_the_windows_of_the_plan,
    without_a_plan_every_window_takes_what_waits,
    few_bits_travel_where_asked,
    micro_batches_accumulate_and_missing_gradients_are_zero,
    what_is_deferred_runs_whole_where_it_fits,
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dense_gradients_travel_in_windows(world: int, tmp_path: Path) -> None:
    run_world(SCENARIOS, world, tmp_path)


def test_there_must_be_something_to_reduce() -> None:
    with pytest.raises(ModelError, match="0 parameters need gradients, and reduce is not None"):
        DenseGradients([], lambda values: None)
