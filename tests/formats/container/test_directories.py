"""Zipped directories: models as Hugging Face writes them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import laconic
from laconic.errors import CheckpointError, FormatError, LaconicError
from laconic.formats import archive
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.zip_manifest import MANIFEST
from tests.formats.container.files import contents, same, tensors, touched


def test_a_directory_comes_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    made = zip_path(folder, num_threads=2)
    assert made.path == tmp_path / "model.laconic"
    assert set(contents(made.path)) == {
        "model-00001-of-00002.safetensors.laconic",
        "model-00002-of-00002.safetensors.laconic",
        "model.safetensors.index.json",
        "config.json",
        "sub/adapter.safetensors.laconic",
        "sub/.hidden/blob",
        "empty",
        MANIFEST,
    }
    assert made.zipped_nbytes == sum(map(len, contents(made.path).values()))
    assert made.original_nbytes == sum(map(len, contents(folder).values()))
    back = unzip(made.path, tmp_path / "back", num_threads=2)
    assert contents(back.path) == contents(folder)
    assert verify(made.path).num_other_files == 4
    loaded = laconic.load_zipped(made.path)
    assert all(same(loaded[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("index", [True, False])
def test_loading_reads_the_listed_files_and_no_others(index: bool, folder: Path, tmp_path: Path) -> None:
    """A copy that ended early would load fewer tensors, a shard of another step its weights."""
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    path = zip_path(folder).path
    shard = path / "model-00001-of-00002.safetensors.laconic"
    save_file({"stray": torch.ones(3)}, path / "stray.safetensors")
    if not index:
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"stray": "stray.safetensors"}}')
    assert set(laconic.load_zipped(path)) == set(tensors())
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors")
    os.replace(zip_path(tmp_path / "other.safetensors").path, shard)
    with pytest.raises(FormatError, match=rf"{shard.name}: is another file than the one listed in laconic-zip.json"):
        laconic.load_zipped(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: No such file"):
        laconic.load_zipped(path)
    if index:
        (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        with pytest.raises(FormatError, match=r"index\.json: damaged"):
            laconic.load_zipped(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_shards_of_other_names_are_read(zipped: bool, tmp_path: Path) -> None:
    """These `laconic zip` copies as they are."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "a.sft")
    save_file({"b": torch.zeros(3)}, tmp_path / "b")
    zip_path(tmp_path / "b", folder / "b.laconic")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.sft", "b": "b"}}')
    path = zip_path(folder).path if zipped else folder
    loaded = laconic.load_zipped(path)
    assert same(loaded["a"], torch.ones(3))
    assert same(loaded["b"], torch.zeros(3))
    if zipped:
        save_file({"a": torch.full((3,), 2.0)}, path / "a.sft")
        with pytest.raises(FormatError, match=r"a\.sft: damaged: .*; restore the file, or zip the original again"):
            laconic.load_zipped(path)


def test_an_index_that_names_what_is_not_listed_is_refused(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"names model-00002-of-00002\.safetensors, which .*; zip a directory"):
        laconic.load_zipped(zip_path(folder).path)


def test_what_is_no_file_is_neither_manifest_nor_index(folder: Path) -> None:
    index, manifest = folder / "model.safetensors.index.json", folder / MANIFEST
    index.unlink()
    index.mkdir()
    assert set(laconic.load_zipped(folder)) == set(tensors())
    manifest.symlink_to(folder / "nowhere")
    with pytest.raises(FormatError, match=r"has no laconic-zip\.json that is a file"):
        laconic.load_zipped(folder)


def test_links_to_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    made = zip_path(snapshot)
    assert not [path for path in made.path.iterdir() if path.is_symlink()]
    assert contents(unzip(made.path, tmp_path / "back").path) == contents(snapshot)


