"""FSDP2's reduce-scatters in windows of the backward, on real processes: the same gradients, and when they travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from laconic.collectives.integrations.zip import zip_collectives
from laconic.errors import ModelError, ScheduleError
from laconic.gradients import quantize_reduction
from laconic.moe import DenseGradients, Grid, fully_shard_layers, reduce_in_slots
from laconic.schedule.moe_gradients import GradientPlan
from laconic.schedule.moe_pipeline import GRADIENTS
from tests.moe.test_windows import Block, batch, model_of, plan_of, scheduled
from tests.moe.worlds import run_world


def sharded(grid: Grid, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    """A unit for each dense part, and one with all gates, which are ready when all of the backward is."""
    model = model_of(grid)
    units = [block.dense for block in model if isinstance(block, Block)]
    fully_shard_layers(model, grid, units=units, mp_policy=policy or MixedPrecisionPolicy())
    return model


def as_it_is(model: nn.Sequential) -> None:
    pass


def quantized(model: nn.Sequential) -> None:
    for block in model:
        quantize_reduction(block.dense, min_nbytes=0)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Of all ranks' shards together."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            assert isinstance(parameter.grad, DTensor), name
            found[name] = parameter.grad.full_tensor()
    return found


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(batch()).pow(2).mean().backward()


def reductions_in_windows_make_the_same_gradients(
    reduced_by: Callable[[nn.Sequential], object], planned: bool, tolerance: float
) -> None:
    grid = Grid()
    plain, model = sharded(grid), sharded(grid)
    plan = plan_of(model_of(grid)) if planned else None
    for one in (plain, model):
        reduced_by(one)
    gradients = DenseGradients((), None, plan)
    scheduled(plain, DenseGradients((), None))
    scheduled(model, gradients)
    assert reduce_in_slots(model, gradients) == 4
    backward(plain)
    expected = gradients_of(plain)
    for _ in range(2):
        backward(model)
        gradients.finish()
        for name, grad in gradients_of(model).items():
            torch.testing.assert_close(grad, expected[name], rtol=tolerance, atol=tolerance * float(grad.abs().max()))
        assert_reduced_in_windows(model, gradients, plan)


def assert_reduced_in_windows(model: nn.Sequential, gradients: DenseGradients, plan: GradientPlan | None) -> None:
    """As many bytes as planned, between the last dispatch and the first combine."""
    sent = {one.slot: one.nbytes for one in gradients.sent}
    # FSDP2 pads each parameter to a multiple of its ranks.
    of_units = [sum(p.nbytes for p in block.dense.parameters()) for block in model]
    assert sum(sent.values()) >= sum(of_units)
    in_windows = [name for name in sent if name is not None and name.startswith("moe")]
    if plan is None:
        assert in_windows == ["moe 1", "moe 0"]
        assert sent["moe 1"] >= of_units[2]
        assert sent["moe 0"] >= of_units[1]
    else:
        budgets = {slot.part: slot.nbytes for slot in plan.slots}
        assert all(budgets[name] / 2 < sent[name] <= budgets[name] for name in in_windows)
    for name in in_windows:
        execution = model[int(name[4:])].moe.schedule.executions["backward"]
        spans = execution.timeline.spans
        assert spans["dispatch 1"].end_seconds <= spans[GRADIENTS].start_seconds < spans[GRADIENTS].end_seconds
        assert spans[GRADIENTS].end_seconds <= spans["combine 0"].start_seconds


def training_accumulates_without_reducing() -> None:
    grid = Grid()
    plain, model = sharded(grid), sharded(grid)
    gradients = DenseGradients((), None)
    reduce_in_slots(model, gradients)
    scheduled(model, gradients)
    for one in (plain, model):
        for last in (False, True):
            one.set_requires_gradient_sync(last)  # type: ignore[operator]
            (one(batch()).pow(2).mean() / 2).backward()
    gradients.finish()
    expected = gradients_of(plain)
    for name, grad in gradients_of(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ScheduleError, match="has gradients already"):
        model(batch()).sum().backward()


def what_looks_at_once_is_refused() -> None:
    grid = Grid()
    model = sharded(grid, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    reduce_in_slots(model, DenseGradients((), None))
    with pytest.raises(ScheduleError, match="reduce_dtype"):
        model(batch()).sum().backward()
    with pytest.raises(ModelError, match="already"):
        reduce_in_slots(model, DenseGradients((), None))
    divided = sharded(grid)
    divided[1].dense.set_gradient_divide_factor(3.0)
    with pytest.raises(ModelError, match="divide factor 3"):
        reduce_in_slots(divided, DenseGradients((), None))
    hooked = sharded(grid)
    hooked[0].dense.set_all_reduce_hook(lambda shard: None)
    with pytest.raises(ModelError, match="all-reduce hook"):
        reduce_in_slots(hooked, DenseGradients((), None))


SCENARIOS: list[Callable[[], None]] = [
    *(partial(reductions_in_windows_make_the_same_gradients, as_it_is, planned, 1e-6) for planned in (False, True)),
    partial(reductions_in_windows_make_the_same_gradients, zip_collectives, False, 1e-6),
    partial(reductions_in_windows_make_the_same_gradients, quantized, True, 0.02),
    training_accumulates_without_reducing,
    what_looks_at_once_is_refused,
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_sharded_gradients_travel_in_windows(world: int, tmp_path: Path) -> None:
    run_world(SCENARIOS, world, tmp_path)
