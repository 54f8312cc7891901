"""`laconic export`: its arguments reach the exporter."""

import sys
import types
from pathlib import Path

import pytest

from laconic.cli.main import main


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ([], (None, False, False)),
        (["--checkpoint", "step-10"], ("step-10", False, False)),
        (["--zip"], (None, True, False)),
        (["--merge"], (None, False, True)),
    ],
)
def test_arguments_reach_the_exporter(
    extra: list[str],
    expected: tuple[str | None, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[str, str, str | None, bool, bool]] = []

    def export(run_dir: str, out_dir: str, name: str | None, zipped: bool, merge: bool) -> Path:
        calls.append((run_dir, out_dir, name, zipped, merge))
        return Path(out_dir)

    stand_in = types.ModuleType("laconic.train.checkpoint.export")
    stand_in.export = export  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "laconic.train.checkpoint.export", stand_in)
    assert main(["export", "runs/a", "out", *extra]) == 0
    assert calls == [("runs/a", "out", *expected)]
    assert capsys.readouterr().out == "wrote out\n"
