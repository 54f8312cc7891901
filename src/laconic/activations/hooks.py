"""The generic way: pack whatever autograd saves, in any module, through saved-tensor hooks.

It needs no knowledge of the model, but it can only shrink what is saved, not leave it out: a norm still saves its input
and its output. Four bits per tensor instead of AGoQ's four bits per rebuilt group.

Left exact: parameters and buffers, tensors that no format packs (integers, booleans, fp64), tensors below `MIN_NUMEL`
values, and what attention, softmax and cross entropy save. Their backward multiplies exponentials with saved
statistics, and the error of four bits there is not small (measured on attention with sharp logits: the gradient is lost
altogether).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from laconic.activations.loss import token_losses
from laconic.activations.tracker import observe, own_storages
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops import DTYPES

__all__ = ["MIN_NUMEL", "HooksForward"]

MIN_NUMEL = 1024
"""Smaller tensors are not worth a call."""

_KEPT_EXACT: frozenset[Callable[..., Any]] = frozenset(
    {
        F.scaled_dot_product_attention,
        F.softmax,
        F.log_softmax,
        F.cross_entropy,
        token_losses,
        torch.softmax,
        torch.log_softmax,
        torch.logsumexp,
        Tensor.softmax,
        Tensor.log_softmax,
        Tensor.logsumexp,
    }
)


def _as_it_is(tensor: Tensor) -> Tensor:
    observe(tensor)
    return tensor.detach()  # with the node that made it, the graph would hold itself


class _ExactFunctions(TorchFunctionMode):
    """Runs the functions above with hooks that change nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT_EXACT:
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, lambda tensor: tensor):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Packed:
    packed: BlockTensor
    shape: torch.Size

    def unpack(self) -> Tensor:
        return self.packed.dequantize().view(self.shape)


class _Packer:
    """One forward's pack and unpack hooks; a tensor saved by several operations is packed once."""

    def __init__(self, format: BlockFormat) -> None:
        self.format = format
        self.exact: set[int] = set()
        self.seen: dict[tuple[Any, ...], tuple[StorageWeakRef, _Packed]] = {}

    def leave_out(self, module: nn.Module, args: object = None) -> None:
        """Keeps the parameters and buffers that a module holds now from being packed."""
        self.exact.update(own_storages(module))

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """The pack hook: codes and scales, or the tensor itself where it stays exact."""
        saved = self._packed(tensor)
        if isinstance(saved, _Packed):
            observe(saved.packed.codes, saved.packed.scales)
            return saved
        return _as_it_is(saved)

    def _packed(self, tensor: Tensor) -> Tensor | _Packed:
        storage = tensor.untyped_storage()
        if tensor.dtype not in DTYPES or tensor.numel() < MIN_NUMEL:
            return tensor
        if storage._cdata in self.exact or isinstance(tensor, nn.Parameter):
            return tensor
        if not tensor.is_contiguous():
            return _Packed(self.format.quantize(tensor.detach()), tensor.shape)
        # Flattened and unflattened views of one tensor are the same bytes. The weak reference pins the address, so a
        # storage that has been freed since cannot be mistaken for this one.
        key = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version)
        found = self.seen.get(key)
        if found is None or found[0].expired():
            found = (StorageWeakRef(storage), _Packed(self.format.quantize(tensor.detach()), tensor.shape))
            self.seen[key] = found
        return _Packed(found[1].packed, tensor.shape)

    @staticmethod
    def unpack(saved: Tensor | _Packed) -> Tensor:
        """The unpack hook."""
        return saved.unpack() if isinstance(saved, _Packed) else saved


class HooksForward:
    """Replaces the forward of a whole model: the original one, with its saved tensors packed.

    Args:
        module: whose forward is replaced.
        format: how saved tensors are packed.
    """

    def __init__(self, module: nn.Module, format: BlockFormat) -> None:
        self.module = module
        self.format = format
        self.replaced = module.__dict__.get("forward")

    # Under torch.compile, hooks of this kind would all unpack when backward starts and save nothing.
    @torch.compiler.disable(
        reason="laconic: saved-tensor hooks run eagerly; compile the model with mode='sites' instead"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.replaced if self.replaced is not None else type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        packer = _Packer(self.format)
        with ExitStack() as stack:
            # Looked at module by module: FSDP2 gathers parameters just before the forward that uses them.
            stack.callback(register_module_forward_pre_hook(packer.leave_out).remove)
            packer.leave_out(self.module)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack))
            stack.enter_context(_ExactFunctions())
            return original(*args, **kwargs)
