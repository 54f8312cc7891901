"""Zipped shards of a checkpoint: a storage for torch.distributed.checkpoint (DCP) that writes compressed files.

Where DCP's own writer makes `__0_0.distcp`, this one makes `__0_0.safetensors.laconic` with the same tensors,
losslessly coded (formats/container.py); DCP's plan and its `.metadata` stay as they are, so that every resharding
works. The reader takes files of both kinds.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from laconic.durable import fsync_file
from laconic.errors import CheckpointError
from laconic.formats.container import SUFFIX, ContainerFile, write_container
from laconic.formats.dcp import DcpReader
from laconic.formats.safetensors_header import element, write_header

_SUFFIX = ".safetensors" + SUFFIX


class ZippedWriter(FileSystemWriter):
    """Writes one zipped file per rank, one chunk encoded at a time, and fsyncs it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of the plan into one zipped file."""
        file_name = f"{plan.storage_data.prefix}0{_SUFFIX}"
        path = Path(self.path) / file_name
        described = [(_name(item.index), *_description(item, planner)) for item in plan.items]
        with open(path, "xb") as file:
            write_container(
                file,
                write_header(described),
                (_bytes(item, planner) for item in plan.items),
                num_threads=1,
                name=str(path),
            )
            fsync_file(file)
        stored = ContainerFile(path).stored
        results = []
        for item in plan.items:
            messages = stored[_name(item.index)].messages
            nbytes = sum(nbytes for _, nbytes in messages)
            info = _StorageInfo(file_name, messages[0][0] if messages else 0, nbytes)
            results.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=info))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class CheckpointReader(DcpReader):
    """Reads what ZippedWriter or DCP's own writer wrote."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of the plan, from zipped files here and from others by DCP."""
        zipped: dict[str, list[ReadItem]] = {}
        plain = []
        for item in plan.items:
            file_name = self.storage_data[item.storage_index].relative_path
            if file_name.endswith(_SUFFIX):
                zipped.setdefault(file_name, []).append(item)
            else:
                plain.append(item)
        for file_name, items in zipped.items():
            file = ContainerFile(Path(self.path) / file_name)
            for item in items:
                _load(file, item, planner)
        return super().read_data(LoadPlan(plain), planner)


def _name(index: MetadataIndex) -> str:
    """A name for one piece of a tensor; unique in a checkpoint."""
    return index.fqn if index.offset is None else f"{index.fqn}[{','.join(map(str, index.offset))}]"


def _description(item: WriteItem, planner: SavePlanner) -> tuple[str, tuple[int, ...]]:
    """dtype, as safetensors spells it, and shape of what is to be written."""
    if item.tensor_data is None:
        content = cast(io.BytesIO, planner.resolve_data(item)).getbuffer()
        return "U8", (len(content),)
    return element(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)


def _bytes(item: WriteItem, planner: SavePlanner) -> Tensor:
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
    return data.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _load(file: ContainerFile, item: ReadItem, planner: LoadPlanner) -> None:
    name = _name(item.storage_index)
    if name not in file.entries:
        raise CheckpointError(f"{file.path} has no tensor {name!r}, but .metadata says it has")
    entry, data = file.entries[name], file.tensor(name)
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(data.numpy().tobytes()))
        return
    dtype = entry.element.torch_dtype
    assert dtype is not None  # write_header took it from a tensor
    part: Any = data.view(dtype).view(entry.shape)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != part.size():
        raise CheckpointError(f"{file.path}: {name!r} has shape {list(part.size())}, {list(target.size())} is needed")
    target.copy_(part)
    planner.commit_tensor(item, target)
