"""Packs what autograd saves while code runs, function by function.

A `Packer` sees which function of torch runs and what it saves, so it can keep of each saved tensor what backward reads:
a bit per value for a relu, four bits for the input of a convolution, everything for a function that it does not know.
It leaves notes on results that can be computed again (see [Note: kept tensors]), as sites do: the output of a batch
norm, and of the relu behind it, is rebuilt from the packed input of the norm and costs the next convolution nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.dtensors import warn_exact
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.host.storages import place_of, storages_of
from laconic.activations.host.streams import record_reader, stream_of
from laconic.activations.host.tracker import own_storages
from laconic.activations.keep.choice import Offload, Packing, block_format_of
from laconic.activations.keep.exact_codes import Layout, as_mask, mask_of_bits
from laconic.activations.keep.function_rules import Call
from laconic.activations.keep.kept import Kept, attach, derive, found, known, pack
from laconic.activations.keep.masked_relu import masked_relu, may_be_masked
from laconic.activations.keep.witnesses import RUNNING, Glances, check_unchanged, glance, glances, same
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from laconic.ops import DTYPES
from laconic.ops.codebooks import AFFINE, LEVEL_MAX

_MIN_NUMEL = 1024
"""Smaller tensors are not worth a call."""


@dataclass(frozen=True)
class _Saved:
    """What autograd holds in the place of a tensor: what the hooks around made of `tensors`, and the way back."""

    tensors: tuple[Any, ...]
    unpack: Callable[[tuple[Tensor, ...]], Tensor]
    outer: Callable[[Any], Tensor] | None

    def restore(self) -> Tensor:
        tensors = self.tensors if self.outer is None else tuple(map(self.outer, self.tensors))
        return self.unpack(tensors)


class _Running(threading.local):
    """The packer whose hooks are in force in this thread."""

    packer: Packer | None = None


_RUNNING = _Running()


def running_packer() -> Packer | None:
    """The packer under which this thread runs, if any."""
    return _RUNNING.packer


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack."""


