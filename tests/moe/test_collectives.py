"""Differentiable collectives: what they move, their adjoints, and grids of real process groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.collectives import Lossless, Raw, audit
from laconic.collectives.integrations.autograd import all_to_all
from laconic.collectives.runtime import torch_compat
from laconic.errors import ConfigError, FormatError
from laconic.moe.parallel import autograd_collectives as collectives
from laconic.moe.parallel.grid import Grid
from laconic.topology import GridLayout
from tests.moe.worlds import run_world

RAW = Raw()


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def everybody(*shape: int) -> list[Tensor]:
    return [of_rank(rank, *shape) for rank in range(dist.get_world_size())]


def values_are_those_of_the_definitions() -> None:
    group, rank, world = world_group(), dist.get_rank(), dist.get_world_size()
    all_x = everybody(2 * world, 3)
    x = all_x[rank]
    assert torch.equal(collectives.all_gather(x, group, codec=RAW), torch.cat(all_x))
    mine = [part.chunk(world)[rank] for part in all_x]
    torch.testing.assert_close(collectives.reduce_scatter(x, group, codec=RAW), torch.stack(mine).sum(0))
    for total in (collectives.all_reduce, collectives.total):
        torch.testing.assert_close(total(x, group, codec=RAW), torch.stack(all_x).sum(0))
    assert torch.equal(collectives.replicate(x, group, codec=RAW), x)
    alike = of_rank(77, 2 * world + 1, 3)
    part = collectives.split(alike, group, codec=RAW)
    sizes = collectives.split_sizes(len(alike), world)
    assert len(part) == sizes[rank]
    assert sizes == [3] + [2] * (world - 1)
    assert torch.equal(collectives.gather(part, group, sizes=sizes, codec=RAW), alike)
    lopsided = [0] * (world - 1) + [len(alike)]
    part = collectives.split(alike, group, sizes=lopsided, codec=RAW)
    assert len(part) == lopsided[rank]
    assert torch.equal(collectives.gather(part, group, sizes=lopsided, codec=RAW), alike)
    counts = torch.arange(world * 2).view(world, 2) + 100 * rank
    expected = torch.stack([torch.arange(world * 2).view(world, 2)[rank] + 100 * source for source in range(world)])
    assert torch.equal(collectives.exchange_counts(counts, group), expected)


def messages_say_how_long_they_are() -> None:
    group, rank, world = world_group(), dist.get_rank(), dist.get_world_size()
    head = torch_compat._HEAD_NBYTES - 8

    def message(number: int, source: int, target: int) -> Tensor:
        length = (0, 7, head, head + 1, 3 * head)[(source + 2 * target + number) % 5]
        generator = torch.Generator().manual_seed(10 * source + target)
        return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)

    for number in range(5):
        received = torch_compat.all_to_all_messages([message(number, rank, target) for target in range(world)], group)
        for source, found in enumerate(received):
            assert torch.equal(found, message(number, source, rank))


def rows_that_all_know_of_need_no_announcement() -> None:
    group, rank, world = world_group(), dist.get_rank(), dist.get_world_size()
    # Rank 0 sends nothing; from 1 on, ever more to ranks further on.
    table = [[source * (target + 1) for target in range(world)] for source in range(world)]
    x = of_rank(rank, sum(table[rank]), 5).float().requires_grad_()
    expected = torch.cat([of_rank(source, sum(row), 5).float().split(row)[rank] for source, row in enumerate(table)])
    received = [row[rank] for row in table]
    for codec in (RAW, Lossless(), "auto"):
        audit.reset()
        rows = all_to_all(x, received, table[rank], group, codec=codec, table=table)
        assert torch.equal(rows, expected)
        (entry,) = audit.snapshot().entries
        away = sum(table[rank]) - table[rank][rank]
        assert entry.raw_nbytes == away * 5 * 4
        if codec is RAW:
            assert entry.sent_nbytes == entry.raw_nbytes
        (grad,) = torch.autograd.grad(rows.square().sum(), x)
        assert torch.equal(grad, 2 * x.detach())
    if rank == 1:  # what ranks say themselves is compared with the table before anything is sent
        table[rank][0] += 1
        with pytest.raises(FormatError, match="table says that rank 1 of the group sends"):
            all_to_all(x.detach(), received, [1, *table[rank][1:]], group, codec=RAW, table=table)


def linear_maps_have_their_adjoints() -> None:
    """The sum over ranks of <map(x), y> is that of <x, gradient>."""
    group, rank, world = world_group(), dist.get_rank(), dist.get_world_size()
    for run in (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce):
        x = of_rank(rank, 2 * world, 3).requires_grad_()
        result = run(x, group, codec=RAW)
        y = of_rank(rank + 50, *result.shape)
        (grad,) = torch.autograd.grad(result, x, y)
        products = torch.stack([(result * y).sum(), (x * grad).sum()]).detach()
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1])


def copies_have_the_gradients_of_one_tensor() -> None:
    """As if there were one tensor: all ranks compute the loss of one program, and each has that program's gradient."""
    group, rank, world = world_group(), dist.get_rank(), dist.get_world_size()
    factors = torch.arange(1.0, world + 1, dtype=torch.float64)
    x = of_rank(5, world + 1, 3).requires_grad_()
    weight = of_rank(6, 3).requires_grad_()
    sizes = collectives.split_sizes(len(x), world)

    mine = collectives.split(x, group, codec=RAW) * collectives.replicate(weight, group, codec=RAW) * factors[rank]
    loss = collectives.gather(mine.sin(), group, sizes=sizes, codec=RAW).pow(2).sum()
    loss = loss + 3 * collectives.total(mine.pow(3).sum(), group, codec=RAW)
    found = torch.autograd.grad(loss, (x, weight))

    rows = torch.cat([part * weight * factor for part, factor in zip(x.split(sizes), factors, strict=True)])
    one = rows.sin().pow(2).sum() + 3 * rows.pow(3).sum()
    torch.testing.assert_close(loss, one)
    torch.testing.assert_close(found, torch.autograd.grad(one, (x, weight)))


