"""Rates measured on a grid: the same on all ranks, of every group, and good for a prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.collectives.codec import Blockwise
from laconic.cost.comm.rates import Line, LinkRates, WireRates
from laconic.cost.comm.seconds import GroupShape
from laconic.cost.moe import Coding, GridLayout, LayerShape, MoERates, fastest, fsmoe_route, parm_routes
from laconic.errors import ConfigError
from laconic.formats import BlockFormat
from laconic.moe.parallel.grid import Grid
from laconic.moe.tuning.measure_cluster import groups_of, measure_moe
from tests.moe.worlds import run_world

LAYER = LayerShape(num_tokens=64, model_dim=32, hidden_dim=64, num_experts=4, top_k=2)
WIRE = WireRates({"node": LinkRates(2, {"all_to_all": Line(1e-3, 1e-9)}, 0.0, 0.0)}, {})


def _measures() -> None:
    grid = Grid(mp=2, ep=2, esp=2, levels=(2,)) if dist.get_world_size() == 4 else Grid(ep=2)
    blocks = Blockwise(BlockFormat("int8", 128))
    rates = measure_moe(grid, LAYER, wire=WIRE, codecs=[blocks], quick=True)
    told: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, rates.to_dict())
    assert all(one == told[0] for one in told)
    assert set(rates.groups) == set(groups_of(grid))
    assert {"ep", "intra0"} <= set(rates.groups)
    assert MoERates.from_dict(json.loads(json.dumps(told[0]))) == rates
    assert 0 <= rates.overlap <= 1
    paths = ("baseline", "s1", "s2", "sharded") if grid.layout.mp > 1 else ("flat", "depth 1")
    assert {f"{path} {code}" for path in paths for code in ("raw", blocks.name)} <= set(rates.overheads)
    for line in (rates.gemm, rates.copy, *rates.groups["ep"].operations.values()):
        assert line.seconds(1e6) > 0
    coded = rates.codecs["bfloat16"][blocks.name]
    assert 1.8 < coded.ratio < 2.0
    world = GroupShape(2, 2)
    assert rates.price("all_to_all", "ep", world, 1e6, Coding(blocks.name)).seconds > 0
    layout = grid.layout
    shape = GridLayout(layout.num_ranks, layout.mp, layout.ep, layout.esp)
    routes = [*parm_routes(LAYER, shape, rates), fsmoe_route(LAYER, shape, rates)]
    assert fastest(routes).seconds > 0
    with pytest.raises(ConfigError, match=re.escape("num_experts is 5, but it must be a multiple of ep = 2")):
        measure_moe(grid, LayerShape(64, 32, 64, 5, 2), wire=WIRE)
    with pytest.raises(ConfigError, match="num_tokens is 0"):
        measure_moe(grid, LayerShape(0, 32, 64, 4, 2), wire=WIRE)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_rates_are_measured_alike_on_all_ranks(world: int, tmp_path: Path) -> None:
    run_world([_measures], world, tmp_path)