def hooks_around() -> Hooks | None:
    """The innermost hooks on saved tensors in this thread, as hooks of ours inside of them use them; None without any.

    A packer among them holds what it is given: codes, scales and computed weights are what is kept already.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    packer = _RUNNING.packer
    return hooks if hooks is None or packer is None else packer.holding(hooks)


@contextmanager
def exactly() -> Iterator[None]:
    """While the block runs, the packer around it packs nothing."""
    packer = _RUNNING.packer
    with ExitStack() as stack:
        if packer is not None:
            stack.enter_context(packer.packing_as(None))
        yield


class Packer(TorchFunctionMode):
    """Packs saved tensors while it is `active`; what is saved several times is packed once.

    Args:
        format: how tensors are packed that are rounded.
        checked: keep tensors exactly whose packed values would not be finite; costs a look at the scales.
    """

    def __init__(self, format: Packing, *, checked: bool) -> None:
        super().__init__()
        self.format: Packing | None = format
        self.checked = checked
        self._call: Call | None = None
        self._outer: Hooks | None = None
        # Parameters and buffers; and what was saved: how it is kept, None if exactly. The weak references pin the
        # addresses, so a storage that has been freed since cannot be mistaken for one of these.
        self._own: dict[int, StorageWeakRef] = {}
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, Kept | None, bytes | Tensor | None]] = {}

    @contextmanager
    def active(self, module: nn.Module) -> Iterator[None]:
        """Pack while the block runs; the parameters and buffers of `module` itself are left out."""
        # Hooks around these see what these make of a tensor: save_on_cpu gets codes.
        self._outer = hooks_around()
        self.leave_out(module)
        for part in module.modules():
            if part._compiled_call_impl is not None:  # its graph takes the parameters of all inside, and runs no hook
                for inside in part.modules():
                    self.leave_out(inside)
        before, _RUNNING.packer = _RUNNING.packer, self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.restore), self:
                yield
        finally:
            _RUNNING.packer = before
            self._seen.clear()  # torch holds the hooks, and so all that was packed, as long as one tensor of it

    @contextmanager
    def packing_as(self, format: Packing | None) -> Iterator[None]:
        """While the block runs, pack in another format; None packs nothing."""
        before, self.format = self.format, format
        try:
            yield
        finally:
            self.format = before

    def leave_out(self, module: nn.Module, args: object = None) -> None:
        """Exclude the parameters and buffers that a module holds now from packing."""
        # A graph that is being traced has none yet; `active` looks at them.
        if torch.compiler.is_compiling():
            return
        self._own.update(own_storages(module))

    def run_one(self, call: Call, module: nn.Module, function: Callable[..., Any], x: Tensor) -> Any:
        """`function(x)`, a forward of which autograd saves what `call` saves and nothing else.

        As `active`, at less than half the time: the functions of torch that run need not be watched.
        """
        if self._may_mask(call, x):  # nothing is saved that has to be packed
            return self._during(call, function, (x,), {}, masks=True)
        self._outer = hooks_around()
        self.leave_out(module)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.restore):
                return self._during(call, function, (x,), {}, masks=False)
        finally:
            self._seen.clear()  # as in `active`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        kwargs = kwargs or {}
        call = Call(func, args, kwargs)
        # Hooks inside of these, as those of a checkpointed region, expect torch's own saved tensors.
        masks = call.family == "relu" and self._may_mask(call, call.argument("input")) and self._is_innermost()
        return self._during(call, func, args, kwargs, masks=masks)

    def _during(self, call: Call, function: Callable[..., Any], args: Any, kwargs: Any, *, masks: bool) -> Any:
        """`function(*args, **kwargs)`, what it saves packed as that of `call`, with a note on what it returns.

        With `masks` it is a relu, which keeps bits of its own making instead of a tensor that is packed into them.
        """
        x = call.argument("input") if call.family is not None and torch.is_grad_enabled() else None
        kept = found(x) if isinstance(x, Tensor) and not x.is_leaf else None  # before the call, which may work in place
        before, self._call = self._call, call
        try:
            if masks and isinstance(x, Tensor):
                result, bits = masked_relu(x, call.is_in_place)
                call.mask = mask_of_bits(bits, Layout.of(result), 1.0, 0.0)
            else:
                result = function(*args, **kwargs)
        finally:
            self._call = before
        if isinstance(x, Tensor) and isinstance(result, Tensor) and result.requires_grad:
            self._note(call, x, kept, result)
        return result

    def _may_mask(self, call: Call, x: object) -> bool:
        """Whether a call is a relu whose result is worth a bit per value."""
        if call.family != "relu" or self.format is None or not isinstance(x, Tensor) or x.numel() < _MIN_NUMEL:
            return False
        return torch.is_grad_enabled() and may_be_masked(x, call.is_in_place)

    def _is_innermost(self) -> bool:
        innermost: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return innermost is not None and getattr(innermost[0], "__self__", None) is self

    def _note(self, call: Call, x: Tensor, kept: Kept | None, result: Tensor) -> None:
        """Note on the result of a call that it can be computed again, if its input can be rebuilt."""
        kept = kept or (found(x) if x is not result and not x.is_leaf else None)
        again = None
        if kept is not None and self.format is not None:
            again = call.again(unbiased=block_format_of(self.format).is_stochastic)
        if kept is None or again is None or result.dtype not in DTYPES:
            return
        function, tensors = again
        inner = kept.memo
        is_relu = function is torch.relu
        dtype, states = result.dtype, tuple(map(_state, tensors))

        def rebuild(x: Tensor, *tensors: Tensor) -> Tensor:
            in_place = is_relu and not torch.is_grad_enabled()  # or the graph of the gradients may have x as well
            for tensor, state in zip(tensors, states, strict=True):
                _unchanged(tensor, state)
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                if in_place and inner.gives_away():
                    return x.relu_()
                return function(x, *tensors).to(dtype)

        # A norm makes a new tensor of anything; dropout and activations may not.
        attach(result, derive(rebuild, (kept,), tensors, kept.origin, makes_new=call.family == "batch_norm"))

    def holding(self, hooks: Hooks) -> Hooks:
        """`hooks`; if they are this packer's, others that pack nothing."""
        return (self._hold, _Saved.restore) if getattr(hooks[0], "__self__", None) is self else hooks

    def _pack(self, tensor: Tensor) -> _Saved:
        return self._saved(*(self._packed(tensor) if _is_large(tensor) else _exact(tensor)))

    def _hold(self, tensor: Tensor) -> _Saved:
        return self._saved(*_exact(tensor))

    def _saved(self, tensors: tuple[Tensor, ...], unpack: Callable[[tuple[Tensor, ...]], Tensor]) -> _Saved:
        if self._outer is None:
            return _Saved(tensors, unpack, None)
        pack, restore = self._outer
        return _Saved(tuple(map(pack, tensors)), unpack, restore)

    def _packed(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Tensor]]:
        call = self._call
        storage = tensor.untyped_storage()
        is_own = storage._cdata in self._own or isinstance(tensor, nn.Parameter) or AUDITED.is_stand_in(storage)
        if self.format is not None and call is not None and not is_own:
            coded = call.code(tensor) if call.family is not None else None
            if coded is not None:
                record_reader(tensor)
                return coded.tensors, coded.decode
        kept = None if is_own else self._kept(tensor, storage, call)
        if kept is not None:
            record_reader(tensor)
            memo, shape = kept.memo, tensor.shape  # not `kept`: hooks around may hold its codes elsewhere
            memo.announce()
            held = tuple(tensor.detach() for tensor in kept.tensors)
            side = call.side(tensor) if call is not None and call.family is not None else None
            if side is None:
                return held, lambda tensors: _shaped(memo.take(tensors), shape)
            mask, correct = as_mask(side.mask, Layout.of(side.mask), 1.0, 0.0), side.correct
            decode = mask.decode

            def on_its_side(tensors: tuple[Tensor, ...]) -> Tensor:
                value = _shaped(memo.take(tensors[:-1]), shape)
                return correct(value, decode(tensors[-1:]))

            return (*held, *mask.tensors), on_its_side
        return _exact(tensor)

    def _kept(self, tensor: Tensor, storage: torch.UntypedStorage, call: Call | None) -> Kept | None:
        """The packed form of a tensor that a call saves; None if it stays exact."""
        format = self.format.format if isinstance(self.format, Offload) else self.format
        if (
            self.format is None
            or format is None
            or tensor.dtype not in DTYPES
            or format.nbytes((tensor.numel(),)) >= tensor.numel() * tensor.element_size()
        ):
            return None
        # Flattened and unflattened views of one tensor are the same bytes.
        layout = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (storage._cdata, tensor.storage_offset(), layout, tensor.dtype, tensor._version, stream_of(tensor))
        tolerated = call is not None and call.may_round(tensor)
        reference, kept, values = self._seen.get(key, (None, None, None))
        is_known = reference is not None and not reference.expired()
        if not is_known or (values is not None and not same(values, tensor)):
            kept = self._rounded(tensor, self.format, format, call) if call is not None and tolerated else None
            values = None if kept is None else glance(tensor)
        elif not tolerated:
            kept = None
        # What one function keeps exact is there anyway, so the next one refers to it.
        self._seen[key] = (StorageWeakRef(storage), kept, values)
        return kept

    def _rounded(self, tensor: Tensor, packing: Packing, format: BlockFormat, call: Call) -> Kept | None:
        # The batch outlives the step, and the next model that reads it may pack in another format.
        kept = None if tensor.is_leaf else known(tensor, by_hooks=True)
        if kept is not None and any(held is tensor for held in kept.tensors):
            # With the node that made it, the graph would hold itself.
            return Kept((tensor.detach(),), kept.memo, kept.origin)
        if kept is not None:
            return kept
        RUNNING.site = call.function.__name__
        layout, x = Layout.of(tensor), tensor.detach()
        center = call.center(x)
        period = None if center is None else _period(layout, center, format.block_size)
        if period is not None:  # the op subtracts while it reads
            kept = pack(layout.flatten(x).view(-1, len(period)), packing, "hooks", period, layout)
        elif center is None:
            kept = pack(layout.flatten(x), packing, "hooks", layout=layout)
        else:
            x = (x.float() if x.dtype == torch.float16 else x) - center  # a difference may leave the range of float16
            flat, dtype = pack(layout.flatten(x), packing, "hooks", layout=layout), tensor.dtype
            # Nobody else reads what was dequantized, so the center is added in place.
            kept = derive(lambda x, center: x.add_(center).to(dtype), (flat,), (center,), "hooks")
        if self.checked and not isinstance(packing, Offload):
            # Infinities and NaN make the scale of their block NaN, which is below nothing.
            # A value is at most LEVEL_MAX scales, of an affine code beyond the minimum.
            limit = torch.finfo(tensor.dtype).max / (LEVEL_MAX[format.code] + (format.code in AFFINE))
            if not bool((kept.tensors[1].float().abs() <= limit).all()):
                return None
        if not tensor.is_leaf:
            attach(tensor, kept)
        return kept


