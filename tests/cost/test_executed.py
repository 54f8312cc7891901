"""A plan carried out keeps what it predicted, and a plan that recomputes, offloads and mixes can be trained."""

from __future__ import annotations

import json

import pytest
import torch

import laconic
from laconic.activations import ActivationPlan, SavedTensorTracker
from laconic.cost import Batch, Choice, Job, Plan, Settings
from laconic.cost.memory.saved_tensors import EXACT, RECOMPUTE, Unit
from laconic.cost.planner.policy import by_bits, choose, describe
from laconic.train.memory.trace import traced_job
from tests.activations.models import gradients_of, loss_of, make_ids, make_model, relative_error
from tests.grid import grid

pytestmark = pytest.mark.slow  # each traces a model

BATCH = Batch(2, 64)


def packed(unit: Unit) -> Choice:
    return EXACT if unit.kind == "attention" else Choice("int8")


def decided(job: Job, case: str) -> Plan:
    """A plan in which something special happens."""
    units = [unit for stage in job.stages() for unit in stage.units()]
    choices = {unit.name: packed(unit) for unit in units}
    recomputed: dict[int, Choice] = {}
    if case == "gate and up again":
        choices |= {unit.name: RECOMPUTE for unit in units if unit.kind == "mlp"}
    elif case == "layers again":
        recomputed = {0: Choice("int8"), 2: EXACT}
    elif case == "all layers again":
        recomputed = dict.fromkeys(range(3), Choice("nf4"))
    elif case == "offloaded":
        choices |= {unit.name: Choice("int8", offload=True) for unit in units if unit.kind in ("norm", "mlp")}
    elif case == "mixed":
        choices |= {unit.name: Choice("int6") for unit in units if unit.kind == "attention" and unit.layer == 1}
        choices |= {unit.name: EXACT for unit in units if unit.layer == 2}
    return Plan.of(job, describe(job, choices, recomputed, case))


CASES = ["gate and up again", "layers again", "all layers again", "offloaded", "mixed"]


@pytest.mark.parametrize(("family", "case"), grid(["llama", "qwen3", "olmo2", "gpt_neox"], CASES, strength=1))
def test_what_a_plan_keeps_is_what_it_predicts(family: str, case: str) -> None:
    model, exact = (make_model(family, num_hidden_layers=3) for _ in range(2))
    job = traced_job(model, BATCH, settings=Settings(precision="fp32"))
    plan = decided(job, case)
    laconic.compress_activations(model, plan=ActivationPlan.from_json(json.dumps(plan.activation_plan())))
    ids = make_ids(BATCH.sequences, BATCH.sequence_length)
    with SavedTensorTracker(model) as tracker:
        loss = loss_of(model, ids)
    predicted = plan.prediction.saved_total_nbytes
    if case == "offloaded":  # on a CPU the packed bytes stay where they are
        assert plan.prediction.ranks[0].host_nbytes > 0
        predicted += plan.prediction.ranks[0].host_nbytes
    assert tracker.nbytes == predicted

    loss.backward()
    loss_of(exact, ids).backward()
    got, expected = gradients_of(model), gradients_of(exact)
    off = torch.cat([got[name].flatten() for name in got]), torch.cat([expected[name].flatten() for name in got])
    assert set(got) == set(expected)
    assert relative_error(*off) < (0.25 if case == "all layers again" else 0.05)


@pytest.mark.ci
def test_what_the_solver_chooses_can_be_carried_out() -> None:
    model = make_model("llama", num_hidden_layers=4, intermediate_size=256)
    job = traced_job(model, Batch(16, 64), settings=Settings(precision="fp32", loss="chunked"))
    for budget in (21_000_000, 15_000_000, 13_000_000):
        plan = Plan.of(job, choose(job, budget, allowed=("16", "8", "6", "5", "4", "recompute")), budget)
        text = json.dumps(plan.activation_plan())
        laconic.compress_activations(model, plan=ActivationPlan.from_json(text), loss="chunked")
        ids = make_ids(16, 64)
        with SavedTensorTracker(model) as tracker:
            loss = loss_of(model, ids)
        loss.backward()
        predicted = plan.prediction.saved_total_nbytes
        assert tracker.nbytes == predicted
        laconic.decompress_activations(model)


def test_the_solver_tells_layers_with_a_window_from_those_without() -> None:
    changed = {"use_sliding_window": True, "sliding_window": 16, "no_rope_layer_interval": 2, "num_hidden_layers": 4}
    model = make_model("smollm3", **changed)
    job = traced_job(model, Batch(16, 64), settings=Settings(precision="fp32", loss="chunked"))
    assert job.model.kinds == (0, 1, 0, 1)
    plan = Plan.of(job, choose(job, 16_000_000, allowed=("16", "8", "4", "recompute")), 16_000_000)
    laconic.compress_activations(
        model, plan=ActivationPlan.from_json(json.dumps(plan.activation_plan())), loss="chunked"
    )
    with SavedTensorTracker(model) as tracker:
        loss_of(model, make_ids(16, 64))
    assert tracker.nbytes == plan.prediction.saved_total_nbytes


@pytest.mark.parametrize("bits", [4, 8])
def test_a_plan_of_a_mixture_of_experts_is_carried_out(bits: int) -> None:
    model = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    job = traced_job(model, BATCH, settings=Settings(precision="fp32"))
    plan = Plan.of(job, by_bits(job, [bits], Choice("int8")), None)
    laconic.compress_activations(model, plan=ActivationPlan.from_json(json.dumps(plan.activation_plan())))
    with SavedTensorTracker(model) as tracker:
        loss_of(model, make_ids(BATCH.sequences, BATCH.sequence_length))
    assert tracker.nbytes == plan.prediction.saved_total_nbytes
