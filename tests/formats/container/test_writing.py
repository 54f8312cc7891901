"""A zipped file is there whole or not at all, and nothing is overwritten."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from laconic import durable
from laconic.errors import CheckpointError, FormatError
from laconic.formats import archive
from laconic.formats.archive import unzip, verify, zip_path
from tests.formats.container.files import contents


def test_nothing_is_overwritten(plain: Path, folder: Path, tmp_path: Path) -> None:
    zipped, zipped_folder = zip_path(plain).path, zip_path(folder).path
    before = contents(tmp_path)
    for call in (
        lambda: zip_path(plain),
        lambda: unzip(zipped),
        lambda: zip_path(folder),
        lambda: unzip(zipped_folder),
        lambda: zip_path(plain, zipped_folder),
        lambda: zip_path(folder, zipped),
    ):
        with pytest.raises(CheckpointError, match="exists already; it is not overwritten"):
            call()
    with pytest.raises(CheckpointError, match="is inside of"):
        zip_path(folder, folder / "here")
    with pytest.raises(CheckpointError, match="is inside of"):
        unzip(zipped_folder, zipped_folder / "deep" / "here")
    with pytest.raises(FormatError, match="say where to unzip it with --out"):
        unzip(folder)
    assert contents(tmp_path) == before


def test_a_file_that_appears_meanwhile_is_not_overwritten(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = plain.with_name("out")

    def late(nbytes: int) -> None:
        out.write_text("mine")

    for refuse_links in (False, True):
        if refuse_links:

            def link(source: Any, target: Any) -> None:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

            monkeypatch.setattr(os, "link", link)
        with pytest.raises(CheckpointError, match=r"cannot write .*out: File exists"):
            zip_path(plain, out, progress=late)
        assert out.read_text() == "mine"
        out.unlink()
    zip_path(plain, out)  # without hard links, too
    verify(out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failed_write_leaves_nothing(
    call: str, number: int, plain: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped, zipped_folder = zip_path(plain, tmp_path / "z.laconic").path, zip_path(folder, tmp_path / "d.laconic").path
    before = contents(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    for attempt in (
        lambda: zip_path(plain),
        lambda: unzip(zipped),
        lambda: zip_path(folder),
        lambda: unzip(zipped_folder),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write .*: {os.strerror(number)}"):
            attempt()
        assert contents(tmp_path) == before


def test_a_place_that_cannot_be_written_is_named(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/out: "):
        zip_path(plain, tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere"):
        zip_path(tmp_path / "nowhere")


def test_what_is_written_begins_to_reach_the_disk_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for each 4 MB; without the system's function nothing is lost but time."""
    path = tmp_path / "large.safetensors"
    save_file({f"w{n}": torch.full((1 << 18,), float(n)) for n in range(12)} | {"small": torch.ones(3)}, path)
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(durable, "_sync_file_range", lambda: lambda *call: calls.append(call))
    zipped = zip_path(path, code="raw").path
    assert [call[1:] for call in calls] == [(0, 0, 2)] * 3
    unzip(zipped, tmp_path / "back")
    assert len(calls) == 6
    monkeypatch.setattr(durable, "_sync_file_range", lambda: None)
    assert unzip(zipped, tmp_path / "again").path.read_bytes() == path.read_bytes()


def test_a_file_that_changes_meanwhile_is_refused(plain: Path, tmp_path: Path) -> None:
    def change(nbytes: int) -> None:
        os.utime(plain, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        zip_path(plain, progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_another_file_of_a_directory_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "optimizer.pt").write_bytes(b"1" * 100)

    def change(file: object) -> None:
        os.utime(tmp_path / "model" / "optimizer.pt", ns=(1, 1))

    monkeypatch.setattr(archive, "fsync_file", change)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt changed while it was being read"):
        zip_path(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
