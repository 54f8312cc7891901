"""Where and how a tensor's numbers lie. A sparse tensor has no storage of its own, but its parts have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.formats.shards import local_part

_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors of which a tensor consists, of a DTensor those of the local shard.

    Returns:
        The tensor itself where it is strided; indices and values of a sparse one; values and offsets of a nested one;
        nothing for layouts that no one else can read, such as that of oneDNN.
    """
    local = local_part(tensor)
    if local.layout == torch.strided:
        return (local,)
    if local.layout == torch.sparse_coo:
        return local._indices(), local._values()
    if local.layout in _ROWS:
        return local.crow_indices(), local.col_indices(), local.values()
    if local.layout in _COLUMNS:
        return local.ccol_indices(), local.row_indices(), local.values()
    if local.layout == torch.jagged:
        return local.values(), local.offsets()  # type: ignore[attr-defined]
    return ()


def storages_of(tensor: Tensor) -> tuple[torch.UntypedStorage, ...]:
    """The storages of `dense_parts`."""
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:  # nearly all
        return (tensor.untyped_storage(),)
    return tuple(part.untyped_storage() for part in dense_parts(tensor))


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Addresses of `storages_of`: equal for tensors that share all they hold, as long as one of them lives."""
    return tuple(storage._cdata for storage in storages_of(tensor))


def laid_out(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`x` with the strides of the tensor it stands for, gaps included.

    A second run hands what it saves to the nodes of the first by place, and torch's kernels save other tensors, or in
    another order, where strides differ: a linear layer does for an input with gaps.
    """
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def overlaps(x: Tensor) -> bool:
    """Whether values of x may lie in one place of memory, as those of an expanded tensor do."""
    if type(x) is Tensor and (known := torch._debug_has_internal_overlap(x)) < _UNKNOWN:
        return bool(known)
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride < extent:
            return True
        extent += (size - 1) * stride
    return False


_UNKNOWN = 2
"""What torch answers where strides have gaps; below it says whether a tensor overlaps itself."""
