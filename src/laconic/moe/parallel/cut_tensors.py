"""What scripts do with tensors that are cut over processes, where torch's DTensor would silently do something else.

[Note: DTensors in scripts of one process]
Scripts of one process take the norm of a gradient as a number, assign `parameter.data` and write into the slice of an
expert. Of a DTensor torch 2.13 gives the part of a norm that this process has, other numbers on each; it leaves the
values as they are when `data` is assigned; it writes into a gathered copy of the slice; and on CPUs it draws the same
random numbers for the experts of each process. None of this can mean what the script means, so it is mended for all
DTensors. That `torch.save` on rank 0 writes a part is said.
"""

from __future__ import annotations

import warnings
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.errors import TrainingError
from laconic.formats.shards import local_runs, sharded_like, taken

_CUTS = {"ep", "esp"}
"""Dimensions of meshes over which `parallelize` cuts; FSDP2, which holds other references to the values, has more."""
_aten = torch.ops.aten
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
def mend_dtensors(on_cpu: bool) -> None:
    """Let numbers, `data`, slices and random values of DTensors be those of the whole, or refused, from now on."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_NUMBERS, _number))
    if on_cpu:  # elsewhere torch lets each process draw its own numbers
        handlers.update(dict.fromkeys(_RANDOM, _drawn))
    named: Any = DTensor
    named.data = property(_data.__get__, _set_data)
    named.__setitem__, named.__reduce_ex__ = _set_item, _pickled
    for name in ("__getitem__", "select", "narrow", "chunk", "split"):
        setattr(DTensor, name, _marking(getattr(Tensor, name)))


def _marking(method: Any) -> Any:
    """Return a method of slices that marks those of experts that are no views of what this process holds."""

    @wraps(method)
    def sliced(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if "ep" in (self.device_mesh.mesh_dim_names or ()) and not torch.compiler.is_compiling():
            own = self._local_tensor.untyped_storage()._cdata
            for part in found if isinstance(found, tuple) else (found,):
                if type(part) is DTensor and part._is_view() and part._local_tensor.untyped_storage()._cdata != own:
                    part.__class__ = _Copy
        return found

    return sliced


class _Copy(DTensor):
    """A slice that was gathered for reading: what is written into it would be lost."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise _lost(args[0])
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if type(found) is DTensor and any(out.alias_info is not None for out in func._schema.returns):
            found.__class__ = cls  # a slice of a slice
        return found


def _set_item(self: DTensor, index: Any, value: Any) -> None:
    """Assign values to a part that all processes hold a part of.

    Raises:
        TrainingError: a process would write into a copy.
    """
    if type(part := self[index]) is _Copy:
        raise _lost(part)
    Tensor.__setitem__(self, index, value)


def _pickled(self: DTensor, protocol: Any) -> Any:
    """Pickle this process's part, as torch does, and say that it is no more."""
    if is_cut(self):
        warnings.warn(
            f"a tensor {list(self.shape)} of experts that are spread over processes is pickled, with the part of rank"
            f" {self.device_mesh.get_rank()} only; let each process write and read a file of its own, or save the model"
            " with save_pretrained, or with laconic.moe.huggingface.save_sharded, which all processes call",
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
    return op(value.full_tensor())


def is_cut(tensor: Tensor | None) -> bool:
    """Return whether `parallelize` has cut a tensor, and FSDP2 has not cut it again."""
    return isinstance(tensor, DTensor) and set() < {*(tensor.device_mesh.mesh_dim_names or ())} <= _CUTS


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw on each process what one would draw, and keep the part of this one."""
    like, *others = args
    found = op(torch.empty(like.shape, dtype=like.dtype, device=like.device), *others, **kwargs)
    part = taken(found, local_runs(like.shape, like.device_mesh, like.placements)).contiguous()
    if not op._schema.is_mutable:
        return sharded_like(part, like)
    like._local_tensor.copy_(part)
    return like


def _set_data(self: DTensor, value: Tensor) -> None:
    """Assign `data`, as of any tensor.

    Raises:
        TrainingError: the values are no DTensor, or others than this tensor refer to what it holds.
    """
    if not (is_cut(self) and isinstance(value, DTensor)):
        raise TrainingError(
            f"data of a tensor {list(self.shape)} that is cut over processes is assigned, which would leave its values"
            " as they are; use copy_ under torch.no_grad(), with values that are cut as it is"
        )
    _data.__set__(self, value)
    self._local_tensor, self._spec = value._local_tensor, value._spec
