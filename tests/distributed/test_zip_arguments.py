"""What `zip_collectives` takes, says and refuses, and fp8 and lists of a group's uncoded calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collectives import Codec, Lossless, ProcessGroupOptions, Raw
from laconic.collectives.integrations.ddp import ddp_zip_hook
from laconic.collectives.integrations.fsdp2 import ZipAllGather, ZipReduceScatter
from laconic.errors import ConfigError, FormatError, ModelError
from laconic.train.launch.worker import leave
from tests.distributed.processes import join_ranks, run_ranks


def ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(30, 30))


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ddp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.full((2, 30), 1.0 + dist.get_rank())).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def arguments(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder)
    expected = gradients(ddp())

    # A name in place of a codec is refused in the call.
    for name in ("lossless", "raw", "Auto", ""):
        for call in (
            lambda name=name: laconic.zip_collectives(ddp(), codec=name),
            lambda name=name: laconic.zip_collectives(fully_shard(nn.Linear(8, 8)), codec=name),
            lambda name=name: ddp_zip_hook(codec=name),
            lambda name=name: ZipAllGather(name),
            lambda name=name: ZipReduceScatter(name),
        ):
            with pytest.raises(ConfigError, match=f"codec is '{name}', but it must be 'auto' or a codec"):
                call()

    # The summary says what was asked for.
    said: list[tuple[Codec | str, str]] = [("auto", "auto"), (Lossless(), "Lossless(auto)"), (Raw(), "raw")]
    for codec, text in said:
        for model in (ddp(), fully_shard(nn.Linear(8, 8))):
            zipped = laconic.zip_collectives(model, codec=codec)
            assert zipped.codec == text
            assert f"codec {text}\n" in str(zipped)

    # On and off and on again; twice without is refused.
    for make in (ddp, Holds):
        model = make()
        for codec in (Lossless(), Raw(), "auto"):
            zipped = laconic.zip_collectives(model, codec=codec)
            with pytest.raises(ModelError, match="another communication hook is registered"):
                laconic.zip_collectives(model)
            assert all(map(torch.equal, gradients(model), expected))
            zipped.remove()
            assert all(map(torch.equal, gradients(model), expected))

    # A hook averages over all ranks of the group, and says so where something else is asked for.
    for attach in (laconic.zip_collectives, laconic.quantize_reduction):
        model = ddp()
        attach(model)
        with model.join():
            for _ in range(1 + rank):
                gradients(model)
        with (
            pytest.raises(ConfigError, match="divide_by_initial_world_size is False in join"),
            model.join(divide_by_initial_world_size=False),
        ):
            gradients(model)

    # Modules around DDP and FSDP2.
    compiled: Any = torch.compile(ddp(), backend="eager")
    assert [part.unit for part in laconic.zip_collectives(compiled).parts] == ["_orig_mod"]
    assert all(map(torch.equal, gradients(compiled), expected))
    assert [part.unit for part in laconic.zip_collectives(Holds()).parts] == ["inner"]
    two = nn.Sequential(ddp(), ddp())
    assert [part.unit for part in laconic.zip_collectives(two).parts] == ["0", "1"]
    with pytest.raises(ConfigError, match="prefetch is True, but DDP"):
        laconic.zip_collectives(Holds(), prefetch=True)
    with pytest.raises(ModelError, match=r"in DDP \(0\) and under FSDP2 \(1\); call zip_collectives with each"):
        laconic.zip_collectives(nn.Sequential(ddp(), fully_shard(nn.Linear(8, 8))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    for model in (old, nn.Sequential(old)):
        with pytest.raises(ModelError, match=r"FSDP1.*use FSDP2"):
            laconic.zip_collectives(model)
    with pytest.raises(ModelError, match="neither DDP nor FSDP2"):
        laconic.zip_collectives(nn.Linear(8, 8))
    dist.barrier()
    leave(0)


def lists(rank: int, world: int, folder: str) -> None:
    join_ranks(rank, world, folder, "laconic", pg_options=ProcessGroupOptions(codec=Lossless(), min_nbytes=0))
    for numel in (10, 100_000):
        x = torch.full((numel,), float(rank))
        for count in (0, 1, 3):
            if count == 0:
                continue
            with pytest.raises(FormatError, match=f"tensor_list has {count} tensors, but the group has 2 ranks"):
                dist.all_gather([torch.empty(numel) for _ in range(count)], x)
        for wrong in (numel - 1, 2 * numel):
            with pytest.raises(FormatError, match=f"have {wrong} elements each, but tensor has {numel}"):
                dist.all_gather([torch.empty(wrong) for _ in range(2)], x)
        torn = torch.empty(5, numel)
        parts = torch.stack([torch.full((5, numel // 2), float(rank)), torch.ones(5, numel // 2)])
        dist.all_to_all_single(torn, parts.view(5, numel))  # as over gloo
        assert torn.view(2, -1).unique(dim=1).T.tolist() == ([[0.0, 1.0]] if rank == 0 else [[1.0, 1.0]])
        rows = [torch.empty(numel) for _ in range(2)]
        dist.all_gather(rows, x)
        assert [row[0].item() for row in rows] == [0.0, 1.0]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for numel in (10, 100_000):
            mine = torch.full((numel,), float(rank + 1)).to(dtype)
            rows = [torch.empty_like(mine) for _ in range(2)]
            calls: list[Callable[[], object]] = [
                lambda mine=mine, rows=rows: dist.gather(mine, rows if rank == 0 else None, 0),
                lambda mine=mine, rows=rows: dist.all_to_all(rows, [mine, mine]),
                lambda mine=mine, rows=rows: dist.all_gather(rows, mine),
            ]
            for number, call in enumerate(calls):
                for row in rows:
                    row.zero_()
                call()
                if number or rank == 0:
                    assert [row.float().unique().tolist() for row in rows] == [[1.0], [2.0]]
            out = torch.empty_like(mine)
            dist.scatter(out, [mine, (mine.float() * 4).to(dtype)] if rank == 0 else None, 0)
            assert out.float().unique().tolist() == [1.0 if rank == 0 else 4.0]
    dist.barrier()
    leave(0)


@pytest.mark.parametrize("work", [arguments, lists])
def test_arguments_are_taken_or_refused_by_name(tmp_path: Path, work: Callable[..., object]) -> None:
    run_ranks(work, (2, str(tmp_path)), 2)
