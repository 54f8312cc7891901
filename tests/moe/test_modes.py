"""Layers of experts validated in inference mode and trained, in any order: the same bits, and gradients as always."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.collectives import Lossless, Raw
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
)
from tests.grid import covering
from tests.moe.parallel import make_whole, spread_over
from tests.moe.worlds import run_world

ORDERS = ("iti", "tit", "nti")


def dispatchers(grid: Grid) -> dict[str, Callable[[Any], Dispatcher]]:
    found: dict[str, Callable[[Any], Dispatcher]] = {
        "flat": lambda codec: FlatDispatcher(grid.joint, num_shards=grid.layout.esp, codec=codec),
        "sharded": lambda codec: ShardedDispatcher(grid.ep, grid.esp, codec=codec),
    }
    if grid.layout.esp == 1:
        found["hierarchical"] = lambda codec: HierarchicalDispatcher(grid.levels, 1, codec=codec)
    if grid.layout.mp > 1:
        found |= {
            "s1": lambda codec: S1Dispatcher(grid, found["flat"](codec), codec=codec),
            "s2": lambda codec: S2Dispatcher(grid, codec=codec),
        }
        if grid.layout.esp > 1:
            found["baseline"] = lambda codec: BaselineDispatcher(grid, codec=codec)
    return found


def layers_in_any_order(every: bool) -> None:
    world = dist.get_world_size()
    for grid in (Grid(1, world, 1), Grid(1, world // 2, 2), Grid(2, world, 1), Grid(2, world // 2, 2)):
        whole = make_whole(grid)
        x, grad = whole.tokens[grid.dp.rank()], whole.grads[grid.dp.rank()]
        axes = (list(dispatchers(grid).items()), ("auto", Raw(), Lossless()), (None, (2, 3)), ORDERS)
        rows = covering([len(axis) for axis in axes], len(axes) if every else 2)
        for row in sorted(rows):
            (name, make), codec, degrees, order = (axis[index] for axis, index in zip(axes, row, strict=True))
            layer = spread_over(grid, whole, make(codec))
            if degrees is not None:
                layer.schedule = ChunkedSchedule(*degrees)
            found, trained = [], []
            for do in order:
                if do == "t":
                    out = layer(x.clone().requires_grad_())
                    out.backward(grad)
                    trained.append([p.grad for p in layer.parameters() if p.grad is not None])
                else:
                    with torch.inference_mode() if do == "i" else torch.no_grad():
                        out = layer(x)
                found.append(out.detach().clone())
            assert all(torch.equal(one, found[0]) for one in found), (name, codec, degrees, order)
            assert trained[0]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_layers_are_validated_and_trained_in_any_order(every: bool, tmp_path: Path) -> None:
    run_world([partial(layers_in_any_order, every)], 2, tmp_path)
