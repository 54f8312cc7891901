"""Plans by a measured table are the cheapest that fit, and damaged tables are refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cost.planner.measured import (
    Linear,
    Measured,
    MeasuredGroup,
    MeasuredPlan,
    MeasuredTable,
    choose_measured,
)
from laconic.errors import PlanError

pytest.importorskip("scipy")


def table_of(groups: list[MeasuredGroup], order: tuple[str, ...], workspace: dict[str, Linear]) -> MeasuredTable:
    return MeasuredTable(
        source="made up",
        precision="fp32",
        sample_shape={"x": [3]},
        tensors=((64, 128), (64, 1)),
        buffers_nbytes=100,
        other_nbytes=Linear(1000, 50),
        workspace_nbytes=workspace,
        groups=tuple(groups),
        order=order,
        largest_batch=4,
    )


@st.composite
def tables(draw: st.DrawFn) -> MeasuredTable:
    words = ["16", *draw(st.lists(st.sampled_from(["8", "6", "4"]), unique=True, min_size=1))]
    amounts = st.integers(0, 200_000)
    groups, order = [], []
    for g in range(draw(st.integers(1, 3))):
        blocks = tuple(f"g{g}.{i}" for i in range(draw(st.integers(1, 3))))
        if g == 2:
            blocks = ("",)
        order += blocks
        options = {}
        for word in ["16", *[w for w in words[1:] if draw(st.booleans())]]:
            error, share = (0.0, 0.0) if word == "16" else (draw(st.floats(0, 0.01)), draw(st.floats(0, 0.1)))
            options[word] = Measured(Linear(draw(amounts), draw(amounts)), error, share, {"site": None})
        groups.append(MeasuredGroup(f"Kind{g}", blocks, options))
    return table_of(
        groups, tuple(draw(st.permutations(order))), {w: Linear(draw(amounts), draw(amounts)) for w in words}
    )


def cost(plan: MeasuredPlan, weight: float) -> float:
    return plan.relative_error**2 / 0.05**2 + weight * plan.time_share / 0.02


def all_plans(table: MeasuredTable, samples: int) -> list[MeasuredPlan]:
    options = [list(table.group_of(block).options) for block in table.order]
    return [
        MeasuredPlan.of(table, samples, dict(zip(table.order, words, strict=True)))
        for words in itertools.product(*options)
    ]


@settings(max_examples=40, deadline=None)
@given(table=tables(), samples=st.integers(1, 9), share=st.floats(0, 1.2), weight=st.sampled_from([0.0, 1.0]))
def test_no_other_choices_that_fit_are_cheaper(table: MeasuredTable, samples: int, share: float, weight: float) -> None:
    plans = all_plans(table, samples)
    least, most = (f(plan.total_nbytes for plan in plans) for f in (min, max))
    budget = round(least + share * (most - least)) + 8
    found = choose_measured(table, samples, budget, time_weight=weight)
    assert found.total_nbytes <= budget
    best = min(cost(plan, weight) for plan in plans if plan.total_nbytes <= budget)
    assert cost(found, weight) == pytest.approx(best, abs=1e-5)
    with pytest.raises(PlanError, match=f"{least:,} bytes"):
        choose_measured(table, samples, least - 8, time_weight=weight)


def example() -> MeasuredTable:
    def option(nbytes: int, error: float, entry: Any) -> Measured:
        return Measured(Linear(0, nbytes), error, error, {"norm": entry, "": entry})

    packed = {"code": "int8", "block_size": 64, "scale_dtype": "bfloat16"}
    group = MeasuredGroup(
        "Layer", ("stack.0", "stack.1"), {"16": option(8000, 0, None), "8": option(2000, 1e-4, packed)}
    )
    workspace = {"16": Linear(0, 10), "8": Linear(0, 20)}
    return table_of([group], ("stack.0", "stack.1"), workspace)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = example()
    table.save(tmp_path / "table.json")
    assert MeasuredTable.load(tmp_path / "table.json") == table
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_the_plan_names_sites_of_all_blocks() -> None:
    plan = choose_measured(example(), 10, 280_000)
    assert sorted(plan.choices.values()) == ["16", "8"]
    sites = plan.activation_plan()["sites"]
    assert set(sites) == {"stack.0", "stack.0.norm", "stack.1", "stack.1.norm"}
    for block, word in plan.choices.items():
        assert sites[block] == sites[f"{block}.norm"]
        assert (sites[block] or {}).get("code") == ("int8" if word == "8" else None)


def test_persistent_memory_is_that_of_the_optimizers() -> None:
    torch = pytest.importorskip("torch")
    from laconic.optim import AdamW8bit

    parameters = [torch.nn.Parameter(torch.zeros(64, 128)), torch.nn.Parameter(torch.zeros(64))]
    for name, kind in (("adamw", torch.optim.AdamW), ("adamw8bit", AdamW8bit)):
        optimizer = kind(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        states = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
        predicted = example().persistent_nbytes(name)
        assert predicted["optimizer"] == sum(x.nbytes for x in states)
        assert predicted["parameters"] == 100 + sum(p.nbytes for p in parameters)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version 2"),
        (("format",), "x", "no laconic memory table"),
        (("precision",), "fp8", "precision 'fp8'"),
        (("order",), ["stack.0"], "order has other blocks"),
        (("workspace_nbytes",), {"16": {"fixed": 0, "per_sample": 1}}, "no workspace for the choice '8'"),
        (("groups", 0, "options", "8", "squared_error"), -1, "error -1"),
        (("groups", 0, "options", "8", "saved_nbytes", "fixed"), "inf", "must be finite"),
        (("groups", 0, "options", "16"), None, "damaged"),
        (("groups",), 3, "damaged"),
        (("tensors",), [[1]], "damaged"),
        (("largest_batch",), None, "damaged"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(json.loads(json.dumps(example().to_dict())))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "table.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        MeasuredTable.load(tmp_path / "table.json")


@settings(max_examples=20, deadline=None)
@given(table=tables(), samples=st.integers(1, 9), weight=st.sampled_from([0.0, 1.0]))
def test_blocks_that_share_get_one_choice(table: MeasuredTable, samples: int, weight: float) -> None:
    words = [word for word in table.workspace_nbytes if all(word in group.options for group in table.groups)]
    table = dataclasses.replace(
        table, uniform_only=True, workspace_nbytes={w: table.workspace_nbytes[w] for w in words}
    )
    plans = [MeasuredPlan.uniform(table, samples, word) for word in words]
    for budget in {plan.total_nbytes for plan in plans}:
        found = choose_measured(table, samples, budget, time_weight=weight)
        assert len(set(found.choices.values())) == 1
        assert cost(found, weight) == min(cost(plan, weight) for plan in plans if plan.total_nbytes <= budget)
    least = min(plan.total_nbytes for plan in plans)
    with pytest.raises(PlanError, match=f"{least:,} bytes"):
        choose_measured(table, samples, least - 1)
    if len(words) > 1 and len(table.order) > 1:
        mixed = dict.fromkeys(table.order, words[0]) | {table.order[0]: words[1]}
        with pytest.raises(PlanError, match="neighbours share"):
            MeasuredPlan.of(table, samples, mixed)


def test_choices_that_were_not_measured_are_refused() -> None:
    with pytest.raises(PlanError, match=r"choices name '5', but the table knows 16, 8"):
        choose_measured(example(), 1, 10**9, allowed=["5"])
    with pytest.raises(PlanError, match=r"choices name '4'"):
        MeasuredPlan.uniform(example(), 1, "4")
    with pytest.raises(PlanError, match="batch is 0"):
        choose_measured(example(), 0, 10**9)
