"""Choosing on real ranks: alike on all of them, the same outputs, new choices for other tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from laconic.collectives.codec import Blockwise, Raw
from laconic.cost.comm.rates import Line, LinkRates, WireRates
from laconic.cost.comm.seconds import MIN_GAIN
from laconic.cost.moe import LayerShape, MoERates, Route, Step
from laconic.cost.moe.search import LayerCandidate, LayerPlan, best_plan
from laconic.errors import ConfigError
from laconic.formats import BlockFormat
from laconic.moe import (
    FlatDispatcher,
    GatedExperts,
    Grid,
    HierarchicalDispatcher,
    MoELayer,
    Placement,
    SoftmaxGate,
    autotune,
    expert_shard,
    make_dispatcher,
)
from laconic.moe.placement.copies import copy_hot_experts
from laconic.moe.placement.routing_record import record_of
from laconic.moe.tuning import autotune as autotune_module
from laconic.moe.tuning.autotune import Autotuned, Measured
from laconic.moe.tuning.measure_cluster import measure_moe
from tests.moe.worlds import run_world

E, M, H, N = 8, 16, 32, 24
WIRE = WireRates({"node": LinkRates(2, {"all_to_all": Line(1e-3, 1e-9)}, 0.0, 0.0)}, {})


_brief = patch.multiple(autotune_module, _WHOLE_SECONDS=0.5, _CHUNKS_SECONDS=0.25)
"""For what does not ask which plan wins."""


def _layer(grid: Grid) -> MoELayer:
    torch.manual_seed(0)
    gate, experts = SoftmaxGate(E, M, top_k=3), GatedExperts(E, M, H)
    if grid.layout.mp > 1:
        return MoELayer(gate, expert_shard(experts, grid), dispatcher=make_dispatcher(grid, "s1", codec=Raw()))
    dispatcher = FlatDispatcher(grid.ep, codec=Raw())
    return MoELayer(gate, expert_shard(experts, grid), dispatcher=dispatcher, placement=Placement(E))


def _tokens(grid: Grid) -> torch.Tensor:
    return torch.randn(N, M, generator=torch.Generator().manual_seed(grid.dp.rank()))


def _rates(alpha: float, beta: float) -> MoERates:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send")
    lines = dict.fromkeys(names, Line(alpha, beta))
    return MoERates.of_lines({kind: lines for kind in ("all", "across", "node")}, Line(0.0, 0.0))


def _told(mine: object) -> list[object]:
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


@_brief
def _measured_choice_is_alike_and_changes_no_output() -> None:
    two = dist.get_world_size() == 2
    grid = Grid(ep=2, device_type="cpu") if two else Grid(mp=2, ep=2, esp=2, device_type="cpu")
    layer, x = _layer(grid), _tokens(grid)
    before = layer(x)
    grads = torch.autograd.grad(before.square().sum(), [*layer.parameters()])
    random = torch.get_rng_state()
    said: list[str] = []
    int8 = Blockwise(BlockFormat("int8"))
    shape = LayerShape(N, M, H, E, top_k=3, item_nbytes=4)
    rates = measure_moe(grid, shape, dtype=torch.float32, wire=WIRE, codecs=[int8], routes=two, quick=True)
    tuned = autotune(layer, grid, x, rates=rates, codecs=(Raw(), int8), report=said.append, cache=False)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in layer.parameters())
    (choice,) = tuned.choices.values()
    plans = _told([(one.plan, one.seconds) for one in choice.candidates])
    assert all(one == plans[0] for one in plans)
    assert len(said) == (dist.get_rank() == 0)
    assert 1 <= len(choice.measured) <= 6
    taken = {plan: sum(both) for plan, both in choice.measured.items()}
    whole = {plan: seconds for plan, seconds in taken.items() if plan.degree == 1}
    if choice.plan.degree == 1:
        assert choice.plan == best_plan(whole)
    else:
        assert taken[choice.plan] <= (1 - MIN_GAIN / 2) * taken[replace(choice.plan, degree=1)]
    names = {str(one.plan) for one in choice.candidates}
    if grid.layout.mp == 1:
        assert names == {"flat", "depth 1"}
    else:
        assert names == {"baseline", "s1", "s2", "sharded"}
    assert {one.plan.code for one in choice.candidates} == {"raw", int8.name}
    assert all(one.seconds > 0 for one in choice.candidates)
    for one in choice.candidates:
        if one.plan.code == "raw":
            tuned.install("layer", one.plan)
            after = layer(x)
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
            for new, old in zip(torch.autograd.grad(after.square().sum(), [*layer.parameters()]), grads, strict=True):
                torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def _slow_wires_want_fewer_bytes_and_slow_starts_fewer_rounds() -> None:
    grid = Grid(ep=2, device_type="cpu")
    layer, x = _layer(grid), _tokens(grid)
    slow = autotune(layer, grid, x, rates=_rates(0.0, 1e-3), codecs=(Raw(),), num_benchmarked=0, report=None)
    assert slow.choices["layer"].plan.path == "depth 1"  # no duplicates
    assert isinstance(layer.dispatcher, HierarchicalDispatcher)
    text = str(slow)
    assert "choice: depth 1: " in text
    assert "less than flat" in text
    quick = autotune(layer, grid, x, rates=_rates(1.0, 0.0), codecs=(Raw(),), num_benchmarked=0, report=None)
    ways = {str(one.plan): one.seconds for one in quick.choices["layer"].candidates}
    assert ways["flat"] == pytest.approx(ways["depth 1"], rel=0.01)


def _a_layer_is_priced_anew_by_its_last_forward() -> None:
    grid = Grid(ep=2, device_type="cpu")
    layer, x = _layer(grid), _tokens(grid)
    tuned = autotune(layer, grid, x, rates=_rates(1e-3, 1e-6), codecs=(Raw(),), num_benchmarked=0, report=None)
    first = tuned.choices["layer"]
    assert first.cost_model.shape.num_tokens == N
    assert len(layer.hooks) == 1
    layer(x[:4])
    assert tuned.choices["layer"] is first
    tuned.tune()
    assert tuned.choices["layer"].cost_model.shape.num_tokens == 4
    assert record_of(layer) is layer.hooks[0]  # the one that a balancer reads, too
    candidates = [(one.plan, one.seconds) for one in tuned.choices["layer"].candidates]
    assert _told(candidates) == [candidates] * 2


@_brief
def _layers_of_one_shape_are_measured_once_and_once_per_cluster() -> None:
    grid = Grid(ep=2, device_type="cpu")
    model, x = torch.nn.Sequential(_layer(grid), _layer(grid)), _tokens(grid)
    calls: list[int] = []
    inner = autotune_module.benchmark_candidates

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(args[2]))
        return inner(*args, **options)

    def tuned(cache: bool, alpha: float = 1.0) -> dict[str, LayerPlan]:
        calls.clear()
        found = autotune(
            model, grid, x, rates=_rates(alpha, 0.0), codecs=(Raw(),), degrees=(1, 2), report=None, cache=cache
        )
        assert ("kept on disk" in str(found)) == (cache and not calls)
        return {name: choice.plan for name, choice in found.choices.items()}

    with patch.object(autotune_module, "benchmark_candidates", counted):
        first = tuned(cache=True)
        # Flat and depth 1; then each of them that is near, whole and in two chunks; once for both layers.
        assert calls in ([2, 2], [2, 4])
        assert first["0"] == first["1"]
        assert tuned(cache=True) == first
        assert calls == []
        tuned(cache=True, alpha=2.0)  # by other rates other candidates may be run
        assert calls in ([2, 2], [2, 4])
        tuned(cache=False)
        assert calls in ([2, 2], [2, 4])


def _bad_input_is_refused() -> None:
    grid = Grid(ep=2, device_type="cpu")
    layer, x = _layer(grid), _tokens(grid)
    with pytest.raises(ConfigError, match=re.escape("Linear has no MoELayer")):
        autotune(torch.nn.Linear(2, 2), grid, x)
    with pytest.raises(ConfigError, match="mesh is None"):
        autotune(layer, None, x)
    with pytest.raises(ConfigError, match="example is None"):
        autotune(layer, grid)
    layer(x)
    load = torch.arange(layer.gate.num_experts, 0, -1) ** 3
    (copied,) = copy_hot_experts([layer], grid, 1, loads=[load])
    assert copied.copies
    with pytest.raises(ConfigError, match=r"layer has copies of experts, which run whole .* or call autotune before"):
        autotune(layer, grid, x)
    assert layer.schedule is None
    copy_hot_experts([layer], grid, 0)


@pytest.mark.ci
def test_choices_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_world(
        [
            _measured_choice_is_alike_and_changes_no_output,
            _slow_wires_want_fewer_bytes_and_slow_starts_fewer_rounds,
            _a_layer_is_priced_anew_by_its_last_forward,
            _layers_of_one_shape_are_measured_once_and_once_per_cluster,
            _bad_input_is_refused,
        ],
        2,
        tmp_path,
    )


@pytest.mark.slow
def test_choices_on_four_ranks_inside_mp_groups(tmp_path: Path) -> None:
    run_world([_measured_choice_is_alike_and_changes_no_output], 4, tmp_path)


def test_chunks_are_tried_on_every_path_that_is_near() -> None:
    """A path that is slower whole may be the one that chunks gain most on; one that is far behind is not run again."""
    flat, deep, far = (LayerPlan(path) for path in ("flat", "depth 1", "depth 2"))
    halves = {flat: 0.010, deep: 0.012, far: 0.0135}
    halves |= {replace(flat, degree=2): 0.009, replace(deep, degree=2): 0.007, replace(far, degree=2): 0.001}
    asked: list[LayerPlan] = []

    def compared(name: str, plans: list[LayerPlan], *_: float) -> Measured:
        asked.extend(plans)
        seconds = {plan: (halves[plan], halves[plan]) for plan in plans}
        return Measured(seconds, best_plan({plan: sum(both) for plan, both in seconds.items()}))

    tuned: Any = SimpleNamespace(
        **{"_num_benchmarked": 5, "_degrees": (1, 2), "_compared": compared},
        grid=SimpleNamespace(layout=SimpleNamespace(joint=4)),
    )
    route = Route("route", (Step("experts", 0.010),))
    found = Autotuned._measure(tuned, "layer", [LayerCandidate(plan, route, route) for plan in (flat, deep, far)])
    assert found.chosen == replace(deep, degree=2)
    assert {deep, replace(deep, degree=2)} <= set(found.seconds)
    assert replace(far, degree=2) not in asked
