"""Experts that processes cannot share evenly: the last processes have fewer, or none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.cost.comm.rates import Line
from laconic.cost.moe import MoERates
from laconic.errors import ConfigError
from laconic.formats.shards import local_part
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.huggingface import Parallelized, load_sharded, parallelize, save_sharded
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.placement.migration import ExpertMover
from laconic.moe.tuning.autotune import autotune
from tests.activations.models import make_ids
from tests.distributed.test_moe_huggingface import (
    assert_gradients_are_means,
    assert_steps_are_alike,
    average_gradients,
    close,
    loss_on,
    tiny,
    whole,
)
from tests.moe.worlds import run_world


def model_of(num_experts: int, family: str = "mixtral") -> nn.Module:
    return tiny(family, num_local_experts=num_experts)


def part_of(ids: Tensor) -> Tensor:
    """This process's part of a batch."""
    return ids.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else ids


def held(done: Parallelized) -> set[int]:
    return {len(local_part(parameter)) for parameter in done.experts()}


def compute_what_one_process_does(
    num_experts: int,
    ep: int,
    shares: list[int],
    families: Sequence[str] = ("mixtral",),
    shard: bool = False,
    **options: Any,
) -> None:
    for family in families:
        reference, model = model_of(num_experts, family), model_of(num_experts, family)
        grid = Grid(ep=ep)
        done = parallelize(model, grid, **options)
        assert held(done) == {shares[grid.ep.rank()]}
        assert f"{num_experts} experts ({shares[grid.ep.rank()]} here)" in str(done)
        if shard:
            done.fully_shard(model.model.layers)
        ids = part_of(make_ids(12, 8, 1))
        expected, got = (each(input_ids=ids, labels=ids, use_cache=False) for each in (reference, model))
        assert close(got.logits, expected.logits), family
        expected.loss.backward()
        got.loss.backward()
        if not shard:
            done.reduce_gradients()
        assert_steps_are_alike(reference, model, done)


def all_dispatchers_and_schedules(num_experts: int, ep: int, shares: list[int]) -> None:
    compute_what_one_process_does(num_experts, ep, shares, ("mixtral", "gpt_oss"))
    levels = lambda grid: HierarchicalDispatcher(grid.levels)  # noqa: E731
    compute_what_one_process_does(num_experts, ep, shares, dispatcher=levels)
    compute_what_one_process_does(num_experts, ep, shares, schedule=ChunkedSchedule(3, 2), dispatcher=levels)


def under_ddp(num_experts: int, ep: int) -> None:
    reference, model, ids = model_of(num_experts), model_of(num_experts), part_of(make_ids(12, 8, 1))
    loss_on(reference, ids).backward()
    average_gradients(reference)
    parallelize(model, Grid(ep=ep))
    wrapped = DistributedDataParallel(model)
    loss_on(wrapped, ids).backward()
    assert_gradients_are_means(reference, model)


def files_stay(folder: Path, num_experts: int, ep: int) -> None:
    model = model_of(num_experts)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / f"whole-{ep}")
    parallelize(model, Grid(ep=ep))
    model.save_pretrained(folder / f"spread-{ep}")
    for path in (folder / f"whole-{ep}").iterdir() if dist.get_rank() == 0 else ():
        assert path.read_bytes() == (folder / f"spread-{ep}" / path.name).read_bytes(), path.name


def experts_change_places(num_experts: int) -> None:
    model, reference = model_of(num_experts), model_of(num_experts)
    grid = Grid()
    done = parallelize(model, grid, movable=True)
    optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    mover = ExpertMover([*done.layers.values()], grid.ep, [optimizer])
    for step in range(2):
        loss_on(reference, make_ids(6, 8, step)).backward()
        other.step()
        other.zero_grad()
        loss_on(model, part_of(make_ids(6, 8, step))).backward()
        done.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        assert mover.swap([(step, num_experts - 1)] * len(done.layers)).num_experts == 2 * len(done.layers)
    with mover.logical_order():
        for name, tensor in model.state_dict().items():
            assert close(whole(tensor), reference.state_dict()[name], 1e-6), name


def start(num_experts: int) -> tuple[Parallelized, torch.optim.Optimizer]:
    model = model_of(num_experts)
    done = parallelize(model, Grid() if dist.is_initialized() else None)
    return done, torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)


def train(done: Parallelized, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_on(done.model, part_of(make_ids(12, 8, step))).backward()
    done.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()


def go_on(folder: Path, num_experts: int, step: int) -> None:
    done, optimizer = start(num_experts)
    load_sharded(folder / f"{step - 1}", done.model, optimizer)
    train(done, optimizer, step)
    save_sharded(folder / f"{step}", done.model, optimizer)


def chain(folder: Path, num_experts: int, worlds: list[int]) -> None:
    done, optimizer = start(num_experts)
    train(done, optimizer, 0)
    save_sharded(folder / "0", done.model, optimizer)
    for step, world in enumerate(worlds, 1):
        (folder / f"world-{step}").mkdir()
        run_world([partial(go_on, folder, num_experts, step)], world, folder / f"world-{step}")
        train(done, optimizer, step)
    last, again = start(num_experts)
    load_sharded(folder / f"{len(worlds)}", last.model, again)
    for (name, got), expected in zip(last.model.named_parameters(), done.model.parameters(), strict=True):
        assert close(got.detach(), expected.detach(), 1e-6), name
        assert all(close(again.state[got][key], optimizer.state[expected][key], 1e-6) for key in again.state[got])


@pytest.mark.ci
def test_five_experts_over_two(tmp_path: Path) -> None:
    scenarios = [
        partial(all_dispatchers_and_schedules, 5, 2, [3, 2]),
        partial(under_ddp, 5, 2),
        partial(files_stay, tmp_path, 5, 2),
        partial(experts_change_places, 5),
        prices_need_even_shares,
    ]
    run_world(scenarios, 2, tmp_path)


@pytest.mark.ci
def test_a_process_without_experts(tmp_path: Path) -> None:
    """Four experts over three processes: 2, 2 and none."""
    scenarios = [
        partial(compute_what_one_process_does, 4, 3, [2, 2, 0], ("mixtral",)),
        partial(files_stay, tmp_path, 4, 3),
        partial(experts_change_places, 4),
    ]
    run_world(scenarios, 3, tmp_path)


@pytest.mark.ci
def test_every_schedule_with_a_process_without_experts(tmp_path: Path) -> None:
    run_world([partial(all_dispatchers_and_schedules, 4, 3, [2, 2, 0])], 3, tmp_path)


@pytest.mark.ci
def test_checkpoints_go_to_other_worlds(tmp_path: Path) -> None:
    chain(tmp_path, 5, [2, 3])


def prices_need_even_shares() -> None:
    done = parallelize(model_of(5), Grid())
    lines = dict.fromkeys(("all_to_all", "send"), Line(0.0, 1e-3))
    rates = MoERates.of_lines({kind: lines for kind in ("all", "across", "node")}, Line(0.0, 0.0))
    with pytest.raises(ConfigError, match="num_experts is 5, but it must be a multiple of "):
        autotune(done, example=make_ids(1, 8, 0), rates=rates, num_benchmarked=0)


def replicas_of_uneven_experts() -> None:
    compute_what_one_process_does(5, 2, [3, 2], shard=True)
    under_ddp(5, 2)


@pytest.mark.slow
def test_two_replicas_of_five_experts_over_two(tmp_path: Path) -> None:
    run_world([replicas_of_uneven_experts], 4, tmp_path)
