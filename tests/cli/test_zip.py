"""`laconic zip`, `unzip` and `verify`: arguments, what is printed, exit codes."""

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laconic.cli import progress
from laconic.cli.main import main
from tests.formats.container.files import contents


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The commands set torch's number of threads, as is right for a process of their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    save_file({"a": torch.randn(5000).bfloat16(), "b": torch.arange(3)}, root / "model.safetensors")
    (root / "config.json").write_text("{}")
    return root


def test_a_file_there_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    original = file.read_bytes()
    assert main(["zip", str(file), "--jobs", "1"]) == 0
    zipped = folder / "model.safetensors.laconic"
    sizes = f"{len(original):,} -> {zipped.stat().st_size:,} bytes"
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {zipped}: {sizes} (")
    assert "2 tensors" in out
    file.unlink()
    assert main(["verify", str(zipped)]) == 0
    assert capsys.readouterr().out.startswith(
        f"{zipped} is sound: 2 tensors, 0 other files, {len(original):,} bytes in "
    )
    assert main(["unzip", str(zipped)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {file}: {len(original):,} bytes, 2 tensors")
    assert file.read_bytes() == original


def test_a_directory_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zipped, back = tmp_path / "z", tmp_path / "back"
    assert main(["zip", str(folder), "--out", str(zipped), "--code", "window", "--jobs", "2"]) == 0
    (zipped / "mine.txt").write_text("")
    assert main(["verify", str(zipped), "--jobs", "2"]) == 0
    assert main(["unzip", str(zipped), "--out", str(back), "--jobs", "2"]) == 0
    assert contents(back) == contents(folder)
    shown = capsys.readouterr()
    assert shown.err.count("note: left alone, because the manifest does not list them: mine.txt") == 2
    assert "2 tensors, 1 other files" in shown.out


def test_a_difference_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(folder / "model.safetensors")
    later = tmp_path / "later.safetensors"
    save_file({"a": torch.randn(5000).bfloat16(), "b": torch.arange(3)}, later)
    assert main(["zip", str(later), "--delta", base]) == 0
    zipped = f"{later}.laconic"
    original = later.read_bytes()
    later.unlink()
    assert main(["unzip", zipped]) == 2
    assert f"difference to '{base}', which is needed to read it" in capsys.readouterr().err
    assert main(["verify", zipped]) == 0
    assert f"give --base {base} to verify the tensors too" in capsys.readouterr().err
    assert main(["verify", zipped, "--base", base]) == 0
    assert capsys.readouterr().err == ""
    assert main(["unzip", zipped, "--base", base]) == 0
    assert later.read_bytes() == original


def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model.safetensors"
    assert main(["zip", str(file)]) == 0
    zipped = Path(f"{file}.laconic")
    content = bytearray(zipped.read_bytes())
    content[len(content) // 2] ^= 1
    zipped.write_bytes(content)
    capsys.readouterr()
    for args, message in [
        (["zip", str(tmp_path / "none")], "cannot read"),
        (["zip", str(folder / "config.json")], "too few for a safetensors file"),
        (["zip", str(file)], "exists already"),
        (["verify", str(zipped)], "damaged"),
        (["unzip", str(zipped), "--out", str(tmp_path / "out")], "damaged"),
        (["verify", str(folder)], "has no laconic-zip.json"),
        (["zip", str(file), "--delta", str(folder / "config.json"), "--out", str(tmp_path / "out")], "config.json"),
    ]:
        assert main(args) == 2, args
        error = capsys.readouterr().err
        assert error.startswith("laconic: error: "), args
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_failed_write_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fail)
    before = contents(folder)
    assert main(["zip", str(folder / "model.safetensors")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert contents(folder) == before


def test_progress_is_shown_on_a_terminal_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["zip", str(folder)]) == 0
    assert "/10.0k " in screen.getvalue()
    assert "B/s" in screen.getvalue()
    with progress.progress_bar(lambda: 10, "what") as advance:
        advance(10)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.progress_bar(lambda: pytest.fail("not asked for"), "what") as advance:
        advance(10)
