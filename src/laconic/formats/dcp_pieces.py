"""DTensors whose local part is several blocks of the whole, for torch.distributed.checkpoint (DCP).

DCP describes what a rank holds of a DTensor by one offset and one size. That is wrong for a strided shard, such as a
part of the gate's and a part of the up projection's columns in one matrix: there the rank has two blocks. `in_pieces`
lists them, each under its own offset in the whole tensor, so that any other layout reads what it needs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from laconic.formats.shards import Runs, local_runs


def in_pieces(value: Any) -> Any:
    """Return what DCP takes in place of `value`: itself, or for a DTensor of several blocks a view that lists them."""
    if not isinstance(value, DTensor):
        return value
    runs = local_runs(value.shape, value.device_mesh, value.placements)
    return value if all(len(one) <= 1 for one in runs) else _Pieces.of(value, runs)


class _Pieces(Tensor):
    """Local part of a DTensor, sharing its memory, with the methods by which DCP asks for its blocks."""

    _whole: torch.Size
    _runs: Runs

    @staticmethod
    def of(tensor: DTensor, runs: Runs) -> _Pieces:
        local = tensor.to_local().detach()
        made = Tensor._make_subclass(_Pieces, local)
        made._whole, made._runs = tensor.shape, runs
        return made

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole, which DCP compares with the file's."""
        return self._whole if dim is None else self._whole[dim]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(run[0] for run in block), torch.Size(run[1] - run[0] for run in block))
            for block in itertools.product(*self._runs)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        block = self._local()
        assert index.offset is not None
        for dim, (runs, offset) in enumerate(zip(self._runs, index.offset, strict=True)):
            first = 0
            for start, stop in runs:
                if start == offset:
                    block = block.narrow(dim, first, stop - start)
                first += stop - start
        return block

    def _local(self) -> Tensor:
        return self.as_subclass(Tensor)
