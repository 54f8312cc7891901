"""The most layers that fit: as by trying one after the other, and as if a model of that depth had been traced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laconic.cost import Batch, Job, Layout, Settings, predict
from laconic.cost.memory.job import precision_of
from laconic.cost.memory.saved_tensors import Choice
from laconic.cost.planner.largest import most_layers
from laconic.cost.planner.policy import BudgetError, Chosen, by_bits, choose
from laconic.errors import PlanError
from tests.cost.shapes import Sizes, traced_llama

BATCH, SETTINGS = Batch(1, 64), Settings(precision="bf16-pure", optimizer="adamw8bit")


def job_of(num_layers: int, layout: Layout, kinds: tuple[int, ...] | None = None) -> Job:
    sizes = Sizes(128, 384, num_layers, 2, 2, 500, head_dim=64)
    model = traced_llama(sizes, BATCH, precision_of(SETTINGS, layout), SETTINGS.loss, kinds)
    return Job(model, BATCH, layout, SETTINGS)


def packed(job: Job, budget: int) -> Chosen | None:
    chosen = by_bits(job, [4] * job.layout.num_chunks, Choice("int8"))
    return chosen if chosen.prediction.peak_nbytes <= budget else None


@pytest.mark.parametrize("layout", [Layout(), Layout(stages=2, micro_batches=4)])
def test_no_deeper_model_fits(layout: Layout) -> None:
    depths = range(layout.num_chunks, 12)
    peaks = {n: packed(job_of(n, layout), 1 << 40).prediction.peak_nbytes for n in depths}  # type: ignore[union-attr]
    job = job_of(5, layout)
    with pytest.raises(PlanError, match=f"not even a model of {layout.num_chunks} layers fits"):
        most_layers(job, lambda job: packed(job, peaks[layout.num_chunks] - 1))
    for budget in {*peaks.values(), *(nbytes - 1 for nbytes in peaks.values())} - {max(peaks.values())}:
        fitting = [n for n in depths if peaks[n] <= budget]
        if fitting:
            assert most_layers(job, lambda job, budget=budget: packed(job, budget)) == max(fitting)  # type: ignore[misc]


def test_a_chosen_plan_fits_and_one_layer_more_does_not() -> None:
    def chosen(job: Job) -> Chosen | None:
        try:
            return choose(job, 20_000_000)
        except BudgetError:
            return None

    found = most_layers(job_of(3, Layout()), chosen)
    assert chosen(job_of(found, Layout())) is not None
    with pytest.raises(BudgetError, match="the least that these choices can do with"):
        choose(job_of(found + 1, Layout()), 20_000_000)


@pytest.mark.parametrize("num_layers", [1, 3, 8, 11])
def test_another_depth_is_as_if_it_had_been_traced(num_layers: int) -> None:
    for kinds in (None, tuple(n % 2 for n in range(num_layers))):
        deeper = job_of(num_layers, Layout(), kinds)
        short = job_of(4, Layout(), None if kinds is None else (0, 1, 0, 1))
        resized = short.model.with_num_layers(num_layers)
        assert resized.names == deeper.model.names
        assert resized.kinds == deeper.model.kinds
        assert resized.config["num_hidden_layers"] == num_layers
        assert predict(replace(short, model=resized)) == predict(deeper)


def test_what_has_no_other_depth_is_refused() -> None:
    model = job_of(4, Layout()).model
    with pytest.raises(PlanError, match="num_layers is 0, but a model has at least one layer"):
        model.with_num_layers(0)
    with pytest.raises(PlanError, match="has no single list of num_hidden_layers layers"):
        replace(model, is_stack=False).with_num_layers(5)
    with pytest.raises(PlanError, match="layers fit, and more would"):
        most_layers(job_of(4, Layout()), lambda job: by_bits(job_of(1, Layout()), [4]))
