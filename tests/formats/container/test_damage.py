"""Zipped safetensors files: no damaged or hostile byte goes unnoticed."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import laconic
from laconic.errors import FormatError
from laconic.formats import container
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.container import ContainerFile
from tests.formats.container.files import entry, read_all


def refused(path: Path, content: bytes, scratch: Path) -> str:
    """The error that every way of reading gives for `content`."""
    path.write_bytes(content)
    with pytest.raises(FormatError, match=path.name) as verified:
        verify(path)
    with pytest.raises(FormatError, match=path.name):
        read_all(path)
    with pytest.raises(FormatError, match=path.name):
        unzip(path, scratch)
    assert not scratch.exists()
    return str(verified.value)


@pytest.mark.parametrize("code", ["auto", "best"])
def test_a_file_cut_off_is_refused(code: Any, plain: Path, tmp_path: Path) -> None:
    path = zip_path(plain, code=code).path
    content = path.read_bytes()
    for n in range(16):
        refused(path, content[: len(content) * n // 16], tmp_path / "back")
    refused(path, content[:-1], tmp_path / "back")
    refused(path, content + b"\0", tmp_path / "back")


def test_every_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    flipped(small, tmp_path)


def test_every_flipped_bit_of_an_entropy_coded_file_is_found(small_best: Path, tmp_path: Path) -> None:
    assert b"LCNB" in small_best.read_bytes()
    flipped(small_best, tmp_path)


def flipped(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        small.write_bytes(damaged)
        with pytest.raises(FormatError, match=small.name):
            verify(small)
        if position % 16 == 0:
            refused(small, bytes(damaged), tmp_path / "back")


def test_exchanged_messages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = torch.randn(3, 1 << 10, generator=torch.Generator().manual_seed(1))
    save_file({"a": values[0], "b": values[1]}, path)
    zipped = zip_path(path, code="raw").path
    stored = ContainerFile(zipped).stored
    (a, n), (b, m) = stored["a"].messages[0], stored["b"].messages[0]
    assert n == m
    content = bytearray(zipped.read_bytes())
    content[a : a + n], content[b : b + n] = content[b : b + n], content[a : a + n]
    assert "tensor 'a': damaged: it has checksum" in refused(zipped, bytes(content), tmp_path / "back")


def with_index(content: bytes, change: Callable[[dict[str, Any]], Any], **fields: int) -> bytes:
    """A container whose index says something else, under a SHA-256 that fits."""
    head = container._HEAD
    magic, version, chunk_nbytes, tail, header_nbytes, _ = head.unpack(content[: head.size])
    header, index = content[tail : tail + header_nbytes], json.loads(content[tail + header_nbytes :])
    changed = change(index)
    text = json.dumps(index if changed is None else changed).encode() if not isinstance(changed, bytes) else changed
    numbers = {"chunk_nbytes": chunk_nbytes, "tail": tail, "header_nbytes": header_nbytes, "index_nbytes": len(text)}
    numbers |= fields
    new = head.pack(magic, version, *numbers.values())
    return new + hashlib.sha256(new + header + text).digest() + content[64:tail] + header + text


def first(index: dict[str, Any]) -> dict[str, Any]:
    """The record of tensor a."""
    record: dict[str, Any] = next(record for record in index["tensors"] if record["name"] == "a")
    return record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["tensors"].pop(), "does not list the tensors"),
        (lambda i: i["tensors"].append(first(i)), "does not list the tensors"),
        (lambda i: i["tensors"].reverse(), "does not list the tensors"),
        (lambda i: first(i).update(name="x"), "does not list the tensors"),
        (lambda i: first(i)["messages"].append(0), "must have the sizes of 1 messages"),
        (lambda i: first(i).update(messages=[]), "must have the sizes of 1 messages"),
        (lambda i: first(i).update(messages=[-1]), "must have the sizes of 1 messages"),
        (lambda i: first(i).update(messages=[1.5]), "must have the sizes of 1 messages"),
        (lambda i: first(i).update(messages=[2**62]), "behind the beginning of the tail"),
        (lambda i: first(i).update(messages=[2**70]), "must have the sizes"),
        (lambda i: first(i).update(messages=[0]), "200 elements cannot be in a message of 0 bytes"),
        (lambda i: first(i).update(messages=[24]), "cannot be in a message of 24 bytes"),
        (lambda i: first(i)["messages"].__setitem__(0, first(i)["messages"][0] + 64), "messages end at byte|behind"),
        (lambda i: first(i)["messages"].__setitem__(0, first(i)["messages"][0] - 1), "damaged"),
        (lambda i: first(i).update(checksum=1), "checksums must be strings"),
        (lambda i: first(i).update(checksum="0" * 32), "damaged: it has checksum"),
        (lambda i: first(i).update(base_checksum=[]), "checksums must be strings"),
        (lambda i: first(i).update(more=1), "its record must have name, checksum and messages"),
        (lambda i: i.update(data_nbytes=10**15), "its tensors have 443 bytes, but the data has"),
        (lambda i: i.update(data_nbytes="443"), "its index must have"),
        (lambda i: i.update(base=3), "its index must have"),
        (lambda i: i.update(tensors={}), "its index must have"),
        (lambda i: i.pop("tensors") and None, "its index is not one of"),
        (lambda i: i["tensors"].__setitem__(0, None), "does not list the tensors"),
        (lambda i: [i], "its index is not one of"),
        (lambda i: b"{", "its index is not one of"),
        (lambda i: b"[" * 50_000, "its index is not one of"),
        (lambda i: b'{"base": null, "base": null}', "its index is not one of"),
    ],
)
def test_a_lying_index_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, small: Path, tmp_path: Path
) -> None:
    def changed(index: dict[str, Any]) -> Any:
        result = change(index)
        return result if isinstance(result, bytes | list) else None

    assert re.search(message, refused(small, with_index(small.read_bytes(), changed), tmp_path / "back"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_nbytes": 0}, "chunk_nbytes is 0"),
        ({"chunk_nbytes": 65}, "chunk_nbytes is 65"),
        ({"chunk_nbytes": 64}, "must have the sizes of 7 messages"),
        ({"chunk_nbytes": 2**24}, None),
        ({"chunk_nbytes": 2**24 + 64}, r"chunk_nbytes is 16,777,280, but must be a multiple of 64 up to 16,777,216"),
        ({"chunk_nbytes": 2**32 - 64}, "chunk_nbytes is 4,294,967,232"),
        ({"tail": 0}, "damaged or cut off"),
        ({"tail": 2**63}, "damaged or cut off"),
        ({"header_nbytes": 2**32 - 1}, "damaged or cut off"),
        ({"index_nbytes": 0}, "damaged or cut off"),
    ],
)
def test_a_lying_head_is_refused(fields: dict[str, int], message: str | None, small: Path, tmp_path: Path) -> None:
    content = with_index(small.read_bytes(), lambda index: None, **fields)
    if message is None:  # larger chunks than there are bytes change nothing
        small.write_bytes(content)
        verify(small)
    else:
        assert message in refused(small, content, tmp_path / "back")


def test_another_version_is_refused(small: Path, tmp_path: Path) -> None:
    content = bytearray(small.read_bytes())
    for version in (0, 3):
        content[8] = version
        said = refused(small, bytes(content), tmp_path / "back")
        assert f"has format version {version}, but this laconic reads versions 1 and 2" in said


def test_entropy_coded_files_have_a_version_that_older_readers_refuse(small: Path, small_best: Path) -> None:
    assert (small.read_bytes()[8], small_best.read_bytes()[8]) == (1, 2)


def test_an_entropy_coded_message_in_a_file_of_version_1_is_refused(small_best: Path, tmp_path: Path) -> None:
    content = small_best.read_bytes()
    head = container._HEAD
    magic, version, chunk_nbytes, tail, *sizes = head.unpack(content[: head.size])
    assert version == 2
    new = head.pack(magic, 1, chunk_nbytes, tail, *sizes)
    sealed = new + hashlib.sha256(new + content[tail:]).digest() + content[64:]
    said = refused(small_best, sealed, tmp_path / "back")
    assert (
        "in chunk 0: its message is entropy-coded, which only a file of version 2 may hold, but this one has version 1"
        in said
    )


def test_a_message_of_another_version_is_refused_by_name(small_best: Path, tmp_path: Path) -> None:
    content = bytearray(small_best.read_bytes())
    content[content.index(b"LCNB") + 4] = 9
    said = refused(small_best, bytes(content), tmp_path / "back")
    assert "version of an entropy-coded message is 9, but this release reads version 1" in said


def test_a_few_bytes_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    """A terabyte that a file of some hundred bytes claims is refused before it is allocated."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(64)}, path)
    zipped = zip_path(path).path
    content = zipped.read_bytes()
    head = container._HEAD
    magic, version, _, tail, *_ = head.unpack(content[: head.size])
    size = 1 << 40
    header = json.dumps({"a": entry(0, size)}).encode()
    for sizes in ([8], [0], [0] * (size >> 31)):
        record = {"name": "a", "checksum": "0" * 32, "messages": sizes}
        for extra in ({}, {"base_checksum": "0" * 32}):
            text = json.dumps({"base": None, "data_nbytes": size, "tensors": [record | extra]}).encode()
            new = head.pack(magic, version, 1 << 31, tail, len(header), len(text))
            zipped.write_bytes(new + hashlib.sha256(new + header + text).digest() + content[64:tail] + header + text)
            with pytest.raises(FormatError):
                laconic.load_zipped(zipped)["a"]
            with pytest.raises(FormatError):
                laconic.load_zipped(zipped, base={"a": torch.ones(64)})["a"]


# Differences to a base.


@pytest.mark.parametrize("code", ["auto", "best"])
def test_random_damage_is_found(code: Any, plain: Path, folder: Path, tmp_path: Path) -> None:
    """Bytes overwritten, inserted, removed and repeated anywhere."""
    path = zip_path(plain, code=code).path
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        at, n = rng.randrange(len(content)), rng.choice((1, 2, 8, 64, 500))
        kind = rng.randrange(4)
        if kind == 0:
            damaged[at : at + n] = rng.randbytes(len(damaged[at : at + n]))
        elif kind == 1:
            damaged[at:at] = rng.randbytes(n)
        elif kind == 2:
            del damaged[at : at + n]
        else:
            damaged[at : at + n] = damaged[:n]
        if damaged == content:
            continue
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=path.name):
            verify(path)
