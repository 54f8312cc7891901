"""Batches of images: normalized, and for training flipped and cropped at random.

Flips and crops are a function of the seed and of a sample's place in the run's order, so they depend neither on the
number of processes nor on where a run was resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.train.config.schema import ImagesConfig
from laconic.train.data.images import ImageCorpus, ImageSet
from laconic.train.data.sampler import sample_id, split_mix


class ImageBatch(NamedTuple):
    """Normalized pixels, fp32 [n, C, H, W], and classes, int64 [n]."""

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> ImageBatch:
        """The batch on `device`."""
        return ImageBatch(self.pixels.to(device), self.labels.to(device))


class ImageBatches:
    """Takes batches from images."""

    def __init__(self, corpus: ImageCorpus, images: ImagesConfig, seed: int) -> None:
        self._corpus, self._seed = corpus, seed
        self._flip, self._padding = images.flip, images.crop_padding
        self._mean = torch.from_numpy(corpus.mean).view(1, -1, 1, 1)
        self._std = torch.from_numpy(corpus.std).view(1, -1, 1, 1)

    def training(self, indices: range) -> ImageBatch:
        """Images at `indices` of the run's order, flipped and cropped at random."""
        train = self._corpus.train
        batch = self._batch(train, [sample_id(self._seed, index, len(train)) for index in indices])
        rows = [self._augmented(image, index) for image, index in zip(batch.pixels, indices, strict=True)]
        return ImageBatch(torch.stack(rows), batch.labels)

    def validation(self, samples: Sequence[int]) -> ImageBatch:
        """Validation images, as they are."""
        assert self._corpus.validation is not None
        return self._batch(self._corpus.validation, samples)

    def _batch(self, images: ImageSet, samples: Sequence[int]) -> ImageBatch:
        chosen = np.asarray(samples, np.int64)
        pixels = torch.from_numpy(images.images[chosen]).float() / 255
        return ImageBatch((pixels - self._mean) / self._std, torch.from_numpy(images.labels[chosen]))

    def _augmented(self, image: Tensor, index: int) -> Tensor:
        bits = split_mix(split_mix(self._seed) ^ split_mix(~index & (1 << 64) - 1))
        if self._flip and bits & 1:
            image = image.flip(-1)
        if self._padding:
            height, width = image.shape[-2:]
            border, offsets = self._padding, 2 * self._padding + 1
            black = -self._mean[0] / self._std[0]
            padded = F.pad(image - black, (border,) * 4) + black
            top, left = (bits >> 1) % offsets, (bits >> 32) % offsets
            image = padded[:, top : top + height, left : left + width]
        return image
