"""`load_zipped`: the tensors of a zipped checkpoint, decoded on access."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from laconic.errors import CheckpointError, FormatError
from laconic.formats.container import SUFFIX, ContainerFile
from laconic.formats.mapped import SafetensorsFile, TensorsInMemory, TensorSource
from laconic.formats.safetensors_header import INDEX_FILE, TensorEntry, read_index
from laconic.formats.zip_manifest import MANIFEST, SAFETENSORS, check_file, listed_container, read_manifest


def load_zipped(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> ZippedTensors:
    """The tensors of a file or directory that `laconic zip` wrote, without unzipping it.

    The files are mapped into memory; each access reads and decodes a tensor and compares its checksums. For a GPU the
    encoded bytes are copied to the device and decoded there.

    Directories may hold several shards; those without the manifest of `laconic zip` plain files and zipped ones.

        >>> weights = laconic.load_zipped("model.laconic")
        >>> weights["model.embed_tokens.weight"]
        >>> model.load_state_dict(weights.state_dict())

    Args:
        path: a file or directory.
        base: the checkpoint, zipped or plain, or its tensors by name, that `path` was zipped against with `--delta`.
        device: of the tensors returned.

    Raises:
        FormatError: a file is damaged or another base is given.
        CheckpointError: a file cannot be read.
    """
    source = None if base is None else TensorsInMemory(base) if isinstance(base, Mapping) else open_tensors(Path(base))
    return ZippedTensors(open_tensors(Path(path), source), torch.device(device))


class ZippedTensors(Mapping[str, Tensor]):
    """Name -> tensor; each access makes a new one. Made by `load_zipped`."""

    def __init__(self, files: TensorFiles, device: torch.device) -> None:
        self._files = files
        self.device = device

    def __getitem__(self, name: str) -> Tensor:
        data = self._files.tensor(name, self.device)
        entry = self._files.entries[name]
        dtype = entry.element.torch_dtype
        if dtype is None:
            raise FormatError(
                f"tensor {name!r} has dtype {entry.dtype}, which torch cannot hold; unzip the file instead"
            )
        return data.view(dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.entries)

    def __len__(self) -> int:
        return len(self._files.entries)

    def shape(self, name: str) -> torch.Size:
        """Shape of a tensor, without decoding it."""
        return torch.Size(self._files.entries[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype of a tensor, without decoding it; None for one that torch cannot hold."""
        return self._files.entries[name].element.torch_dtype

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of the safetensors files."""
        return self._files.metadata

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, decoded."""
        return {name: self[name] for name in self}


class TensorFiles:
    """The tensors of one or several files, plain or zipped, as one source."""

    def __init__(self, name: str, files: Mapping[str, SafetensorsFile | ContainerFile]) -> None:
        self.name = name
        self._home = files
        self.entries: dict[str, TensorEntry] = {tensor: file.entries[tensor] for tensor, file in files.items()}

    @property
    def files(self) -> list[SafetensorsFile | ContainerFile]:
        """Each file once."""
        return list({id(file): file for file in self._home.values()}.values())

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of all files."""
        return {key: value for file in self.files for key, value in file.metadata.items()}

    def require(self, name: str) -> None:
        """Check that all is there that reading a tensor needs: the base that it is a difference to, and no other."""
        self._home[name].require(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes `start` to `stop` of a tensor, uint8 [stop - start], on the CPU; read-only."""
        return self._home[name].read(name, start, stop)

    def checksum(self, name: str) -> str:
        """Checksum of all bytes of a tensor."""
        return self._home[name].checksum(name)

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """All bytes of a tensor, uint8 [nbytes], on `device` in memory of its own."""
        file = self._home[name]
        if isinstance(file, ContainerFile):
            return file.tensor(name, device)
        return file.read(name, 0, file.entries[name].nbytes).to(device, copy=True)


def is_zipped(path: Path) -> bool:
    """Whether a file has the name of a zipped one."""
    return path.name.endswith(SUFFIX)


def open_tensors(path: Path, base: TensorSource | None = None) -> TensorFiles:
    """The tensors of a safetensors file, a zipped one, or a directory of such files, whose index says where each is.

    Without model.safetensors.index.json a tensor must not be in two files. A zipped directory has the files that its
    manifest lists, each with the size and digest written there.
    """
    if not path.is_dir():
        file = _open_file(path, base)
        return TensorFiles(str(path), dict.fromkeys(file.entries, file))
    index = path / INDEX_FILE
    records = read_manifest(path) if os.path.lexists(path / MANIFEST) else None

    def open_shard(name: str) -> SafetensorsFile | ContainerFile:
        if records is not None:
            if name not in records:
                raise FormatError(f"{index}: names {name}, which {MANIFEST} does not list; zip a directory that has it")
            if "digest" in records[name]:
                return listed_container(path / name, records[name], base)
            check_file(path / name, records[name])
        return _open_file(path / name, base)

    names = sorted(entry.name for entry in path.iterdir()) if records is None else sorted(records)
    if index.is_file() if records is None else INDEX_FILE in records:
        if records is not None:
            check_file(index, records[INDEX_FILE])
        return TensorFiles(str(path), _by_index(index, names, open_shard))
    found = [n for n in names if "/" not in n and n.endswith((SAFETENSORS, SAFETENSORS + SUFFIX))]
    if not found:
        raise CheckpointError(f"{path} holds neither safetensors files nor zipped ones")
    home: dict[str, SafetensorsFile | ContainerFile] = {}
    for file in map(open_shard, found):
        for name in file.entries:
            if name in home:
                raise FormatError(f"{path}: tensor {name!r} is both in {home[name].path.name} and in {file.path.name}")
            home[name] = file
    return TensorFiles(str(path), home)


def _open_file(path: Path, base: TensorSource | None) -> SafetensorsFile | ContainerFile:
    return ContainerFile(path, base) if is_zipped(path) else SafetensorsFile(path)


def _by_index(
    index: Path, names: Sequence[str], open_shard: Callable[[str], SafetensorsFile | ContainerFile]
) -> dict[str, SafetensorsFile | ContainerFile]:
    """Tensor -> file, as a Hugging Face index says, of the files `names` of its directory."""
    try:
        weight_map = read_index(index)
    except ValueError as error:
        raise FormatError(f"{index}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    opened: dict[str, SafetensorsFile | ContainerFile] = {}
    for shard in dict.fromkeys(weight_map.values()):
        opened[shard] = open_shard(shard + SUFFIX if shard + SUFFIX in names else shard)
    home = {}
    for tensor, shard in weight_map.items():
        if tensor not in opened[shard].entries:
            raise FormatError(f"{index}: says that tensor {tensor!r} is in {shard}, but it is not")
        home[tensor] = opened[shard]
    return home
