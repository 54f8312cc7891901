"""Zipped safetensors files: every byte comes back, and no damaged or hostile byte goes unnoticed."""

import errno
import hashlib
import json
import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import laconic
from laconic.errors import CheckpointError, FormatError, LaconicError
from laconic.formats import archive, container
from laconic.formats.archive import MANIFEST, unzip, verify, zip_path
from laconic.formats.container import ContainerFile

CHUNK = 1 << 12


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CHUNK_NBYTES", CHUNK)


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


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("code", ["auto", "window", "raw"])
def test_a_file_comes_back_byte_for_byte(code: Any, num_threads: int, plain: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    made = zip_path(plain, code=code, num_threads=num_threads, progress=seen.append)
    assert made.path == tmp_path / "model.safetensors.laconic"
    assert made.zipped_nbytes == made.path.stat().st_size
    assert made.original_nbytes == plain.stat().st_size
    back = unzip(made.path, tmp_path / "back.safetensors", num_threads=num_threads)
    assert back.path.read_bytes() == plain.read_bytes()
    assert sum(seen) == sum(t.numel() * t.element_size() for t in tensors().values())
    assert verify(made.path, num_threads=num_threads).num_tensors == len(tensors())


def test_zipping_is_reproducible(plain: Path, tmp_path: Path) -> None:
    one = zip_path(plain, tmp_path / "one", num_threads=1).path.read_bytes()
    assert zip_path(plain, tmp_path / "two", num_threads=3).path.read_bytes() == one


def test_weights_shrink_by_a_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()}, path)
    made = zip_path(path)
    assert made.zipped_nbytes < 0.68 * made.original_nbytes


def test_tensors_are_loaded_without_unzipping(plain: Path) -> None:
    loaded = laconic.load_zipped(zip_path(plain).path)
    expected = tensors()
    assert set(loaded) == set(expected)
    assert len(loaded) == len(expected)
    for name, tensor in expected.items():
        assert same(loaded[name], tensor), name
        assert (loaded.shape(name), loaded.dtype(name)) == (tensor.shape, tensor.dtype)
    assert loaded.metadata == {"format": "pt"}
    assert all(same(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    loaded["weight"].zero_()  # memory of its own
    assert same(loaded["weight"], expected["weight"])
    with pytest.raises(KeyError):
        loaded["wait"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_decoded_on_a_gpu(pair: tuple[Path, Path]) -> None:
    plain, later = pair
    for loaded, expected in (
        (laconic.load_zipped(zip_path(plain).path, device="cuda"), tensors()),
        (laconic.load_zipped(zip_path(later, base=plain).path, base=plain, device="cuda"), touched(tensors())),
    ):
        assert all(loaded[name].is_cuda for name in expected)
        assert all(same(loaded[name].cpu(), tensor) for name, tensor in expected.items())


def test_a_plain_file_is_loaded_too(plain: Path) -> None:
    loaded = laconic.load_zipped(plain)
    assert all(same(loaded[name], tensor) for name, tensor in tensors().items())


def test_a_part_of_a_tensor_is_read(plain: Path) -> None:
    zipped = ContainerFile(zip_path(plain).path)
    whole = tensors()["double"].view(torch.uint8)
    for start, stop in [(0, 0), (1, 2), (CHUNK - 1, CHUNK + 1), (100, 3 * CHUNK), (0, len(whole))]:
        assert torch.equal(zipped.read("double", start, stop), whole[start:stop])


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({}, b""),
        ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b""),
        # Out of order, with spaces, and data that is not aligned.
        (
            b'{"b": {"data_offsets":[ 6,10],"shape":[1],"dtype":"F32"}, "a":{"dtype":"BF16","shape":[3],'
            b'"data_offsets":[0,6]} , "__metadata__":{"k":"v"}}   ',
            bytes(range(10)),
        ),
        ({"a": {"dtype": "F4", "shape": [4, 2], "data_offsets": [0, 4]}}, b"abcd"),
        ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"abc"),
    ],
)
def test_unusual_files_come_back(header: Any, data: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    made = zip_path(path)
    assert unzip(made.path, tmp_path / "back").path.read_bytes() == path.read_bytes()
    verify(made.path)


def test_what_torch_cannot_hold_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"abcd")
    loaded = laconic.load_zipped(zip_path(path).path)
    with pytest.raises(FormatError, match="tensor 'a' has dtype F4, which torch cannot hold"):
        loaded["a"]


