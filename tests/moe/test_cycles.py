"""A pass of a layer leaves no cycles of references: its rows and indices would stay on the device for many steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.formats import BlockFormat
from laconic.moe import (
    BaselineDispatcher,
    ChunkedSchedule,
    Dispatcher,
    FlatDispatcher,
    Grid,
    HierarchicalDispatcher,
    S1Dispatcher,
    S2Dispatcher,
    ShardedDispatcher,
    SoftmaxGate,
    copy_hot_experts,
)
from tests.garbage import left_in_cycles
from tests.moe.parallel import DIM, TOP_K, make_whole, spread_over
from tests.moe.worlds import run_world

CODECS: tuple[Codec, ...] = (Raw(), Lossless(), Blockwise(BlockFormat("int8", 64)))


def leaves_nothing(grid: Grid, dispatcher: Dispatcher, *degrees: int, copies: int = 0) -> None:
    whole = make_whole(grid, gate=SoftmaxGate(2 * grid.layout.ep, DIM, TOP_K))
    layer = spread_over(grid, whole, dispatcher).float()
    if degrees:
        layer.schedule = ChunkedSchedule(*degrees)
    if copies:
        loads = torch.arange(2 * grid.layout.ep, 0, -1)
        assert copy_hot_experts([layer], grid, copies, loads=[loads**3])[0].copies
    x = whole.tokens[grid.dp.rank()].float().requires_grad_()

    def once() -> None:
        layer(x).square().sum().backward()
        layer.zero_grad()
        x.grad = None
        dist.barrier()

    found = left_in_cycles(once)
    assert not found, f"{type(dispatcher).__name__} in {degrees or 1}: {found}"


def every_dispatcher() -> None:
    world = dist.get_world_size()
    for grid in (Grid(levels=(2,)), Grid(1, world // 2, 2)):
        for codec in CODECS:
            ways: list[Dispatcher] = [FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=codec)]
            if grid.layout.esp == 1:
                ways += [HierarchicalDispatcher(grid.levels, depth, codec=codec) for depth in (1, 2)]
            else:
                ways.append(ShardedDispatcher(grid.ep, grid.esp, codec=codec))
            for dispatcher in ways:
                leaves_nothing(grid, dispatcher)
                leaves_nothing(grid, dispatcher, 2, 2)
    leaves_nothing(grid := Grid(levels=(2,)), HierarchicalDispatcher(grid.levels, codec=Raw()), copies=1)
    grid = Grid(mp=2, ep=world // 2, esp=2)
    sharded = ShardedDispatcher(grid.ep, grid.esp, codec=Raw())
    for dispatcher in (
        S1Dispatcher(grid, sharded, codec=Raw()),
        S2Dispatcher(grid, forward="rows", backward="tokens", codec=Raw()),
        BaselineDispatcher(grid, codec=Raw()),
    ):
        leaves_nothing(grid, dispatcher)
        leaves_nothing(grid, dispatcher, 2, 2)


@pytest.mark.ci
def test_a_pass_of_a_layer_leaves_nothing_for_the_search_for_cycles(tmp_path: Path) -> None:
    run_world([every_dispatcher], 4, tmp_path)
