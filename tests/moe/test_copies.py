"""Copies of hot experts in training: which, and that nothing but the ranks of rows changes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import Raw
from laconic.errors import ConfigError
from laconic.moe import (
    ChunkedSchedule,
    ExpertBalancer,
    ExpertMover,
    Grid,
    HierarchicalDispatcher,
    MoELayer,
    copy_hot_experts,
    expert_shard,
    make_dispatcher,
    moe_layers,
    parallelize,
    reduce_gradients,
)
from laconic.moe.huggingface import load_sharded, save_sharded
from laconic.moe.placement.expert_map import Placement
from laconic.moe.placement.search import hot_copies
from tests.activations.models import make_ids
from tests.distributed.test_moe_huggingface import loss_on, tiny
from tests.distributed.test_moe_moves import PAYING
from tests.moe.test_replicas import EXPERTS, batches, make_model
from tests.moe.worlds import run_world

STEPS = 3


def test_the_busiest_rank_is_relieved_by_the_fewest_copies() -> None:
    # Half of expert 0's rows go to rank 1, half of expert 2's to rank 0, and further copies would gain nothing.
    assert hot_copies([8, 0, 2, 0], [0, 0, 1, 1], 2, 1) == (((0, 1), (2, 0)), 1.6, 1.0)
    assert hot_copies([8, 0, 2, 0], [0, 0, 1, 1], 2, 2) == (((0, 1), (2, 0)), 1.6, 1.0)
    assert hot_copies([8, 0, 2, 0], [0, 0, 1, 1], 2, 0) == ((), 1.6, 1.6)
    assert hot_copies([3, 3, 3, 3], [0, 0, 1, 1], 2, 2) == ((), 1.0, 1.0)
    assert hot_copies([0, 0], [0, 1], 2, 1) == ((), 0.0, 0.0)
    assert hot_copies([5, 1], [0, 0], 1, 1) == ((), 1.0, 1.0)
    copies, before, after = hot_copies([90, 10, 10, 10, 10, 10, 10, 10], [0, 0, 1, 1, 2, 2, 3, 3], 4, 1)
    assert (copies, before) == (((0, 1), (0, 2), (0, 3), (2, 0)), 2.5)
    assert after == pytest.approx(1.0625)


def spread(whole: nn.Module, grid: Grid, levels: bool) -> nn.Module:
    """This rank's part of a model of one process."""
    model = copy.deepcopy(whole)
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.experts = expert_shard(module.experts, grid)  # type: ignore[type-var]
            one = (
                HierarchicalDispatcher(grid.levels, codec=Raw())
                if levels
                else make_dispatcher(grid, "joint", codec=Raw())
            )
            module.dispatcher = one
    return model


