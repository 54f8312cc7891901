"""Files of all kinds, cut into small chunks."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laconic.formats import container
from laconic.formats.archive import zip_path
from tests.formats.container.files import CHUNK, tensors, touched


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CHUNK_NBYTES", CHUNK)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A container of a few hundred bytes with all kinds of chunks."""
    path = tmp_path / "s.safetensors"
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"a": values, "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bool)}, path)
    return zip_path(path).path


@pytest.fixture
def small_best(small: Path) -> Path:
    """The same, entropy-coded, with what takes few bytes as tiered messages."""
    return zip_path(small.with_suffix(""), small.with_name("best.laconic"), code="best").path


@pytest.fixture
def pair(plain: Path, tmp_path: Path) -> tuple[Path, Path]:
    later = tmp_path / "later.safetensors"
    save_file(touched(tensors()), later)
    return plain, later


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
