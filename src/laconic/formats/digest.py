"""A hash of a tensor's bits, as fast as memory is read, on the device where the tensor lies."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["DIGEST_NBYTES", "digest"]

DIGEST_NBYTES = 8
_WIDTH = 1021
"""Words in a row of `digest`: a prime, so that words a power of two apart are in different columns."""


def digest(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits: any dtype and device -> int64 0-d on the same device, without waiting for it.

    The bytes, filled up with zeros, are 64-bit words in rows of 1021; the hash is the sum of all columns' sums, each
    times an odd number of its own, modulo 2**64. So one word that changes always changes it.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if (data.storage_offset() % 8 or data.data_ptr() % 8) and data.numel():
        data = data.clone()
    num_whole = data.numel() // 8
    words = data[: 8 * num_whole].view(torch.int64)
    num_rows = num_whole // _WIDTH
    weights = _weights(tensor.device)
    columns = words[: num_rows * _WIDTH].view(num_rows, _WIDTH).sum(0)
    rest = words[num_rows * _WIDTH :]
    columns[: rest.numel()] += rest
    tail = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
    tail[: data.numel() - 8 * num_whole] = data[8 * num_whole :]
    columns[rest.numel()] += tail.view(torch.int64)[0]
    return (columns * weights).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (_WIDTH,), generator=generator) * 2 + 1
    return weights.to(device)