def test_what_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "loop").symlink_to(folder)
    with pytest.raises(CheckpointError, match="loop is a link to a directory"):
        zip_path(folder)
    (folder / "loop").unlink()
    (folder / "gone").symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match="gone is neither a file nor a directory"):
        zip_path(folder)
    (folder / "gone").unlink()
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is neither a file nor a directory"):
        zip_path(folder)
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is not a file"):
        zip_path(folder / "pipe.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    (folder / "pipe.safetensors").unlink()
    zipped = zip_path(folder).path
    (zipped / "loop").symlink_to(zipped)
    for read in (unzip, verify):
        progress: list[int] = []
        with pytest.raises(CheckpointError, match="loop is a link to a directory"):
            read(zipped, progress=progress.append, **({"out": tmp_path / "back"} if read is unzip else {}))
        assert not progress
        assert not (tmp_path / "back").exists()


def test_a_difference_to_a_directory_comes_back(folder: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    save_file(touched(tensors()), later / "model.safetensors")  # another cut into shards
    base = zip_path(folder).path
    for given in (folder, base):
        made = zip_path(later, tmp_path / f"{given.name}.zip", base=given)
        for again in (folder, base):
            back = unzip(made.path, tmp_path / "back", base=again).path
            assert contents(back) == contents(later)
            for path in back.iterdir():
                path.unlink()
        loaded = laconic.load_zipped(made.path, base=folder)
        assert all(same(loaded[name], tensor) for name, tensor in touched(tensors()).items())


def test_damage_to_a_directory_is_found(folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    for name, content in contents(path).items():
        damages = [content[:-2], content + b"x"] if content else [b"x"]
        if content:
            middle = len(content) // 2
            damages.append(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        for damaged in damages:
            (path / name).write_bytes(damaged)
            for read in (verify, lambda p: unzip(p, tmp_path / "back")):
                with pytest.raises(FormatError, match=name.split("/")[-1]):
                    read(path)
        (path / name).unlink()
        with pytest.raises(LaconicError, match=name.split("/")[-1]):
            verify(path)
        (path / name).write_bytes(content)
    verify(path)
    # Two good files in each other's place.
    one, two = (path / f"model-0000{n}-of-00002.safetensors.laconic" for n in (1, 2))
    one.rename(tmp_path / "moved")
    two.rename(one)
    (tmp_path / "moved").rename(two)
    with pytest.raises(FormatError, match=r"is another file than the one listed in laconic-zip\.json"):
        verify(path)


def test_files_that_came_later_are_told(folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    (path / "sub" / "notes.txt").write_text("mine")
    assert verify(path).unlisted == ("sub/notes.txt",)
    back = unzip(path, tmp_path / "back")
    assert back.unlisted == ("sub/notes.txt",)
    assert contents(back.path) == contents(folder)


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "", ".", "a\\..\\b", "a\0b", MANIFEST]
)
def test_names_that_lead_elsewhere_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = manifest["files"]["config.json"]
    manifest["sha256"] = archive.manifest_sha256(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    for read in (verify, lambda p: unzip(p, tmp_path / "out" / "back")):
        with pytest.raises(FormatError, match="is not the name of a file inside of its directory"):
            read(path)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 50_000,
        b'{"sha256": "", "sha256": ""}',
        {"version": 1},
        {"version": 1, "files": []},
        {"version": 2, "files": {}},
        {"version": 1, "files": {"config.json": {"nbytes": 3}}},
        {"version": 1, "files": {"config.json": {"nbytes": True, "sha256": ""}}},
        {"version": 1, "files": {"config.json": {"nbytes": 3, "digest": ""}}},
        {"version": 1, "files": {"model-00001-of-00002.safetensors.laconic": {"nbytes": 3, "sha256": ""}}},
        {"version": 1, "files": {"config.json": None}},
    ],
)
def test_a_false_manifest_is_refused(manifest: Any, folder: Path) -> None:
    path = zip_path(folder).path
    if isinstance(manifest, dict):
        manifest = json.dumps(manifest | {"sha256": archive.manifest_sha256(manifest)}).encode()
    (path / MANIFEST).write_bytes(manifest)
    with pytest.raises(FormatError, match=MANIFEST):
        verify(path)


def test_what_is_zipped_is_not_zipped_again(folder: Path, plain: Path) -> None:
    path = zip_path(folder).path
    with pytest.raises(FormatError, match="is zipped already"):
        zip_path(path)
    with pytest.raises(FormatError, match="is zipped already"):
        zip_path(zip_path(plain).path)
    (path / MANIFEST).unlink()
    with pytest.raises(FormatError, match=r"holds model-00001-of-00002.safetensors.laconic, which is zipped already"):
        zip_path(path)
    with pytest.raises(FormatError, match=r"has no laconic-zip\.json"):
        unzip(path)


def test_an_index_of_shards_is_checked(folder: Path) -> None:
    path = zip_path(folder).path
    (path / MANIFEST).unlink()
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, message in [
        ({"weight": "../model.safetensors"}, "not the name of a file beside it"),
        ({"weight": 3}, "not the name of a file beside it"),
        ({"weight": "model-00002-of-00002.safetensors", "wait": "model-00001-of-00002.safetensors"}, "but it is not"),
        ({"weight": ["a"]}, "is not an index"),
        ([], "is not an index"),
    ]:
        index.write_text(json.dumps(good | {"weight_map": weight_map}))
        with pytest.raises(FormatError, match=message):
            laconic.load_zipped(path)
    index.write_text(json.dumps(good | {"weight_map": {"weight": "model-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"cannot read .*model-00003\.safetensors"):
        laconic.load_zipped(path)
    index.unlink()
    assert same(laconic.load_zipped(path)["weight"], tensors()["weight"])
    (path / "more.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(
        FormatError, match=r"is both in model-00001-of-00002.safetensors.laconic and in more.safetensors"
    ):
        laconic.load_zipped(path)


# Whole or not there.
