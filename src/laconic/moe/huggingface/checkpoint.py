"""Checkpoints of torch.distributed.checkpoint (DCP) that any number of processes can load.

Keys are "model.<parameter>" and "optimizer.<parameter>.<moment>", those of the trainer's checkpoints as well. Tensors
are stored whole, in chunks: EP 1 reads what EP 4 wrote and the other way round. Before a byte is read the checkpoint's
list of tensors is compared with the required ones.

DCP's `.metadata` is a pickle, and is read as in formats/dcp.py: no code that it names is run.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from laconic.errors import CheckpointError
from laconic.formats.dcp import DcpReader, SafeLoadPlanner
from laconic.formats.shards import Runs, local_runs, without_aliases
from laconic.moe.huggingface.apart import own_names
from laconic.moe.huggingface.stage_names import check_stage_names

_SEPARATE = re.compile(r"\.experts\.\d+\.")


def save_sharded(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the weights, and the moments of an optimizer, each process its own part. All processes call it together.

    Pipeline stages are saved together, each under the names of the whole model.

    Raises:
        CheckpointError: writing fails; or, before anything is written, two pipeline stages have different tensors of
            one name, of which only one would be kept.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        stored, _, _ = _state(model, optimizer)
        check_stage_names(model, stored)
        try:
            save(_in_pieces(stored), storage_writer=FileSystemWriter(directory), no_dist=not dist.is_initialized())
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"{directory} could not be written: {error}") from error


def load_sharded(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load weights into `model`, and moments into `optimizer` if it is given. All processes call it together.

    The checkpoint may have been written by any number of processes, with any N_EP, or before `parallelize`. Moments of
    a parameter the checkpoint has none of begin afresh.

    Raises:
        CheckpointError: the checkpoint cannot be read; or, before anything is changed, tensors are missing or have
            other shapes, naming them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        stored, full, shared = _state(model, optimizer)
        reader = DcpReader(directory)
        try:
            found = reader.read_metadata().state_dict_metadata
        except CheckpointError as error:
            raise CheckpointError(f"{directory} holds no checkpoint that can be read: {error}") from error
        sizes = {key: getattr(entry, "size", None) for key, entry in found.items()}

        # 1. Find tensors that are missing or do not fit.
        for name, moments in stored["optimizer"].items():
            if not any(key.startswith(f"optimizer.{name}.") for key in sizes):
                moments.clear()
        if optimizer is not None and not any(key.startswith("optimizer.") for key in sizes):
            raise CheckpointError(f"{directory} has weights only, no state of an optimizer; load it without one")
        problems = _problems(stored, sizes)
        if problems:
            separate = [key for key in sizes if _SEPARATE.search(key)]
            hint = ""
            if separate:
                hint = (
                    f" The checkpoint has experts one by one ({separate[0]}); load such a model with from_pretrained,"
                    " parallelize it and save it again."
                )
            raise CheckpointError(
                f"{directory} does not fit the model: {len(problems)} tensors are missing or have another shape:"
                f" {'; '.join(problems[:20])}{'; ...' if len(problems) > 20 else ''}.{hint}"
            )

        # 2. Load everything, each process its part.
        try:
            pieces = _in_pieces(stored)
            load(pieces, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=not dist.is_initialized())
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"{directory} could not be read: {error}") from error
        _take_values(stored, pieces)
        for value, each in shared:
            if not each:  # a process without experts
                continue
            value.copy_(most := torch.stack(each).amax())
            if any(one < most for one in each):
                warnings.warn(
                    f"experts of {directory} have taken {int(min(each))} to {int(most)} steps, but a stack of them has"
                    " one number, and takes the largest",
                    stacklevel=2,
                )
        if optimizer is not None:
            set_state_dict(model, optimizer, model_state_dict=full["model"], optim_state_dict=full["optimizer"])


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Any], dict[str, Any], list[tuple[Tensor, list[Tensor]]]]:
    """Return what DCP stores, the full state dicts it is a view of, and numbers of steps of stacks, with each expert's.

    What is stored has no param_groups, a tied weight once, and the parts of stacks under their experts' own names.
    """
    if optimizer is None:
        weights: Mapping[str, Any] = get_model_state_dict(model)
        full: dict[str, Any] = {"model": weights, "optimizer": {}}
        moments: Any = {}
    else:
        weights, whole = get_state_dict(model, optimizer)
        full = {"model": weights, "optimizer": whole}
        states: Any = whole["state"]
        moments = dict(states)
    unique = without_aliases(weights)
    shared: list[tuple[Tensor, list[Tensor]]] = []
    for stack, names in own_names(model).items():
        unique |= (here := _by_expert(unique.pop(stack), names))
        of_stack = moments.pop(stack, {})
        parts = {key: _by_expert(value, names) for key, value in of_stack.items() if isinstance(value, DTensor)}
        for key, value in of_stack.items():
            if key not in parts:
                parts[key] = {one: value.clone() for one in here}
                shared.append((value, [*parts[key].values()]))
        moments |= {one: {key: part[one] for key, part in parts.items()} for one in here if parts}
    return {"model": unique, "optimizer": moments}, full, shared


def _in_pieces(value: Any) -> Any:
    """Return what DCP takes in place of a value or of those of a tree: for a DTensor of several blocks, `_Pieces`."""
    if isinstance(value, Mapping):
        return {key: _in_pieces(each) for key, each in value.items()}
    if not isinstance(value, DTensor):
        return value
    runs = local_runs(value.shape, value.device_mesh, value.placements)
    return value if all(len(one) <= 1 for one in runs) else _Pieces.of(value.to_local().detach(), value.shape, runs)


def _by_expert(stack: DTensor, names: list[str]) -> dict[str, Tensor]:
    """Return this process's parts of a stack of experts, by the experts' names."""
    here, *runs = local_runs(stack.shape, stack.device_mesh, stack.placements)
    numbers = [number for first, end in here for number in range(first, end)]
    held = zip(numbers, stack.to_local().detach(), strict=True)
    return {names[number]: _Pieces.of(part, stack.shape[1:], runs) for number, part in held}


class _Pieces(Tensor):
    """Local part of a DTensor, sharing its memory, with the methods by which DCP asks for its blocks.

    DCP describes what a rank holds of a DTensor by one offset and one size. That is wrong for a strided shard, such as
    a part of the gate's and a part of the up projection's columns in one matrix: there the rank has two blocks. Each is
    listed under its own offset in the whole tensor, so that any other layout reads what it needs.
    """

    _whole: torch.Size
    _runs: Runs

    @staticmethod
    def of(local: Tensor, whole: torch.Size, runs: Runs) -> _Pieces:
        made = Tensor._make_subclass(_Pieces, local)
        made._whole, made._runs = whole, runs
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


def _take_values(tree: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put what is no tensor, and so was not loaded in place, from `loaded` into `tree`."""
    for key, value in loaded.items():
        if isinstance(value, Mapping):
            _take_values(tree[key], value)
        elif not isinstance(value, Tensor):
            tree[key] = value


def _problems(stored: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[str]:
    wanted: dict[str, Tensor] = {f"model.{name}": value for name, value in stored["model"].items()}
    for name, moments in stored["optimizer"].items():
        wanted |= {f"optimizer.{name}.{moment}": value for moment, value in moments.items()}
    problems = []
    for key, value in wanted.items():
        if key not in sizes:
            problems.append(f"{key} is missing")
        elif isinstance(value, Tensor) and sizes[key] is not None and tuple(sizes[key]) != tuple(value.size()):
            problems.append(f"{key} is {list(sizes[key])} there and {list(value.size())} here")
    return problems