def gradients_of_gradients_travel() -> None:
    """All ranks perturb the same element of equal tensors, so numbers of one rank are those of all."""
    group, world = world_group(), dist.get_world_size()
    x = torch.randn(world, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(x: Tensor) -> Tensor:
        gathered = collectives.all_gather(x**2, group, codec=RAW)
        return collectives.reduce_scatter(gathered.sin(), group, codec=RAW) / world

    torch.autograd.gradcheck(run, x)
    if world == 2:
        torch.autograd.gradgradcheck(run, x)


def a_replicated_call_adds_the_gradients_of_parameters() -> None:
    group, rank = world_group(), dist.get_rank()
    gate = nn.Linear(3, 2, dtype=torch.float64)
    gate.bias.requires_grad_(False)
    rows = everybody(4, 3)
    collectives.replicated_call(gate, rows[rank], group, codec=RAW).pow(2).sum().backward()
    found = gate.weight.grad
    assert gate.bias.grad is None
    gate.weight.grad = None
    gate(torch.cat(rows)).pow(2).sum().backward()
    torch.testing.assert_close(found, gate.weight.grad)
    with torch.no_grad():
        assert torch.equal(collectives.replicated_call(gate, rows[rank], group), gate(rows[rank]))


def sizes_that_do_not_fit_are_refused() -> None:
    """On all ranks before anything travels."""
    group, world = world_group(), dist.get_world_size()
    x = torch.zeros(world + 1, 2)
    with pytest.raises(FormatError, match="pad"):
        collectives.reduce_scatter(x, group)
    with pytest.raises(FormatError, match="sizes are"):
        collectives.split(x, group, sizes=[1] * world)
    with pytest.raises(FormatError, match="count again"):
        collectives.gather(x, group, sizes=[1] * world)


def groups_are_those_of_the_layout() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for mp, ep, esp in ((1, world, 1), (2, world // 2, 2), (world, 1, world), (2, 1, 1)):
        grid = Grid(mp, ep, esp)
        for name in ("dp", "mp", "edp", "ep", "esp", "joint"):
            (expected,) = [group for group in grid.layout.ranks(name) if rank in group]
            assert dist.get_process_group_ranks(getattr(grid, name)) == expected, (grid, name)
    assert repr(grid) == f"Grid(dp={world // 2}, mp=2, edp={world}, ep=1, esp=1, levels=())"
    assert Grid(esp=2).layout == GridLayout(world, 1, world // 2, 2)


def levels_are_those_of_the_layout() -> None:
    rank = dist.get_rank()
    grid = Grid(levels=(2,))
    assert [level.num_groups for level in grid.levels] == [1, 2]
    assert grid.levels[0].within is grid.ep
    assert grid.levels[0].across is None
    (within,) = [group for group in grid.layout.within(1) if rank in group]
    (across,) = [group for group in grid.layout.across(1) if rank in group]
    assert dist.get_process_group_ranks(grid.levels[1].within) == within
    assert grid.levels[1].across is not None
    assert dist.get_process_group_ranks(grid.levels[1].across) == across


def meshes_name_their_grids() -> None:
    world = dist.get_world_size()
    half = world // 2
    for shape, names, layout in (
        ((world,), None, GridLayout(world, ep=world)),
        ((half, 2), ("dp", "mp"), GridLayout(world, mp=2)),
        ((half, 2), ("dp", "tp"), GridLayout(world, mp=2)),
        ((half, 2), ("edp", "ep"), GridLayout(world, ep=2)),
        ((half, 2), ("data", "ep"), GridLayout(world, ep=2)),
        ((half, 2), ("dp", "ep"), GridLayout(world, ep=2)),
        ((1, half, 2), ("dp_replicate", "dp_shard", "ep"), GridLayout(world, ep=2)),
        ((half, 1, 2), ("dp", "cp", "ep"), GridLayout(world, ep=2)),
        ((1, half, 2), ("dp_replicate", "edp", "ep"), GridLayout(world, ep=2)),
        ((half, 2), ("efsdp", "ep"), GridLayout(world, ep=2)),
        ((1, half, 2), ("dp", "ep", "etp"), GridLayout(world, ep=half, esp=2)),
        ((half, 2), ("ep", "esp"), GridLayout(world, ep=half, esp=2)),
    ):
        assert Grid.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names)).layout == layout
    with pytest.raises(ConfigError, match=r"mesh_dim_names, or pass Grid\(ep=2\)"):
        Grid.from_mesh(init_device_mesh("cpu", (half, 2), mesh_dim_names=("replicate", "shard")))
    if world > 2:
        for shape, names, call in (
            ((2, half), ("ep", "edp"), "ep=2"),
            ((2, half), ("ep", "cp"), "ep=2"),
            ((2, half), ("tp", "ep"), f"mp=2, ep={half}"),
            ((2, half), ("esp", "ep"), f"esp=2, ep={half}"),
            ((2, 1, half), ("dp", "ep", "pp"), f"ep=1, stages={half}"),
        ):
            with pytest.raises(ConfigError, match=rf"pass Grid\({call}\), or order the dimensions"):
                Grid.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))
        calls = rf"pass Grid\(mp=2, ep={half}, esp=2\), .* or Grid\(mp=2, ep={world}\), which spreads"
        with pytest.raises(ConfigError, match=calls):
            Grid.from_mesh(init_device_mesh("cpu", (half, 2), mesh_dim_names=("ep", "tp")))
        assert Grid(mp=2, ep=half, esp=2).layout.ranks("mp") == Grid(mp=2, ep=world).layout.ranks("mp")
        part = init_device_mesh("cpu", (half, 2), mesh_dim_names=("dp", "ep"))["ep"]
        with pytest.raises(ConfigError, match=r"pass the mesh of all ranks, or Grid\(ep=2\)"):
            Grid.from_mesh(part)
    with pytest.raises(ConfigError, match="must divide num_ranks = "):
        Grid(ep=3)


COLLECTIVES = [
    values_are_those_of_the_definitions,
    linear_maps_have_their_adjoints,
    copies_have_the_gradients_of_one_tensor,
    gradients_of_gradients_travel,
    a_replicated_call_adds_the_gradients_of_parameters,
    messages_say_how_long_they_are,
    rows_that_all_know_of_need_no_announcement,
    sizes_that_do_not_fit_are_refused,
    groups_are_those_of_the_layout,
    levels_are_those_of_the_layout,
    meshes_name_their_grids,
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_and_their_gradients(world: int, tmp_path: Path) -> None:
    run_world(COLLECTIVES, world, tmp_path)
