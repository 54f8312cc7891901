"""Parts of parameters from safetensors files: whole tensors, stacks of them, and what other rules make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.errors import CheckpointError
from laconic.formats.safetensors_header import INDEX_FILE, read_index
from laconic.formats.shards import Runs, local_part, local_runs, taken

_Range = tuple[int, int]


class TensorFiles:
    """The safetensors files of a directory, open while it is a context; counts the bytes that are read.

    If there are none, the index names another file than there is, or one cannot be read, it is a CheckpointError.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.directory, self.nbytes_read = directory, 0
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stack = ExitStack()
        wanted = _index(directory)
        opened = {}
        for name in sorted(set(wanted.values())) if wanted else ["model.safetensors"]:
            try:
                opened[name] = self._stack.enter_context(safe_open(directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise CheckpointError(f"{directory / name} cannot be read: {error}") from error
        for name, file in opened.items():
            for key in file.keys():  # noqa: SIM118
                if not wanted or wanted.get(key) == name:
                    self._files[key] = file
        if lacking := sorted(set(wanted) - set(self._files)):
            self._stack.close()
            raise CheckpointError(f"{directory} has {lacking[0]} in its index, but {wanted[lacking[0]]} does not")

    def keys(self) -> list[str]:
        """List the names of all tensors."""
        return list(self._files)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its file's header."""
        if key not in self._shapes:
            self._shapes[key] = tuple(self._files[key].get_slice(key).get_shape())
        return self._shapes[key]

    def read(self, key: str, ranges: tuple[_Range, ...] | None = None) -> Tensor:
        """Read a tensor, or a block of it."""
        found = self._files[key].get_slice(key)
        shape = self.shape(key)
        if ranges is None or not shape:
            part: Tensor = found[...] if shape else self._files[key].get_tensor(key)
        else:
            part = found[tuple(slice(*one) for one in ranges)]
        self.nbytes_read += part.nbytes
        return part

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class Source(Protocol):
    """Where some parameters come from."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the parameters."""

    def shapes(self, files: TensorFiles) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of each target; reads headers only."""

    def read(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> list[str]:
        """Fill this process's parts of `parameters`, by name; return the names of those that were read whole."""


@dataclass(frozen=True)
class Plain(Source):
    """A tensor of the files that is a parameter as it is."""

    target: str
    key: str

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def shapes(self, files: TensorFiles) -> dict[str, tuple[int, ...]]:
        return {self.target: files.shape(self.key)}

    def read(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> list[str]:
        """See `Source.read`: only the blocks that are here."""
        parameter = parameters[self.target]
        for block, place in _blocks(_runs(parameter)):
            local_part(parameter)[place].copy_(files.read(self.key, block))
        return []


@dataclass(frozen=True)
class Stacked(Source):
    """A parameter whose rows are tensors of the files, each concatenated from one tensor of every kind."""

    target: str
    kinds: list[list[str]]
    """Names of the tensors of each kind, one for each row."""
    along: int
    """Dimension of the parameter along which the kinds follow each other."""

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def shapes(self, files: TensorFiles) -> dict[str, tuple[int, ...]]:
        parts = []
        for keys in self.kinds:
            shapes = {files.shape(key): key for key in keys}
            if len(shapes) > 1:
                different = "; ".join(f"{key} is {list(shape)}" for shape, key in shapes.items())
                raise CheckpointError(f"{self.target} is stacked of tensors that differ: {different}")
            parts.append(next(iter(shapes)))
        axis = self.along - 1
        if len({(*part[:axis], *part[axis + 1 :]) for part in parts}) > 1 or axis >= len(parts[0]):
            raise CheckpointError(f"{self.target} is made of tensors that do not fit: {', '.join(map(str, parts))}")
        whole = list(parts[0])
        whole[axis] = sum(part[axis] for part in parts)
        return {self.target: (len(self.kinds[0]), *whole)}

    def read(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> list[str]:
        """See `Source.read`: only rows that are here, and their blocks."""
        parameter = parameters[self.target]
        sizes = [files.shape(keys[0])[self.along - 1] for keys in self.kinds]
        starts = [0, *itertools.accumulate(sizes)]
        for block, place in _blocks(_runs(parameter)):
            here = local_part(parameter)[place]
            first, last = block[self.along]
            for number, row in enumerate(range(*block[0])):
                for kind, keys in enumerate(self.kinds):
                    start, stop = max(first, starts[kind]), min(last, starts[kind + 1])
                    if start < stop:
                        ranges = list(block[1:])
                        ranges[self.along - 1] = (start - starts[kind], stop - starts[kind])
                        target = here[number].narrow(self.along - 1, start - first, stop - start)
                        target.copy_(files.read(keys[row], tuple(ranges)))
        return []


@dataclass(frozen=True)
class Converted(Source):
    """Parameters that a rule makes of whole tensors."""

    made: Mapping[str, tuple[int, ...]]
    convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]]
    """Makes the parameters of the tensors that a function returns by name."""

    @staticmethod
    def of(convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]], files: TensorFiles) -> Converted:
        """Find out what `convert` makes, by tensors without values."""
        made = convert(lambda key: torch.empty(files.shape(key), device="meta", dtype=torch.float32))
        return Converted({name: tuple(value.shape) for name, value in made.items()}, convert)

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.made)

    def shapes(self, files: TensorFiles) -> dict[str, tuple[int, ...]]:
        return dict(self.made)

    def read(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> list[str]:
        made = self.convert(files.read)
        for name, parameter in parameters.items():
            local_part(parameter).copy_(taken(made[name], _runs(parameter)))
        return list(parameters)


def _runs(parameter: Tensor) -> Runs:
    if isinstance(parameter, DTensor):
        return local_runs(parameter.shape, parameter.device_mesh, parameter.placements)
    return [[(0, size)] for size in parameter.shape]


def _blocks(runs: Runs) -> Iterator[tuple[tuple[_Range, ...], tuple[slice, ...]]]:
    """Yield the blocks of a process's part: where each lies in the whole, and in the part."""
    places = []
    for one in runs:
        ends = [0, *itertools.accumulate(stop - start for start, stop in one)]
        places.append([(run, slice(*ends[i : i + 2])) for i, run in enumerate(one)])
    for block in itertools.product(*places):
        yield tuple(run for run, _ in block), tuple(place for _, place in block)


def _index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says; empty without one."""
    path = directory / INDEX_FILE
    try:
        return read_index(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} {error}") from error
