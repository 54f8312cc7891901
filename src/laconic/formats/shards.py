"""The local part of a distributed tensor, where it lies in the whole, and whose a sharded parameter is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Runs = list[list[tuple[int, int]]]
"""For each dimension the (start, stop) of the whole tensor that a rank holds, in its order; one each where the local
part is one block."""


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the local shard of a DTensor (FSDP2, tensor parallelism), else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def alias_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors of one memory and shape, of which a checkpoint needs one; others may be parts of one buffer."""
    part = local_part(tensor)
    return part.untyped_storage()._cdata, part.storage_offset(), tensor.shape


def without_aliases(tensors: Mapping[str, Any], left_out: Iterable[tuple[Any, ...]] = ()) -> dict[str, Any]:
    """The tensors of a state dict by name, of aliases the first; without those whose `alias_key` is left out."""
    seen, unique = set(left_out), {}
    for name, tensor in tensors.items():
        if (key := alias_key(tensor)) not in seen:
            seen.add(key)
            unique[name] = tensor
    return unique


def has_inner_tensors(tensor: Tensor) -> bool:
    """Whether what this rank holds of a tensor is a subclass of several tensors, as those of quantized weights.

    torch gives an op that takes it to the subclass, and one that writes into other tensors too may write there once for
    each. A subclass around one tensor of its own shape and dtype (torchao's for fp8 gathers) is as good as that one.
    """
    local: Any = local_part(tensor)
    shape, dtype = local.shape, local.dtype
    if not is_traceable_wrapper_subclass(local):
        return False
    parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
    return [part.dtype for part in parts if part.shape == shape] != [dtype]


def sharded_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A local shard of what lies over the ranks as `tensor` does: a DTensor beside a DTensor, else the shard itself."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def local_runs(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Runs:
    """Which parts of a tensor of `shape` this rank holds under `placements` over `mesh`, also strided ones."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "this rank is one of the mesh"
    found: Runs = []
    for dim, size in enumerate(shape):
        held = torch.arange(size, device="cpu")
        for number, place in enumerate(placements):
            if getattr(place, "dim", None) == dim:
                cut: Any = _along_first(place)
                held = cut._split_tensor(held, mesh.size(number), with_padding=False)[0][coordinates[number]]
        found.append(_runs(held.tolist()))
    return found


def taken(tensor: Any, runs: Runs) -> Tensor:
    """The parts `runs` of a tensor, or of what takes slices as one does (safetensors' slices), joined."""
    first = tuple(slice(*one[0]) if one else slice(0, 0) for one in runs)
    for dim, several in enumerate(runs):
        if len(several) > 1:
            return torch.cat([taken(tensor, [*runs[:dim], [one], *runs[dim + 1 :]]) for one in several], dim)
    part: Tensor = tensor[first] if first else tensor[...]
    return part


def is_deepspeeds(parameter: Tensor) -> bool:
    """Whether a parameter is DeepSpeed's: ZeRO 3 partitions it, or ZeRO 1 or 2 updates it from a copy."""
    return hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None


def _along_first(place: Any) -> Placement:
    """The same cut of a vector."""
    factor = getattr(place, "split_factor", None)
    placement: Placement = type(place)(0) if factor is None else type(place)(0, split_factor=factor)
    return placement


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found
