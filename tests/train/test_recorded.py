"""What a run records for its report beside curves: memory, and tokens of each expert."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.train import steps
from laconic.train.report.charts import experts_chart, left_out, sites_chart
from laconic.train.report.metrics import METRICS_VERSION, read_metrics
from laconic.train.report.run_reader import load_runs
from tests.train.runs import tiny_config, train_alone

MIXTRAL: dict[str, Any] = {
    "model.family": "mixtral",
    "model.intermediate_size": 32,
    "model.extra": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ASSIGNMENTS = 4 * 32 * 2
"""Of a layer in a step: sequences, tokens, experts per token."""


def test_memory_is_recorded_after_every_step(tmp_path: Path) -> None:
    train_alone(tiny_config(tmp_path, "run"))
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert all(10**7 < row["memory_nbytes"] <= row["peak_memory_nbytes"] for row in rows)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics_version"] == METRICS_VERSION
    assert not any("moe_loads" in row for row in rows)
    (run,) = load_runs([tmp_path / "run"])
    assert sites_chart(run)
    assert {sentence.partition(" of ")[0] for sentence in left_out([run])} == {"Bytes sent", "Load", "Schedule"}


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.ci), {"moe.expert_parallel": 1}],
    ids=["own blocks", "layers of laconic.moe"],
)
def test_tokens_of_each_expert_are_recorded(tmp_path: Path, changes: dict[str, Any]) -> None:
    train_alone(tiny_config(tmp_path, "run", MIXTRAL | changes))
    rows = [row for row in read_metrics(tmp_path / "run") if "moe_loads" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all([sum(load) for load in row["moe_loads"]] == [ASSIGNMENTS] * 2 for row in rows)
    assert all(len(load) == 4 for row in rows for load in row["moe_loads"])
    (run,) = load_runs([tmp_path / "run"])
    chart = experts_chart(run)
    assert chart is not None
    assert chart["layers"] == [[row["moe_loads"][layer] for row in rows] for layer in range(2)]


def test_long_runs_record_tokens_of_experts_at_some_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_MAX_LOAD_ROWS", 2)
    train_alone(tiny_config(tmp_path, "run", MIXTRAL))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "moe_loads" in row] == [3, 6]
