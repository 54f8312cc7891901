"""Choosing under a budget: optimal, within the budget on every rank, the same each time; policies and plan files."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cost import Batch, Job, Layout, Plan, Settings, load_plan, predict
from laconic.cost.hardware.compute import Hardware, Sensitivity
from laconic.cost.memory.job import precision_of
from laconic.cost.memory.saved_tensors import EXACT, Choice
from laconic.cost.memory.traced import Workspace
from laconic.cost.planner.policy import Weights, agoq, by_bits, choose, describe
from laconic.errors import LaconicError, PlanError
from tests.cost.shapes import Sizes, shape_of, traced_llama
from tests.grid import slow_but

SMALL = Sizes(512, 1536, 2, 8, 4, 1000, head_dim=64)
PAPER = Layout(stages=4, stages_per_rank=2, schedule="interleaved-1f1b", micro_batches=8)


def job_of(sizes: Sizes, batch: Batch, layout: Layout, settings: Settings, kinds: tuple[int, ...] | None = None) -> Job:
    model = traced_llama(sizes, batch, precision_of(settings, layout), settings.loss, kinds)
    return Job(model, batch, layout, settings)


LARGE = job_of(
    shape_of("llama3-8b"),
    Batch(1, 8192),
    replace(PAPER, data_parallel=8, sharded=True),
    Settings(optimizer="adamw8bit", loss="chunked"),
)


def budgets_of(job: Job) -> tuple[int, int]:
    """Bytes of the fullest rank at 4 bits with packed attention, and with everything exact."""
    return by_bits(job, [4] * job.layout.num_chunks, Choice("nf4")).prediction.peak_nbytes, predict(job).peak_nbytes


@pytest.mark.parametrize("share", slow_but([0.02, 0.2, 0.5, 0.9, 1.1], 0.2, 1.1))
def test_no_rank_exceeds_its_budget_and_less_budget_costs_more(share: float) -> None:
    least, most = budgets_of(LARGE)
    budget = int(least + share * (most - least))
    chosen = choose(LARGE, budget)
    assert all(rank.total_nbytes <= budget for rank in chosen.prediction.ranks)
    assert choose(LARGE, budget) == chosen
    if share > 1:
        assert chosen.relative_error == 0
        assert chosen.time_share == 0


def test_the_choice_is_the_best_of_all() -> None:
    """Every assignment of a small job is tried by hand."""
    job = job_of(replace(SMALL, num_layers=1), Batch(2, 64), Layout(), Settings(precision="fp32"))
    words = ("16", "8", "4")
    sensitivity, hardware, weights = Sensitivity.default(), Hardware.named("a100"), Weights(0.5)
    units = [unit for stage in job.stages() for unit in stage.units() if unit.num_elements is not None]
    options = [[Choice.from_bits(int(w)) for w in words if int(w) >= u.minimum_bits] for u in units]
    step = 3 * 1  # in units of one layer's forward

    def cost_of(assignment: tuple[Choice, ...]) -> tuple[float, int]:
        choices = {unit.name: choice for unit, choice in zip(units, assignment, strict=True)}
        choices |= {u.name: Choice("nf4") for s in job.stages() for u in s.units() if u.num_elements is None}
        found = describe(job, choices, {}, "by hand")
        from laconic.cost.hardware.compute import pack_seconds, recompute_seconds

        seconds = sum(pack_seconds(job, hardware, u, choices[u.name]) for u in units)
        error = (found.relative_error / 0.05) ** 2
        time = 0.5 * seconds / (step * recompute_seconds(job, hardware)) / 0.02
        return error + time, found.prediction.peak_nbytes

    tried = [cost_of(assignment) for assignment in itertools.product(*options)]
    sizes = sorted(nbytes for _, nbytes in tried)
    for budget in (sizes[0], sizes[len(sizes) // 3], sizes[-1]):
        best = min(cost for cost, nbytes in tried if nbytes <= budget)
        chosen = choose(job, budget, allowed=words, sensitivity=sensitivity, hardware=hardware, weights=weights)
        got, nbytes = cost_of(tuple(chosen.choices[unit.name] for unit in units))
        assert nbytes <= budget
        assert got == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_a_budget_nothing_can_meet_says_the_smallest() -> None:
    for words in (("16", "8", "6", "5", "4", "recompute", "offload"), ("16", "8", "4"), ("8", "recompute")):
        with pytest.raises(PlanError, match=r"the least that these choices can do with is [\d,]+ bytes") as caught:
            choose(LARGE, 1_000_000, allowed=words)
        smallest = int(str(caught.value).split("do with is ")[1].split(" bytes")[0].replace(",", ""))
        assert choose(LARGE, smallest, allowed=words).prediction.peak_nbytes <= smallest
        with pytest.raises(PlanError, match="least"):
            choose(LARGE, int(smallest * 0.999), allowed=words)


@given(
    layers=st.integers(1, 6),
    other=st.sets(st.integers(0, 5)),
    layout=st.sampled_from(
        [
            Layout(),
            Layout(stages=2, schedule="gpipe", micro_batches=4),
            Layout(stages=2, stages_per_rank=2, schedule="interleaved-1f1b", micro_batches=4),
        ]
    ),
    batch=st.sampled_from([Batch(1, 2048), Batch(3, 512)]),
    words=st.sampled_from([("16", "4", "recompute"), ("8", "5", "4"), ("8", "recompute"), ("16", "8", "4", "offload")]),
    lowers_loss=st.booleans(),
)
@settings(max_examples=15)
def test_the_smallest_budget_is_met_and_nothing_below_it(
    layers: int,
    other: set[int],
    layout: Layout,
    batch: Batch,
    words: tuple[str, ...],
    lowers_loss: bool,
) -> None:
    layers = max(layers, layout.num_chunks)
    kinds = tuple(int(layer in other) for layer in range(layers))  # as with and without a sliding window
    job = job_of(replace(SMALL, num_layers=layers), batch, layout, Settings(precision="bf16"), kinds)
    if lowers_loss:  # as the loss of a packed model does, which is computed in tiles
        wide = 1 << 30
        workspace = job.model.workspace | {"loss": Workspace(2 * wide, -wide)}
        job = replace(job, model=replace(job.model, workspace=workspace))
    with pytest.raises(PlanError, match="least") as caught:
        choose(job, 1, allowed=words)
    smallest = int(str(caught.value).split("do with is ")[1].split(" bytes")[0].replace(",", ""))
    # The program counts a layer of a pipeline's chunk as the average of its layers.
    peak = choose(job, smallest, allowed=words).prediction.peak_nbytes
    assert 0.95 * smallest <= peak <= smallest
    with pytest.raises(PlanError, match="least"):
        choose(job, int(smallest * 0.999), allowed=words)


def test_recomputing_and_offloading_are_used_when_bits_do_not_suffice() -> None:
    job = replace(LARGE, layout=replace(LARGE.layout, schedule="gpipe", stages_per_rank=1, micro_batches=32))

    def least(words: tuple[str, ...]) -> int:
        with pytest.raises(PlanError) as caught:
            choose(job, 1, allowed=words)
        return int(str(caught.value).split("do with is ")[1].split(" bytes")[0].replace(",", ""))

    bits = least(("16", "8", "6", "5", "4"))
    again = least(("16", "8", "6", "5", "4", "recompute"))
    host = least(("16", "8", "6", "5", "4", "offload"))
    assert again < bits
    assert host < again
    chosen = choose(job, again, allowed=("16", "8", "6", "5", "4", "recompute"))
    assert chosen.recomputed
    assert chosen.time_share > 0.1
    half = choose(job, (again + bits) // 2, allowed=("16", "8", "6", "5", "4", "recompute"))
    assert half.time_share < chosen.time_share
    chosen = choose(job, host, allowed=("16", "8", "6", "5", "4", "offload"))
    assert chosen.prediction.ranks[0].host_nbytes > 0


def test_gate_and_up_run_again_only_where_their_norm_is_packed() -> None:
    least, most = budgets_of(LARGE)
    found = 0
    for share in (0.0, 0.1, 0.4):
        budget = int(least + share * (most - least))
        chosen = choose(LARGE, budget, allowed=("16", "8", "recompute", "4"), weights=Weights(0.01))
        for name, choice in chosen.choices.items():
            if choice.recompute:
                found += 1
                norm = name.replace(".mlp", ".self_attn.q_proj")
                assert chosen.choices[norm] != EXACT
    assert found > 0


def test_the_head_never_has_less_than_eight_bits() -> None:
    least, _ = budgets_of(LARGE)
    for chosen in (choose(LARGE, least), by_bits(LARGE, [4] * 8), agoq(LARGE)):
        assert chosen.choices["model.norm"].bits >= 8


def test_the_papers_rule_is_4_5_6_8() -> None:
    chosen = agoq(LARGE)
    bits = [
        {chosen.choices[unit.name].bits for unit in stage.units() if unit.kind == "mlp"}.pop()
        for stage in LARGE.stages()
    ]
    assert bits == [4, 5, 6, 8] * 2
    layout = Layout(data_parallel=8, sharded=True, stages=4, schedule="1f1b", micro_batches=8)
    plain = agoq(replace(LARGE, layout=layout))
    assert [plain.choices[f"model.layers.{i}.mlp"].bits for i in (0, 10, 20, 31)] == [4, 5, 8, 8]


def test_a_plan_goes_through_its_file(tmp_path: Path) -> None:
    least, most = budgets_of(LARGE)
    for chosen in (choose(LARGE, (2 * least + most) // 3), choose(LARGE, int(0.97 * least)), agoq(LARGE)):
        plan = Plan.of(LARGE, chosen, most)
        plan.save(tmp_path / "plan.json")
        read = load_plan(tmp_path / "plan.json")
        assert read == plan
        assert read.prediction == chosen.prediction
        data = json.loads((tmp_path / "plan.json").read_text())
        assert data["format"] == "laconic plan"
        assert data["predicted"]["ranks"][0]["total_nbytes"] == chosen.prediction.ranks[0].total_nbytes
        sites = data["settings"]["activations"]["sites"]
        assert set(sites) == {site for stage in LARGE.stages() for unit in stage.units() for site in unit.sites}
        plan.check(LARGE.model.config, stages=4, world_size=32, sequence_length=8192, split=LARGE.split)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_for_another_model_or_world_is_refused_naming_the_difference() -> None:
    plan = Plan.of(LARGE, agoq(LARGE))
    with pytest.raises(PlanError, match=r"a model with num_hidden_layers = 32, but this model has 16"):
        plan.check({**LARGE.model.config, "num_hidden_layers": 16})
    with pytest.raises(PlanError, match=r"a run with stages = 4, but this run has 2"):
        plan.check(LARGE.model.config, stages=2)
    with pytest.raises(PlanError, match=r"a run with world_size = 32, but this run has 8"):
        plan.check(LARGE.model.config, world_size=8)
    with pytest.raises(PlanError, match=r"says nothing about 'colour'"):
        plan.check(LARGE.model.config, colour="red")


def test_damaged_plans_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="it must be a file"):
        load_plan(path)
    Plan.of(LARGE, agoq(LARGE)).save(path)
    good = json.loads(path.read_text())

    def changed(change: Any) -> Any:
        data = json.loads(path.read_text())
        change(data)
        return data

    for damage, message in (
        (lambda d: d.pop("format"), "no laconic plan"),
        (lambda d: d.update(version=9), "version 9"),
        (lambda d: d.pop("model"), "has no 'model'"),
        (lambda d: d["world"].pop("stages"), "has no 'stages'"),
        (lambda d: d["world"].pop("world_size"), "the plan's world.world_size is not what this laconic writes"),
        (lambda d: d["world"].update(rings=2), "the plan's world.rings is not"),
        (lambda d: d["settings"].update(offload=True), "the plan's settings.offload is not"),
        (lambda d: d["batch"].update(rings=2), "damaged: TypeError.*'rings'"),
        (lambda d: d["schedule"][0].pop(), "the plan's schedule.0 is not"),
        (lambda d: d.update(notes=[]), "the plan's notes is not"),
        (lambda d: d.update(version=True), "the plan's version is not"),
        (lambda d: d["model"]["names"].pop(), "kinds that it does not describe"),
        (lambda d: d["settings"].update(optimizer="sgd"), "optimizer is 'sgd'"),
        (
            lambda d: d["settings"]["activations"]["sites"].update({"lm_head": None}),
            "settings.activations.sites.lm_head is not",
        ),
        (lambda d: d["choices"].update({"model.layers.99.mlp": None}), "model.layers.99.mlp"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_dict(changed(damage))
    assert Plan.from_dict(good)
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        load_plan(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose(LARGE, 10**11, allowed=["7"]), "choices name '7'"),
        (lambda: choose(LARGE, 10**11, allowed=["offload"]), "choices are empty"),
        (lambda: Weights(-1), "time weight is -1"),
        (lambda: Hardware.named("abacus"), "hardware is 'abacus', but it must be one of h100"),
        (lambda: Sensitivity.load("/nowhere.json"), "it must be a file"),
        (lambda: Sensitivity.from_dict({"errors": {}}), "no laconic sensitivity"),
        (lambda: choose(LARGE, 10**11, sensitivity=Sensitivity({}, "")), "nothing is known about norm"),
    ],
)
def test_bad_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(LaconicError, match=message):
        call()


def test_sensitivity_takes_the_next_coarser_measurement() -> None:
    unit = LARGE.stages()[0].units()[0]
    known = Sensitivity({"norm": {"int8": 0.01, "nf4": 0.1}}, "")
    assert known.squared_error(unit, Choice("int8"), 4) == pytest.approx(0.01**2 / 4)
    assert known.squared_error(unit, Choice("int6"), 4) == pytest.approx(0.1**2 / 4)
    assert known.squared_error(unit, EXACT, 4) == 0


def test_two_bits_are_taken_only_by_who_names_them_and_never_stand_for_other_codes() -> None:
    budget = budgets_of(LARGE)[0]
    smallest = by_bits(LARGE, [2] * LARGE.layout.num_chunks, Choice("uint2")).prediction.peak_nbytes
    assert smallest < budget
    with pytest.raises(PlanError, match="the least that these choices can do with"):
        choose(LARGE, smallest, allowed=("16", "8", "6", "5", "4"))
    chosen = choose(LARGE, smallest, allowed=("8", "2"))
    assert 2 in {choice.bits for choice in chosen.choices.values()}
    assert all(rank.total_nbytes <= smallest for rank in chosen.prediction.ranks)
    norm = next(unit for unit in LARGE.stages()[0].units() if unit.kind == "norm")
    only = Sensitivity({"norm": {"uint2": 0.5}}, "")
    with pytest.raises(PlanError, match="nothing is known about norm at nf4"):
        only.squared_error(norm, Choice("nf4"), 1)
    with pytest.raises(PlanError, match="nothing is known about norm at uint2"):
        Sensitivity({"norm": {"nf4": 0.1}}, "").squared_error(norm, Choice("uint2"), 1)


def test_shipped_numbers_name_their_source() -> None:
    assert len(Sensitivity.default().source) > 20
    data = json.loads((Path(__file__).parents[2] / "src/laconic/cost/data/hardware.json").read_text())
    for entries in data.values():
        for entry in entries.values():
            assert entry["value"] > 0
            assert len(entry["source"]) > 20


def test_planning_needs_no_torch() -> None:
    modules = "laconic.cost.planner.policy, laconic.cost.planner.plan"
    code = f"import {modules}, sys; assert not {{'torch', 'scipy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
