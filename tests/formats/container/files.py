"""What is zipped in these tests, and how it is read."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laconic

CHUNK = 1 << 12
"""Bytes of a chunk in these tests."""


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of element, sizes around the chunk, and what is odd."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(5000, generator=generator) * 0.02
    any_bytes = torch.randint(0, 256, (3000,), generator=generator, dtype=torch.uint8)
    return {
        "weight": normal.bfloat16().view(50, 100),
        "half": normal.half()[:4097].clone(),
        "master": normal[:1025].clone(),
        "fp8": normal.to(torch.float8_e4m3fn),
        "fp8 wide": normal.to(torch.float8_e5m2)[:7].clone(),
        "codes": any_bytes.view(torch.int8).clone(),
        "bytes": any_bytes,
        "any bf16": any_bytes.view(torch.bfloat16).clone(),
        "scales": any_bytes[:300].view(torch.float8_e8m0fnu).clone(),
        "mask": any_bytes > 100,
        "ids": torch.arange(2000),
        "short ints": torch.arange(-500, 500, dtype=torch.int16),
        "unsigned": torch.arange(1000, dtype=torch.int32).view(torch.uint32),
        "double": normal.double(),
        "complex": torch.complex(normal[:100], normal[100:200]),
        "zeros": torch.zeros(10000, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "ключ/..": torch.ones(3),
    }


def same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


def write(path: Path, header: dict[str, Any] | bytes, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def touched(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A later version of `state`: some weights moved a little, the others did not."""
    later = {name: tensor.clone() for name, tensor in state.items()}
    generator = torch.Generator().manual_seed(9)
    later["weight"] += (torch.randn(50, 100, generator=generator) * 1e-4).bfloat16()
    later["master"] += torch.randn(1025, generator=generator) * 1e-6
    later["ids"][3] += 1
    later["new"] = torch.ones(5)
    later["half"] = later["half"][:100].clone()
    return later


def entry(start: int, stop: int, dtype: object = "U8", shape: object = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read_all(path: Path) -> dict[str, Tensor]:
    return laconic.load_zipped(path).state_dict()
