"""metrics.jsonl, TensorBoard files, and what a terminal shows."""

import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import ConfigError, DataError
from laconic.train.report.metrics import (
    METRICS_FILE,
    MetricsWriter,
    Progress,
    peak_memory_nbytes,
    read_metrics,
)

values = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "text", 'a "quote"\n'])
names = st.sampled_from(["loss", "grad_norm", "learning_rate", "tokens", "wire_nbytes", "validation_loss"])


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and left == right


@given(rows=st.lists(st.tuples(st.integers(0, 10**9), st.dictionaries(names, values))))
def test_rows_read_back_as_written(
    rows: list[tuple[int, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsWriter(run_dir) as writer:
        for step, fields in rows:
            writer.write(step, **fields)
    read = read_metrics(run_dir)
    assert len(read) == len(rows)
    for row, (step, fields) in zip(read, rows, strict=True):
        assert row.keys() == {"step", *fields}
        assert row["step"] == step
        assert all(same(row[name], value) for name, value in fields.items())


def test_each_line_is_strict_json_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, loss=math.nan, grad_norm=math.inf, other=-math.inf)
    line = (tmp_path / METRICS_FILE).read_text()  # the writer is still open: rows are flushed one by one

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads(line, parse_constant=refuse)
    assert parsed == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "other": "-Infinity"}
    writer.close()
    writer.close()


def test_torn_last_line_is_ignored_and_repaired(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, loss=1.0)
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, loss=0.5)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_truncate_drops_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, loss=math.nan if step == 2 else float(step))
        writer.write(5, validation_loss=9.0)
        writer.truncate_after(3)
        writer.write(4, loss=40.0)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert math.isnan(rows[1]["loss"])
    assert rows[3]["loss"] == 40.0
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


@pytest.mark.parametrize("line", ["{", "3", '{"loss": 1}', '{"step": "1"}', "\0\0"])
def test_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / METRICS_FILE).write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2 is damaged"):
        read_metrics(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*metrics.jsonl: No such file.*is .* a run directory\?"):
        read_metrics(tmp_path)


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write(step, loss=float(step), note="text", flag=True)
        writer.truncate_after(1)
        writer.write(2, loss=20.0)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'laconic\[tensorboard\]'"):
        MetricsWriter(tmp_path, tensorboard=True)


def test_peak_memory_is_at_least_what_is_resident_now() -> None:
    held = bytearray(b"x") * (64 << 20)
    resident = psutil.Process().memory_info().rss
    slack = 8 << 20  # the kernel counts pages per thread and adds them up late
    assert 64 << 20 < resident - slack <= peak_memory_nbytes() < psutil.virtual_memory().total
    assert held


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_are_plain_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(25, log_every=10) as progress:
        for step in range(1, 26):
            progress.update(step, {"loss": 2.0, "tokens_per_second": 12345.6, "saved_nbytes": 2e6})
        progress.message("done")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["10/25", "20/25", "25/25"]
    assert lines[0].startswith("step 10/25  loss 2.0000  12,346 tokens/s  kept 2.00 MB  0:00 left")
    assert lines[-1] == "done"


def test_terminal_gets_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(10, first_step=5) as progress:
        for step in range(6, 11):
            progress.update(step, {"loss": 2.0, "validation_loss": 1.5})
        progress.message("saved")
    shown = terminal.getvalue()
    assert "10/10" in shown
    assert "loss 2.0000, validation 1.5000" in shown
    assert "saved" in shown


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, rank=1, log_every=1) as progress:
        progress.update(1, {"loss": 1.0})
        progress.message("text")
    assert capsys.readouterr().err == ""
