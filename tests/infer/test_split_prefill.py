"""The benchmark of split prefill: what it times is what a plan needs, and what it runs computes the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.infer_split import LinkTimes, Predictions, interval, layer_times, plan_name
from benchmarks.kit.local_link import LocalLink
from benchmarks.kit.split_prefill import LayerTrace, Model, Prefill, Trace, load_share, save_model, traced
from laconic.schedule.inference import InferencePlan

MODEL = Model("qwen2_moe", 64, 32, 32, 8, 2, 2, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(MODEL, path)
    return path


@pytest.mark.ci
def test_a_trace_holds_every_task_of_every_layer(folder: Path) -> None:
    """A row is 2 choices and weights of 4 bytes and 64 values of 4 bytes, and comes back as values alone."""
    plans = [InferencePlan(1, 1), InferencePlan(1, 3), InferencePlan(1, 4, slicing="experts")]
    whole, tokens, groups = traced(folder, MODEL.prompt_tokens, plans, load_share(folder), 1)
    row, values = 2 * 8 + 64 * 4, 64 * 4
    for trace, slices in ((whole, 1), (tokens, 3)):
        assert len(trace.layers) == MODEL.num_layers
        assert trace.tail > 0
        for layer in trace.layers:
            assert layer.sent == (48 // slices * row,) * slices
            assert layer.received == (48 // slices * values,) * slices
            assert min(layer.attention, layer.shared, *layer.experts) > 0
    for layer in groups.layers:
        # Rows go to one or two of the four groups.
        assert 48 * values <= sum(layer.received) <= 2 * 48 * values
        assert [sent * values for sent in layer.sent] == [received * row for received in layer.received]
    assert Trace.from_values(tokens.to_values()) == tokens


@pytest.mark.ci
def test_every_plan_chooses_the_same_tokens(folder: Path) -> None:
    share = load_share(folder)
    found = []
    for plan in (InferencePlan(2, shared_first=True), InferencePlan(2, 3), InferencePlan(2, 2, "AASS", "experts")):
        prefill = Prefill(folder, MODEL.prompt_tokens, plan, LocalLink(share.run))
        seconds, tokens = prefill.run(7)
        assert seconds > 0
        found.append(tokens)
        assert prefill.run(7)[1] == tokens
        prefill.close()
    assert found[0] == found[1] == found[2]


def test_predictions_are_the_simulated_makespans() -> None:
    """One layer without anything after it: attention 4, dispatch 1 + 2, experts 3, combine 1 + 1; shared 2."""
    link = LinkTimes.fit({1: 1.5, 3: 2.5})
    assert (link.start_up, link.per_byte) == (1.0, 0.5)
    assert link.seconds(0) == 0.0
    whole = Trace((LayerTrace(4.0, 2.0, (3.0,), (4,), (2,)),), 0.5)
    halves = Trace((LayerTrace(4.0, 2.0, (1.5, 1.5), (2, 2), (0, 2)),), 0.5)
    assert [len(block.dispatch) for block in layer_times(halves, link)] == [2, 0]
    predictions = Predictions({(1, "tokens"): whole, (2, "tokens"): halves}, link)
    assert predictions.seconds(InferencePlan(shared_first=True)) == pytest.approx(4 + 2 + 3 + 3 + 2 + 0.5)
    assert predictions.seconds(InferencePlan()) == pytest.approx(4 + 3 + 3 + 2 + 0.5)
    assert predictions.seconds(InferencePlan(1, 2)) == pytest.approx(4 + 2 + 2 + 1.5 + 2 + 0.5)
    assert predictions.findep(1) == InferencePlan(1, 2)
    assert predictions.pppipe(1) == InferencePlan(shared_first=True)
    assert plan_name(predictions.findep(1)) == "FinDEP r1 = 1, 2 slices of tokens"


def test_an_interval_leaves_out_as_many_as_it_may() -> None:
    """The median lies below the second smallest of 9 with probability 10 / 512, and outside of 5 always too often."""
    assert interval(range(9)) == (1, 7)
    assert interval(range(8)) == (0, 7)
    assert interval([3, 1, 2]) == (1, 3)
