"""Shapes, grids, rates of mixture-of-experts layers and their file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cost.comm.rates import CodecRates, Line, LinkRates, WireRates
from laconic.cost.comm.seconds import GroupShape, sent_nbytes
from laconic.cost.moe import GROUPS, Coding, GridLayout, LayerShape, MoERates
from laconic.cost.moe.overhead import Overhead
from laconic.cost.moe.rates import default_moe_path
from laconic.cost.moe.shape import group_shape
from laconic.errors import ConfigError

LAYER = LayerShape(num_tokens=64, model_dim=32, hidden_dim=48, num_experts=8, top_k=2)


def link(seconds_per_byte: float, alpha: float = 1e-4, world: int = 4) -> LinkRates:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    return LinkRates(world, {name: Line(alpha, seconds_per_byte) for name in names}, 1e-5, 1.0)


def rates(**others: Any) -> MoERates:
    links = {"node": link(1e-10, 1e-5), "across": link(1e-8), "all": link(2e-8)}
    lossless = CodecRates(Line(1e-5, 1e-10), Line(1e-5, 1e-10), Line(1e-5, 1e-10), 1.5)
    blocks = CodecRates(Line(1e-5, 2e-10), Line(1e-5, 2e-10), Line(1e-5, 2e-10), 1.9)
    known = {"copy": Line(1e-6, 1e-10), "codecs": {"bfloat16": {"blockwise8": blocks}}, "source": "made up"} | others
    return MoERates(WireRates(links, {"bfloat16": {"tiered": lossless}}), Line(1e-5, 1e-12), **known)


# --- shapes ---


def test_volumes_are_those_of_the_papers() -> None:
    shape = replace(LAYER, capacity_factor=1.5)
    assert shape.rows_per_token == 3.0  # c = k*f
    assert shape.rows_nbytes == 3 * 64 * 32 * 2  # E*T*M elements of 2 bytes
    assert LAYER.rows_nbytes == 2 * LAYER.tokens_nbytes
    assert replace(LAYER, num_tokens=0).rows_nbytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k is 9, but a token has at most num_experts = 8"),
        ({"num_tokens": -1}, "num_tokens is -1, but it must be a whole number from 0 on"),
        ({"model_dim": 0}, "model_dim is 0, but it must be a whole number from 1 on"),
        ({"hidden_dim": 1.5}, "hidden_dim is 1.5"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0, but it must be positive"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
    ],
)
def test_impossible_layers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LAYER, **change)


def test_a_layer_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts is 9, but it must be a multiple of ep = 4"):
        replace(LAYER, num_experts=9).check(GridLayout(4, ep=4))
    with pytest.raises(ConfigError, match="hidden_dim is 50, but it must be a multiple of esp = 4"):
        replace(LAYER, hidden_dim=50).check(GridLayout(4, esp=4))


def test_groups_know_their_machines() -> None:
    grid = GridLayout(32, mp=8, ep=4, esp=8, ranks_per_node=8)  # FSMoE's layout: MP = ESP = node
    worlds = {group: group_shape(grid, group) for group in GROUPS}
    assert worlds["mp"] == worlds["esp"] == GroupShape(8, 8)
    assert worlds["ep"] == worlds["dp"] == GroupShape(4, 1)
    assert worlds["joint"] == GroupShape(32, 8)
    assert worlds["edp"] == GroupShape(1, 1)
    assert [worlds[group].kind for group in ("mp", "ep", "joint")] == ["node", "across", "all"]
    assert group_shape(GridLayout(6, mp=2, ranks_per_node=3), "mp") == GroupShape(
        2, 1
    )  # some groups cross, so all may wait for it
    with pytest.raises(ConfigError, match="group is 'tp', but it must be one of mp, dp"):
        group_shape(grid, "tp")


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_machines_equal_those_counted_rank_by_rank(mp: int, ep: int, esp: int, per_node: int) -> None:
    num_ranks = 64
    grid = GridLayout(num_ranks, mp=2**mp, ep=2**ep, esp=2**esp, ranks_per_node=2**per_node)
    members = {
        "mp": lambda rank: (rank // grid.mp,),
        "dp": lambda rank: (rank % grid.mp,),
        "esp": lambda rank: (rank // grid.esp,),
        "ep": lambda rank: (rank // (grid.esp * grid.ep), rank % grid.esp),
        "joint": lambda rank: (rank // (grid.esp * grid.ep),),
        "edp": lambda rank: (rank % (grid.esp * grid.ep),),
    }
    for group, key in members.items():
        ranks = [rank for rank in range(num_ranks) if key(rank) == key(0)]
        nodes = {rank // 2**per_node for rank in ranks}
        assert group_shape(grid, group) == GroupShape(len(ranks), len(ranks) // len(nodes)), group


# --- prices ---


def test_a_price_is_alpha_and_the_bytes_sent() -> None:
    found = rates()
    price = found.price("all_to_all", "ep", GroupShape(4, 1), 1e6)
    assert price.sent_nbytes == sent_nbytes("all_to_all", 1e6, 4)
    assert price.seconds == pytest.approx(1e-4 + 0.75e6 * 1e-8)
    assert found.price("all_to_all", "ep", GroupShape(1, 1), 1e6).seconds == 0.0


def test_a_group_that_was_measured_counts_before_its_kind() -> None:
    own = replace(rates(), groups={"ep": link(5e-8)})
    assert own.price("all_gather", "ep", GroupShape(4, 1), 1e6).seconds == pytest.approx(1e-4 + 3e6 * 5e-8)
    assert own.price("all_gather", "dp", GroupShape(4, 1), 1e6) == rates().price(
        "all_gather", "dp", GroupShape(4, 1), 1e6
    )


def test_codes_shorten_slow_messages_and_auto_takes_the_best() -> None:
    found, world = rates(), GroupShape(4, 1)
    raw = found.price("all_to_all", "ep", world, 1e7)
    lossless = found.price("all_to_all", "ep", world, 1e7, Coding("tiered"))
    blocks = found.price("all_to_all", "ep", world, 1e7, Coding("blockwise8"))
    assert raw.seconds > lossless.seconds > blocks.seconds > raw.seconds / 1.9
    assert blocks.num_chunks > 1
    assert found.price("all_to_all", "ep", world, 1e7, Coding("auto")) == blocks
    assert found.price("all_to_all", "ep", GroupShape(4, 4), 1e7, Coding("auto")).code == "raw"  # too fast a link
    worse = found.price("all_to_all", "ep", world, 1e7, Coding("tiered", ratio=1.0))
    assert worse.seconds > lossless.seconds


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"code is 'zip', .* measured on bfloat16: tiered, blockwise8; or auto"):
        rates().price("all_to_all", "ep", GroupShape(4, 1), 1e6, Coding("zip"))


def test_products_of_experts_are_one_call_or_one_for_each() -> None:
    assert rates().products_seconds(1e9, 3, 8) == pytest.approx(3e-5 + 1e-3)
    assert rates(grouped=False).products_seconds(1e9, 3, 8) == pytest.approx(24e-5 + 1e-3)


# --- the file ---


def test_rates_survive_their_file(tmp_path: Path) -> None:
    found = rates(groups={"ep": link(5e-8), "inter1": link(1e-9), "intra0": link(1e-7)}, overlap=0.5, grouped=False)
    found.save(tmp_path / "rates.json")
    assert MoERates.load(tmp_path / "rates.json") == found


ALPHA = {"alpha_seconds": 0.0, "seconds_per_row": 0.0, "seconds_per_byte": 0.0, "error": 0.0}
BOTH = {"forward": ALPHA, "backward": ALPHA}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "version is 0, but this laconic reads version 1 of laconic moe rates"),
        ({"format": "x"}, "this is no laconic moe rates file"),
        ({"overlap": 2}, "overlap is 2, but it must be less than or equal to 1"),
        ({"groups": {"tp": {}}}, "groups.tp is 'tp', but it must be one of mp, "),
        ({"wire": {}}, "this is no laconic wire rates file"),
        ({"overheads": {"flat raw": {"forward": ALPHA}}}, "overheads.flat raw.backward is missing"),
        ({"overheads": {"flat raw": BOTH | {"sideways": ALPHA}}}, "overheads.flat raw.sideways is"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(rates().to_dict() | change))
    with pytest.raises(ConfigError, match=message):
        MoERates.load(path)


def test_overheads_of_routes_survive_their_file(tmp_path: Path) -> None:
    both = {"forward": Overhead(1e-3, 1e-6, 1e-9, 0.1), "backward": Overhead(2e-3)}
    known = rates(overheads={"flat raw": both})
    known.save(tmp_path / "rates.json")
    assert MoERates.load(tmp_path / "rates.json") == known
    assert known.overhead_of("flat") == known.overhead_of("flat", "tiered") == both
    assert known.overhead_of("depth 1") is None
    data = known.to_dict()
    with pytest.raises(ConfigError, match=r"overheads is missing; measure with laconic profile --moe"):
        MoERates.from_dict({name: value for name, value in data.items() if name != "overheads"})
    data["overheads"]["flat raw"]["forward"]["alpha_seconds"] = -1
    assert MoERates.from_dict(data).overheads["flat raw"]["forward"].alpha_seconds == -1
    data["overheads"]["flat raw"]["forward"]["seconds_per_row"] = -1
    with pytest.raises(ConfigError, match=re.escape("overheads.flat raw.forward.seconds_per_row is -1, but it must")):
        MoERates.from_dict(data)


def test_what_the_file_has_besides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sharing is not known here"):
        MoERates.from_dict(rates().to_dict() | {"sharing": 0.75})


def test_the_level_names_of_a_file_are_checked() -> None:
    data = rates(groups={"inter1": link(1e-9)}).to_dict()
    data["groups"] = {"inter0": data["groups"]["inter1"]}
    with pytest.raises(ConfigError, match=r"groups.inter0 is 'inter0', but it must be one of mp, "):
        MoERates.from_dict(data)


def test_the_default_path_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LACONIC_MOE_RATES", str(tmp_path / "mine.json"))
    assert default_moe_path() == tmp_path / "mine.json"
    monkeypatch.delenv("LACONIC_MOE_RATES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_moe_path() == tmp_path / "laconic" / "moe_rates.json"
