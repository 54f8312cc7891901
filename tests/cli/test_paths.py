"""Every path that a command takes, given everything that a path can be: done, or one line that says what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laconic.cli.main import main


def kinds(folder: Path) -> dict[str, str]:
    """Paths by what is there."""
    (folder / "directory").mkdir()
    (folder / "file").write_text("hello")
    (folder / "empty").write_bytes(b"")
    (folder / "binary").write_bytes(bytes(range(256)))
    os.symlink(folder / "loop", folder / "loop")
    os.symlink(folder / "nowhere", folder / "dangling")
    os.mkfifo(folder / "fifo")
    undecodable = os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")
    os.mkdir(undecodable)
    names = ("directory", "file", "empty", "binary", "loop", "dangling", "fifo")
    return {name: str(folder / name) for name in names} | {
        "missing": str(folder / "absent"),
        "not UTF-8": undecodable,
        "below a file": str(folder / "file" / "x"),
        "too long": str(folder / ("x" * 300)),
        "no text": "",
        "no file system": "/proc/laconic",
    }


_PLAN = ["plan", "--hidden-size", "64", "--intermediate-size", "128", "--num-layers", "2", "--num-heads", "2"]
_PLAN += ["--vocab-size", "100"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text("hello world " * 100)
    save_file({"a": torch.zeros(64)}, folder / "w.safetensors")
    return folder


def _train(prepared: Path, out: Path, **changes: str) -> list[str]:
    settings = {
        **{"nproc": "1", "steps": "1", "batch-size": "2", "sequence-length": "8", "eval-every": "0"},
        **{"data.paths": str(prepared / "text.txt"), "data.cache-dir": str(out / "cache"), "run-dir": str(out / "run")},
        **{"model.hidden-size": "16", "model.intermediate-size": "16", "model.num-hidden-layers": "1"},
        **{"model.num-attention-heads": "1", "activations.bits": "16"},
    }
    if "model.path" in changes:
        settings = {name: value for name, value in settings.items() if not name.startswith("model.")}
    return ["train", *(f"--{name}={value}" for name, value in (settings | changes).items())]


Command = Callable[[Path, Path, str], list[str]]
COMMANDS: dict[str, Command] = {
    "train --run-dir": lambda prepared, out, path: _train(prepared, out, **{"run-dir": path}),
    "train --data.tokenizer": lambda prepared, out, path: _train(prepared, out, **{"data.tokenizer": path}),
    "train --model.path": lambda prepared, out, path: _train(prepared, out, **{"model.path": path}),
    "train --data.cache-dir": lambda prepared, out, path: _train(prepared, out, **{"data.cache-dir": path}),
    "train --data.paths": lambda prepared, out, path: _train(prepared, out, **{"data.paths": path}),
    "train --plan": lambda prepared, out, path: ["train", "--plan", path, "--print-config"],
    "train --config": lambda prepared, out, path: ["train", "--config", path, "--print-config"],
    "train --resume": lambda prepared, out, path: ["train", "--resume", "--run-dir", path],
    "export": lambda prepared, out, path: ["export", path, str(out / "model")],
    "compare": lambda prepared, out, path: ["compare", path, "--out", str(out / "report.html")],
    "plan": lambda prepared, out, path: ["plan", path],
    "plan --out": lambda prepared, out, path: [*_PLAN, "--out", path],
    "plan --calibration": lambda prepared, out, path: [*_PLAN, "--calibration", path, "--memory", "1GB"],
    "zip": lambda prepared, out, path: ["zip", path, "--out", str(out / "zipped")],
    "zip --out": lambda prepared, out, path: ["zip", str(prepared / "w.safetensors"), "--out", path],
    "zip --delta": lambda prepared, out, path: [
        *("zip", str(prepared / "w.safetensors"), "--out", str(out / "zipped"), "--delta", path)
    ],
    "unzip": lambda prepared, out, path: ["unzip", path, "--out", str(out / "plain")],
    "verify": lambda prepared, out, path: ["verify", path],
    "explain --record": lambda prepared, out, path: ["explain", "--record", path, "--operation", "all_reduce"],
}
# A command that is told to read a pipe waits for it to be filled, as any other does.
WAITING = {"train --plan", "train --config", "plan", "plan --out", "plan --calibration", "explain --record"}


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is empty is the current directory, which must not be that of the project."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_is_used_or_refused_in_one_line(
    command: str, prepared: Path, tmp_path: Path, traced_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "paths").mkdir()
    for kind, path in kinds(tmp_path / "paths").items():
        if kind == "fifo" and command in WAITING:
            continue
        out = tmp_path / kind
        out.mkdir()
        code = main(COMMANDS[command](prepared, out, path))  # an error that is not ours fails the test
        said = capsys.readouterr().err
        assert code in (0, 2), (kind, code, said)
        assert "Traceback" not in said, (kind, said)
        if code == 2:
            errors = [line for line in said.splitlines() if "error" in line.lower() or "usage" in line]
            assert len(errors) >= 1, (kind, said)
            assert said.count("laconic: error: ") <= 1, (kind, said)
        leftovers = [file.name for file in out.rglob("*") if file.name.endswith((".part", ".tmp"))]
        assert not leftovers, (kind, leftovers)
    leftovers = [name for name in os.listdir(tmp_path / "paths") if ".part" in name or ".tmp" in name]
    assert not leftovers
    assert Path(tmp_path / "paths" / "file").read_text() == "hello" or command == "plan --out"


def test_a_glob_of_directories_says_so(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert main(_train(prepared, tmp_path, **{"data.paths": str(tmp_path / "a" / "*")})) == 2
    assert "which matches only directories" in capsys.readouterr().err


def test_a_directory_without_tensors_is_zipped_without_a_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["zip", str(tmp_path / "empty"), "--out", str(tmp_path / "zipped")]) == 0
    shown = capsys.readouterr()
    assert "%" not in shown.out
    assert "holds no safetensors with tensors, so nothing was shortened\n" in shown.err
    (tmp_path / "empty" / "checkpoints").mkdir()
    assert main(["zip", str(tmp_path / "empty"), "--out", str(tmp_path / "run"), "--json"]) == 0
    assert "checkpoint.zip shortens a run's checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--batch", "--sequence-length", "--hidden-size", "--dp", "--micro-batches"])
def test_a_plan_of_more_than_there_can_be_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("1" + "0" * 24, "9" * 5000):
        assert main([*_PLAN, "--memory", "24GB", flag, number]) == 2
        assert "is more than the largest number that can be planned" in capsys.readouterr().err
    assert main([*_PLAN, "--memory", "24GB", "--reserve", "nan"]) == 2
    assert "reserve is nan" in capsys.readouterr().err
