"""Packs what autograd saves while code runs, function by function.

A `Packer` sees which function of torch runs and what it saves, so it can keep of each saved tensor what backward reads:
a bit per value for a relu, four bits for the input of a convolution, everything for a function that it does not know.
It leaves notes on results that can be computed again (see [Note: kept tensors]), as sites do: the output of a batch
norm, and of the relu behind it, is rebuilt from the packed input of the norm and costs the next convolution nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from laconic.activations.host.audited import AUDITED
from laconic.activations.host.dtensors import warn_exact
from laconic.activations.host.modules import modules_of
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.host.streams import record_reader, stream_of
from laconic.activations.host.tracker import own_storages
from laconic.activations.keep.choice import Offload, Packing, block_format_of
from laconic.activations.keep.exact_codes import MemoryLayout, as_mask, mask_of_bits
from laconic.activations.keep.function_rules import Again, FunctionCall, Standard
from laconic.activations.keep.kept import Kept, Tensors, as_packed, attach, derive, found, held, known, pack
from laconic.activations.keep.masked_relu import masked_relu, may_be_masked
from laconic.activations.keep.witnesses import RUNNING, check_unchanged, glance, same
from laconic.errors import ModelError
from laconic.ops import DTYPES
from laconic.ops.codebooks import AFFINE, LEVEL_MAX
from laconic.ops.huge_pages import empty

MIN_NUMEL = 1024
"""Smaller tensors are not worth a call."""

_Unpack = Callable[[Tensors], Tensor]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack."""


_VERSION = attrgetter("_version")


class _Saved:
    """What autograd holds in the place of a tensor: what the hooks around made of `tensors`, and the way back."""

    __slots__ = ("_outer", "_tensors", "_unpack", "_versions")

    def __init__(self, tensors: Tensors, unpack: _Unpack, outer: Hooks | None) -> None:
        self._tensors: Any = tensors if outer is None else tuple(map(outer[0], tensors))
        self._unpack, self._outer = unpack, outer
        self._versions = sum(map(_VERSION, tensors))

    def restore(self) -> Tensor:
        if torch.is_grad_enabled():  # where backward makes a graph of the gradients
            with torch.no_grad():
                return self.restore()
        if self._outer is not None:  # these may be copies, whose versions say nothing
            return self._unpack(tuple(map(self._outer[1], self._tensors)))
        if sum(map(_VERSION, self._tensors)) != self._versions:  # torch does not look below hooks
            shapes = ", ".join(str(list(tensor.shape)) for tensor in self._tensors)
            raise ModelError(
                f"a tensor that backward needs, one of {shapes}, was changed in place after the forward that saved it, "
                f"so the gradient would be wrong; call backward before the change, or change a copy"
            )
        return self._unpack(self._tensors)


class _Running(threading.local):
    """The packer whose hooks are in force in this thread."""

    packer: Packer | None = None


_RUNNING = _Running()


def running_packer() -> Packer | None:
    """The packer under which this thread runs, if any."""
    return _RUNNING.packer


def hooks_around() -> Hooks | None:
    """The innermost hooks on saved tensors in this thread, as hooks of ours inside of them use them; None without any.

    A packer among them is passed over: codes, scales and computed weights are what is kept already.
    """
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    packer = _RUNNING.packer
    return hooks if packer is None or hooks is None or hooks[0] != packer._pack else packer._outer


