"""Figures that pages cite: their files are there, and today's programs take the commands that reports begin with."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from benchmarks import moe_training, quality
from tools import figures
from tools.report_commands import NOT_AGAIN, command_of, complaint, words_of

OLD = """# Benchmark: x

`python -m benchmarks.run optim --out benchmarks/results/x_202611.md`

## Steps

| case | ms | of exact |
| --- | --- | --- |
| exact | 100.0 | 1.00 |
| ours | 120.0 (30%) | 1.20 |
| ours | 7 | 1.30 |

Spread (distance of the quartiles over the
median): 8.0% in the middle of 3 cases, at most 9.0% (ours).
"""


def test_pages_and_results_have_no_faults() -> None:
    cited = figures.citations()
    found = [figures.read_report(path, cited) for path in sorted(figures.RESULTS.glob("*.md"))]
    assert len(found) > 60
    assert figures.faults(found, cited) == []


def test_settings_that_reports_choose_are_there() -> None:
    for path in figures.RESULTS.glob("quality_*.md"):
        words = words_of(command_of(path.read_text()) or "")[1]
        only = words.index("--only") + 1 if "--only" in words else len(words)
        assert {*words[only : only + 1]} <= {*quality.COMPARISONS[words[3]]}, path.name


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m benchmarks.run optim --threads 1 2 --rounds 21", None),
        ("A=b C=d python -m benchmarks.run largest --memory 1.5GB --only exact", None),
        ("python -m benchmarks.run optim --thread-count 2", "unrecognized arguments: --thread-count 2"),
        ("python -m benchmarks.run moe-paths", "invalid choice: 'moe-paths'"),
        ("python -m benchmarks.run largest --memory 3XB", "3XB"),
        ("python -m benchmarks.run side-by-side --only nothing", "side-by-side has no such case"),
        ("python -m benchmarks.run optim --only nothing", "it always runs whole"),
        ("python -m benchmarks.quality parts --size small --out x", None),
        ("python -m benchmarks.quality --steps 600", "argument comparison: invalid choice: '600'"),
        ("python -m benchmarks.gone --out x", "benchmarks.gone is not known to parse its arguments before it works"),
        ("python tools/soak.py --kills 3", None),
        ("python tools/soak.py --kill-all", "unrecognized arguments: --kill-all"),
        ("laconic advise model.py:make --rounds 9", None),
        ("laconic advise model.py:make --round-count 9", "--round-count"),
        ("laconic advice", "advice"),
    ],
)
def test_a_command_that_no_program_takes_is_told(command: str, said: str | None) -> None:
    found = complaint(command)
    assert found is None if said is None else found is not None and said in found, found


def test_a_program_that_would_work_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "works_at_once.py").write_text("def main():\n    raise AssertionError('it works')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(complaint("python -m works_at_once")).startswith("works_at_once is not known to parse its arguments")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(moe_training, "as_rank", lambda work: pytest.fail("it works"))
    assert complaint("python -m benchmarks.moe_training --out x") is None
    assert os.environ["RANK"] == "0"


def test_the_environment_of_a_command_belongs_to_it() -> None:
    command = "OMP_NUM_THREADS=2 EPLB=path/to/EPLB python -m benchmarks.run optim"
    assert command_of(f"# One\n\n`{command}`\n") == command
    assert words_of(command)[0] == {"OMP_NUM_THREADS": "2", "EPLB": "path/to/EPLB"}


def test_a_report_without_a_command_is_a_fault_and_so_is_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_202611.md").write_text("# One\n\n| `python -m benchmarks.run optim` | in a table |\n")
    (tmp_path / "two_202611.md").write_text(f"# Two\n\n{NOT_AGAIN}: its machine is gone. `laconic plan`\n")
    (tmp_path / "three_202611.png").write_bytes(b"")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    cited = {"gone_202611.md": ["docs/a.md:3"], "one_202611.png": ["README.md:1"]}
    found = [figures.read_report(path, cited) for path in sorted(tmp_path.glob("*.md"))]
    assert [report.places for report in found] == [("README.md:1",), ()]
    assert figures.faults(found, cited) == [
        "docs/a.md:3 cites gone_202611.md, which is not there",
        "README.md:1 cites one_202611.png, which is not there",
        "three_202611.png has no report beside it",
        f"one_202611.md names no command that makes it, nor says: {NOT_AGAIN}",
    ]


def test_figures_move_by_more_than_their_spread() -> None:
    assert figures.moved(OLD, OLD) == []
    near = OLD.replace("100.0", "107.9").replace("120.0 (30%)", "91.0 (2%)").replace("| 7 ", "| 8 ")
    assert figures.moved(OLD, near) == []  # within 8 % of the report, 30 % of its own, and what the last digit rounds
    far = OLD.replace("100.0", "108.1").replace("120.0 (30%)", "80 (2%)").replace("| 1.30", "| 1.50")
    assert figures.moved(OLD, far) == [
        "Steps / exact / ms: 100.0 -> 108.1",
        "Steps / ours / ms: 120.0 (30%) -> 80 (2%)",
        "Steps / ours / of exact: 1.30 -> 1.50",
    ]
    pairs = OLD.replace("| 7 ", "| 621 / 574 (10 to 20) ")
    assert figures.moved(pairs, pairs.replace("574 (10", "575 (14")) == []  # a range is no figure
    for other in ("621 / 57 (10 to 20)", "57 / 574", "621", "-"):
        new = pairs.replace("621 / 574 (10 to 20)", other)
        assert figures.moved(pairs, new) == [f"Steps / ours / ms: 621 / 574 (10 to 20) -> {other}"]
        assert len(figures.moved(new, pairs)) == 1
    assert figures.moved(OLD, "")[0] == "Steps / exact / ms: 100.0 -> nothing"


def test_a_report_is_made_again_beside_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path)

    def made(command: str) -> str | None:
        path = figures.remake(figures.Report("x.md", command, 0, "-", ()))
        return None if path is None else path.read_text()

    assert made("python -c 'print(1)'") == "1\n"
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(2))"
    assert made(f"python -c '{write}' benchmarks/results/x.md") == "2"
    assert made("python -c 'raise SystemExit(3)'") is None
    assert "exit code 3" in capsys.readouterr().out
    show = 'import os; print(os.environ["ONE"], os.environ["T"])'
    monkeypatch.setenv("ONE", "1")
    monkeypatch.setenv("T", "/here")
    assert made(f"ONE=2 T=path/to/it python -c {shlex.quote(show)}") == "2 /here\n"


def test_a_report_that_lacks_a_variable_is_left_out_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "NO_SUCH_THING=path/to/it python -m benchmarks.run optim"
    (tmp_path / "x_202611.md").write_text(f"# One\n\n`{command}`\n")
    (tmp_path / "y_202611.md").write_text(f"# Two\n\n{NOT_AGAIN}: its machine is gone.\n")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "citations", dict)
    assert figures.main([]) == 0
    said = capsys.readouterr().out
    assert "x_202611.md: left out, as it needs NO_SUCH_THING in the environment\n" in said
    assert "y_202611.md: left out, as no command makes it\n" in said


def test_reports_are_chosen_by_benchmark_or_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--list", "--only", "optim", "quality_50m"]) == 0
    listed = capsys.readouterr().out.partition("command\n")[2]
    assert "\noptim_epyc_202611.md " in listed
    assert "\nquality_50m_xeon_202611.md " in listed
    assert "\ngradients_xeon" not in listed
    with pytest.raises(SystemExit):
        figures.main(["--only", "nothing"])
    assert "--only nothing: no report's benchmark has this name" in capsys.readouterr().err


def test_what_moved_is_named_with_the_machine_and_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    old = OLD.replace("## Steps", "2026-11-29, AMD EPYC, torch 2.13.0\n\n## Steps")
    (results / "x_202611.md").write_text(old)
    new = old.replace("AMD EPYC", "Xeon").replace("1.20", "1.40")
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "OUT", tmp_path / "out")
    monkeypatch.setattr(figures, "citations", lambda: {"x_202611.md": ["docs/optim.md:25"]})

    def remake(report: figures.Report) -> Path:
        made = figures.OUT / report.name
        made.write_text(new)
        return Path(made)

    monkeypatch.setattr(figures, "remake", remake)
    assert figures.main(["--only", "optim"]) == 0
    said = capsys.readouterr().out
    assert "on Xeon, the old one on AMD EPYC: times are not comparable" in said
    assert "Steps / ours / of exact: 1.20 -> 1.40; cited by docs/optim.md:25" in said
