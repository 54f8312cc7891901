"""DTensors among activations: what lies on this rank is packed, and placed again when it is rebuilt.

[Note: tensor parallelism] `parallelize_module` and transformers' tensor plans put layers between two hooks: one makes
a DTensor of the input (`from_local`, a collective), the layer multiplies DTensors, and the other makes a plain tensor
of the output. Between the layers, where attention and the products of feed-forward blocks are, tensors are plain and
hold this rank's heads and features. So there are two kinds of saved tensors; of both, what this rank holds is packed:

- Notes (see kept.py) are always on plain tensors and about plain tensors. A DTensor is asked for its local part, which
  shares memory with the tensor that it was made from; so the query, key and value projections, each of which makes a
  DTensor of its own, find one note.
- A value that was kept for a DTensor becomes one again by the mesh and the placements it had (`Placement`). Nothing is
  communicated for that, but backward's own products of DTensors communicate as those of torch do.

What a collective makes is a new tensor: under sequence parallelism the gathered input of the projections is packed
once, beside the shard that the norm keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


def local_of(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor, without gradients; any other tensor itself."""
    if not isinstance(x, DTensor):
        return x
    local = x._local_tensor  # not to_local(), whose result is a new object each time
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


@dataclass(frozen=True)
class Placed:
    """How a DTensor lies on its mesh; holds no memory of it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: DTensor) -> Placed:
        """Where `x` lies."""
        return cls(x.device_mesh, x.placements, x.shape, x.stride())

    def __call__(self, local: Tensor) -> Tensor:
        """The DTensor of which this rank holds `local`."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def reduced(self, local: Tensor) -> Tensor:
        """A sum over rows of which this rank holds its own: of the mesh's ranks the same, or parts of a sum."""
        rows = [Replicate() if placement.is_replicate() else Partial() for placement in self.placements]
        return DTensor.from_local(local, self.mesh, rows, run_check=False)


def is_packable(x: Tensor) -> bool:
    """Whether a DTensor can be packed by what this rank holds: it is no part of a sum, and no graph is traced."""
    return (
        isinstance(x, DTensor)
        and not torch.compiler.is_compiling()
        and not any(placement.is_partial() for placement in x.placements)
    )


def has_whole_rows(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether this rank can normalize rows of x [..., features]: it holds whole ones, and whole parameters."""
    if not isinstance(x, DTensor):
        return not any(isinstance(p, DTensor) for p in parameters)
    last = x.dim() - 1
    is_whole = all(p.is_replicate() or (p.is_shard() and p.dim % x.dim() != last) for p in x.placements)  # type: ignore[attr-defined]
    return is_whole and all(_is_replicated(p, x.device_mesh) for p in parameters if p is not None)


def on_rows(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """`function(x, *others)`, of which each row of the result depends on that row of x; of DTensors on local parts."""
    return Placed.of(x)(function(*map(local_of, (x, *others)))) if isinstance(x, DTensor) else function(x, *others)


def row_dim(x: Tensor) -> int:
    """The dimension of x [..., features] that has to come first, so that no collective is needed to flatten rows."""
    placements = x.placements if isinstance(x, DTensor) else ()
    dims = [p.dim % x.dim() for p in placements if p.is_shard()]  # type: ignore[attr-defined]
    return next((dim for dim in dims if dim < x.dim() - 1), 0)


def _is_replicated(parameter: Tensor, mesh: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return parameter.device_mesh == mesh and all(p.is_replicate() for p in parameter.placements)


def warn_exact(kind: str, x: Any) -> None:
    """Say once per kind of site that it keeps a DTensor exactly."""
    if isinstance(x, DTensor) and not torch.compiler.is_compiling():
        _warn_once(kind)


@cache
def _warn_once(kind: str) -> None:
    logging.getLogger("laconic").warning(
        "%s: a DTensor that is saved there stays exact; let the parallel layer in front return what this rank holds of "
        "it (use_local_output=True)",
        kind,
    )
