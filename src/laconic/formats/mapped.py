"""Files mapped into memory as tensors of bytes; plain safetensors files on top of that."""

from __future__ import annotations

import mmap
import os
import stat
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from laconic.errors import CheckpointError, FormatError
from laconic.formats.lossless import Checksum, check_has_bytes
from laconic.formats.safetensors_header import HEADER_LIMIT_NBYTES, TensorEntry, element, parse_header

_PIECE_NBYTES = 1 << 23


class TensorSource(Protocol):
    """Tensors by name, as bytes: a plain file, a zipped one, or several."""

    @property
    def name(self) -> str:
        """How messages call the source."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Name -> dtype, shape and place of a tensor."""

    def require(self, name: str) -> None:
        """Check that all is there that reading a tensor needs: the base that it is a difference to, and no other."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes `start` to `stop` of a tensor, uint8 [stop - start]; read-only."""

    def checksum(self, name: str) -> str:
        """Checksum of all bytes of a tensor."""


def map_file(path: Path) -> Tensor:
    """The bytes of a regular file, uint8 [size], fetched from the disk as they are touched, not to be written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO would wait for its writer
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a file")
            if status.st_size == 0:
                return torch.empty(0, dtype=torch.uint8, device="cpu")
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # a NUL, or what no file system can write
        raise CheckpointError(f"cannot read {str(path)!r}: it is not the name of a file ({error})") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


class SafetensorsFile:
    """A plain safetensors file, its header checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = map_file(path)
        if len(self.content) < 8:
            raise FormatError(f"{path}: has {len(self.content)} bytes, too few for a safetensors file")
        (header_nbytes,) = struct.unpack("<Q", self.content[:8].numpy().tobytes())
        if header_nbytes > min(HEADER_LIMIT_NBYTES, len(self.content) - 8):
            raise FormatError(
                f"{path}: not a whole safetensors file: the length of its header reads {header_nbytes:,}, but the file "
                f"has {len(self.content):,} bytes"
            )
        self.header = self.content[8 : 8 + header_nbytes].numpy().tobytes()
        """Without its length."""
        self.data = self.content[8 + header_nbytes :]
        entries, self.metadata = parse_header(self.header, len(self.data), str(path))
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}
        self._checksums: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def require(self, name: str) -> None:
        """Does nothing: the constructor compared the header with the length of the file."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes `start` to `stop` of a tensor, uint8 [stop - start]; a view of the mapped file."""
        begin = self.entries[name].start
        return self.data[begin + start : begin + stop]

    def checksum(self, name: str) -> str:
        """Checksum of all bytes of a tensor, computed once."""
        if name not in self._checksums:
            total, nbytes = Checksum(), self.entries[name].nbytes
            for start in range(0, nbytes, _PIECE_NBYTES):
                total.add_bytes(self.read(name, start, min(start + _PIECE_NBYTES, nbytes)))
            self._checksums[name] = str(total)
        return self._checksums[name]


class TensorsInMemory:
    """Tensors of a mapping as a source, for instance a state dict. They must not change meanwhile."""

    name = "the tensors given"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            check_has_bytes(tensor, f"tensor {name!r}")
        self._tensors = tensors
        self._last: tuple[str, Tensor] | None = None
        self._checksums: dict[str, str] = {}
        self.entries = {
            name: TensorEntry(
                name, element(tensor.dtype), tuple(tensor.shape), 0, tensor.numel() * tensor.element_size()
            )
            for name, tensor in tensors.items()
        }

    def require(self, name: str) -> None:
        """Does nothing: the tensors are there."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Bytes `start` to `stop` of a tensor in contiguous order, uint8 [stop - start], on the CPU."""
        last = self._last
        if last is None or last[0] != name:  # one that had to be copied is copied once, not for every piece of it
            tensor = self._tensors[name].detach().resolve_conj().resolve_neg()
            self._last = last = name, tensor.cpu().contiguous().view(-1).view(torch.uint8)
        return last[1][start:stop]

    def checksum(self, name: str) -> str:
        """Checksum of all bytes of a tensor, computed once."""
        if name not in self._checksums:
            total = Checksum()
            total.add_bytes(self.read(name, 0, self.entries[name].nbytes))
            self._checksums[name] = str(total)
        return self._checksums[name]