def entry(start: int, stop: int, dtype: object = "U8", shape: object = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 6), "b": entry(5, 10)}, "'b' begins at byte 5 of the data, but the one before it ends at 6"),
        ({"a": entry(0, 4), "b": entry(5, 10)}, "'b' begins at byte 5 .* ends at 4"),
        ({"a": entry(1, 10)}, "'a' begins at byte 1"),
        ({"a": entry(0, 9)}, "its tensors have 9 bytes, but the data has 10"),
        ({"a": entry(0, 11)}, "its tensors have 11 bytes, but the data has 10"),
        ({"a": entry(0, 10, shape=[11])}, r"'a' has 10 bytes, but U8 of shape \[11\] takes 88 bits"),
        ({"a": entry(0, 10, shape=[2**62, 2**62])}, "'a' has 10 bytes, but"),
        ({"a": entry(0, 10, shape=[-10])}, "'a' has shape"),
        ({"a": entry(0, 10, shape=[10.0])}, "'a' has shape"),
        ({"a": entry(0, 10, shape=[True, 10])}, "'a' has shape"),
        ({"a": entry(0, 10, dtype="F128")}, "'a' has dtype 'F128'; known are BF16"),
        ({"a": entry(0, 10, dtype=["U8"])}, "'a' has dtype"),
        ({"a": entry(0, 10) | {"data_offsets": [10, 0]}}, "'a' has data_offsets"),
        ({"a": entry(0, 10) | {"data_offsets": [0]}}, "'a' has data_offsets"),
        ({"a": entry(0, 10) | {"more": 1}}, "'a' must have dtype, shape and data_offsets"),
        ({"a": [0, 10]}, "'a' must have dtype"),
        ({"__metadata__": {"a": 1}}, "__metadata__ must be a table of strings"),
        (b'{"a": {}, "a": {}}', "not valid JSON .*'a' comes twice"),
        (b"[1]", "is a list, but it must be an object"),
        (b'{"a"', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)
