"""Counts of a step's routing, against counting by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from laconic.collectives.codec import Blockwise, Codec, Raw
from laconic.formats import BlockFormat
from laconic.moe.experts.modules import GatedExperts
from laconic.moe.gates import SoftmaxGate
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.placement.copies import ExpertCopies
from laconic.moe.placement.expert_map import Placement
from laconic.moe.routing import RoutedTokens, Routing
from laconic.topology import Levels
from laconic.train.distributed.world import World
from laconic.train.moe.metrics import Capacity, ExpertMeter, moved_rows
from tests.train.runs import ALONE


class Routed(Hook):
    """Remembers what was dispatched."""

    def __init__(self) -> None:
        self.routings: list[Routing] = []

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> None:
        assert isinstance(tokens.routing, Routing)
        self.routings.append(tokens.routing)


def layer_with(hooks: Sequence[Hook], num_experts: int = 8) -> MoELayer:
    torch.manual_seed(0)
    gate, experts = SoftmaxGate(num_experts, 16, top_k=3), GatedExperts(num_experts, 16, 8)
    return MoELayer(gate, experts, hooks=hooks)


@pytest.mark.parametrize("levels", [(), (2,)])
def test_counts_are_those_of_the_routing(levels: tuple[int, ...]) -> None:
    # This process is number 1 of 4; each has two experts. The dispatcher is local, which sends what a flat one would.
    routed = Routed()
    meter = ExpertMeter(World(rank=1, size=1, local_rank=0, device=ALONE.device), 4, levels)
    layer = layer_with((meter, routed))
    for seed in (1, 2):
        layer(torch.randn(20, 16, generator=torch.Generator().manual_seed(seed)))
    use = meter.take([layer])
    assert use is not None
    groups = (*levels, 4)
    loads, entries, nbytes = [0] * 8, 0, [0] * len(groups)
    rows = 0
    for routing in routed.routings:
        pairs = list(zip(routing.tokens.tolist(), routing.experts.tolist(), strict=True))
        entries += len(pairs)
        for _, expert in pairs:
            loads[expert] += 1
            crossed = [level for level, num in enumerate(groups) if expert // 2 // (4 // num) != 1 // (4 // num)]
            if crossed:
                nbytes[crossed[0]] += 16 * 4
        rows += len({(token, expert // 2 // (4 // groups[0])) for token, expert in pairs})
    assert use.loads == (tuple(loads),)
    assert (use.num_entries, use.num_rows) == (entries, rows)
    assert use.level_nbytes == tuple(nbytes)
    assert use.load_ratio == use.worst_load_ratio == max(loads) * 8 / sum(loads)
    assert use.duplicate_rate == 1 - rows / entries
    assert use.to_metrics()["moe_level1_nbytes"] == nbytes[0]
    assert meter.take([layer]) is None


@given(
    st.sampled_from([((1, 4), 1), ((1, 2, 4), 2), ((1, 2, 4, 8), 3), ((1, 3, 12), 2)]),
    st.integers(1, 3),
    st.integers(0, 1 << 30),
)
@settings(max_examples=40)
def test_rows_are_those_of_a_walk_stage_by_stage(sizes: tuple[tuple[int, ...], int], depth: int, seed: int) -> None:
    groups, most = sizes
    depth, size = min(depth, most), groups[-1]
    rng = random.Random(seed)
    wanted = [(place, token, rng.randrange(size)) for place in range(size) for token in range(3) for _ in range(4)]
    expected = [0] * (len(groups) - 1)
    at = {(place, token, rank): place for place, token, rank in wanted}
    for stage in Levels(size, groups[:-1]).stages(depth):
        sent = set()
        for (place, token, rank), here in at.items():
            there = stage.peers(here)[stage.place(rank)]
            if there != here:
                sent.add((place, token, here, there))
            at[place, token, rank] = there
        for _, _, here, there in sent:
            level = next(i for i, num in enumerate(groups) if here // (size // num) != there // (size // num))
            expected[level - 1] += 1
    assert at == {key: key[2] for key in at}
    found = [0] * len(expected)
    for place in range(size):
        pairs = [(token, rank) for origin, token, rank in wanted if origin == place]
        tokens, ranks = torch.tensor(pairs).T
        moved = moved_rows(tokens, ranks, place, groups, depth)
        found = [a + b for a, b in zip(found, moved, strict=True)]
    assert found == expected


@pytest.mark.parametrize(("codec", "nbytes"), [(Raw(), 4 * 16), (Blockwise(BlockFormat("int8", 16)), 16 + 2)])
def test_rows_count_as_they_travel(codec: Codec, nbytes: int) -> None:
    meters, layers = [], []
    for place in (0, 1):
        meters.append(ExpertMeter(World(rank=place, size=1, local_rank=0, device=ALONE.device), 2))
        layers.append(layer := layer_with((meters[-1],)))
        layer.dispatcher.codec = codec  # type: ignore[attr-defined]  # as dispatchers that send rows have one
        layer(torch.randn(20, 16, generator=torch.Generator().manual_seed(1)))
    uses = [meter.take(layers) for meter in meters]
    assert sum(use.level_nbytes[0] for use in uses if use is not None) == 20 * 3 * nbytes


def test_experts_that_processes_cannot_share_evenly_are_counted_where_they_are() -> None:
    routed, meter = Routed(), ExpertMeter(ALONE, 2)
    layer = layer_with((meter, routed), num_experts=5)  # 3 and 2
    layer(torch.randn(20, 16))
    use = meter.take([layer])
    assert use is not None
    assert use.level_nbytes == (int((routed.routings[0].experts >= 3).sum()) * 16 * 4,)


class TwoRanks:
    """As much of a process group as a table of copies reads."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_rows_for_a_copy_here_do_not_leave() -> None:
    routed, meter = Routed(), ExpertMeter(ALONE, 2)
    layer = layer_with((meter, routed))
    x = torch.randn(20, 16)
    layer(x)
    before = meter.take([layer])
    group: Any = TwoRanks()
    layer.placement = placement = Placement(8)
    placement.copies = ExpertCopies([(5, 0), (6, 0)], group, placement.slots.tolist())
    for hook in layer.hooks:
        hook.before_dispatch(layer, RoutedTokens(x, routed.routings[0]))
    after = meter.take([layer])
    assert before is not None
    assert after is not None
    experts = routed.routings[0].experts
    here = int(((experts == 5) | (experts == 6)).sum())
    assert here > 0
    assert before.level_nbytes[0] - after.level_nbytes[0] == here * 16 * 4
    assert before.loads == after.loads


