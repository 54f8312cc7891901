"""What scripts do with tensors that are cut over processes, where torch's DTensor would silently do something else.

[Note: DTensors in scripts of one process]
Scripts of one process take the norm of a gradient as a number, assign `parameter.data` and write into the slice of an
expert. Of a DTensor torch 2.13 gives the part of a norm that this process has, other numbers on each; it leaves the
values as they are when `data` is assigned; it writes into a gathered copy of the slice; and on CPUs it draws the same
random numbers for the experts of each process. None of this can mean what the script means, so it is mended for the
DTensors that `parallelize` has cut, by methods and operators of DTensor that are replaced for the process; other
DTensors, as FSDP2's and TP's, have torch's way in each of them. That `torch.save` on rank 0 writes a part is said.
"""

from __future__ import annotations

import warnings
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from laconic.errors import TrainingError
from laconic.formats.shards import local_runs, sharded_like, taken

_CUTS = {"ep", "esp"}
"""Dimensions of meshes over which `parallelize` cuts; FSDP2, which holds other references to the values, has more."""
_aten = torch.ops.aten
_HANDLERS: Any = DTensor._op_dispatcher._custom_op_handlers
_data: Any = vars(torch._C.TensorBase)["data"]
_NUMBERS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)
_RANDOM = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.rand_like.default,
    _aten.randn_like.default,
)


@cache
def mend_dtensors() -> None:
    """Let numbers, `data`, slices and random values of cut tensors be those of the whole, or refused, from now on."""
    _HANDLERS.update({**dict.fromkeys(_NUMBERS, _number), **dict.fromkeys(_RANDOM, _drawn)})
    named: Any = DTensor
    named.data = property(_data.__get__, _set_data)
    named.__setitem__, named.__reduce_ex__ = _set_item, _pickled
    for name in ("__getitem__", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split"):
        setattr(DTensor, name, _marking(getattr(Tensor, name)))


def _is_ours(tensor: DTensor) -> bool:
    """Return whether `parallelize` has cut a tensor, also one that FSDP2 has cut again."""
    return not _CUTS.isdisjoint(tensor.device_mesh.mesh_dim_names or ())


def _marking(method: Any) -> Any:
    """Return a method of slices that marks those of experts that are no views of what this process holds."""

    @wraps(method)
    def sliced(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if _is_ours(self) and not torch.compiler.is_compiling():
            own = self._local_tensor.untyped_storage()._cdata
            for part in found if isinstance(found, tuple | list) else (found,):
                if type(part) is DTensor and part._is_view() and part._local_tensor.untyped_storage()._cdata != own:
                    part.__class__ = _Copy
        return found

    return sliced


class _Copy(DTensor):
    """A slice that was gathered for reading: what is written into it would be lost."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            for part in tree_leaves((args[0], (kwargs or {}).get("out"))):  # a list of torch._foreach_mul_
                if isinstance(part, cls):
                    raise _lost(part)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if type(found) is DTensor and any(out.alias_info is not None for out in func._schema.returns):
            found.__class__ = cls  # a slice of a slice
        return found


def _set_item(self: DTensor, index: Any, value: Any) -> None:
    """Assign values to a part that all processes hold a part of; what a process would write into a copy is refused."""
    if _is_ours(self):
        looked: list[Any] = []
        for one in index if isinstance(index, tuple) else (index,):
            if isinstance(one, Tensor) and (one.dim() or one.dtype == torch.bool):  # torch writes these in place
                looked += [slice(None)] * (one.dim() if one.dtype == torch.bool else 1)
            else:
                looked.append(one)
        if type(part := self[tuple(looked)]) is _Copy:
            raise _lost(part)
    Tensor.__setitem__(self, index, value)


def _pickled(self: DTensor, protocol: Any) -> Any:
    """Pickle this process's part, as torch does, and say that it is no more."""
    if is_cut(self):
        warnings.warn(
            f"a tensor {list(self.shape)} of experts that are spread over processes is pickled, or copied by copy.copy,"
            f" with the part of rank {self.device_mesh.get_rank()} only; let each process write and read a file of its"
            " own, or save the model with save_pretrained, or with laconic.moe.huggingface.save_sharded, which all"
            " processes call",
            stacklevel=2,
        )
    return Tensor.__reduce_ex__(self, protocol)


def _lost(part: Tensor) -> TrainingError:
    return TrainingError(
        f"a slice {list(part.shape)} of a tensor that is cut over processes is changed in place, but it is a gathered"
        " copy, so that the change would be lost; multiply or add a tensor of the whole's shape, cut by"
        " torch.distributed.tensor.distribute_tensor, or write into to_local() on the process that has the slice"
    )


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the one value of a DTensor as a number, added up over the processes where each has a part."""
    (value,) = args
    return op(value.full_tensor() if _is_ours(value) else value._local_tensor)  # the latter is torch's way


def is_cut(tensor: Tensor | None) -> bool:
    """Return whether `parallelize` has cut a tensor, and FSDP2 has not cut it again."""
    return isinstance(tensor, DTensor) and set() < {*(tensor.device_mesh.mesh_dim_names or ())} <= _CUTS


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw on each process what one would draw, and keep the part of this one."""
    like, *others = args
    if not _is_ours(like) or like.device.type != "cpu" or any(place.is_partial() for place in like.placements):
        # Torch's way, by which on GPUs each process draws its own numbers.
        _HANDLERS.pop(op, None)
        try:
            return op(*args, **kwargs)
        finally:
            _HANDLERS[op] = _drawn
    with _disable_current_modes():  # of FakeTensorMode and torch.compile, which have no numbers
        runs = local_runs([int(size) for size in like.shape], like.device_mesh, like.placements)
    found = op(torch.empty(like.shape, dtype=like.dtype, device=like.device), *others, **kwargs)
    part = taken(found, runs).contiguous()
    if not op._schema.is_mutable:
        return sharded_like(part, like)
    like._local_tensor.copy_(part)
    return like


def _set_data(self: DTensor, value: Tensor) -> None:
    """Assign `data`, as of any tensor; refuse what is no DTensor of the shape and mesh."""
    if not _is_ours(self):
        _data.__set__(self, value)
        return
    if isinstance(value, DTensor) and value._spec == self._spec:
        held, given = self._local_tensor, value._local_tensor
        if (
            held.untyped_storage()._cdata == given.untyped_storage()._cdata
            and held.storage_offset() == given.storage_offset()
            and held.stride() == given.stride()
        ):
            return  # p.data -= x has changed the values, and assigns an alias
    if not (is_cut(self) and isinstance(value, DTensor)):
        raise TrainingError(
            f"data of a tensor {list(self.shape)} that is cut over processes is assigned, which would leave its values"
            " as they are; use copy_ under torch.no_grad(), with values that are cut as it is"
        )
    if value.shape != self.shape or value.device_mesh != self.device_mesh:
        raise TrainingError(
            f"data of a tensor {list(self.shape)} that is cut over {self.device_mesh} is assigned, but the values are"
            f" {list(value.shape)} over {value.device_mesh}; assign values of its shape that are cut over its mesh"
        )
    if value.placements != self.placements:  # as those of p.data.flip(0)
        with torch.no_grad():
            value = value.redistribute(placements=self.placements)
    _data.__set__(self, value)
    self._local_tensor, self._spec = value._local_tensor, value._spec
