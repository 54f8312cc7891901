"""The paper's layer grids, simulated from the paper's constants, come out as the paper measured; the benchmark runs."""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks import moe_pipeline
from tests.benchmark_runs import run


def _means(cluster: moe_pipeline._Cluster, papers_rule: bool) -> list[float]:
    layers = moe_pipeline._layers(cluster, 5)
    found = [moe_pipeline._speedups(layer, cluster.reduce, papers_rule) for layer in layers]
    return [mean(column) for column in zip(*found, strict=True)]


def test_mean_speedups_are_those_of_the_paper() -> None:
    """A as printed, within 2 %. B lies between the simulation with and without the paper's rule for short exchanges."""
    improved, one_link, fsmoe = _means(moe_pipeline._A, False)
    assert (improved, one_link, fsmoe) == (
        pytest.approx(1.09, rel=0.02),
        pytest.approx(1.12, rel=0.03),
        pytest.approx(1.18, rel=0.02),
    )
    assert _means(moe_pipeline._B, True)[2] < 1.22 < _means(moe_pipeline._B, False)[2]


@pytest.mark.slow
def test_the_benchmark_writes_its_tables() -> None:
    result = run("moe-pipeline", "--smoke")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n| A (48 A6000) | as printed, per element | ") == 1
    assert result.stdout.count("\n| B (32 RTX2080Ti) | 1 to 16 | ") == 1
    assert "\n| degree of one layer, 16 tried by simulation | " in result.stdout
