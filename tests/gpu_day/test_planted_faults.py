"""Each planted fault ends as promised: its exit code, its reason on the page, and the tables of all other parts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.gpu_day import page, predictions
from benchmarks.gpu_day.preflight import Findings
from tests.gpu_day.faults import BROKEN, GOOD, ROOT, part, run_day
from tests.patience import patient


@pytest.mark.parametrize("fault", BROKEN)
def test_a_part_that_fails_leaves_its_reason_and_the_others_their_tables(
    fault: str, gpu_day: ModuleType, tmp_path: Path
) -> None:
    program, reason = BROKEN[fault]
    seconds = 1 if "killed after" in reason else patient(20)
    started = time.monotonic()
    ended = run_day(gpu_day, tmp_path, [part("broken", program, seconds=seconds), part("good", GOOD)])
    assert time.monotonic() - started < patient(20)
    assert ended.code == (0 if reason == "done" else 1)
    overview = next(line for line in ended.page.splitlines() if line.startswith("| broken |"))
    assert reason in overview
    assert "### good" in ended.page
    for before in ("begun", "before", "whole", "made", "bits"):  # what was known before the fault stays
        assert (f"table('{before}')" in program) == (f"### {before}\n" in ended.page)
    if fault == "exception":
        assert "an illegal memory access was encountered" in ended.page


def test_what_a_part_started_ends_with_it(gpu_day: ModuleType, tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open(sys.argv[0] or 'pid', 'w'))"
    program = program.replace("sys.argv[0] or 'pid'", repr(str(tmp_path / "pid")))
    run_day(gpu_day, tmp_path, [part("leaves", program)])
    assert_ends(int((tmp_path / "pid").read_text()))


def assert_ends(pid: int) -> None:
    """A process is gone, or waits for nothing but its parent, in five seconds."""
    for _ in range(int(patient(100))):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("a process of a part is still there")


def test_out_of_memory_costs_one_section() -> None:
    pytest.importorskip("torch")
    import torch

    from benchmarks.gpu_day.record import Report
    from benchmarks.gpu_day.setting import is_fatal

    lines: list[str] = []
    report = Report(lines.append, is_fatal)
    with report.section("3B: exact"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    with report.section("3B: laconic"):
        report.table("## table")
    assert report.problems == ["3B: exact"]
    assert "Tried to allocate 20.00 GiB" in lines[0]
    assert "## table" in lines[1]


def test_a_fault_of_the_device_ends_the_part() -> None:
    import torch

    from benchmarks.gpu_day.record import Report
    from benchmarks.gpu_day.setting import is_fatal

    report = Report(lambda _: None, is_fatal)
    with pytest.raises(torch.AcceleratorError), report.section("memory"):
        raise torch.AcceleratorError("CUDA error: invalid configuration argument")
    with pytest.raises(RuntimeError, match="Triton"), report.section("kernel"):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert report.problems == ["memory", "kernel"]


def test_what_is_missing_is_said_before_anything_starts(
    gpu_day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "pydantic is missing (ModuleNotFoundError): bring its wheel, with tools/gpu_wheels.py"
    driver = "torch (built for CUDA: 13.0) has no device: The NVIDIA driver on your system is too old"
    ended = run_day(gpu_day, tmp_path, [part("good", GOOD)], findings=Findings([missing, driver]))
    said = capsys.readouterr().out
    assert ended.code == 2
    assert missing in said
    assert driver in said
    assert "== good" not in said


@pytest.mark.parametrize("is_file", [False, True])
def test_a_report_folder_that_cannot_be_written_to_is_refused(
    is_file: bool, gpu_day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report").write_text("") if is_file else (tmp_path / "report" / "gpu_day.jsonl").mkdir(parents=True)
    ended = run_day(gpu_day, tmp_path, [part("good", GOOD)])
    assert ended.code == 2
    assert "cannot be written to" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_files_and_no_table(
    gpu_day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "gpu_day.jsonl").symlink_to("/dev/full")
    (report / "gpu_day.tmp").symlink_to("/dev/full")
    ended = run_day(gpu_day, tmp_path, [part("good", GOOD)])
    said = capsys.readouterr().out
    assert ended.code == 1
    assert "the journal could not be written: " in said
    assert "the page could not be written" in said
    assert "### good" in said


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.gpu_day.faults import load_tool, part, run_day
parts = [part("first", {good!r}), part("second", "table(f'begun {{os.getpid()}}'); time.sleep(600)", seconds=600)]
sys.exit(run_day(load_tool(), Path({folder!r}), [*parts, part("third", {good!r})]).code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_call_that_is_cut_off_leaves_its_tables_and_a_second_one_goes_on(
    number: signal.Signals, gpu_day: ModuleType, tmp_path: Path
) -> None:
    program = DRIVER.format(root=str(ROOT), good=GOOD, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as process:
        page = tmp_path / "report" / "gpu_day.md"  # written after the journal
        for _ in range(int(patient(400))):
            if page.exists() and "### begun" in page.read_text():
                break
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(patient(20)) == (-9 if number == signal.SIGKILL else 128 + number)
    left = page.read_text()
    assert_ends(int(left.partition("### begun ")[2].split()[0]))
    assert "### good" in left
    assert "cut off: the call ended while it ran" in left
    # The second call runs neither what has ended, nor loses its table.
    parts = [part("first", "raise SystemExit('again')"), part("second", "table('finished')"), part("third", GOOD)]
    ended = run_day(gpu_day, tmp_path, parts)
    assert ended.code == 0
    assert ended.page.count("### good") == 2
    assert "### finished" in ended.page
    assert "### begun" not in ended.page


def test_a_journal_that_was_cut_in_a_line_is_read_without_it(gpu_day: ModuleType, tmp_path: Path) -> None:
    run_day(gpu_day, tmp_path, [part("first", GOOD)])
    journal = tmp_path / "report" / "gpu_day.jsonl"
    with journal.open("a") as file:
        file.write('{"part": "first", "event": "rec')
    ended = run_day(gpu_day, tmp_path, [part("first", "raise SystemExit('again')"), part("second", "table('more')")])
    assert ended.code == 0
    assert "A line of the journal was cut off" in ended.page
    assert "### good" in ended.page
    assert "### more" in ended.page


def test_calls_take_their_parts_and_named_parts_run_again(gpu_day: ModuleType, tmp_path: Path) -> None:
    parts = [part("one", "table('one')"), part("two", "table('two')", call=2)]
    assert "### two" not in run_day(gpu_day, tmp_path, parts, ["--call", "1"]).page
    assert "| two |  | 0 | not run |" in run_day(gpu_day, tmp_path, parts, ["--call", "1"]).page
    both = run_day(gpu_day, tmp_path, parts, ["--call", "2"]).page
    assert "### one" in both
    assert "### two" in both
    again = [part("one", "table('again')"), parts[1]]
    named = run_day(gpu_day, tmp_path, again, ["--parts", "one"]).page
    assert "### again" in named
    assert "### one" not in named
    assert "### two" in named


def test_time_that_is_over_keeps_the_rest_for_the_next_call(
    gpu_day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_day(gpu_day, tmp_path, [part("later", GOOD, seconds=600)], ["--minutes", "0.01"])
    assert ended.code == 1
    assert "a further call runs later" in capsys.readouterr().out
    assert run_day(gpu_day, tmp_path, [part("later", GOOD)]).code == 0


def test_a_prediction_that_is_far_off_needs_an_explanation(
    gpu_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, explanations = tmp_path / "results", tmp_path / "explanations.toml"
    results.mkdir()
    (results / "gpu_code_1.md").write_text("| op | us on H200, at least |\n| --- | --- |\n| a | 10 |\n| b | 10 |\n")
    monkeypatch.setattr(
        page, "compare", lambda *found: predictions.compare(*found, results=results, explanations=explanations)
    )
    figures = "report.figures({'kernel: a': 11.9, 'kernel: b': 12.1}, 'us')"
    ended = run_day(gpu_day, tmp_path, [part("kernels", figures)])
    assert ended.code == 1
    assert "| kernel: a | 10 us | 11.9 us | 1.19 |  |" in ended.page
    assert "| kernel: b | 10 us | 12.1 us | 1.21 | **not explained** |" in ended.page
    assert "not explained: kernel: b" in capsys.readouterr().out
    explanations.write_text('"kernel: b" = "its stores are a byte wide"\n')
    ended = run_day(gpu_day, tmp_path, [part("kernels", "")], ["--page"])
    assert ended.code == 0
    assert "| 1.21 | its stores are a byte wide |" in ended.page


def test_a_rehearsal_says_in_every_table_that_nothing_was_measured(gpu_day: ModuleType, tmp_path: Path) -> None:
    program = "table('one'); table('two'); report.figure('kernel: quantize_blockwise, nf4', 9.0, 'us')"
    ended = run_day(gpu_day, tmp_path, [part("kernels", program)], ["--rehearse"])
    assert ended.code == 0
    tables = [chunk for chunk in ended.page.split("\n### ")[1:]]
    assert len(tables) == 2
    assert all(page.REHEARSED in chunk for chunk in tables)
    assert "| kernel: quantize_blockwise, nf4 | 9 us | not measured |  |  |" in ended.page
    # A device's figures never stand beside a rehearsal's.
    refused = run_day(gpu_day, tmp_path, [part("kernels", program)])
    assert refused.code == 2


def test_predictions_are_read_from_the_committed_tables() -> None:
    found = predictions.predictions("NVIDIA H200")
    assert sum(name.startswith("kernel: ") for name in found) >= 30
    assert found["layer: unmodified, forward"][1] == "ms"
    assert found["layer: nf4, backward"][0] < found["layer: unmodified, backward"][0]
    hopper = predictions.predictions("NVIDIA H100 80GB HBM3")
    name = "kernel: quantize_blockwise, nf4"
    assert hopper[name][0] == pytest.approx(found[name][0] * 4.8 / 3.35)
    # Products take as long on both; all else takes longer on the one with less bandwidth.
    layer = "layer: unmodified, forward"
    assert found[layer][0] < hopper[layer][0] < 1.1 * found[layer][0]
    assert hopper["layer: nf4, forward, host"] == found["layer: nf4, forward, host"]
    assert predictions.predictions("NVIDIA L4") == {}


def test_the_journal_is_one_line_for_each_record(gpu_day: ModuleType, tmp_path: Path) -> None:
    run_day(gpu_day, tmp_path, [part("good", GOOD)])
    entries = [json.loads(line) for line in (tmp_path / "report" / "gpu_day.jsonl").read_text().splitlines()]
    assert [entry.get("event", "call") for entry in entries] == ["call", "start", "record", "end"]
