"""Every parser of bytes that come from outside, as a function that must bear any bytes.

A target either takes its input or raises what it may; anything else is a finding. Add a parser here, or to
documents.py if it reads text, and both fuzzers, the plain one of `run.py` and atheris, take it.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.formats.archive import zip_path
from laconic.formats.container import ContainerFile
from laconic.formats.safetensors_header import parse_header
from laconic.ops import lossless_decode_, lossless_decode_add_, reference
from laconic.ops.entropy import MAX_ELEMENTS_PER_BYTE, entropy_decode_, entropy_encode
from laconic.ops.lossless import EXPONENT_DTYPES, LAYOUTS, TOO_LONG, DamagedMessage, Status, front_checksum
from laconic.ops.native import entropy as entropy_kernels
from laconic.ops.reference import entropy as entropy_reference
from tests.formats.structured import structured
from tests.fuzz.documents import DOCUMENTS
from tests.fuzz.target import Target

__all__ = ["TARGETS", "Target", "try_once"]


def _messages() -> list[bytes]:
    """A message of every dtype and code, ranked ones too; with zeros left out, a capacity, two blocks."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in EXPONENT_DTYPES:
        x = torch.randn(150, generator=generator)
        x[::3] *= torch.arange(50) % 2
        for code in ("raw", "window", "tiered"):
            y = (x * 40).to(dtype) if dtype.itemsize == 1 else x.to(dtype)
            found.append(lossless.encode(y.view(3, 50), code))
    found.append(lossless.encode(torch.randn(4200, generator=generator).bfloat16(), capacity_nbytes=9000))
    found.append(lossless.encode(torch.zeros(5000), "window"))
    found.append(lossless.encode(torch.randn(90, generator=generator), capacity_nbytes=100))
    for dtype in LAYOUTS:
        if dtype != torch.complex32:  # torch warns of it
            values = structured(dtype)
            for name in ("two far modes", "both zeros", "few levels", "integers"):
                found.append(lossless.encode(values[name][:300]))
    found.append(lossless.encode(structured(torch.float32)["three far modes"][:4200]))
    return [bytes(message.tolist()) for message in found]


def _decode(data: bytes) -> object:
    """The whole way in, without knowing what to expect: the header decides what is allocated."""
    buffer = _tensor(data)
    header = lossless.read_header(buffer)
    x = lossless.decode(buffer)
    assert (x.dtype, tuple(x.shape)) == (header.dtype, header.shape)
    assert x.untyped_storage().nbytes() <= 64 * len(data)
    again = lossless.decode(lossless.encode(x))
    assert again.view(-1).view(torch.uint8).equal(x.view(-1).view(torch.uint8))
    return True


def _compare(data: bytes) -> object:
    """Both decoders come to the same status and, where that is sound, to the same values."""
    buffer = _tensor(data)
    try:
        header = lossless.read_header(buffer)
        shape, dtype = header.shape, header.dtype
    except FormatError:
        shape, dtype = (3, 50), torch.bfloat16
    out, expected = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    status = lossless_decode_(out, buffer)
    assert status == reference.lossless_decode_(expected, buffer), (status, data.hex())
    # A sum takes any dtype of version 1.
    added = lossless_decode_add_(torch.zeros(shape), buffer)
    assert added == reference.lossless_decode_add_(torch.zeros(shape), buffer)
    if dtype in EXPONENT_DTYPES:
        assert added == status or status == Status.MISMATCH
    else:
        assert added != Status.SOUND
    if status == Status.SOUND:
        assert out.view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8))
    return status >= Status.DIRECTORY or status == Status.SOUND


