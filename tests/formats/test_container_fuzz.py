"""The parsers of zipped files, fed with what a machine made up: an error of ours, or the right bytes.

Every claim lies under a SHA-256, so the mutations are sealed anew; otherwise only the seal would be tried.
LACONIC_FUZZ_SECONDS makes it go on for longer.
"""

import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import laconic
from laconic.errors import LaconicError
from laconic.formats import archive, container
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.zip_manifest import MANIFEST

SECONDS = float(os.environ.get("LACONIC_FUZZ_SECONDS", "2"))
_TEXTS = ["", "a", "../a", "/", "\0", "\ud800", "BF16", "F4", "I64"]
_NUMBERS = [0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64]
_VALUES = [None, True, False, [], {}, [0], [[]], 1.5, 1e308, -1, -(2**63), 10**30, *_TEXTS, *_NUMBERS]


def mutated(value: Any, dice: random.Random) -> Any:
    """JSON with a value somewhere replaced, removed, repeated, exchanged or moved by a little."""
    places = list(_places(value))
    if not places:
        return deepcopy(dice.choice(_VALUES))
    holder, key = dice.choice(places)
    kind = dice.randrange(6)
    if kind <= 1:
        holder[key] = deepcopy(dice.choice(_VALUES))
    elif kind == 2:
        del holder[key]
    elif kind == 3:
        other, other_key = dice.choice(places)
        holder[key], other[other_key] = other[other_key], holder[key]
        if _is_cyclic(value):
            return None
    elif kind == 4 and type(holder[key]) is int:
        holder[key] += dice.choice((-64, -1, 1, 64, 4096))
    elif isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        holder[dice.choice(list(holder)) + dice.choice(("", "x"))] = deepcopy(holder[key])
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _is_cyclic(value: Any) -> bool:
    try:
        json.dumps(value)
    except (ValueError, RecursionError):
        return True
    return False


def sealed(content: bytes, dice: random.Random) -> bytes:
    """A container whose header, index, head or messages were changed, under a SHA-256 that fits."""
    head = container._HEAD
    magic, version, chunk_nbytes, tail, header_nbytes, _ = head.unpack(content[: head.size])
    header, index = content[tail : tail + header_nbytes], content[tail + header_nbytes :]
    messages = bytearray(content[64:tail])
    for _ in range(dice.choice((1, 1, 2, 4))):
        kind = dice.randrange(8)
        if kind <= 2:
            index = json.dumps(mutated(json.loads(index), dice)).encode()
        elif kind <= 4:
            header = json.dumps(mutated(json.loads(header), dice)).encode()
        elif kind == 5:
            at = dice.randrange(len(messages))
            messages[at : at + 8] = dice.randbytes(8)
        elif kind == 6:
            chunk_nbytes = dice.choice((0, 1, 64, 128, 4096, 1 << 24, (1 << 32) - 64, chunk_nbytes))
        else:
            text = bytearray(index)
            text[dice.randrange(len(text))] = dice.randrange(256)
            index = bytes(text)
            break
    new = head.pack(magic, version, chunk_nbytes, tail, len(header), len(index))
    return new + hashlib.sha256(new + header + index).digest() + bytes(messages) + header + index


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation that is larger than anything here can need fails the test instead of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(params=["auto", "best"])
def seeds(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a shard of all kinds of chunks, one of differences, and their base."""
    monkeypatch.setattr(container, "CHUNK_NBYTES", 4096)
    source, base = tmp_path / "m", tmp_path / "base.safetensors"
    source.mkdir()
    state = {"a": torch.randn(3000).bfloat16(), "b": torch.arange(50), "c": torch.zeros(0, 3), "d": torch.ones(())}
    save_file(state, base)
    save_file({name + "2": tensor for name, tensor in state.items()}, source / "one.safetensors")
    state["a"][7] = 1
    save_file(state, source / "two.safetensors")
    (source / "config.json").write_text("{}")
    zip_path(source, base=base, code=request.param)
    return tmp_path


def attempts(seed: int) -> Iterator[random.Random]:
    """As many as there is time for, at least a hundred; the same ones each time."""
    end = time.monotonic() + SECONDS
    number = 0
    while number < 100 or time.monotonic() < end:
        yield random.Random(f"{seed} {number}")
        number += 1


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", ["one", "two"])
def test_made_up_containers_are_refused_or_read_right(name: str, seeds: Path) -> None:
    base = seeds / "base.safetensors"
    content = (seeds / "m.laconic" / f"{name}.safetensors.laconic").read_bytes()
    original = (seeds / "m" / f"{name}.safetensors").read_bytes()
    path, out = seeds / "x.safetensors.laconic", seeds / "x.safetensors"
    refused = 0
    for dice in attempts(1):
        path.write_bytes(sealed(content, dice))
        try:
            verify(path, base=base)
            unzip(path, base=base)
            state = laconic.load_zipped(path, base=base).state_dict()
        except LaconicError:
            refused += 1
            assert not [p for p in seeds.iterdir() if p.name.startswith((".x", "x.safetensors.tmp"))]
        else:
            # Only names, metadata and types of the same size can change without a contradiction.
            data_nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
            assert out.read_bytes()[-data_nbytes:] == original[-data_nbytes:]
        out.unlink(missing_ok=True)
    assert refused > 50


@pytest.mark.usefixtures("little_memory")
def test_made_up_manifests_are_refused_or_read_right(seeds: Path) -> None:
    path, base, out = seeds / "m.laconic", seeds / "base.safetensors", seeds / "deep" / "out"
    good = json.loads((path / MANIFEST).read_text())
    del good["sha256"]
    text = json.dumps(good)
    outside = sorted(p for p in seeds.rglob("*") if p != path / MANIFEST)
    for dice in attempts(2):
        manifest = json.loads(text)
        for _ in range(dice.choice((1, 1, 2, 4))):
            manifest = mutated(manifest, dice)
        if isinstance(manifest, dict):
            manifest["sha256"] = archive.manifest_sha256(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest))
        try:
            unzip(path, out, base=base)
        except LaconicError:
            assert not out.exists()
        else:
            for file in out.rglob("*"):
                assert file.read_bytes() == (seeds / "m" / file.relative_to(out)).read_bytes()
                file.unlink()
            out.rmdir()
        if out.parent.exists():
            out.parent.rmdir()
        assert sorted(p for p in seeds.rglob("*") if p != path / MANIFEST) == outside
