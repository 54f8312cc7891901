"""The benchmark runs; what it measures is not asserted."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from benchmarks.afi import _fashion
from laconic.errors import DataError
from tests.ops.test_benchmarks import run


@pytest.mark.slow
def test_benchmark_writes_its_table() -> None:
    result = run("afi", "--smoke")
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 5
    assert "random images (no result)" in result.stdout


def test_files_of_the_dataset_are_read_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASHION_MNIST", str(tmp_path))
    with pytest.raises(DataError, match=r"train-images.* is not in .*install .*dataset-fashion-mnist"):
        _fashion("train", 1)
    pixels = torch.arange(2 * 28 * 28, dtype=torch.int64).remainder(256).to(torch.uint8)
    sizes = b"".join(size.to_bytes(4, "big") for size in (2, 28, 28))
    images = bytes([0, 0, 8, 3]) + sizes + bytes(pixels.tolist())
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    labels = bytes([0, 0, 8, 1]) + (2).to_bytes(4, "big") + bytes([7, 9])
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    data = _fashion("train", 10)
    assert data.labels.tolist() == [7, 9]
    assert data.images.shape == (2, 1, 28, 28)
    torch.testing.assert_close(data.images.flatten() * 0.3530 + 0.2860, pixels / 255)
