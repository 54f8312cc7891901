"""Generic mode: packs whatever autograd saves, in any module, through saved-tensor hooks.

It needs no knowledge of the model, but it can only shrink saved tensors, not leave them out: a norm still saves its
input and its output. Four bits per tensor instead of AGoQ's four bits per rebuilt group.

Where the exact gradient is finite the gradient of packed tensors has to be finite too. So only tensors saved by
functions whose backward tolerates rounding are packed (see `laconic.activations.tolerant`); those of all others stay
exact: divisions, logarithms, roots, attention, softmax, cross entropy, user-defined functions. Also exact: parameters
and buffers, tensors that no format packs (integers, booleans, fp64) or that packing would not make smaller, tensors
below `_MIN_NUMEL` values, and tensors whose packed values would not be finite, which a test of the scales finds.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from laconic.activations.checkpoint import runs_twice
from laconic.activations.derivatives import is_transformed
from laconic.activations.replacement import ModelReplacement
from laconic.activations.tolerant import least_numel
from laconic.activations.tracker import observe, own_storages
from laconic.errors import ModelError
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops import DTYPES
from laconic.ops.codebooks import LEVEL_MAX

__all__ = ["HooksForward"]

_MIN_NUMEL = 1024
"""Smaller tensors are not worth a call."""


@dataclass(frozen=True)
class _Packed:
    packed: BlockTensor
    shape: torch.Size

    def unpack(self) -> Tensor:
        return self.packed.dequantize().view(self.shape)


class _Packer(TorchFunctionMode):
    """One forward's pack and unpack hooks, in force while it is entered; what is saved several times is packed once."""

    def __init__(self, format: BlockFormat) -> None:
        super().__init__()
        self.format = format
        self.exact: dict[int, StorageWeakRef] = {}
        self.seen: dict[tuple[Any, ...], tuple[StorageWeakRef, _Packed | None]] = {}  # None: exact
        self.least_numel: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, kwargs = self.least_numel, kwargs or {}
        self.least_numel = least_numel(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.least_numel = before

    def leave_out(self, module: nn.Module, args: object = None) -> None:
        """Exclude the parameters and buffers that a module holds now from packing."""
        self.exact.update(own_storages(module))

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """The pack hook: codes and scales, or the tensor itself where it stays exact."""
        saved = self._saved(tensor)
        if isinstance(saved, _Packed):
            observe(saved.packed.codes, saved.packed.scales)
            return saved
        observe(tensor)
        return tensor.detach()  # with the node that made it, the graph would hold itself

    def _saved(self, tensor: Tensor) -> Tensor | _Packed:
        storage = tensor.untyped_storage()
        if storage._cdata in self.exact or isinstance(tensor, nn.Parameter) or not self._worthwhile(tensor):
            return tensor
        # Flattened and unflattened views of one tensor are the same bytes. The weak reference pins the address, so a
        # storage that has been freed since cannot be mistaken for this one.
        layout = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), layout, tensor.dtype, tensor._version)
        tolerated = self.least_numel is not None and tensor.numel() >= self.least_numel
        reference, packed = self.seen.get(key, (None, None))
        if reference is None or reference.expired():
            packed = _packed(self.format, tensor) if tolerated else None
        elif not tolerated:
            packed = None
        # What one function keeps exact is there anyway, so the next one refers to it.
        self.seen[key] = (StorageWeakRef(storage), packed)
        return tensor if packed is None else _Packed(packed.packed, tensor.shape)

    def _worthwhile(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype in DTYPES
            and tensor.numel() >= _MIN_NUMEL
            and self.format.nbytes(tensor.shape) < tensor.numel() * tensor.element_size()
        )

    @staticmethod
    def unpack(saved: Tensor | _Packed) -> Tensor:
        """The unpack hook."""
        return saved.unpack() if isinstance(saved, _Packed) else saved


def _packed(format: BlockFormat, tensor: Tensor) -> _Packed | None:
    """The packed tensor, or None if it would not come back finite: it holds infinities, or numbers next to them."""
    packed = format.quantize(tensor.detach())
    # Infinities and NaN make the scale of their block NaN, which is below nothing.
    limit = torch.finfo(tensor.dtype).max / LEVEL_MAX[format.code]
    return _Packed(packed, tensor.shape) if bool((packed.scales.float() <= limit).all()) else None


class _Running(threading.local):
    """The forward in hooks mode that runs in this thread."""

    forward: HooksForward | None = None


_RUNNING = _Running()


class HooksForward(ModelReplacement):
    """Replaces the forward of a whole model: the original one, with its saved tensors packed.

    Args:
        module: whose forward is replaced.
        format: how saved tensors are packed.
    """

    def __init__(self, module: nn.Module, format: BlockFormat) -> None:
        super().__init__(module)
        self.format = format

    # Under torch.compile, hooks of this kind would all unpack when backward starts and save nothing.
    @torch.compiler.disable(
        reason="laconic: saved-tensor hooks run eagerly; compile the model with mode='sites' instead"
    )
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward under the pack and unpack hooks."""
        if not torch.is_grad_enabled() or runs_twice() or is_transformed() or _RUNNING.forward is self:
            return self.original(*args, **kwargs)
        if _RUNNING.forward is not None:
            raise ModelError(
                f"{type(self.module).__name__} is compressed with mode='hooks' inside of "
                f"{type(_RUNNING.forward.module).__name__}, which is so too, but a tensor can be packed only once; "
                f"call laconic.decompress_activations on one of the two"
            )
        packer = _Packer(self.format)
        with ExitStack() as stack:
            # Looked at module by module: FSDP2 gathers parameters just before the forward that uses them.
            stack.callback(register_module_forward_pre_hook(packer.leave_out).remove)
            packer.leave_out(self.module)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack))
            stack.enter_context(packer)
            stack.callback(setattr, _RUNNING, "forward", None)
            _RUNNING.forward = self
            return self.original(*args, **kwargs)
