"""Reads what torch.distributed.checkpoint (DCP) wrote without running code that somebody may have put into it.

DCP's index `.metadata` is a pickle, and an entry of kind "bytes" is another one, inside a shard. Python runs whatever a
pickle asks for. Here the index may only ask for the dozen names that DCP writes, each of which stands for a passive
record; the objects that DCP gets are made from these records after every field has been checked. Entries of bytes are
loaded with `weights_only=True`. DCP itself reads tensors in that way.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import reprlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from laconic.errors import CheckpointError, first_line

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""Classes of which DCP pickles objects."""
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PLAIN_FILE = re.compile(r"[A-Za-z0-9._-]+")


class DcpReader(FileSystemReader):
    """torch's reader of a checkpoint directory whose index, checked by `read_dcp_metadata`, is read once.

    It may refer to `files` only; None allows any in the directory.
    """

    def __init__(self, path: str | Path, files: Collection[str] | None = None) -> None:
        super().__init__(path)
        self._files = files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked index; CheckpointError also if it names a file outside of `files`."""
        if self._metadata is None:
            metadata = read_dcp_metadata(Path(self.path))
            for info in metadata.storage_data.values():
                if self._files is not None and info.relative_path not in self._files:
                    raise CheckpointError(
                        f"{self.path}/.metadata names {info.relative_path}, which is not in the manifest"
                    )
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self._metadata = metadata
        return self._metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner for `load`, but entries of bytes may hold tensors and plain data only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry of bytes with `weights_only=True`."""
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{read_item.dest_index.fqn} holds what is no tensor or number: {first_line(error)}"
            ) from None
        checked = io.BytesIO()
        torch.save(loaded, checked)
        checked.seek(0)
        super().load_bytes(read_item, checked)


def read_dcp_metadata(directory: Path) -> Metadata:
    """The index of the checkpoint in `directory`, without the saving planner's own notes.

    A CheckpointError if it cannot be read, asks for anything but the classes DCP writes (the message names it), or has
    fields of other types or values than DCP writes, such as a file outside of `directory`.
    """
    file = directory / ".metadata"
    try:
        data = file.read_bytes()
        _check_memo(data)
        loaded = _Unpickler(io.BytesIO(data)).load()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except _Refused as error:
        raise CheckpointError(
            f"{file} asks for {error}, which no checkpoint needs; nothing of it was run. Do not use this checkpoint"
        ) from None
    except _Unfit as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from None
    try:
        return _metadata(loaded)
    except (_Unfit, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None


def _check_memo(data: bytes) -> None:
    """Refuse what would allocate more than it holds: an unpickler makes its memo as long as the largest index says."""
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(data):
            raise _Unfit(f"it remembers an object under number {argument}, but has {len(data)} bytes")


class _Refused(Exception):
    """A name that is not one of DCP's."""


class _Unfit(Exception):
    """A field holds something else than DCP writes there."""


class _Record:
    """Stands for an object of a class of DCP: holds the state that was pickled, and does nothing with it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records. Its classes are its own, so that no pickle can change those of torch."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in _RECORDS}
        self._known |= {("torch", name): dtype for name, dtype in _DTYPES.items()}
        self._known |= dict.fromkeys(_PATHS, _joined)
        self._known["torch", "Size"] = lambda sizes: torch.Size(sizes)
        self._known["torch.serialization", "_get_layout"] = lambda name: name
        self._known[_METADATA, "_MEM_FORMAT_ENCODING"] = lambda number: number

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise _Refused(f"{module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"the persistent object {reprlib.repr(pid)}")


def _joined(*parts: Any) -> str:
    """A path. Of nothing but text: whatever else is in a pickle may be long to print."""
    if not all(map(_is_text, parts)):
        raise _Unfit("a path has parts that are no text")
    return "/".join(parts)


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The state of a record of class `name`, a dict with string keys."""
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise _Unfit(f"a {name} was expected, but there is a {type(value).__name__}")
    state = {} if value.state is None else value.state
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _Unfit(f"{name} has no fields")
    return state


def _checked(fields: dict[str, Any], name: str, holds: Callable[[Any], bool]) -> Any:
    if name not in fields or not holds(fields[name]):
        raise _Unfit(f"{name} is {reprlib.repr(fields.get(name))}")
    return fields[name]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table_of_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value))


def _metadata(loaded: Any) -> Metadata:
    fields = _fields(loaded, "Metadata")
    entries = _checked(fields, "state_dict_metadata", _is_table_of_names)
    stored = _checked(fields, "storage_data", lambda value: isinstance(value, dict))
    version = fields.get("version")
    return Metadata(
        state_dict_metadata={key: _entry(entry) for key, entry in entries.items()},
        storage_data={_index(index): _storage(info) for index, info in stored.items()},
        storage_meta=StorageMeta(),
        version=version if isinstance(version, str) else None,
    )


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    size = _checked(fields, "size", _is_size)
    properties = _checked(fields, "properties", lambda value: isinstance(value, _Record)).state
    if not isinstance(properties, tuple) or not properties or not isinstance(properties[0], torch.dtype):
        raise _Unfit(f"a tensor has the properties {reprlib.repr(properties)}")
    chunks = []
    for chunk in _checked(fields, "chunks", lambda value: isinstance(value, list)):
        of_chunk = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = (_checked(of_chunk, name, _is_size) for name in ("offsets", "sizes"))
        inside = len(offsets) == len(sizes) == len(size) and all(
            start >= 0 and length >= 0 and start + length <= whole
            for start, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise _Unfit(f"a piece at {list(offsets)} of {list(sizes)} lies outside a tensor of {list(size)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=properties[0]), size, chunks)


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    return MetadataIndex(
        _checked(fields, "fqn", _is_text),
        _checked({"offset": None} | fields, "offset", lambda value: value is None or _is_size(value)),
        _checked({"index": None} | fields, "index", lambda value: value is None or _is_count(value)),
    )


def _storage(info: Any) -> _StorageInfo:
    fields = _fields(info, "_StorageInfo")
    name = _checked(fields, "relative_path", _is_text)
    if not _PLAIN_FILE.fullmatch(name) or name in (".", ".."):
        raise _Unfit(f"it names the file {name!r}, which is not a plain file name")
    if fields.get("transform_descriptors"):
        raise _Unfit(f"{name} is stored in another form: {reprlib.repr(fields['transform_descriptors'])}")
    return _StorageInfo(name, _checked(fields, "offset", _is_count), _checked(fields, "length", _is_count))
