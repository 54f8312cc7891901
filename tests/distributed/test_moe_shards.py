"""Hugging Face models inside MP groups (mp) and with experts that processes share (esp): FSMoE's and Parm's paths."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError, RoutingError
from laconic.formats.shards import local_part
from laconic.moe import HierarchicalDispatcher, S1Dispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.huggingface import Parallelized, load_sharded, parallelize, save_sharded
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline.schedule import ChunkedSchedule
from tests.activations.models import make_ids, make_model
from tests.distributed.test_moe_huggingface import assert_steps_are_alike, close, loss_on, tiny, whole
from tests.moe.worlds import run_world

PATHS = ["s1", "s2", "sharded", "baseline"]


def own_ids(grid: Grid, seed: int) -> torch.Tensor:
    """The tokens that the processes of an MP group have alike."""
    return make_ids(4, 6, seed).chunk(grid.layout.dp)[grid.dp.rank()]


def computes_what_one_process_does(
    family: str, mp: int, ep: int, esp: int, *, num_experts: int = 4, wrap: str = "", **options: Any
) -> None:
    name = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    reference, model = (tiny(family, **{name: num_experts}) for _ in range(2))
    grid = Grid(mp, ep, esp)
    done = parallelize(model, grid, **options)
    for parameter, one in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.shape == one.shape
        assert torch.equal(whole(parameter.detach()), one.detach())
    down = local_part(done.experts()[-1] if family != "gpt_oss" else done.experts()[2])
    assert down.numel() <= -(-num_experts // ep) * one_expert(reference) // esp
    if wrap == "fsdp":
        done.fully_shard(model.model.layers)
    ids = own_ids(grid, 1)
    wrapped = DistributedDataParallel(model, process_group=grid.dp) if wrap == "ddp" else model
    expected, got = (each(input_ids=ids, labels=ids, use_cache=False) for each in (reference, wrapped))
    assert close(got.logits, expected.logits)
    expected.loss.backward()
    got.loss.backward()
    if not wrap:
        done.reduce_gradients()
    assert_steps_are_alike(reference, model, done)


def one_expert(model: Any) -> int:
    """Values in the down projection of one expert."""
    number: int = model.model.layers[0].mlp.experts.down_proj[0].numel()
    return number


def all_paths(mp: int, ep: int, esp: int, families: tuple[str, ...] = ("mixtral",), **options: Any) -> None:
    for family in families:
        for path in PATHS:
            computes_what_one_process_does(family, mp, ep, esp, dispatcher=path, **options)


def files_stay(folder: Path, mp: int, ep: int, esp: int) -> None:
    for family in ("mixtral", "gpt_oss"):
        model = tiny(family)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / f"{family}-whole")
        parallelize(model, Grid(mp, ep, esp))
        model.save_pretrained(folder / f"{family}-spread")
        for path in (folder / f"{family}-whole").iterdir() if dist.get_rank() == 0 else ():
            assert path.read_bytes() == (folder / f"{family}-spread" / path.name).read_bytes(), path.name


def start(family: str, sizes: tuple[int, int, int] | None) -> tuple[Parallelized, torch.optim.Optimizer]:
    done = parallelize(tiny(family), Grid(*sizes) if sizes else None)
    return done, torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)


def train(done: Parallelized, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_on(done.model, own_ids(done.grid, step) if done.grid else make_ids(4, 6, step)).backward()
    done.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()


def go_on(folder: Path, family: str, sizes: tuple[int, int, int], shard: bool, step: int) -> None:
    done, optimizer = start(family, sizes)
    if shard:
        done.fully_shard(done.model.model.layers)
        optimizer = torch.optim.AdamW(done.parameter_groups(), lr=1e-2, eps=1e-3)
    load_sharded(folder / f"{step - 1}", done.model, optimizer)
    if shard:
        loss_on(done.model, own_ids(done.grid, step)).backward()
        optimizer.step()
    else:
        train(done, optimizer, step)
    save_sharded(folder / f"{step}", done.model, optimizer)


def chain(folder: Path, family: str, worlds: list[tuple[int, tuple[int, int, int], bool]]) -> None:
    done, optimizer = start(family, None)
    train(done, optimizer, 0)
    save_sharded(folder / "0", done.model, optimizer)
    for step, (world, sizes, shard) in enumerate(worlds, 1):
        (folder / f"world-{step}").mkdir()
        run_world([partial(go_on, folder, family, sizes, shard, step)], world, folder / f"world-{step}")
        train(done, optimizer, step)
    last, again = start(family, None)
    load_sharded(folder / f"{len(worlds)}", last.model, again)
    for (name, got), expected in zip(last.model.named_parameters(), done.model.parameters(), strict=True):
        assert close(got.detach(), expected.detach(), 1e-6), name
        assert all(close(again.state[got][key], optimizer.state[expected][key], 1e-6) for key in again.state[got])


def what_would_count_twice_is_refused() -> None:
    model = make_model("mixtral")
    for sizes, dispatcher, match in [
        ((2, 1, 1), "joint", "FlatDispatcher and mp is 2, but it would send the tokens"),
        ((2, 1, 2), lambda grid: HierarchicalDispatcher(grid.levels), "HierarchicalDispatcher and mp is 2"),
        ((1, 1, 2), lambda grid: HierarchicalDispatcher(grid.levels), "does not add up the parts of 2 shards"),
        ((1, 1, 2), lambda grid: FlatDispatcher(grid.ep), "FlatDispatcher and esp is 2"),
        ((2, 1, 2), lambda grid: S1Dispatcher(grid, FlatDispatcher(grid.ep)), "FlatDispatcher and esp is 2"),
        ((1, 2, 1), "s3", "path is 's3'"),
    ]:
        with pytest.raises(ConfigError, match=match):
            parallelize(model, Grid(*sizes), dispatcher=dispatcher)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dispatcher is 's1', but there is no mesh"):
        parallelize(model, dispatcher="s1")
    odd = make_model("mixtral", intermediate_size=161)
    with pytest.raises(ConfigError, match=r"esp is 2, but it must divide the hidden dimension of .*, which is 161"):
        parallelize(odd, Grid(1, 1, 2))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def tokens_of_one_group_that_differ_are_refused_on_all_processes() -> None:
    """Those of the other MP group would wait for their experts."""
    for path in PATHS:
        done = parallelize(tiny("mixtral"), Grid(2, 4), dispatcher=path)
        with pytest.raises(RoutingError, match=r"^the ranks \(2, 3\) of an MP group have other tokens, but"):
            done.model(make_ids(2, 6, max(1, dist.get_rank())))


@pytest.mark.ci
def test_two_processes_share_experts_or_tokens(tmp_path: Path) -> None:
    scenarios = [
        partial(all_paths, 2, 1, 2),
        partial(computes_what_one_process_does, "gpt_oss", 1, 1, 2),
        partial(computes_what_one_process_does, "gpt_oss", 2, 1, 2, dispatcher="baseline"),
        partial(computes_what_one_process_does, "qwen3_moe", 2, 2, 1, schedule=ChunkedSchedule(2)),
        partial(computes_what_one_process_does, "mixtral", 2, 1, 1),
        partial(computes_what_one_process_does, "mixtral", 2, 1, 1, wrap="ddp"),
        partial(files_stay, tmp_path, 1, 1, 2),
        what_would_count_twice_is_refused,
    ]
    run_world(scenarios, 2, tmp_path)


@pytest.mark.ci
def test_checkpoints_of_shards_go_to_other_worlds(tmp_path: Path) -> None:
    chain(tmp_path, "mixtral", [(2, (1, 1, 2), False), (2, (2, 2, 1), False)])


@pytest.mark.slow
def test_checkpoints_of_shards_and_replicas_go_to_other_worlds(tmp_path: Path) -> None:
    chain(tmp_path, "gpt_oss", [(4, (2, 2, 2), False), (4, (1, 1, 2), True), (2, (1, 1, 2), False)])


@pytest.mark.ci
def test_four_processes_refuse_other_tokens_together(tmp_path: Path) -> None:
    run_world([tokens_of_one_group_that_differ_are_refused_on_all_processes], 4, tmp_path)


@pytest.mark.slow
def test_four_processes_share_both(tmp_path: Path) -> None:
    scenarios = [
        partial(all_paths, 2, 2, 2, ("mixtral", "gpt_oss")),
        partial(all_paths, 2, 2, 2, num_experts=3, schedule=ChunkedSchedule(2)),
        *(
            partial(computes_what_one_process_does, "mixtral", *sizes, wrap=wrap)
            for wrap in ("fsdp", "ddp")
            for sizes in ((1, 1, 2), (2, 2, 1), (2, 1, 2))
        ),
        partial(computes_what_one_process_does, "mixtral", 2, 2, 2, wrap="fsdp"),
        partial(files_stay, tmp_path, 2, 2, 2),
    ]
    run_world(scenarios, 4, tmp_path)
