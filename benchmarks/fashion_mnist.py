"""Fashion-MNIST (arXiv 1708.07747), as Debian's package dataset-fashion-mnist installs it."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic.errors import DataError

_MEAN, _DEVIATION = 0.2860, 0.3530
"""Of the pixels of the training images."""


@dataclass(frozen=True)
class Images:
    """Images float32 [n, 1, 28, 28] of mean 0 and deviation 1, and their classes int64 [n], 0 to 9."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def fashion_mnist(part: str, count: int) -> Images:
    """The first `count` images of a part, "train" (60,000) or "t10k" (10,000).

    Raises:
        DataError: the files are not there.
    """
    pixels = _read(f"{part}-images-idx3-ubyte.gz")[:count].float().unsqueeze(1) / 255
    return Images((pixels - _MEAN) / _DEVIATION, _read(f"{part}-labels-idx1-ubyte.gz")[:count].long())


def random_images(count: int) -> Images:
    """Noise of the same shape, for a run that only shows that it runs."""
    return Images(torch.randn(count, 1, 28, 28), torch.randint(10, (count,)))


def _read(name: str) -> Tensor:
    """One of the dataset's files, in the IDX format: two zeros, a type, the rank, the sizes, the bytes."""
    folder = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
    try:
        raw = gzip.decompress((folder / name).read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{name} is not in {folder}; install Debian's package dataset-fashion-mnist, or name the folder of its "
            f"files in FASHION_MNIST"
        ) from None
    rank = raw[3]
    sizes = np.frombuffer(raw, ">i4", rank, offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(sizes).copy())