def test_a_false_safetensors_header_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", header, bytes(10))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FormatError, match=f"^{path}: .*{message}"):
        zip_path(path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 9, struct.pack("<Q", 1 << 40) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.safetensors: "):
        zip_path(path)
    path.rename(tmp_path / "a.safetensors.laconic")
    with pytest.raises(FormatError, match="not a file that `laconic zip` wrote"):
        unzip(tmp_path / "a.safetensors.laconic")


def read_all(path: Path) -> dict[str, Tensor]:
    return laconic.load_zipped(path).state_dict()


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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A container of a few hundred bytes with all kinds of chunks."""
    path = tmp_path / "s.safetensors"
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"a": values, "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bool)}, path)
    return zip_path(path).path


def test_a_file_cut_off_is_refused(plain: Path, tmp_path: Path) -> None:
    path = zip_path(plain).path
    content = path.read_bytes()
    for n in range(16):
        refused(path, content[: len(content) * n // 16], tmp_path / "back")
    refused(path, content[:-1], tmp_path / "back")
    refused(path, content + b"\0", tmp_path / "back")


def test_every_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
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
        ({"chunk_nbytes": 2**31}, None),
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
    content[8] = 2
    assert "has format version 2, but this laconic reads version 1" in refused(small, bytes(content), tmp_path / "back")


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


@pytest.fixture
def pair(plain: Path, tmp_path: Path) -> tuple[Path, Path]:
    later = tmp_path / "later.safetensors"
    save_file(touched(tensors()), later)
    return plain, later


@pytest.mark.parametrize("zipped_base", [False, True])
def test_a_difference_comes_back(zipped_base: bool, pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, later = pair
    base = zip_path(plain).path if zipped_base else plain
    made = zip_path(later, base=base)
    assert made.zipped_nbytes < 0.5 * zip_path(later, tmp_path / "direct").zipped_nbytes
    assert unzip(made.path, tmp_path / "back", base=plain).path.read_bytes() == later.read_bytes()
    assert verify(made.path, base=base).unchecked is None
    assert verify(made.path).unchecked == str(base)
    expected = touched(tensors())
    for given in (plain, base, tensors()):
        loaded = laconic.load_zipped(made.path, base=given)
        assert all(same(loaded[name], tensor) for name, tensor in expected.items())
    assert same(laconic.load_zipped(made.path)["new"], expected["new"])  # it was not in the base


def test_an_unchanged_tensor_costs_nothing(plain: Path, tmp_path: Path) -> None:
    made = zip_path(plain, base=plain)
    stored = ContainerFile(made.path).stored
    assert all(set(s.messages) <= {(64, 0)} for s in stored.values())
    assert made.zipped_nbytes < 250 * len(tensors())
    assert unzip(made.path, tmp_path / "back", base=plain).path.read_bytes() == plain.read_bytes()


def test_a_difference_that_is_longer_is_not_stored(plain: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file(tensors(seed=5) | {"weight": tensors(seed=5)["weight"] * 1e3}, other)
    made = zip_path(plain, base=other)
    assert ContainerFile(made.path).stored["weight"].base_checksum is None
    assert ContainerFile(made.path).stored["zeros"].base_checksum is not None
    assert unzip(made.path, tmp_path / "back", base=other).path.read_bytes() == plain.read_bytes()


def test_another_base_is_refused_and_both_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, later = pair
    zipped = zip_path(later, base=plain).path
    other = tmp_path / "other.safetensors"
    changed = tensors()
    changed["weight"].view(torch.int16)[7, 7] ^= 1
    save_file(changed, other)
    for base in (other, zip_path(other).path):
        with pytest.raises(
            FormatError, match=f"'weight' is stored as the difference to '{plain}' .*given, {base}, has"
        ):
            unzip(zipped, tmp_path / "back", base=base)
        with pytest.raises(FormatError, match="give the one it was zipped with"):
            verify(zipped, base=base)
    with pytest.raises(FormatError, match=f"difference to '{plain}', which is needed to read it"):
        unzip(zipped, tmp_path / "back")
    with pytest.raises(FormatError, match="which is needed to read it"):
        laconic.load_zipped(zipped)["weight"]
    save_file({"weight": torch.ones(3)}, other)
    with pytest.raises(FormatError, match=r"has no such tensor"):
        unzip(zipped, tmp_path / "back", base=other)
    assert not (tmp_path / "back").exists()


def test_flipped_bits_of_a_difference_are_found(tmp_path: Path) -> None:
    base, later = tmp_path / "b.safetensors", tmp_path / "l.safetensors"
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"a": values}, base)
    values[5] += 1
    save_file({"a": values}, later)
    zipped = zip_path(later, base=base).path
    content = zipped.read_bytes()
    for position in range(0, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        zipped.write_bytes(damaged)
        with pytest.raises(FormatError, match=zipped.name):
            verify(zipped)
        with pytest.raises(FormatError, match=zipped.name):
            unzip(zipped, tmp_path / "back", base=base)


# Directories.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded model as Hugging Face writes it, and what lies beside it."""
    root = tmp_path / "model"
    (root / "sub" / ".hidden").mkdir(parents=True)
    state = tensors()
    names = list(state)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, held in shards.items():
        save_file({name: state[name] for name in held}, root / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text("{}\n")
    (root / "sub" / "adapter.safetensors").write_bytes((root / "model-00001-of-00002.safetensors").read_bytes())
    (root / "sub" / ".hidden" / "blob").write_bytes(os.urandom(3000))
    (root / "empty").write_bytes(b"")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_directory_comes_back_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    made = zip_path(folder, num_threads=2)
    assert made.path == tmp_path / "model.laconic"
    assert set(contents(made.path)) == {
        "model-00001-of-00002.safetensors.laconic",
        "model-00002-of-00002.safetensors.laconic",
        "model.safetensors.index.json",
        "config.json",
        "sub/adapter.safetensors.laconic",
        "sub/.hidden/blob",
        "empty",
        MANIFEST,
    }
    assert made.zipped_nbytes == sum(map(len, contents(made.path).values()))
    assert made.original_nbytes == sum(map(len, contents(folder).values()))
    back = unzip(made.path, tmp_path / "back", num_threads=2)
    assert contents(back.path) == contents(folder)
    assert verify(made.path).num_other_files == 4
    loaded = laconic.load_zipped(made.path)
    assert all(same(loaded[name], tensor) for name, tensor in tensors().items())


def test_links_to_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    made = zip_path(snapshot)
    assert not [path for path in made.path.iterdir() if path.is_symlink()]
    assert contents(unzip(made.path, tmp_path / "back").path) == contents(snapshot)


def test_what_is_no_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "loop").symlink_to(folder)
    with pytest.raises(CheckpointError, match="loop is a link to a directory"):
        zip_path(folder)
    (folder / "loop").unlink()
    (folder / "gone").symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match="gone is neither a file nor a directory"):
        zip_path(folder)
    (folder / "gone").unlink()
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is neither a file nor a directory"):
        zip_path(folder)
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is not a file"):
        zip_path(folder / "pipe.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_difference_to_a_directory_comes_back(folder: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    save_file(touched(tensors()), later / "model.safetensors")  # another cut into shards
    base = zip_path(folder).path
    for given in (folder, base):
        made = zip_path(later, tmp_path / f"{given.name}.zip", base=given)
        for again in (folder, base):
            back = unzip(made.path, tmp_path / "back", base=again).path
            assert contents(back) == contents(later)
            for path in back.iterdir():
                path.unlink()
        loaded = laconic.load_zipped(made.path, base=folder)
        assert all(same(loaded[name], tensor) for name, tensor in touched(tensors()).items())


def test_damage_to_a_directory_is_found(folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    for name, content in contents(path).items():
        damages = [content[:-2], content + b"x"] if content else [b"x"]
        if content:
            middle = len(content) // 2
            damages.append(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        for damaged in damages:
            (path / name).write_bytes(damaged)
            for read in (verify, lambda p: unzip(p, tmp_path / "back")):
                with pytest.raises(FormatError, match=name.split("/")[-1]):
                    read(path)
        (path / name).unlink()
        with pytest.raises(LaconicError, match=name.split("/")[-1]):
            verify(path)
        (path / name).write_bytes(content)
    verify(path)
    # Two good files in each other's place.
    one, two = (path / f"model-0000{n}-of-00002.safetensors.laconic" for n in (1, 2))
    one.rename(tmp_path / "moved")
    two.rename(one)
    (tmp_path / "moved").rename(two)
    with pytest.raises(FormatError, match=r"is another file than the one listed in laconic-zip\.json"):
        verify(path)


def test_files_that_came_later_are_told(folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    (path / "sub" / "notes.txt").write_text("mine")
    assert verify(path).unlisted == ("sub/notes.txt",)
    back = unzip(path, tmp_path / "back")
    assert back.unlisted == ("sub/notes.txt",)
    assert contents(back.path) == contents(folder)


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "", ".", "a\\..\\b", "a\0b", MANIFEST]
)
def test_names_that_lead_elsewhere_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    path = zip_path(folder).path
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = manifest["files"]["config.json"]
    manifest["sha256"] = archive._manifest_sha256(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    for read in (verify, lambda p: unzip(p, tmp_path / "out" / "back")):
        with pytest.raises(FormatError, match="is not the name of a file inside of its directory"):
            read(path)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 50_000,
        b'{"sha256": "", "sha256": ""}',
        {"version": 1},
        {"version": 1, "files": []},
        {"version": 2, "files": {}},
        {"version": 1, "files": {"config.json": {"nbytes": 3}}},
        {"version": 1, "files": {"config.json": {"nbytes": True, "sha256": ""}}},
        {"version": 1, "files": {"config.json": {"nbytes": 3, "digest": ""}}},
        {"version": 1, "files": {"model-00001-of-00002.safetensors.laconic": {"nbytes": 3, "sha256": ""}}},
        {"version": 1, "files": {"config.json": None}},
    ],
)
def test_a_false_manifest_is_refused(manifest: Any, folder: Path) -> None:
    path = zip_path(folder).path
    if isinstance(manifest, dict):
        manifest = json.dumps(manifest | {"sha256": archive._manifest_sha256(manifest)}).encode()
    (path / MANIFEST).write_bytes(manifest)
    with pytest.raises(FormatError, match=MANIFEST):
        verify(path)


def test_what_is_zipped_is_not_zipped_again(folder: Path, plain: Path) -> None:
    path = zip_path(folder).path
    with pytest.raises(FormatError, match="is zipped already"):
        zip_path(path)
    with pytest.raises(FormatError, match="is zipped already"):
        zip_path(zip_path(plain).path)
    (path / MANIFEST).unlink()
    with pytest.raises(FormatError, match=r"holds model-00001-of-00002.safetensors.laconic, which is zipped already"):
        zip_path(path)
    with pytest.raises(FormatError, match=r"has no laconic-zip\.json"):
        unzip(path)


def test_an_index_of_shards_is_checked(folder: Path) -> None:
    path = zip_path(folder).path
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, message in [
        ({"weight": "../model.safetensors"}, "not the name of a file beside it"),
        ({"weight": 3}, "not the name of a file beside it"),
        ({"weight": "model-00002-of-00002.safetensors", "wait": "model-00001-of-00002.safetensors"}, "but it is not"),
        ({"weight": ["a"]}, "is not an index"),
        ([], "is not an index"),
    ]:
        index.write_text(json.dumps(good | {"weight_map": weight_map}))
        with pytest.raises(FormatError, match=message):
            laconic.load_zipped(path)
    index.write_text(json.dumps(good | {"weight_map": {"weight": "model-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"cannot read .*model-00003\.safetensors"):
        laconic.load_zipped(path)
    index.unlink()
    assert same(laconic.load_zipped(path)["weight"], tensors()["weight"])
    (path / "more.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(
        FormatError, match=r"is both in model-00001-of-00002.safetensors.laconic and in more.safetensors"
    ):
        laconic.load_zipped(path)


# Whole or not there.


def test_nothing_is_overwritten(plain: Path, folder: Path, tmp_path: Path) -> None:
    zipped, zipped_folder = zip_path(plain).path, zip_path(folder).path
    before = contents(tmp_path)
    for call in (
        lambda: zip_path(plain),
        lambda: unzip(zipped),
        lambda: zip_path(folder),
        lambda: unzip(zipped_folder),
        lambda: zip_path(plain, zipped_folder),
        lambda: zip_path(folder, zipped),
    ):
        with pytest.raises(CheckpointError, match="exists already; it is not overwritten"):
            call()
    with pytest.raises(CheckpointError, match="is inside of"):
        zip_path(folder, folder / "here")
    with pytest.raises(CheckpointError, match="is inside of"):
        unzip(zipped_folder, zipped_folder / "deep" / "here")
    with pytest.raises(FormatError, match="say where to unzip it with --out"):
        unzip(folder)
    assert contents(tmp_path) == before


def test_a_file_that_appears_meanwhile_is_not_overwritten(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = plain.with_name("out")

    def late(nbytes: int) -> None:
        out.write_text("mine")

    for refuse_links in (False, True):
        if refuse_links:

            def link(source: Any, target: Any) -> None:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

            monkeypatch.setattr(os, "link", link)
        with pytest.raises(CheckpointError, match=r"cannot write .*out: File exists"):
            zip_path(plain, out, progress=late)
        assert out.read_text() == "mine"
        out.unlink()
    zip_path(plain, out)  # without hard links, too
    verify(out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failed_write_leaves_nothing(
    call: str, number: int, plain: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipped, zipped_folder = zip_path(plain, tmp_path / "z.laconic").path, zip_path(folder, tmp_path / "d.laconic").path
    before = contents(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    for attempt in (
        lambda: zip_path(plain),
        lambda: unzip(zipped),
        lambda: zip_path(folder),
        lambda: unzip(zipped_folder),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write .*: {os.strerror(number)}"):
            attempt()
        assert contents(tmp_path) == before


def test_a_place_that_cannot_be_written_is_named(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/out: "):
        zip_path(plain, tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere"):
        zip_path(tmp_path / "nowhere")


def test_a_file_that_changes_meanwhile_is_refused(plain: Path, tmp_path: Path) -> None:
    def change(nbytes: int) -> None:
        os.utime(plain, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while it was being zipped"):
        zip_path(plain, progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_random_damage_is_found(plain: Path, folder: Path, tmp_path: Path) -> None:
    """Bytes overwritten, inserted, removed and repeated anywhere."""
    path = zip_path(plain).path
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
