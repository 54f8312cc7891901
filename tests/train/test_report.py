"""Comparing runs: the table, the page, and runs that lack something."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from laconic.activations.recognize.plan import ATTENTION
from laconic.cli.main import main
from laconic.errors import DataError
from laconic.train.config.toml import load_config, save_config
from laconic.train.report.compare import compare, downsample, smooth
from laconic.train.report.metrics import MetricsWriter
from laconic.train.report.run_reader import load_runs
from laconic.train.report.side_by_side import config_differences, summary_rows
from tests.train.report_runs import make_run, page_data


def cells(run_dirs: list[Path]) -> dict[str, list[tuple[str, str, bool | None]]]:
    rows = summary_rows(load_runs(run_dirs))
    return {row.label: [(cell.text, cell.difference, cell.better) for cell in row.cells] for row in rows}


def test_formats_have_their_names(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, str(bits), bits=bits) for bits in (2, 4, 5, 6, 8)]
    found = [text for text, _, _ in cells(runs)["activations kept as"]]
    assert found == ["uint2 b64", "nf4 b64", "int5 b64", "int6 b64", "int8 b64"]


def test_table_shows_values_and_differences(tmp_path: Path) -> None:
    exact = make_run(tmp_path, "exact", loss=1.5, speed=1000)
    nf4 = make_run(tmp_path, "nf4", bits=4, loss=1.49, speed=900)
    shown = cells([exact, nf4])
    assert shown["activations kept as"] == [("exact", "", None), ("nf4 b64", "", None)]
    assert shown["steps"] == [("40", "", None), ("40", "=", None)]
    assert shown["validation loss"] == [("1.6250", "", None), ("1.6150", "-0.0100", True)]
    assert shown["validation loss, best"] == [("1.6250", "", None), ("1.6150", "-0.0100", True)]
    assert shown["train loss, last 20 steps"] == [("1.5000", "", None), ("1.4900", "-0.0100", True)]
    assert shown["tokens/s, median"] == [("1,000", "", None), ("900", "-10.0 %", False)]
    assert shown["kept for backward per token"] == [("1.00 KB", "", None), ("325 B", "-67.5 %", True)]
    assert shown["sent by a process per step"] == [("2.00 MB", "", None), ("2.00 MB", "=", None)]
    assert config_differences(load_runs([exact, nf4]))[0].label == "activations.bits"
    text = compare([exact, nf4], tmp_path / "report.html")
    assert re.search(r"validation loss +1\.6250 +1\.6150 \(-0\.0100\)", text)
    assert re.search(r"activations\.bits +16 +4", text)
    assert "run_dir" not in text


def test_the_peak_of_memory_counts_every_start_and_what_came_after_the_last_step(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run")
    assert cells([run_dir])["peak memory of a process"][0][0] == "500.00 MB"
    summary = json.loads((run_dir / "summary.json").read_text())
    for of_last_start, shown in ((600_000_000, "600.00 MB"), (400_000_000, "500.00 MB")):
        (run_dir / "summary.json").write_text(json.dumps(summary | {"peak_memory_nbytes": of_last_start}))
        assert cells([run_dir])["peak memory of a process"][0][0] == shown
    (run_dir / "summary.json").write_text(json.dumps(summary | {"earlier_peak_memory_nbytes": 700_000_000}))
    assert cells([run_dir])["peak memory of a process"][0][0] == "700.00 MB"


def test_losses_after_other_numbers_of_steps_are_compared_at_the_last_common_step(tmp_path: Path) -> None:
    short, long = make_run(tmp_path, "short", steps=20), make_run(tmp_path, "long", steps=30)
    shown = cells([short, long])
    assert shown["validation loss"] == [("1.2000", "", None), ("1.1333", "", None)]
    assert shown["validation loss at step 20"] == [("1.2000", "", None), ("1.2000", "=", None)]
    assert shown["train loss, 20 steps to step 20"][1][1] == "="
    assert not any(
        difference
        for label in shown
        if label.endswith(("steps", "best"))
        for _, difference, _ in shown[label][1:]
        if "loss" in label
    )
    compare([short, long], tmp_path / "report.html")
    assert "has, after 20 steps, a validation loss 0.0000 lower" in page_data(tmp_path / "report.html")["verdicts"][0]


def test_a_setting_that_is_left_out_shows_what_is_in_effect(tmp_path: Path) -> None:
    one, other = make_run(tmp_path, "one", bits=4), make_run(tmp_path, "other", bits=4)
    save_config(
        load_config(None, {"optimizer.learning_rate": 0.5, "activations.attention": "exact"}), other / "config.toml"
    )
    shown = {row.label: [cell.text for cell in row.cells] for row in config_differences(load_runs([one, other]))}
    assert shown == {"optimizer.learning_rate": ["0.002", "0.5"], "activations.attention": [ATTENTION, "exact"]}


def test_best_is_the_lowest_not_the_last(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run")
    with MetricsWriter(run_dir) as writer:
        for step in range(41, 61):
            writer.write(step, loss=5.0)
        writer.write(60, validation_loss=7.0)
    shown = cells([run_dir])
    assert shown["validation loss"][0][0] == "7.0000"
    assert shown["validation loss, best"][0][0] == "1.1250"
    assert shown["train loss, last 20 steps"][0][0] == "5.0000"
    assert shown["train loss, best 20 steps"][0][0] == "1.0000"


def test_diverged_run_shows_nan_and_still_renders(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run")
    with MetricsWriter(run_dir) as writer:
        writer.write(41, loss=math.nan)
        writer.write(41, validation_loss=math.inf)
    shown = cells([make_run(tmp_path, "fine"), run_dir])
    assert shown["validation loss"][1] == ("inf", "", None)
    assert shown["train loss, last 20 steps"][1] == ("nan", "", None)
    compare([run_dir], tmp_path / "report.html")
    assert all(math.isfinite(value) for _, value in page_data(tmp_path / "report.html")["runs"][0]["loss"])


def test_page_is_self_contained(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "exact"), make_run(tmp_path, "nf4", bits=4)]
    compare(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\((?!#)", page)


def test_page_holds_curves_kinds_and_verdict(tmp_path: Path) -> None:
    compare([make_run(tmp_path, "exact"), make_run(tmp_path, "nf4", bits=4, loss=1.01)], tmp_path / "report.html")
    data = page_data(tmp_path / "report.html")
    exact, nf4 = data["runs"]
    assert exact["validation_loss"][-1] == [40, pytest.approx(1.125)]
    assert nf4["validation_gap"] == [[step, pytest.approx(0.01)] for step in (10, 20, 30, 40)]
    assert exact["loss_gap"] == []
    assert nf4["kept"] == {"mlp": 125.0, "attention": 100.0, "linear": 75.0, "norm": 25.0}
    assert next(iter(nf4["kept"])) == "mlp"
    assert data["verdicts"] == [
        "Against exact, nf4 keeps 32 % of the bytes for backward, ends with a validation loss 0.0100 higher "
        "and trains at 100 % of the speed."
    ]


def test_name_of_a_run_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "<!--<script>alert(1)"
    compare([make_run(tmp_path, name)], tmp_path / "report.html")
    assert page_data(tmp_path / "report.html")["runs"][0]["name"] == name
    assert "<script>alert" not in (tmp_path / "report.html").read_text("utf-8")


def test_runs_of_the_same_name_keep_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", "run"), make_run(tmp_path / "b", "run")]
    assert [run.name for run in load_runs(runs)] == [str(path) for path in runs]


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "activations.json", "summary.json"])
def test_missing_file_shows_as_a_dash_and_is_named(tmp_path: Path, missing: str) -> None:
    run_dir = make_run(tmp_path, "run")
    (run_dir / missing).unlink()
    text = compare([make_run(tmp_path, "whole"), run_dir], tmp_path / "report.html")
    assert re.search(rf"note: .*{missing}.*No such file", text)
    expected = {
        "config.toml": "activations kept as",
        "metrics.jsonl": "validation loss",
        "activations.json": "unmodified model keeps",
        "summary.json": "in bf16",
    }
    if missing in expected:
        assert re.search(rf"{expected[missing]}.* -$", text, re.MULTILINE)


@pytest.mark.parametrize("damaged", ["config.toml", "metrics.jsonl", "activations.json", "summary.json"])
@pytest.mark.parametrize("content", [b"[1]]\n", b"{\n", b"\xff\xfe\n", b'"text"\n'])
def test_damaged_file_is_survived_and_named(tmp_path: Path, damaged: str, content: bytes) -> None:
    run_dir = make_run(tmp_path, "run")
    (run_dir / damaged).write_bytes(content)
    text = compare([run_dir, make_run(tmp_path, "whole")], tmp_path / "report.html")
    assert re.search(rf"note: .*{damaged}.* (is damaged|holds no table)", text)


def test_numbers_of_the_wrong_type_show_as_dashes(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run")
    (run_dir / "activations.json").write_text(
        '{"by_kind_after": 3, "by_kind_before": {"mlp": "x"}, "after_nbytes_per_token": "x"}'
    )
    assert cells([run_dir])["kept for backward per token"] == [("-", "", None)]
    compare([run_dir], tmp_path / "report.html")
    assert page_data(tmp_path / "report.html")["runs"][0]["kept"] == {}


def test_run_that_died_at_once_is_shown(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(load_config(), run_dir / "config.toml")
    text = compare([make_run(tmp_path, "whole"), run_dir], tmp_path / "report.html")
    assert re.search(r"validation loss +1\.1250 +-$", text, re.MULTILINE)
    assert page_data(tmp_path / "report.html")["verdicts"] == ["run and whole have no measure in common."]


def with_tokenizer(run_dir: Path, content: str, nbytes: float | None) -> Path:
    """The run as one of a tokenizer of its own, with its bytes per token if they are known."""
    (run_dir / "tokenizer.json").write_text(content)
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "bytes_per_token": nbytes}))
    return run_dir


def test_losses_of_different_tokenizers_are_compared_per_byte(tmp_path: Path) -> None:
    # 0.75 nats per byte are 3 nats per token of 4 bytes: the same model, told in two units.
    of_bytes = make_run(tmp_path, "bytes", loss=0.75)
    of_tokens = with_tokenizer(make_run(tmp_path, "tokens", loss=3.0), "{}", 4.0)
    shown = cells([of_bytes, of_tokens])
    assert shown["train loss, last 20 steps, bits per byte"] == [("1.0820", "", None), ("1.0820", "=", None)]
    assert "validation loss" not in shown
    text = compare([of_bytes, of_tokens], tmp_path / "report.html")
    gap = page_data(tmp_path / "report.html")["runs"][1]["loss_gap"]
    assert abs(gap[-1][1]) < 1e-4, text
    same = [of_tokens, with_tokenizer(make_run(tmp_path, "again", loss=3.0), "{}", 4.0)]
    assert cells(same)["train loss, last 20 steps"] == [("3.0000", "", None), ("3.0000", "=", None)]


def test_a_loss_of_unknown_unit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "bytes"), with_tokenizer(make_run(tmp_path, "tokens"), "{}", None)]
    text = compare(runs, tmp_path / "report.html")
    assert re.search(r"validation loss, bits per byte +1\.6230 +-$", text, re.MULTILINE)
    assert "note: losses of tokens are not compared: the tokenizers of the runs differ or are not known" in text
    assert "validation loss" not in page_data(tmp_path / "report.html")["verdicts"][0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"step": -3, "loss": 1.0}, "step is -3 after 40, but steps never go back"),
        ({"step": 7, "loss": 1.0}, "step is 7 after 40, but steps never go back"),
        ({"step": 41, "loss": "low"}, "loss is 'low', but it must be a number"),
        ({"step": 41, "loss": True}, "loss is True, but it must be a number"),
        ({"step": 41, "loss": -1.0}, "loss is -1.0, but it must be at least 0"),
        ({"step": 41, "loss": 1.0, "tokens_per_second": "NaN"}, "tokens_per_second is nan, but it must be finite"),
        ({"step": 41, "loss": 1.0, "wire_nbytes": [1]}, "wire_nbytes is [1], but it must be a number"),
    ],
)
def test_a_row_that_is_no_measurement_is_left_out_and_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    run_dir = make_run(tmp_path, "run")
    whole = cells([run_dir])["tokens/s, median"]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (run,) = load_runs([run_dir])
    assert [note for note in run.notes if problem in note], run.notes
    assert cells([run_dir])["tokens/s, median"] == whole


def test_metrics_without_a_loss_say_so(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "run")
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    (run,) = load_runs([run_dir])
    assert any("holds no loss" in note for note in run.notes)


def test_files_of_other_programs_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[tool]\nname = "other"\n')
    (tmp_path / "summary.json").write_text('{"accuracy": 1.0}')
    with pytest.raises(DataError, match=r"is no run directory: .*config.toml is no configuration of laconic train"):
        compare([tmp_path])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent is not a directory; give run directories"):
        compare([tmp_path / "absent"])
    with pytest.raises(DataError, match=r"is no run directory: it holds none of config.toml"):
        compare([tmp_path])
    with pytest.raises(DataError, match="at least one run"):
        compare([])
    with pytest.raises(DataError, match=r"cannot write the report .*: No such file"):
        compare([make_run(tmp_path, "run")], tmp_path / "absent" / "report.html")


def test_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["compare", str(make_run(tmp_path, "run")), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "validation loss" in shown
    assert shown.endswith(f"wrote {out}\n")
    assert out.exists()


def test_smoothing_keeps_lines_straight_and_skips_nan() -> None:
    line = [(step, 2.0 * step) for step in range(20)]
    smoothed = smooth(line, 5)
    assert smoothed[2:-2] == line[2:-2]
    assert smooth([(0, 1.0), (1, math.nan), (2, 3.0)], 1) == [(0, 1.0), (2, 3.0)]
    assert smooth([], 5) == []


def test_downsampling_keeps_the_mean_and_the_end() -> None:
    points = [(step, float(step)) for step in range(1, 10_001)]
    thinned = downsample(points, 1000)
    assert len(thinned) == 1000
    assert thinned[-1][0] == 10_000
    assert sum(value for _, value in thinned) / 1000 == pytest.approx(5000.5)
    assert downsample(points[:5], 1000) == points[:5]


def test_json_has_the_numbers_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path, "exact"), make_run(tmp_path, "nf4", bits=4, loss=1.01)]
    out = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["exact", "nf4"]
    assert found["report"] == str(out)
    assert out.exists()
    kept = found["measures"]["kept for backward per token"]
    assert kept[0] > kept[1] > 0
    assert found["configuration"]["activations.bits"] == ["16", "4"]


def test_runs_on_other_data_under_one_name_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name) for name in "abc"]
    for run_dir, data in zip(runs, ["0" * 64, "0" * 64, "1" * 64], strict=True):
        summary = json.loads((run_dir / "summary.json").read_text())
        (run_dir / "summary.json").write_text(json.dumps(summary | {"data": data}))
    assert config_differences(load_runs(runs[:2])) == []
    [row] = config_differences(load_runs(runs[1:]))
    assert (row.label, [cell.text for cell in row.cells]) == ("hash of the data", ["00000000", "11111111"])