def test_a_layer_that_did_not_run_has_zeros() -> None:
    meter = ExpertMeter(ALONE, 1)
    ran, other = layer_with((meter,)), layer_with((meter,), num_experts=6)
    ran(torch.randn(4, 16))
    use = meter.take([other, ran])
    assert use is not None
    assert use.loads[0] == (0,) * 6
    assert sum(use.loads[1]) == 4 * 3
    assert use.load_ratio == use.worst_load_ratio == max(use.loads[1]) * 8 / 12  # of what ran
    assert meter.take([other, ran]) is None


def test_a_process_on_which_no_layer_ran_counts_the_others() -> None:
    class Two(World):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.tensor([*range(8), 0, 0, 0, 0, 1])

    meter = ExpertMeter(Two(rank=0, size=1, local_rank=0, device=ALONE.device), 2)
    use = meter.take([layer_with((meter,))])
    assert use is not None
    assert use.loads == (tuple(range(8)),)


def test_only_training_counts() -> None:
    meter = ExpertMeter(ALONE, 1)
    layer = layer_with((meter,)).eval()
    layer(torch.randn(4, 16))
    assert meter.take([layer]) is None


@pytest.mark.parametrize(("factor", "most"), [(1.0, 9), (0.5, 5), (100.0, 24)])
def test_a_capacity_drops_what_is_beyond_it(factor: float, most: int) -> None:
    meter = ExpertMeter(ALONE, 1)
    layer = layer_with((Capacity(factor, None), meter))
    x = torch.randn(24, 16)
    layer(x)
    use = meter.take([layer])
    assert use is not None
    assert max(use.loads[0]) <= most
    assert sum(use.loads[0]) + use.num_dropped == 24 * 3
    assert layer.num_dropped == use.num_dropped
    assert (use.num_dropped > 0) == (factor < 100)
    layer.eval()
    layer(x)
    assert layer.num_dropped == 0
    layer.hooks = (Capacity(None, factor), meter)
    layer(x)
    assert layer.load is not None
    assert int(layer.load.max()) <= most
    layer.train()(x)
    assert layer.num_dropped == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_tokens_of_a_layer_that_runs_again_are_counted_once(reentrant: bool) -> None:
    meter = ExpertMeter(ALONE, 1)
    layer = layer_with((meter,))
    out = checkpoint(layer, torch.randn(20, 16).requires_grad_(), use_reentrant=reentrant)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    use = meter.take([layer])
    assert use is not None
    assert sum(use.loads[0]) == 20 * 3
