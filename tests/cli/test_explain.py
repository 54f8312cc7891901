"""`laconic explain`: tables of candidates, sweeps, and refusals in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.cli.main import main
from laconic.cost.comm.rates import Line
from laconic.cost.moe.rates import MoERates
from tests.collectives.simulated import made_up_rates


@pytest.fixture
def record(tmp_path: Path) -> str:
    made_up_rates().save(tmp_path / "rates.json")
    return str(tmp_path / "rates.json")


def test_one_message_shows_every_candidate_best_first_and_the_choice(
    record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--record", record, "--operation", "all_gather", "--nbytes", "4MB", "--world", "4"]
    assert main(["explain", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "all_gather of 4.00 MB per rank, bfloat16, 4 ranks on 4 nodes"
    rows = [line.split() for line in lines[6 : lines.index("", 6)]]
    assert {tuple(row[:3]) for row in rows} >= {("raw", "1", "1"), ("tiered", "8", "1"), ("window", "4", "1")}
    gains = [float(row[-1].rstrip("x")) for row in rows]
    assert gains == sorted(gains, reverse=True)
    best = rows[0]
    assert lines[-1] == f"choice: {best[0]}, {best[1]} chunks ({gains[0]:.2f}x): coding is predicted to pay"


def test_a_sweep_shows_where_coding_begins_to_pay(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--record", record, "--operation", "reduce_scatter"]) == 0
    out = capsys.readouterr().out
    assert "raw: message is too small" in out
    assert "coding is predicted to pay" in out
    assert out.count(" 4.10 KB ") == 1


def test_without_an_operation_three_are_shown(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--record", record, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("all_gather,", "reduce_scatter,", "all_reduce,") if f"\n{name} float32" in out] == [
        "all_gather,",
        "reduce_scatter,",
        "all_reduce,",
    ]


def test_the_rates_themselves_can_be_printed(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--record", record, "--rates"]) == 0
    out = capsys.readouterr().out
    assert "links, across: 4 ranks; coding and wire overlap by 50%" in out
    assert "8.000" in out  # GB/s of the codec


def test_without_rates_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LACONIC_WIRE_RATES", str(tmp_path / "none.json"))
    assert main(["explain"]) == 2
    error = capsys.readouterr().err
    assert "none.json', but it must be a file" in error
    assert "measure with laconic profile, or name another file" in error


def test_a_world_that_is_none_is_refused(record: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--record", record, "--world", "6", "--ranks-per-node", "4"]) == 2
    assert "world is 6 with 4 ranks per node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "5"], "--tokens is given, but would have no effect without --moe; leave it out"),
        (["--moe", "--nbytes", "4MB"], "--nbytes is given, but would have no effect with --moe"),
        (["--rates", "--world", "4", "--dtype", "float16"], "--world and --dtype are given, but would have no effect"),
        (["--world", "0"], "world is 0"),
        (["--ranks-per-node", "0"], "--ranks-per-node is 0, but it must be at least 1"),
    ],
)
def test_flags_without_effect_and_zeros_are_refused(
    record: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--record", record, *flags]) == 2
    assert message in capsys.readouterr().err


def test_every_way_through_a_layer_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "moe.json"
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    slow, fast = (dict.fromkeys(names, Line(1e-3, beta)) for beta in (1e-7, 1e-9))
    MoERates.of_lines({"all": slow, "across": slow, "node": fast}, Line(1e-4, 1e-11)).save(file)
    layer = ["--tokens", "512", "--model-dim", "256", "--hidden-dim", "128", "--experts", "32", "--top-k", "8"]
    world = ["--world", "8", "--ranks-per-node", "4"]
    assert main(["explain", "--moe", "--record", str(file), *layer, *world]) == 0
    out = capsys.readouterr().out
    assert "512 tokens of bfloat16 per process, balanced; 8 processes, 4 per node, mp 1, ep 8, esp 1" in out
    assert [line.split("  ")[0] for line in out.splitlines()[6:9]] == ["depth 2", "depth 1", "flat"]
    assert "choice: depth 2: " in out
    assert main(["explain", "--moe", "--record", str(file), *layer, *world, "--mp", "4", "--esp", "4"]) == 0
    out = capsys.readouterr().out
    for path in ("baseline", "s1", "s2", "sharded"):
        assert f"\n{path}  " in out
    assert main(["explain", "--moe", "--record", str(file), "--rates"]) == 0
    assert "work of a rank" in capsys.readouterr().out
    assert main(["explain", "--moe", "--record", str(tmp_path / "none.json")]) == 2
    assert main(["explain", "--moe", "--record", str(file), "--experts", "6", *world]) == 2
    assert "num_experts is 6, but it must be a multiple of ep = 8" in capsys.readouterr().err
