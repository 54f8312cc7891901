"""The header of a safetensors file, with every claim checked: which tensors it has, of what dtype and shape, and where.

The layout is that of the safetensors project: a u64 with the length of the header, the header (a JSON object), the
data. Each entry has a dtype, a shape and the range of its bytes in the data; the ranges fill the data without holes.
The parser is ours because a file has to come back byte for byte: header, order and all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.errors import FormatError
from laconic.json_text import parse_json, short

HEADER_LIMIT_NBYTES = 100_000_000
"""What the safetensors project allows; of an index, what is read."""
INDEX_FILE = "model.safetensors.index.json"
"""Beside the files of a checkpoint in several: which tensor is in which."""


@dataclass(frozen=True)
class Element:
    """How laconic handles a dtype of safetensors."""

    bits: int
    torch_dtype: torch.dtype | None = None
    """None: torch has none, or packs several elements into one; such a tensor is kept, but cannot be loaded."""
    coded: torch.dtype = torch.uint8
    """As what the lossless format takes it; uint8 for all that it has no exponent code for."""

    @property
    def itemsize(self) -> int:
        """Bytes that belong together: of an element, or 1 where elements share bytes."""
        return max(self.bits // 8, 1)


_ELEMENTS = {
    "BF16": Element(16, torch.bfloat16, torch.bfloat16),
    "F16": Element(16, torch.float16, torch.float16),
    "F32": Element(32, torch.float32, torch.float32),
    "F8_E4M3": Element(8, torch.float8_e4m3fn, torch.float8_e4m3fn),
    "F8_E5M2": Element(8, torch.float8_e5m2, torch.float8_e5m2),
    "I8": Element(8, torch.int8, torch.int8),
    "U8": Element(8, torch.uint8),
    "BOOL": Element(8, torch.bool),
    "F8_E8M0": Element(8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": Element(8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": Element(8, torch.float8_e5m2fnuz),
    "I16": Element(16, torch.int16),
    "U16": Element(16, torch.uint16),
    "I32": Element(32, torch.int32),
    "U32": Element(32, torch.uint32),
    "I64": Element(64, torch.int64),
    "U64": Element(64, torch.uint64),
    "F64": Element(64, torch.float64),
    "C64": Element(64, torch.complex64),
    "F4": Element(4),
    "F6_E2M3": Element(6),
    "F6_E3M2": Element(6),
}
_NAMES = {element.torch_dtype: name for name, element in _ELEMENTS.items() if element.torch_dtype is not None}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """As safetensors spells it: BF16, F32, ..."""
    shape: tuple[int, ...]
    start: int
    """First byte of it in the data."""
    nbytes: int

    @property
    def element(self) -> Element:
        """How laconic handles its dtype."""
        return _ELEMENTS[self.dtype]


def element(dtype: torch.dtype) -> str:
    """The safetensors name of `dtype`; FormatError if it has none."""
    if dtype not in _NAMES:
        raise FormatError(f"dtype is {dtype}, but a safetensors file has none like it; convert the tensor")
    return _NAMES[dtype]


def parse_header(text: bytes, data_nbytes: int, where: str) -> tuple[list[TensorEntry], dict[str, str]]:
    """Entries in the order of their bytes, and the metadata, of a header, without its length, over `data_nbytes`.

    A FormatError, beginning with `where`: it is no header or names a tensor twice, or the tensors do not fill the data.
    """
    try:
        header = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise FormatError(f"{where}: the safetensors header is not valid JSON ({short(error)})") from None
    if not isinstance(header, dict):
        raise FormatError(f"{where}: the safetensors header is a {type(header).__name__}, but it must be an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: __metadata__ must be a table of strings")
    entries = [_entry(name, fields, where) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise FormatError(
                f"{where}: tensor {entry.name!r} begins at byte {entry.start} of the data, but the one before it ends "
                f"at {end}; tensors must neither overlap nor leave holes"
            )
        end += entry.nbytes
    if end != data_nbytes:
        raise FormatError(f"{where}: its tensors have {end:,} bytes, but the data has {data_nbytes:,}")
    return entries, metadata


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> file, as the index of a checkpoint in several files says; OSError if it cannot be read.

    ValueError if it is none, or names what is not the name of a file beside it; the message follows its path.
    """
    try:
        if path.stat().st_size > HEADER_LIMIT_NBYTES:
            raise ValueError
        weight_map: dict[str, str] = parse_json(path.read_text("utf-8"))["weight_map"]
        files = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("is not an index of safetensors files") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"names the shard {file!r}, which is not the name of a file beside it")
    return weight_map


def write_header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """The header, without its length, of a file that holds tensors of these (name, dtype, shape) one after another."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        if name in header or name == "__metadata__":
            raise FormatError(f"tensor {name!r} comes twice; names must differ")
        start, end = end, end + math.prod(shape) * _ELEMENTS[dtype].bits // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _entry(name: str, fields: Any, where: str) -> TensorEntry:
    where = f"{where}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ELEMENTS:
        raise FormatError(f"{where} has dtype {dtype!r}; known are {', '.join(_ELEMENTS)}")
    if not _is_sizes(shape):
        raise FormatError(f"{where} has shape {short(shape)}, but it must be a list of sizes from 0 to 2^63 - 1")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where} has data_offsets {short(offsets)}, but they must be a begin and an end after it")
    num_bits = math.prod(shape) * _ELEMENTS[dtype].bits
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise FormatError(
            f"{where} has {offsets[1] - offsets[0]:,} bytes, but {dtype} of shape {short(shape)} takes {num_bits} bits"
        )
    return TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