def _period(layout: Layout, center: Tensor, block_size: int) -> Tensor | None:
    """Fp32 [a multiple of `block_size`], which repeats `center` [1, channels, ...] along a tensor in memory.

    None where the channels of a tensor do not lie side by side, or the period does not divide it.
    """
    channels = center.numel()
    if center.shape[0] != 1 or channels != layout.shape[1] or layout.stride[1] != 1:
        return None
    repeats = block_size // math.gcd(block_size, channels)
    if layout.shape.numel() % (repeats * channels):
        return None
    each = center.float().view(-1)
    return each if repeats == 1 else each.repeat(repeats)


def _exact(tensor: Tensor) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], Tensor]]:
    # With the node that made it, the graph would hold itself.
    state = _state(tensor)
    return (tensor.detach(),), lambda tensors: _unchanged(tensors[0], state)


def _is_large(tensor: Tensor) -> bool:
    warn_exact("hooks", tensor)
    return tensor.numel() >= _MIN_NUMEL and tensor.layout == torch.strided and not isinstance(tensor, DTensor)


def _shaped(value: Tensor, shape: torch.Size) -> Tensor:
    return value if value.shape == shape else value.view(shape)


_State = tuple[tuple[StorageWeakRef, ...], int, Glances]


def _state(tensor: Tensor) -> _State:
    """The storages, the version and, if somebody trains it, some values of what a tensor holds.

    A storage that has been freed leaves its address to none, as long as it is referred to weakly.
    """
    # Statistics of a batch norm are saved, changed by its own forward, and not read in backward.
    storages = tuple(map(StorageWeakRef, storages_of(tensor)))
    return storages, tensor._version, glances((tensor if tensor.requires_grad else None,))


def _unchanged(tensor: Tensor, state: _State) -> Tensor:
    """The tensor, if nobody changed it in place since it had `state`; torch does not look where hooks are in force.

    A copy, which hooks around ours may make, has not been changed.

    Raises:
        ModelError: it was.
    """
    storages, version, values = state
    if tensor._version != version and place_of(tensor) == tuple([storage.cdata for storage in storages]):
        raise ModelError(
            f"a tensor {list(tensor.shape)} that backward needs was changed in place after the forward that saved it "
            f"(version {tensor._version} instead of {version}), so the gradient would be wrong; call backward before "
            f"the change, or change a copy"
        )
    check_unchanged(values, (tensor,))
    return tensor
