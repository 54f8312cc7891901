"""`laconic train --zip` in two processes: the same training bit for bit, fewer bytes, and a record of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.collectives.audit import Snapshot
from laconic.train.report.compare import compare
from laconic.train.report.metrics import read_metrics
from tests.distributed.processes import run_joined
from tests.distributed.zipped import RUNS, SLOW_RUNS, everything, more
from tests.train.runs import exact_metrics, losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done all that `tests.distributed.zipped` lists."""
    folder = tmp_path_factory.mktemp("zipped")
    run_joined(everything, (folder,), 2)
    return folder


@pytest.fixture(scope="module")
def with_more(folder: Path) -> Path:
    """The same folder, with the slow runs as well."""
    run_joined(more, (folder,), 2)
    return folder


@pytest.fixture
def runs(request: pytest.FixtureRequest, name: str) -> Path:
    """The folder with the run `name`."""
    found: Path = request.getfixturevalue("with_more" if name in SLOW_RUNS else "folder")
    return found


NAMES = [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_zipped_run_is_the_raw_one_bit_for_bit(runs: Path, name: str) -> None:
    assert exact_metrics(runs / f"{name}-on") == exact_metrics(runs / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_zipped_run_resumes_bit_for_bit(runs: Path, name: str) -> None:
    assert exact_metrics(runs / f"{name}-broken") == exact_metrics(runs / f"{name}-on")


@pytest.mark.parametrize("name", NAMES)
def test_raw_bytes_are_those_of_the_raw_run(runs: Path, name: str) -> None:
    raw = [row for row in read_metrics(runs / name) if "loss" in row]
    zipped = [row for row in read_metrics(runs / f"{name}-on") if "loss" in row]
    for row, expected in zip(zipped, raw, strict=True):
        assert expected["wire_raw_nbytes"] == expected["wire_nbytes"]
        assert row["wire_nbytes"] != row["wire_raw_nbytes"]
        # After an evaluation, here after step 3, FSDP2 has the root's parameters already; the raw count is step 1's.
        if row["step"] != 4:
            assert row["wire_raw_nbytes"] == expected["wire_nbytes"]


def test_gathered_bf16_takes_two_thirds(folder: Path) -> None:
    entries = Snapshot.from_dict(
        json.loads((folder / "fsdp-bf16-on" / "summary.json").read_text())["collectives"]
    ).entries
    gathered = [entry for entry in entries if (entry.operation, entry.dtype) == ("all_gather", "bfloat16")]
    assert len(gathered) == 1
    assert gathered[0].raw_nbytes / gathered[0].sent_nbytes > 1.25


def test_the_audit_counts_both_processes_and_compare_shows_it(folder: Path, tmp_path: Path) -> None:
    summary = json.loads((folder / "1f1b-on" / "summary.json").read_text())
    sends = [entry for entry in Snapshot.from_dict(summary["collectives"]).entries if entry.operation == "send"]
    # In 6 steps 2 micro-batches go each way, and 2 evaluations of 2 rounds of 2 go forward.
    assert sum(entry.num_calls for entry in sends) == 6 * 2 * 2 + 2 * 2 * 2
    text = compare([folder / "1f1b", folder / "1f1b-on"], tmp_path / "report.html")
    assert "collectives of 1f1b-on, all processes" in text
    assert "before lossless coding" in text
    assert "collectives of 1f1b, all processes" not in text


def test_codes_of_gradients_are_left_alone(folder: Path) -> None:
    assert json.loads((folder / "ddp-agoq" / "summary.json").read_text())["collectives"] is None


def test_auto_trains(folder: Path) -> None:
    assert list(losses(folder / "auto")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("name", "coded"), [("torch", False), ("codec", True)])
def test_auto_leaves_ddp_alone_where_torch_is_faster_and_goes_on_so(folder: Path, name: str, coded: bool) -> None:
    """A run that is continued keeps to it, whatever is measured then."""
    for run in (f"auto-{name}", f"auto-{name}-broken"):
        collectives = json.loads((folder / run / "summary.json").read_text())["collectives"]
        entries = [] if collectives is None else Snapshot.from_dict(collectives).entries
        assert any(entry.operation == "all_reduce" for entry in entries) == coded
        state = json.loads((folder / run / "checkpoints" / "step-00000006" / "collectives.json").read_text())
        assert (state["num_replicas"], state["coded"]) == (2, coded)
    assert exact_metrics(folder / f"auto-{name}-broken") == exact_metrics(folder / f"auto-{name}")


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_different_settings_are_refused(folder: Path, rank: int) -> None:
    error = (folder / f"different.{rank}.txt").read_text()
    assert error.startswith("ConfigError: zip is 'on' on rank 0 and 'off' on rank 1")
