"""Replicas that differ by one bit are found and named, in runs and in loops of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import ConfigError, CorruptionError
from laconic.formats.digest import digest
from laconic.formats.shards import local_part
from laconic.train.distributed.world import World
from laconic.train.report.run_dir import checkpoint_names
from laconic.train.trainer import Trainer
from tests.distributed.pair import FSDP, Pair
from tests.distributed.processes import run_joined
from tests.distributed.spread import EP, QWEN
from tests.train.runs import tiny_config

PIPELINE = {"pipeline.stages": 2}


def flip(tensor: Tensor, place: int = 0) -> None:
    """Flip the lowest bit of one byte."""
    local_part(tensor.detach()).view(-1).view(torch.uint8)[place] ^= 1


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(CorruptionError) as refused:
        laconic.verify_replicas(*arguments, **options)
    return str(refused.value)


def stepped(model: nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return optimizer


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 32))


def four_ranks(world: World) -> None:
    rank = world.rank
    # 1. Weights, moments and scales of DDP.
    for kind, states in ((torch.optim.AdamW, 3), (laconic.AdamW8bit, 3)):
        model = DistributedDataParallel(layers())
        optimizer = stepped(model, kind)
        report = laconic.verify_replicas(model, optimizer)
        assert not report.uncovered
        assert report.num_tensors >= 6 * states
        weight = model.module[0].weight  # large enough for moments in 8 bits
        for name, tensor in (
            ("0.weight", weight),
            *((f"{k} of 0.weight", v) for k, v in optimizer.state[weight].items()),
        ):
            if rank == 2:
                flip(tensor)
            expected = f"replicas differ: rank 2 has other bits than ranks 0, 1 and 3 in {name}"
            assert refusal(model, optimizer) == expected
            if rank == 2:
                flip(tensor)
        laconic.verify_replicas(model, optimizer)

    # 2. A tie, two odd ranks with the same fault, and more tensors than are named.
    weight = model.module[2].weight
    if rank in (1, 3):
        flip(weight, 5)
    assert "ranks 0, 1, 2 and 3 have different bits, and replicas without a majority do not tell which" in refusal(
        model
    )
    if rank == 1:
        flip(weight, 5)
        for parameter in model.parameters():
            flip(parameter)
    said = refusal(model)
    assert "rank 3 has other bits" not in said  # 2.weight: three kinds of bits on four ranks, two of them alike
    assert "rank 1 has other bits than ranks 0, 2 and 3 in 0.weight, 0.bias, 1.weight and 2 more tensors" in said

    # 3. Buffers only on demand: DDP itself leaves them different.
    model = layers()
    model[1].running_mean.fill_(rank)
    laconic.verify_replicas(model)
    assert "1.running_mean" in refusal(model, buffers=True)

    # 4. Two replicas cannot tell; the others are not asked.
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = layers()
    if rank == 3:
        flip(model[0].bias)
    if rank < 2:
        laconic.verify_replicas(model, group=halves[0])
        with pytest.raises(ConfigError, match="group does not contain this process"):
            laconic.verify_replicas(model, group=halves[1])
    else:
        said = refusal(model, group=halves[1])
        why = "and two replicas do not tell which is right"
        assert said == f"replicas differ: ranks 2 and 3 have different bits, {why}, in 0.bias"

    # 5. Experts: each half holds its own, and all ranks hear of a difference in one of them.
    model = layers()
    own = {parameter: halves[rank // 2] for parameter in model[2].parameters()}
    with torch.no_grad():
        model[2].weight += rank // 2
    laconic.verify_replicas(model, groups=own)
    if rank == 1:
        flip(model[2].weight)
    assert "ranks 0 and 1 have different bits" in refusal(model, groups=own)
    alone = laconic.verify_replicas(model, groups=dict.fromkeys(model[2].parameters()))
    assert alone.uncovered == ("2.weight", "2.bias")
    assert "2 (12,416 bytes) have no replica and are not covered" in str(alone)

    # 6. FSDP2: shards have no replica; HSDP's have one.
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        model = layers()
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        optimizer = stepped(model)
        report = laconic.verify_replicas(model, optimizer)
        hybrid = len(shape) == 2
        assert len(report.uncovered) == (0 if hybrid else 18), report.uncovered
        if rank == 2:
            flip(optimizer.state[model[0].weight]["exp_avg_sq"])
        if hybrid:
            assert "ranks 0 and 2 have different bits" in refusal(model, optimizer)
        else:
            laconic.verify_replicas(model, optimizer)

    # 7. Other tensors are no replicas.
    model = nn.Linear(3, 3, bias=rank != 1)
    with pytest.raises(ConfigError, match="rank 1 has 1 tensors and rank 0 has 2"):
        laconic.verify_replicas(model)


@pytest.mark.slow
def test_one_bit_on_one_of_four_ranks_is_found_and_named() -> None:
    run_joined(four_ranks, (), 4)


def test_without_a_process_group_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="no process group exists"):
        laconic.verify_replicas(layers())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.int64]
)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    for numel in (0, 1, 3, 7, 1021, 5000):
        tensor = (torch.arange(numel) % 7).to(dtype)
        data = tensor.view(-1).view(torch.uint8)
        before = int(digest(tensor))
        assert before == int(digest(tensor.clone()))
        for place in {0, len(data) // 2, len(data) - 1} if len(data) else ():
            data[place] ^= 1
            assert int(digest(tensor)) != before, (numel, place)
            data[place] ^= 1


def test_words_that_change_places_change_the_hash() -> None:
    tensor = torch.randn(100_000)
    swapped = tensor.clone()
    swapped[:4096], swapped[4096:8192] = tensor[4096:8192], tensor[:4096]
    assert int(digest(swapped)) != int(digest(tensor))


def test_views_at_odd_places_and_other_layouts_are_hashed_by_value() -> None:
    values = torch.arange(60, dtype=torch.uint8)
    assert int(digest(values[3:])) == int(digest(values[3:].clone()))
    square = torch.randn(8, 8)
    assert int(digest(square.T)) == int(digest(square.T.contiguous())) != int(digest(square))


@contextmanager
def flipped(here: bool, step: int, what: str) -> Iterator[None]:
    """Flip a bit of the first weight, or of its state, on one process after its step number `step` (from 0)."""
    original = Trainer.step

    def then_flip(self: Trainer, number: int, *args: Any) -> Any:
        result = original(self, number, *args)
        if here and number == step:
            weight = next(iter(self.optimizer.state))
            flip(weight if what == "weight" else self.optimizer.state[weight][what], 2)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", then_flip)
        yield


# Settings, the rank whose bit flips, what of it, and what is said; None: nothing can be.
FLIPS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "ddp": (
        {},
        1,
        "weight",
        r"after step 4, replicas differ: ranks 0 and 1 have different bits, and two replicas do not",
    ),
    "ddp-8bit": ({"optimizer.kind": "adamw8bit"}, 0, "exp_avg_sq_scales", "exp_avg_sq_scales of"),
    "fsdp": (FSDP, 1, "weight", None),
    "ep": (EP | QWEN, 1, "weight", "ranks 0 and 1 have different bits"),
    "pipeline": (PIPELINE, 1, "weight", None),
    "off": ({"verify.every": 0}, 1, "weight", None),
}


def flips(world: World, folder: Path, names: list[str]) -> None:
    pair = Pair(folder, world)
    for name in names:
        changes, rank, what, said = FLIPS[name]
        config = tiny_config(folder, name, {"verify.every": 2, "checkpoint.every": 3, "eval_every": 0} | changes)
        with flipped(world.rank == rank, 3, what):
            if said is None:
                assert pair.train(config) == 0
            else:
                pair.expect_error(name, config)


@pytest.mark.parametrize(
    "names",
    [["ddp"], pytest.param([name for name in FLIPS if name != "ddp"], marks=pytest.mark.slow)],
)
def test_a_run_stops_before_it_saves_what_differs(names: list[str], tmp_path: Path) -> None:
    run_joined(flips, (tmp_path, names), 2)
    for name in names:
        said = FLIPS[name][3]
        found = checkpoint_names(tmp_path / name)
        if said is None:
            assert found == ["step-00000006", "step-00000003"], name
            continue
        assert found == ["step-00000003"], name  # the bit flipped after step 4
        for rank in range(2):
            text = (tmp_path / f"{name}.{rank}.txt").read_text()
            assert text.startswith("CorruptionError: after step 4, ")
            assert re.search(said, text), text
            assert "(equal after step 3); nothing was saved" in text