@contextmanager
def exactly() -> Iterator[None]:
    """While the block runs, the packer around it packs nothing."""
    packer = _RUNNING.packer
    with nullcontext() if packer is None else packer.packing_as(None):
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
        self._call: FunctionCall | None = None
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
        for part in modules_of(module):
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        kwargs = kwargs or {}
        call = FunctionCall(func, args, kwargs)
        x = call.argument("input") if call.family is not None and torch.is_grad_enabled() else None
        kept = found(x) if isinstance(x, Tensor) and not x.is_leaf else None  # before the call, which may work in place
        before, self._call = self._call, call
        try:
            # Hooks inside of these, as those of a checkpointed region, expect torch's own saved tensors.
            if isinstance(x, Tensor) and self._may_mask(call, x):
                result, bits = masked_relu(x, call.is_in_place)
                call.mask = mask_of_bits(bits, MemoryLayout.of(result), 1.0, 0.0)
            else:
                result = func(*args, **kwargs)
            if call.late is not None:
                saved, tensor = call.late
                saved.__init__(*self._packed(tensor, call))
        finally:
            self._call = before
        if isinstance(x, Tensor) and isinstance(result, Tensor) and result.requires_grad and self.format is not None:
            if (kept is None or call.is_norm) and x is not result and not x.is_leaf:
                kept = found(x)  # a norm packs anew what others have packed
            again = None if kept is None else call.again(unbiased=block_format_of(self.format).is_stochastic)
            if kept is not None and again is not None and result.dtype in DTYPES:
                # A norm makes a new tensor of anything; dropout and activations may not.
                note(result, kept, again, makes_new=call.family == "batch_norm")
        return result

    def _may_mask(self, call: FunctionCall, x: Tensor) -> bool:
        if call.family != "relu" or self.format is None or x.numel() < MIN_NUMEL:
            return False
        innermost: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_innermost = innermost is not None and innermost[0] == self._pack
        return is_innermost and torch.is_grad_enabled() and may_be_masked(x, call.is_in_place)

    def _pack(self, tensor: Tensor) -> _Saved:
        call = self._call
        if call is not None and call.normed:
            if call.late is None and tensor.numel() == call.normed[0].numel():
                call.late = _Saved.__new__(_Saved), tensor
                return call.late[0]
            if not any([tensor is given for given in call.normed]):
                call.statistics.append(tensor)
        return _Saved(*self._packed(tensor, call))

    def _packed(self, tensor: Tensor, call: FunctionCall | None) -> tuple[Tensors, _Unpack, Hooks | None]:
        """What `_Saved` takes for a tensor that a call saves."""
        if not _is_large(tensor):
            return self._exact(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._own or isinstance(tensor, nn.Parameter) or AUDITED.is_stand_in(storage):
            return self._exact(tensor)
        if self.format is not None and call is not None and call.family is not None:
            coded = call.code(tensor)
            if coded is not None:
                record_reader(tensor)
                return coded.tensors, coded.decode, self._outer
        kept = self._kept(tensor, storage, call)
        if kept is None:
            return self._exact(tensor)
        record_reader(tensor)
        memo, shape = kept.memo, tensor.shape  # not `kept`: hooks around may hold its codes elsewhere
        memo.announce()
        side = call.side(tensor) if call is not None and call.family is not None else None
        if side is None:
            return kept.tensors, lambda tensors: _shaped(memo.take(tensors), shape), self._outer
        mask, correct = as_mask(side.mask, MemoryLayout.of(side.mask), 1.0, 0.0), side.correct
        decode = mask.decode

        def on_its_side(tensors: tuple[Tensor, ...]) -> Tensor:
            value = _shaped(memo.take(tensors[:-1]), shape)
            return correct(value, decode(tensors[-1:]))

        return (*kept.tensors, *mask.tensors), on_its_side, self._outer

    def _exact(self, tensor: Tensor) -> tuple[Tensors, _Unpack, Hooks | None]:
        # Statistics of a batch norm are saved, changed by its own forward, and not read in backward.
        seen = glance(tensor) if tensor.requires_grad and tensor.is_floating_point() else None
        if seen is None:
            return (tensor.detach(),), itemgetter(0), self._outer

        def unchanged(tensors: tuple[Tensor, ...]) -> Tensor:
            check_unchanged((seen,), tensors)
            return tensors[0]

        # With the node that made it, the graph would hold itself.
        return (tensor.detach(),), unchanged, self._outer

    def _kept(self, tensor: Tensor, storage: torch.UntypedStorage, call: FunctionCall | None) -> Kept | None:
        """The packed form of a tensor that a call saves; None if it stays exact."""
        if self.format is None or tensor.dtype not in DTYPES:
            return None
        format = block_format_of(self.format)
        if format.nbytes((tensor.numel(),)) >= tensor.numel() * tensor.element_size():
            return None
        # Flattened and unflattened views of one tensor are the same bytes.
        layout = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        place = storage._cdata, tensor.storage_offset(), layout, tensor.dtype
        key = (*place, tensor._version, stream_of(tensor), format, call is not None and call.is_norm)
        tolerated = call is not None and call.may_round(tensor)
        reference, kept, values = self._seen.get(key, (None, None, None))
        is_known = reference is not None and not reference.expired()
        if not is_known or (values is not None and not same(values, tensor)):
            kept = None
            if call is not None and tolerated:
                RUNNING.site = call.function.__name__
                kept = keep_image(tensor, self.format, call.standard if call.is_norm else None, self.checked)
            values = None if kept is None else glance(tensor)
        elif not tolerated:
            kept = None
        # What one function keeps exact is there anyway, so the next one refers to it.
        self._seen[key] = (StorageWeakRef(storage), kept, values)
        return kept


def keep_image(
    x: Tensor,
    packing: Packing,
    standard_of: Callable[[Tensor], Standard | None] | None = None,
    checked: bool = False,
) -> Kept:
    """What is kept of `x` already, or its codes in the order in which it lies in memory, noted on it.

    Args:
        x: [batch, channels, ...], or any other floating-point tensor.
        packing: how it is packed if it has to be packed.
        standard_of: x -> how it is standardized before it is rounded; None for not at all.
        checked: keep x itself where its codes stand for infinity or NaN.
    """
    # The batch outlives the step, and the next model that reads it may pack in another format.
    kept, format = None if x.is_leaf else known(x, by_hooks=True), block_format_of(packing)
    # Codes of a reader that is no norm may be rounded beside anything.
    serves = standard_of is None or (kept is not None and kept.origin == "norm")
    if kept is not None and (kept.bits is None or (serves and kept.bits >= format.bits)):
        is_held = any([tensor is x for tensor in kept.tensors])
        return held(x.detach(), kept.origin) if is_held else kept  # with its node, the graph would hold itself
    layout, dtype = MemoryLayout.of(x), x.dtype
    values = x.detach()
    standard = None if standard_of is None else standard_of(values)
    if standard is None:
        kept = pack(layout.flatten(values), packing, "hooks", layout=layout)
    else:
        kept = _pack_standard(values, standard, layout, packing)
    if checked and not isinstance(packing, Offload):
        # Infinities and NaN make the scale of their block NaN, which is below nothing.
        # A value is at most LEVEL_MAX scales, of an affine code beyond the minimum.
        limit = torch.finfo(dtype).max / (LEVEL_MAX[format.code] + (format.code in AFFINE))
        if not bool((kept.tensors[1].float().abs() <= limit).all()):
            return held(x.detach(), "hooks")
    if not x.is_leaf:
        attach(x, kept)
    return kept


def _pack_standard(x: Tensor, standard: Standard, layout: MemoryLayout, packing: Packing) -> Kept:
    """Codes of x without its center, times the factor where blocks reach over what has one."""
    center = standard.center
    factor = standard.factor if standard.run % block_format_of(packing).block_size else None
    if center is None and factor is None:
        return pack(layout.flatten(x), packing, "norm", layout=layout)
    wide = layout.unflatten(empty((x.numel(),), torch.float32, x.device))
    if center is None:
        torch.mul(x, _in_range(standard.factor), out=wide)
    else:
        torch.sub(x, center, out=wide)
        if factor is not None:
            wide.mul_(_in_range(factor))
    given = tuple([tensor for tensor in (center, factor) if tensor is not None])
    flat = pack(layout.flatten(wide), packing, "norm", layout=layout)
    again = partial(_unstandardized, center is not None, factor is not None, x.dtype)
    return as_packed(derive(again, (flat,), given, "norm"), flat)


def _unstandardized(has_center: bool, has_factor: bool, dtype: torch.dtype, x: Tensor, *given: Tensor) -> Tensor:
    """What `_pack_standard` was given, in the place of `x`: nobody else reads what was dequantized."""
    if has_factor:
        x = x.div_(_in_range(given[-1]))
    return (x.add_(given[0]) if has_center else x).to(dtype)


def _in_range(factor: Tensor) -> Tensor:
    """Of a variance that overflows it would be 0, of none without an epsilon infinite."""
    bounds = torch.finfo(torch.float32)
    return factor.clamp(bounds.tiny, bounds.max)


def note(result: Tensor, kept: Kept, again: Again, *, makes_new: bool = False) -> None:
    """Note on what was computed of a tensor that is `kept` how it is computed again."""
    function, tensors = again
    if function is torch.relu and kept.memo.makes_new:
        attach(result, Kept(kept.tensors, kept.memo.then(torch.relu_), kept.origin))
    else:
        function = partial(_again, function, result.dtype)
        attach(result, derive(function, (kept,), tensors, kept.origin, makes_new=makes_new))


def _again(function: Callable[..., Tensor], dtype: torch.dtype, x: Tensor, *tensors: Tensor) -> Tensor:
    """The result of a call from its rebuilt input."""
    if not torch._C._is_any_autocast_enabled():
        return function(x, *tensors).to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        return function(x, *tensors).to(dtype)


def _is_large(tensor: Tensor) -> bool:
    warn_exact("hooks", tensor)
    return tensor.numel() >= MIN_NUMEL and tensor.layout == torch.strided and not isinstance(tensor, DTensor)


def _shaped(value: Tensor, shape: torch.Size) -> Tensor:
    return value if value.shape == shape else value.view(shape)