def _entropy_messages() -> list[bytes]:
    """Words of every size, rotated and not; with zeros left out, raw and constant planes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator) * 0.02
    found = []
    for itemsize, is_rotated, dtype in _WORDS:
        for y in (x, torch.where(torch.arange(300) % 3 == 0, 0, x), torch.ones(300)):
            data = y.to(dtype).view(torch.uint8)
            found.append(entropy_encode(data, itemsize, is_rotated)[0])
    return [bytes(message.tolist()) for message in found]


_WORDS = (
    *((1, False, torch.float8_e4m3fn), (2, False, torch.float16), (2, True, torch.bfloat16)),
    *((4, False, torch.float32), (4, True, torch.float32), (8, False, torch.float64)),
)


def _compare_entropy(data: bytes) -> object:
    """C++ and the reference come to the same words, or both refuse; and so does the whole way in."""
    if len(data) < 40:
        data = data.ljust(40, b"\0")
    itemsize, is_rotated, *_ = next((kind for kind in _WORDS if bytes(kind[:2]) == data[5:7]), _WORDS[0])
    numel = min(struct.unpack_from("<Q", data, 8)[0], MAX_ELEMENTS_PER_BYTE * len(data))
    buffer = _tensor(data)
    out, expected = (torch.zeros(numel * itemsize, dtype=torch.uint8) for _ in range(2))
    blocks = buffer[32:-8]
    found = entropy_kernels.decode_blocks_(out, blocks, itemsize, is_rotated)
    assert found == entropy_reference.decode_blocks_(expected, blocks, itemsize, is_rotated), data.hex()
    if found[0]:
        assert out.equal(expected)
    entropy_decode_(out, buffer, itemsize, is_rotated)
    return True


def _reseal_message(data: bytes) -> bytes:
    if len(data) < 64:
        return data
    (numel,) = struct.unpack_from("<Q", data, 8)
    lists = 5 * -(-numel // 4096) if 0 < data[6] < TOO_LONG else 0
    front = data[: min(len(data), 64 + 8 * data[7] + lists)]
    return data[:48] + struct.pack("<Q", front_checksum(_tensor(front))) + data[56:]


def _containers() -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(20, 30, generator=generator).bfloat16(), "b": torch.zeros(7), "c": torch.ones(())}
    with tempfile.TemporaryDirectory() as directory:
        path, zipped = Path(directory) / "seed.safetensors", Path(directory) / "seed.laconic"
        save_file(tensors, path, {"format": "pt"})
        zip_path(path, zipped)
        best = zip_path(path, Path(directory) / "best.laconic", code="best").path
        return [zipped.read_bytes(), best.read_bytes()]


def _reseal_container(data: bytes) -> bytes:
    (tail,) = struct.unpack_from("<Q", data.ljust(64), 16)
    return data[:32] + hashlib.sha256(data[:32] + data[tail:]).digest() + data[64:]


def _read_container(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fuzz.laconic"
        path.write_bytes(data)
        file = ContainerFile(path)
        for name in file.entries:
            file.tensor(name)
    return True


def _safetensors_headers() -> list[bytes]:
    matrix = b'{"a":{"dtype":"BF16","shape":[5,40],"data_offsets":[0,400]},'
    return [
        matrix + b'"b":{"dtype":"F32","shape":[],"data_offsets":[400,404]}}',
        b"{}",
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}} ',
    ]


def _read_safetensors_header(data: bytes) -> object:
    entries, _ = parse_header(data, 404 if len(data) > 100 else 0, "fuzz")
    return len(entries) > 0


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


TARGETS = {
    "decode": Target(_decode, _messages, _reseal_message),
    "compare": Target(_compare, _messages, _reseal_message),
    "entropy": Target(_compare_entropy, _entropy_messages),
    "container": Target(_read_container, _containers, _reseal_container),
    "safetensors_header": Target(_read_safetensors_header, _safetensors_headers),
    **DOCUMENTS,
}


def try_once(target: Target, data: bytes) -> bool:
    """Whether the target got deep into `data`. Raises what the target must not raise."""
    try:
        return bool(target.run(data))
    except DamagedMessage as damage:
        return damage.status >= Status.DIRECTORY
    except target.refusals:
        return False
