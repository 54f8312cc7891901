"""`laconic profile`: measures two processes of this machine, writes what choices need, refuses what cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laconic.cli.main import main
from laconic.cost.comm.rates import CODES, ITEM_NBYTES, OPERATIONS, WireRates
from laconic.cost.comm.seconds import GroupShape, decide
from laconic.cost.moe.rates import MoERates
from tests.distributed.processes import Ending, environment, finish, free_port, rank_environment, start


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ending, Path]:
    file = tmp_path_factory.mktemp("profile") / "new" / "rates.json"
    ending = finish(start(["-m", "laconic", "profile", "--quick", "--out", str(file)], environment()))
    assert ending.code == 0, ending.err
    return ending, file


@pytest.mark.slow
def test_everything_is_measured_and_written(measured: tuple[Ending, Path]) -> None:
    rates = WireRates.load(measured[1])
    (link,) = rates.links.values()
    assert list(rates.links) == ["node"]
    assert (link.world, rates.layout, rates.device, len(rates.hosts)) == (2, (1, 2), "cpu", 1)
    assert set(link.operations) == set(link.extra) == set(OPERATIONS)
    assert set(rates.codecs) == set(ITEM_NBYTES)
    for codes in rates.codecs.values():
        assert set(codes) == set(CODES)
    assert rates.codecs["bfloat16"]["tiered"].ratio > rates.codecs["bfloat16"]["window"].ratio > 1.4
    assert decide("all_gather", 1 << 20, "bfloat16", GroupShape(2, 2), rates).predicted_seconds > 0


@pytest.mark.slow
def test_the_tables_are_printed_once(measured: tuple[Ending, Path]) -> None:
    ending, file = measured
    assert ending.out.count("links, node: 2 ranks") == 1
    assert f"wrote {file}" in ending.out
    assert ending.err.splitlines()[0] == "laconic: measuring links, node: 2 ranks"


@pytest.mark.slow
def test_explain_reads_it(measured: tuple[Ending, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--record", str(measured[1]), "--operation", "all_reduce"]) == 0
    assert "2 ranks on 1 node;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--infer", "--moe"], "--infer and --moe are both given, but a call measures one of both"),
        (["--moe", "--out", "f"], "--out is given, but would have no effect with --moe, whose file is --moe-out"),
        (["--infer", "--moe-out", "f"], "no effect with --infer, whose file is --infer-out"),
        (["--infer-out", "f"], "no effect without --moe or --infer, whose file is --out"),
        (["--infer", "--top-k", "2"], "--top-k is given, but would have no effect with --infer"),
        (["--model-dim", "64", "--codec", "int8"], "--model-dim and --codec are given, .* without --moe or --infer"),
    ],
)
def test_what_would_not_be_measured_or_written_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_one_process_has_no_links(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["profile", "--nproc", "1"]) == 2
    assert "nproc is 1, but links need at least 2 processes" in capsys.readouterr().err
    for name, value in rank_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    assert main(["profile"]) == 2
    assert "WORLD_SIZE is 1, but links need two processes" in capsys.readouterr().err


@pytest.mark.slow
def test_routes_of_a_layer_are_measured_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "moe.json"
    layer = ["--tokens", "16", "--model-dim", "32", "--hidden-dim", "32", "--experts", "4", "--dtype", "float32"]
    command = ["-m", "laconic", "profile", "--moe", "--quick", "--moe-out", str(file), *layer, "--codec", "int8"]
    ending = finish(start(command, environment()))
    assert ending.code == 0, ending.err
    assert "worst fit" in ending.out
    assert f"wrote {file}" in ending.out
    rates = MoERates.load(file)
    assert {"ep", "joint", "dp"} <= set(rates.groups)
    codes = ["raw", "tiered", *rates.codecs["float32"]]
    assert {f"{path} {code}" for path in ("flat", "depth 1") for code in codes} <= set(rates.overheads)
    assert main(["explain", "--moe", "--record", str(file), "--experts", "4", "--dtype", "float32"]) == 0
    assert "choice: " in capsys.readouterr().out
