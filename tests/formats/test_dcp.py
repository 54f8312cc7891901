"""The index of a DCP checkpoint: read as DCP reads it when DCP wrote it, and never run when somebody else did."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from laconic.errors import CheckpointError
from laconic.formats.dcp import DcpReader, SafeLoadPlanner, read_dcp_metadata

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to .* in a single process.*")


def state() -> dict[str, Any]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {str(dtype): torch.arange(12).to(dtype).view(3, 4) for dtype in dtypes}
    return {"model": tensors, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "numbers": {"step": 7, "x": 0.5}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    save(state(), storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_what_dcp_wrote_is_read_as_dcp_reads_it(written: Path) -> None:
    with open(written / ".metadata", "rb") as file:
        theirs: Metadata = pickle.load(file)
    for entry in theirs.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):  # torch 2.15 adds strides, which nobody reads
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
    ours = read_dcp_metadata(written)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version


def test_state_comes_back(written: Path) -> None:
    wanted = state()
    empty = {"model": {name: torch.zeros_like(value) for name, value in wanted["model"].items()}}
    empty |= {"scalar": torch.zeros(()), "empty": torch.empty(0, 3), "numbers": {"step": 0, "x": 0.0}}
    load(empty, storage_reader=DcpReader(written), planner=SafeLoadPlanner(), no_dist=True)
    assert empty["numbers"] == wanted["numbers"]
    assert torch.equal(empty["scalar"], wanted["scalar"])
    for name, value in wanted["model"].items():
        assert torch.equal(empty["model"][name], value), name


class Calls:
    """A pickle that calls `function` with `arguments` when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.how = function, arguments

    def __reduce__(self) -> Any:
        return self.how


def hostile(marker: Path) -> dict[str, bytes]:
    """Pickles that create `marker` if what they ask for is run, or that ask for what DCP never writes."""
    path = str(marker)
    inner = pickle.dumps(Calls(os.mkdir, path))
    objects: dict[str, Any] = {
        "posix.mkdir": Calls(os.mkdir, path),
        "builtins.exec": Calls(exec, f"import os; os.mkdir({path!r})"),
        "builtins.eval": {"state_dict_metadata": Calls(eval, f"__import__('os').mkdir({path!r})")},
        "_pickle.loads": Calls(pickle.loads, inner),
        "torch.serialization.load": Calls(torch.load, io.BytesIO(inner)),
        "builtins.getattr": Calls(getattr, torch, "load"),
        "builtins.setattr": Calls(setattr, torch.Size, "x", 1),
        "collections.OrderedDict": OrderedDict(a=1),
        "pathlib.PosixPath.mkdir": Calls(Path.mkdir, Path(path)),
    }
    pickles = {}
    for name, value in objects.items():
        try:
            pickles[name] = pickle.dumps(value)
        except (TypeError, pickle.PicklingError):
            pickles[name] = b"c" + name.rpartition(".")[0].encode() + b"\n" + name.rpartition(".")[2].encode() + b"\n."
    # Dotted names and old opcodes reach a callable in ways of their own.
    quoted = f"V{path}\n".encode()
    pickles |= {
        "torch.distributed.checkpoint.metadata.os.mkdir": (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93" + quoted + b"\x85R."
        ),
        "os.mkdir": b"(" + quoted + b"ios\nmkdir\n.",
        "posix.system": b"(cposix\nsystem\n" + f"Vmkdir {path}\n".encode() + b"o.",
        "torch._C": b"ctorch\n_C\n.",
        "torch.float32.__class__": b"\x80\x04\x8c\x05torch\x8c\x11float32.__class__\x93.",
    }
    return pickles


NAMES = sorted(hostile(Path("x")))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_dcp_does_not_write_is_refused_by_name(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(hostile(marker)[name])
    with pytest.raises(CheckpointError, match=r"asks for \S+, which no checkpoint needs") as refused:
        read_dcp_metadata(tmp_path)
    assert name.rpartition(".")[2].partition(".")[0] in str(refused.value) or "io.BytesIO" in str(refused.value)
    assert not marker.exists()


def test_no_pickle_changes_the_classes_of_torch(tmp_path: Path) -> None:
    before = dict(vars(Metadata))
    # BUILD on the class itself, with a state for its attributes.
    text = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}V__getattr__\nctorch\nfloat32\ns\x86b."
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_dcp_metadata(tmp_path)
    assert dict(vars(Metadata)) == before


Change = Callable[[Metadata], None]


def outside(name: str) -> Change:
    def change(metadata: Metadata) -> None:
        for index, info in list(metadata.storage_data.items()):
            metadata.storage_data[index] = _StorageInfo(name, info.offset, info.length)

    return change


def _larger_piece(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["scalar"]
    matrix: Any = metadata.state_dict_metadata["model.torch.int64"]
    entry.chunks = matrix.chunks


def _negative(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = -1


def _other_form(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (outside("../other/__0_0.distcp"), "names the file '../other/__0_0.distcp'"),
        (outside("/etc/passwd"), "not a plain file name"),
        (outside(".."), "not a plain file name"),
        (_larger_piece, "lies outside a tensor of"),
        (_negative, "offset is -1"),
        (_other_form, "another form"),
        (lambda metadata: setattr(metadata, "storage_data", [1]), "storage_data is"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", {1: 2}), "state_dict_metadata is"),
        (lambda metadata: metadata.state_dict_metadata.update(x=3), "TensorStorageMetadata was expected"),
    ],
)
def test_fields_that_dcp_does_not_write_are_refused(change: Change, message: str, written: Path) -> None:
    with open(written / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (written / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message):
        read_dcp_metadata(written)


def test_a_file_that_is_not_expected_is_refused(written: Path) -> None:
    with pytest.raises(CheckpointError, match=r"names __0_0\.distcp, which is not in the manifest"):
        DcpReader(written, files={"other"}).read_metadata()


def test_a_pickle_inside_a_shard_is_not_run(written: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    evil = io.BytesIO()
    torch.save(Calls(os.mkdir, str(marker)), evil)
    (written / "evil").write_bytes(evil.getvalue())
    with open(written / ".metadata", "rb") as file:
        metadata: Metadata = pickle.load(file)
    metadata.state_dict_metadata["scalar"] = BytesStorageMetadata()  # a tensor is asked for; a pickle is what there is
    metadata.storage_data[MetadataIndex("scalar")] = _StorageInfo("evil", 0, len(evil.getvalue()))
    (written / ".metadata").write_bytes(pickle.dumps(metadata))
    wanted = {"scalar": torch.zeros(())}
    with pytest.raises(CheckpointException, match="scalar holds what is no tensor or number"):
        load(wanted, storage_reader=DcpReader(written), planner=SafeLoadPlanner(), no_dist=True)
    assert not marker.exists()
    # The test can fail: DCP's own reader and planner do run it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"scalar": torch.zeros(())}, storage_reader=FileSystemReader(written), no_dist=True)
    assert marker.exists()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_gives_one_error_or_a_sound_index(data: st.DataObject, written: Path) -> None:
    original = (written / ".metadata").read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    (written / ".metadata").write_bytes(damaged[:cut])
    with contextlib.suppress(CheckpointError):  # any other error fails the test
        found = read_dcp_metadata(written)
        assert isinstance(found, Metadata)
        assert all(isinstance(index, MetadataIndex) for index in found.storage_data)
    (written / ".metadata").write_bytes(original)