def copies_have_their_experts_bits(layers: list[MoELayer], grid: Grid) -> int:
    """Compare what a forward fetches with what is in the homes; return how many copies there are."""
    number = 0
    for layer in layers:
        assert isinstance(layer.placement, Placement)
        if (copies := layer.placement.copies) is None:
            continue
        slots, rank = layer.placement.slots, grid.ep.rank()
        most = -(-len(slots) // grid.ep.size())
        here = [expert for expert, place in copies.copies if place == rank != int(slots[expert]) // most]
        here.sort(key=lambda expert: (int(slots[expert]) // most, expert))
        parts = [p.detach() for p in layer.experts.parameters()]
        told: list[Any] = [None] * grid.ep.size()
        dist.all_gather_object(told, parts, group=grid.ep)
        homes = [torch.cat([one[i] for one in told])[slots[here]] for i in range(len(parts))]
        for fetched, home in zip(copies.fetched(parts), homes, strict=True):
            assert torch.equal(fetched, home)
        number += len(copies.copies)
    return number


def loads(*hot: int) -> list[Tensor]:
    """One load for each layer, with a hot expert."""
    return [torch.ones(EXPERTS).index_fill(0, torch.tensor(one), 50.0) for one in hot]


def training_is_that_of_one_process(ep: int, esp: int, levels: bool = False) -> None:
    grid = Grid(1, ep, esp, levels=(ep,) if levels else ())
    whole = make_model()
    model = spread(whole, grid, levels)
    layers = [*moe_layers(model).values()]
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-2}
    ours = torch.optim.AdamW(model.parameters(), **options)
    theirs = torch.optim.AdamW(whole.parameters(), **options)
    mover = ExpertMover(layers, grid.ep, [ours], replicas=grid.edp)
    seen = []
    for step, rows in enumerate(batches(grid.layout.dp) * 2):
        if step in (1, 2, 4):
            found = copy_hot_experts(layers, grid, 1 + step % 2, loads=loads(step % 4, 3))
            assert all(one.copies and one.busiest_after < one.busiest_before for one in found)
        elif step == 3:
            mover.swap([(0, 3), (1, 2)])  # homes move below copies
        elif step == 5:
            copy_hot_experts(layers, grid, 0)
        loss = model(rows[grid.dp.rank()]).sin().sum()
        loss.backward()
        reduce_gradients(model, grid, codec=Raw())
        expected = torch.stack([whole(x).sin().sum() for x in rows])
        torch.testing.assert_close(loss, expected[grid.dp.rank()], rtol=0, atol=1e-10)
        expected.mean().backward()
        norm = clipped(model, layers, grid, 0.05)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.05), rtol=1e-10, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(copies_have_their_experts_bits(layers, grid))
    assert seen[0] == seen[5] == 0
    assert min(seen[1:5]) > 0
    with mover.logical_order():
        state = copy.deepcopy(model.state_dict())
    for name, value in spread(whole, grid, levels).state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


def clipped(model: nn.Module, layers: list[MoELayer], grid: Grid, most: float) -> Tensor:
    """Clip by the norm that counts each parameter once."""
    of_experts = [p.grad for layer in layers for p in layer.experts.parameters() if p.grad is not None]
    known = {id(p) for layer in layers for p in layer.experts.parameters()}
    dense = [p.grad for p in model.parameters() if id(p) not in known and p.grad is not None]
    square = torch.stack([grad.square().sum() for grad in of_experts]).sum()
    dist.all_reduce(square, group=grid.joint)
    norm = (square + torch.stack([grad.square().sum() for grad in dense]).sum()).sqrt()
    for grad in (*of_experts, *dense):
        grad.mul_((most / (norm + 1e-6)).clamp(max=1))
    return norm


def of_hugging_face(folder: Path, family: str, wrap: str, esp: int = 1, uneven: bool = False) -> None:
    """Accumulation, clipping, checkpointed layers, resuming and saving, with copies by measured loads."""
    num_experts = 5 if uneven else 4
    number = {"num_experts" if family == "qwen3_moe" else "num_local_experts": num_experts}
    world, folder = dist.get_world_size(), folder / f"{family}-{wrap}-{esp}-{uneven}"
    grid = Grid(1, world // esp, esp)

    def start() -> tuple[Any, Any, Any]:
        done = parallelize(tiny(family, **number), grid)
        model = DistributedDataParallel(done.model) if wrap == "ddp" else done.model
        if wrap == "checkpoint":
            done.model.train().gradient_checkpointing_enable()
        return done, model, torch.optim.AdamW(done.parameter_groups(), **options)

    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
    reference = tiny(family, **number)
    theirs = torch.optim.AdamW(reference.parameters(), **options)
    done, model, ours = start()
    for step in range(5):
        layers, ids = [*done.layers.values()], make_ids(4 * world, 6, step).chunk(2)
        if step in (1, 2, 4):
            measured = None if step == 1 else [torch.arange(num_experts)] * 2
            found = copy_hot_experts(layers, grid, 1 + step // 2, loads=measured)
            assert step == 1 or all(one.copies for one in found)
        if step == 2 and wrap != "ddp":
            with torch.inference_mode():
                found = done.model(input_ids=ids[0], use_cache=False).logits
                torch.testing.assert_close(
                    found, reference(input_ids=ids[0], use_cache=False).logits, rtol=0, atol=1e-10
                )
        if step == 3:  # resumed, from files that know nothing of copies
            save_sharded(str(folder), done.model, ours)
            done, model, ours = start()
            load_sharded(str(folder), done.model, ours)
            layers = [*done.layers.values()]
        for part in ids:
            loss_on(model, part.chunk(world)[dist.get_rank()]).backward()
            (sum(loss_on(reference, one) for one in part.chunk(world)) / world).backward()
        if wrap != "ddp":
            done.reduce_gradients()
        norm = done.clip_gradients(0.2)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.2), rtol=1e-10, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / "one")
    done.model.save_pretrained(folder / "all")
    dist.barrier()
    one, saved = (load_file(folder / kind / "model.safetensors") for kind in ("one", "all"))
    assert {*one} == {*saved}
    for name, value in one.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-10, msg=name)


def what_cannot_have_copies_is_refused() -> None:
    grid = Grid(ep=2)

    def layers(path: str = "joint", **options: Any) -> list[MoELayer]:
        done = parallelize(tiny("qwen3_moe"), grid, dispatcher=path, **options)
        return [*done.layers.values()]

    given = loads(0, 0)
    for wanted, message, arguments in (
        (layers(), "num_per_rank is -1, but it must be at least 0", {"num_per_rank": -1}),
        ([], "layers are empty", {}),
        (layers(), "layer 0 has not run yet, .* or give loads", {"loads": None}),
        (layers(), "loads are those of 1 layers, but there are 2", {"loads": given[:1]}),
        (layers(), "loads of layer 1 are .* must be 4 numbers from 0 on", {"loads": [given[0], -given[0]]}),
        (layers("s1"), "layer 0 has a S1Dispatcher, but copies of experts need a FlatDispatcher", {}),
        (layers(schedule=ChunkedSchedule(2, 2)), "layer 0 runs by a ChunkedSchedule, which knows no copies", {}),
        (layers(), "spread over 2 places, but the grid's ep is 1", {"grid": Grid(ep=1)}),
        (layers(), "mp is 2, but copies need ranks with tokens of their own", {"grid": Grid(mp=2, ep=2)}),
    ):
        with pytest.raises(ConfigError, match=message):
            copy_hot_experts(wanted, **{"grid": grid, "num_per_rank": 1, "loads": given, **arguments})
        assert all(getattr(layer.placement, "copies", None) is None for layer in wanted)
    # One rank's mistake is an error on all, not a wait.
    alone = given if grid.ep.rank() == 0 else [given[0], -given[0]]
    with pytest.raises(ConfigError, match="the loads of another rank" if alone is given else "loads of layer 1 are"):
        copy_hot_experts(layers(), grid, 1, loads=alone)
    done = parallelize(tiny("qwen3_moe").float(), grid)
    done.fully_shard(done.model.model.layers)
    with pytest.raises(ConfigError, match="FSDP2 shards the experts of layer 0, so no rank has whole ones to copy"):
        copy_hot_experts([*done.layers.values()], grid, 1, loads=given)
    wanted = layers()
    wanted[1].experts.register_buffer("scales", torch.ones(2))
    with pytest.raises(ConfigError, match=r"scales of layer 1 cannot be copied .* and no buffers; leave copies out"):
        copy_hot_experts(wanted, grid, 1, loads=given)
    wanted = layers()
    wanted[0].experts.adapters.append(object())
    with pytest.raises(ConfigError, match="the experts of layer 0 have adapters, which are of all experts"):
        copy_hot_experts(wanted, grid, 1, loads=given)
    levels = Grid(levels=(2,))
    done = parallelize(tiny("qwen3_moe"), levels, dispatcher=lambda grid: HierarchicalDispatcher(grid.levels))
    wanted = [*done.layers.values()]
    balancer = ExpertBalancer(ExpertMover(wanted, levels.ep), PAYING)
    copy_hot_experts(wanted, levels, 1, loads=given)
    loss_on(done.model.train(), make_ids(1, 6)).backward()
    with pytest.raises(ConfigError, match=r"layer 0 has copies of experts, .* copy_hot_experts\(layers, grid, 0\)"):
        balancer.step(0)
    # What a layer with copies becomes later.
    done = parallelize(tiny("qwen3_moe"), grid)
    wanted = [*done.layers.values()]
    copy_hot_experts(wanted, grid, 1, loads=given)
    wanted[0].schedule = ChunkedSchedule(2, 2)
    with pytest.raises(ConfigError, match="a layer with copies of experts runs by a ChunkedSchedule"):
        loss_on(done.model, make_ids(1, 6))


TWO = [partial(training_is_that_of_one_process, *layout) for layout in ((2, 1), (2, 1, True))]
FOUR = [partial(training_is_that_of_one_process, *layout) for layout in ((4, 1), (2, 1), (2, 2), (4, 1, True))]


@pytest.mark.ci
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_with_copies_is_that_of_one_process(world: int, tmp_path: Path) -> None:
    run_world(TWO if world == 2 else FOUR, world, tmp_path)


@pytest.mark.ci
def test_hugging_face_models_train_resume_and_save_with_copies(tmp_path: Path) -> None:
    wraps = ("", "ddp", "checkpoint")
    run_world([partial(of_hugging_face, tmp_path, "qwen3_moe", wrap) for wrap in wraps], 2, tmp_path)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("gpt_oss", "ddp", 2), ("qwen3_moe", "", 1, True)], id="both", marks=pytest.mark.ci),
        pytest.param([("gpt_oss", "", 1), ("mixtral", "ddp", 1)], id="more", marks=pytest.mark.slow),
    ],
)
def test_so_do_biases_shards_of_experts_and_uneven_ranks(cases: list[tuple[Any, ...]], tmp_path: Path) -> None:
    run_world([partial(of_hugging_face, tmp_path, *case) for case in cases], 4, tmp_path)


@pytest.mark.ci
def test_what_cannot_have_copies_is_refused(tmp_path: Path) -> None:
    run_world([what_cannot_have_copies_is_refused], 2, tmp_path)
