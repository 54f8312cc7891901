"""What reading a file may cost: memory and work that its own length, or its base's, vouches for."""

import hashlib
import json
import os
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import laconic
from laconic.errors import CheckpointError, FormatError, LaconicError
from laconic.formats import chunk as chunk_module
from laconic.formats import container
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.container import ContainerFile
from laconic.formats.mapped import TensorsInMemory
from laconic.formats.zip_manifest import MANIFEST, manifest_sha256
from tests.formats.container.files import tensors

MOST_BYTES_PER_BYTE = {1: 64, 2: 512}  # elements of eight bytes per byte of a message, by the file's version: 8 and 64
ITEMSIZES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What asks for much more than one chunk fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Work:
    """Counts what is asked for while a file is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded = self.largest = self.calls = 0
        empty, decode = torch.empty, container.decode_chunk
        lock = threading.Lock()  # chunks are decoded by several threads

        def counting_empty(*args: Any, **kwargs: Any) -> Tensor:
            made = empty(*args, **kwargs)
            with lock:
                self.largest = max(self.largest, made.nbytes)
            return made

        def counting_decode(message: Tensor, element: Any, out: Tensor, where: str) -> Any:
            with lock:
                self.calls += 1
                self.decoded += len(out)
            return decode(message, element, out, where)

        monkeypatch.setattr(torch, "empty", counting_empty)
        monkeypatch.setattr(container, "decode_chunk", counting_decode)
        assert chunk_module.decode_chunk is decode


def sealed(
    path: Path, claims: list[dict[str, Any]], chunk_nbytes: int, messages: bytes = b"", version: int = 1
) -> Path:
    """A container that claims anything; each claim has name, dtype, nbytes, messages and perhaps base_checksum."""
    header: dict[str, Any] = {}
    end = 0
    for claim in claims:
        item = ITEMSIZES[claim["dtype"]]
        stop = end + claim["nbytes"]
        header[claim["name"]] = {
            "dtype": claim["dtype"],
            "shape": [claim["nbytes"] // item],
            "data_offsets": [end, stop],
        }
        end = stop
    records = [{k: v for k, v in c.items() if k not in ("dtype", "nbytes")} | {"checksum": "0" * 32} for c in claims]
    text = json.dumps(header).encode()
    index = json.dumps({"base": "b", "data_nbytes": end, "tensors": records}).encode()
    head = container._HEAD.pack(b"LCNZFILE", version, chunk_nbytes, 64 + len(messages), len(text), len(index))
    path.write_bytes(head + hashlib.sha256(head + text + index).digest() + messages + text + index)
    return path


def every_way_of_reading(path: Path, scratch: Path) -> list[Callable[[], object]]:
    return [
        lambda: verify(path),
        lambda: unzip(path, scratch),
        lambda: verify(path, base=path),
        lambda: unzip(path, scratch, base=path),
        lambda: laconic.load_zipped(path).state_dict(),
        lambda: laconic.load_zipped(path, base=path).state_dict(),
        lambda: laconic.load_zipped(path, base={"a": torch.ones(3)}).state_dict(),
    ]


@pytest.mark.usefixtures("little_memory")
def test_a_few_hundred_bytes_cannot_ask_for_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An exclusive or with a base that nobody has, of which no chunk changed: nothing of it is in the file.
    for chunk_nbytes in (2**32 - 64, 2**24, 2**22, 64):
        num_chunks = 1 if chunk_nbytes > 2**24 else 20
        nbytes = chunk_nbytes * num_chunks
        claim = {"name": "a", "dtype": "U8", "nbytes": nbytes, "messages": [0] * num_chunks, "base_checksum": "0" * 32}
        path = sealed(tmp_path / "x.laconic", [claim], chunk_nbytes)
        assert path.stat().st_size < 400
        with monkeypatch.context() as patch:
            work = Work(patch)
            for read in every_way_of_reading(path, tmp_path / "out"):
                try:
                    read()
                except LaconicError:
                    assert not (tmp_path / "out").exists()
            assert work.largest <= MOST_BYTES_PER_BYTE[1] * path.stat().st_size
            assert work.calls == 0


CLAIM = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEMSIZES]),
        "nbytes": st.one_of(
            st.integers(0, 9000),
            st.integers(0, 1 << 36),
            st.sampled_from([1 << 22, 1 << 24, 1 << 30, 1 << 40, 1 << 62]),
        ),
        "sizes": st.lists(st.sampled_from([0, 1, 64, 72, 100, 128, 1 << 20, 1 << 40]), max_size=3),
        "fits": st.booleans(),
        "has_base": st.booleans(),
    }
)


@pytest.mark.usefixtures("little_memory")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    claims=st.lists(CLAIM, min_size=1, max_size=3),
    chunk_nbytes=st.sampled_from([64, 4096, 1 << 22, 1 << 24, (1 << 24) + 64, 1 << 31, (1 << 32) - 64]),
    seed=st.integers(0, 3),
    version=st.sampled_from([1, 2]),
)
def test_made_up_claims_cost_no_more_than_the_file_is_long(
    claims: list[dict[str, Any]],
    chunk_nbytes: int,
    seed: int,
    version: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = bytearray()
    described = []
    for number, claim in enumerate(claims):
        item = ITEMSIZES[claim["dtype"]]
        nbytes = claim["nbytes"] // item * item
        num_chunks = -(-nbytes // chunk_nbytes)
        sizes = claim["sizes"]
        if claim["fits"] and num_chunks <= 100:
            sizes = ([*sizes, 0])[:1] * num_chunks
        described.append({"name": "abc"[number], "dtype": claim["dtype"], "nbytes": nbytes, "messages": sizes})
        if claim["has_base"]:
            described[-1]["base_checksum"] = "0" * 32
        for size in sizes:
            if size < 1 << 20:
                # A message whose header promises whatever the index does.
                numel = min(nbytes, chunk_nbytes) // item
                if version == 1 or seed == 3:
                    front = struct.pack("<4s4B8Q", b"LCNZ", 1, seed, seed % 3, 1, numel, size, size, 0, 0, 0, 0, numel)
                else:
                    rotated = claim["dtype"] in ("BF16", "F16", "F32")
                    front = struct.pack("<4s4B3Q8B", b"LCNB", 1, item, rotated, 0, numel, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1)
                content += front[:size].ljust(-(-size // 64) * 64, b"\0")
    path = sealed(tmp_path / "x.laconic", described, chunk_nbytes, bytes(content), version)
    most = MOST_BYTES_PER_BYTE[version]
    with monkeypatch.context() as patch:
        work = Work(patch)
        for read in every_way_of_reading(path, tmp_path / "out"):
            try:
                read()
            except LaconicError:
                assert not (tmp_path / "out").exists()
            (tmp_path / "out").unlink(missing_ok=True)
        length = path.stat().st_size
        assert work.largest <= max(most * length, 1 << 16)
        assert work.decoded <= 7 * most * length


@pytest.mark.usefixtures("little_memory")
def test_zeros_by_the_hundred_megabytes_are_read_chunk_by_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The most that a file can shrink is legitimate; what it takes is one chunk per thread, not the tensor.
    monkeypatch.setattr(container, "CHUNK_NBYTES", 1 << 22)
    plain = tmp_path / "z.safetensors"
    nbytes = 300_000_000
    header = json.dumps({"z": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    with open(plain, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    made = zip_path(plain)
    assert made.zipped_nbytes < nbytes / 31
    work = Work(monkeypatch)
    verify(made.path, num_threads=2)
    assert work.largest <= 1 << 22
    assert work.decoded == nbytes


def test_pieces_of_a_zipped_base_are_decoded_once(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, later = pair
    monkeypatch.setattr(container, "CHUNK_NBYTES", 1 << 14)  # larger than any tensor here
    base = zip_path(plain).path
    monkeypatch.setattr(container, "CHUNK_NBYTES", 64)
    zipped = zip_path(later, base=base).path
    assert ContainerFile(zipped).stored["weight"].base_checksum is not None
    work = Work(monkeypatch)
    unzip(zipped, tmp_path / "back", base=base)
    own = sum(bool(nbytes) for stored in ContainerFile(zipped).stored.values() for _, nbytes in stored.messages)
    assert work.calls - own <= sum(len(stored.messages) for stored in ContainerFile(base).stored.values())
    assert (tmp_path / "back").read_bytes() == later.read_bytes()


def test_a_strided_base_in_memory_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 128).t()
    source = TensorsInMemory({"x": x})
    copies = 0
    contiguous = Tensor.contiguous

    def counting(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal copies
        copies += not self.is_contiguous()
        return contiguous(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "contiguous", counting)
    read = torch.cat([source.read("x", start, start + 64) for start in range(0, x.nbytes, 64)])
    assert source.checksum("x") == source.checksum("x")
    assert copies == 1
    assert torch.equal(read.view(torch.float32).view(128, 64), x)


# --- bases that lie ---


def test_a_base_that_is_not_what_its_index_says_is_noticed_while_zipping(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    # Otherwise no base could ever undo the difference.
    plain, later = pair
    base = zip_path(plain).path
    other = tensors()
    other["weight"].view(torch.int16)[7, 7] ^= 1
    save_file(other, tmp_path / "other.safetensors")
    lying = zip_path(tmp_path / "other.safetensors").path
    content, truth = lying.read_bytes(), ContainerFile(base).stored["weight"].checksum
    head = container._HEAD
    magic, version, chunk_nbytes, tail, header_nbytes, index_nbytes = head.unpack(content[: head.size])
    header, index = content[tail : tail + header_nbytes], content[tail + header_nbytes :]
    index = index.replace(ContainerFile(lying).stored["weight"].checksum.encode(), truth.encode())
    new = head.pack(magic, version, chunk_nbytes, tail, header_nbytes, index_nbytes)
    lying.write_bytes(new + hashlib.sha256(new + header + index).digest() + content[64:tail] + header + index)
    with pytest.raises(FormatError, match=f"{lying}: tensor 'weight': damaged, or changed meanwhile: it has checksum"):
        zip_path(later, tmp_path / "delta.laconic", base=lying)
    assert not (tmp_path / "delta.laconic").exists()
    good = zip_path(later, tmp_path / "delta.laconic", base=base).path
    with pytest.raises(FormatError, match=f"tensor 'weight': damaged, or its base '{base}' is: it has checksum"):
        unzip(good, tmp_path / "back", base=lying)
    with pytest.raises(FormatError, match="damaged, or its base"):
        laconic.load_zipped(good, base=lying)["weight"]


def test_a_file_is_not_its_own_base(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, later = pair
    zipped = zip_path(later, base=plain).path
    with pytest.raises(FormatError, match=r"which is needed to read it|give the one it was zipped with"):
        unzip(zipped, tmp_path / "back", base=zipped)


# --- names ---


@pytest.mark.parametrize(
    "name", ["\ud800", "a/\udfff.safetensors.laconic", "a\0b", "../x", "/x", "a//b", "a/./b", "a\\b"]
)
def test_a_manifest_with_a_name_that_no_file_has_is_refused(name: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    zipped = zip_path(folder).path
    manifest = json.loads((zipped / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"][name] = {"nbytes": 2, "digest" if name.endswith(".laconic") else "sha256": "0" * 64}
    (zipped / MANIFEST).write_text(json.dumps(manifest | {"sha256": manifest_sha256(manifest)}))
    for read in (lambda: verify(zipped), lambda: unzip(zipped, tmp_path / "back")):
        with pytest.raises(FormatError, match="which is not the name of a file inside of its directory"):
            read()
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "x" * 5000])
def test_an_index_with_a_name_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="cannot read"):
        laconic.load_zipped(tmp_path)


def test_names_that_are_not_utf8_come_back(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    odd = os.fsdecode(b"\xff\xfe.bin")
    try:
        (folder / odd).write_bytes(b"1")
    except OSError:
        pytest.skip("this file system wants UTF-8")
    zipped = zip_path(folder).path
    verify(zipped)
    unzip(zipped, tmp_path / "back")
    assert os.listdir(os.fsencode(tmp_path / "back")) == [b"\xff\xfe.bin"]
