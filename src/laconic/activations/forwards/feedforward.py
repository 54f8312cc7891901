"""Forwards for feed-forward blocks: the block's own code runs, and its activation and its product save packed tensors.

[Note: feed-forward blocks] A block is recognized by a formula, down(act(gate(x)) * up(x)), but no formula replaces it:
dropout wherever it stands, noise, scales, casts and whatever else the block does, in training or from some later moment
on, is the block's own code. Only two operations inside of it are replaced, each by one with the same value and its own
backward:

- its activation module, which packs its input and leaves a note that its output can be rebuilt from that;
- the product of two tensors of one shape of which one carries such a note: the other one is packed.

So the input of the down projection can be rebuilt if nothing stands in between, and is packed there otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.backward import functions
from laconic.activations.backward.decisions import Habit
from laconic.activations.backward.replay import Replay, swap_parameters
from laconic.activations.forwards.base import BlockMode, SiteForward
from laconic.activations.forwards.checkpoint import is_plain
from laconic.activations.forwards.elementwise import activation
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.host.dtensors import is_packable
from laconic.activations.host.modules import modules_of
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import attach, derive, found, found_or_held
from laconic.activations.recognize.sites import MlpSpec, Site
from laconic.activations.recognize.trial import PlainAttributes
from laconic.formats import BlockFormat
from laconic.ops import DTYPES


class MlpForward(SiteForward):
    """Runs the block's own code; its activation and its product save packed gate and up projections."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        assert isinstance(site.spec, MlpSpec)
        self.spec = site.spec
        self.activation = ActivationForward.of(module.get_submodule(site.spec.act), site, format)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward; in training, with its activation and its product replaced while it runs."""
        if not is_plain() and (not torch.is_grad_enabled() or self.stays_exact()):
            return self.original(*args, **kwargs)
        outer, self.activation.block = self.activation.block, self
        try:
            if self.spec.up is None and not self.spec.fused:
                return self.original(*args, **kwargs)
            with _Products(self):
                return self.original(*args, **kwargs)
        finally:
            self.activation.block = outer

    def may_keep(self, x: Tensor) -> bool:
        """Whether operations inside of the block may save `x` in the block's format."""
        return True


class ActivationForward(SiteForward):
    """The activation module of blocks; it keeps its input packed while one of them runs.

    `block` is the one that runs; several may share an activation.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.block: MlpForward | None = None
        self.attributes = PlainAttributes(module)

    def serves(self, x: Any) -> bool:
        """Whether the input is a tensor or DTensor that can be packed."""
        return self.ours(x) or (isinstance(x, Tensor) and is_packable(x) and x.dtype in DTYPES)

    @classmethod
    def of(cls, module: nn.Module, site: Site, format: Packing) -> ActivationForward:
        """The replaced forward of a module, which gets one if it has none."""
        known = next(replacements_of(module), None)
        if isinstance(known, cls):
            return known
        forward = cls(module, site, format)
        forward.install()
        return forward

    def keeps(self, x: Tensor) -> bool:
        """Whether a block runs that may pack this input, and the module still computes what was recognized.

        Not of a relu in a compiled graph, which has no bits for the signs.
        """
        block = self.block
        if block is None or (block.spec.activation == "relu" and torch.compiler.is_compiling()):
            return False
        return x.requires_grad and self.attributes.unchanged(self.module) and block.may_keep(x)

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The activation of x, saving x packed."""
        block = self.block
        if block is None:  # another thread has just left the block
            y: Tensor = self.original(x)
            return y
        y = activation(x, self.value(x, is_traced), block.spec.activation, block.format)
        return block._noting_origin(y, is_traced)


PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__)
PARTS = (torch.chunk, torch.split, Tensor.chunk, Tensor.split, Tensor.__getitem__)


class _Products(BlockMode):
    """Lets the product of two tensors, one of which can be rebuilt, keep the other one packed."""

    def __init__(self, block: MlpForward) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        kwargs = kwargs or {}
        if func in PRODUCTS and not kwargs and torch.is_grad_enabled() and self._may_keep(*args):
            a, b = args
            return functions.multiply(a, b, self._block.format)
        result = func(*args, **kwargs)
        if func in PARTS and not torch.compiler.is_compiling():
            note_parts(func, args, kwargs, result)
        return result

    def _may_keep(self, a: Any, b: Any) -> bool:
        ours = self._block.activation.serves(a) and self._block.activation.serves(b)
        # What needs no gradient is a mask or a constant, which is exact, and the other factor is not kept for it. A
        # leaf is a parameter, which is there anyway.
        if not ours or a.shape != b.shape or a.dtype != b.dtype or not (is_made(a) and is_made(b)):
            return False
        return self._block.may_keep(a) and self._block.may_keep(b)


def is_made(x: Tensor) -> bool:
    """Whether a tensor was computed and wants a gradient: no mask, no constant, no parameter."""
    return x.requires_grad and not x.is_leaf


def note_parts(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    """Note on the parts of a tensor that can be rebuilt (gate and up, side by side) that they can be too."""
    whole = found(args[0]) if args and isinstance(args[0], Tensor) else None
    if whole is None or any(isinstance(leaf, Tensor) for leaf in args[1:]):
        return
    rest, kwargs = kept_arguments(args[1:], kwargs)
    for index, part in enumerate(result if isinstance(result, tuple | list) else ()):
        attach(part, derive(_part(func, rest, kwargs, index), (whole,), (), whole.origin))


def kept_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to call again with in backward: lists, such as of sizes, are the caller's and may change."""
    return tuple(map(_kept, args)), {name: _kept(value) for name, value in kwargs.items()}


def _kept(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _part(func: Callable[..., Any], args: Any, kwargs: Any, index: int) -> Callable[[Tensor], Tensor]:
    def part(x: Tensor) -> Tensor:
        y: Tensor = func(x, *args, **kwargs)[index]
        return y

    return part


class RecomputedMlpForward(MlpForward):
    """Saves neither gate nor up: backward projects the rebuilt input again, at the price of two matrix products."""

    def __init__(self, module: nn.Module, site: Site) -> None:
        super().__init__(module, site, BlockFormat())
        self.running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, during which gate and up note how to recompute their outputs."""
        outer, self.running = self.running, True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.running = outer

    def may_keep(self, x: Tensor) -> bool:
        """Whether `x` can be rebuilt; anything else stays exact. A compiled graph packs gate and up instead."""
        # Nothing is packed here but in a compiled graph: what cannot be made again stays exact.
        return torch.compiler.is_compiling() or found(x) is not None

    def note_projections(self) -> None:
        """Make gate and up note how to recompute their outputs; called when they have their own forwards."""
        for name in (self.spec.gate, self.spec.up):
            if name is not None:
                layer = self.module.get_submodule(name)
                ProjectionForward(layer, self).install()


class ProjectionForward(SiteForward):
    """Notes on gate or up that backward can project them again from the rebuilt input."""

    def __init__(self, module: nn.Module, block: RecomputedMlpForward) -> None:
        super().__init__(module, block.site, block.format)
        self.block = block
        self.habit = Habit(block.site.name)

    def keeps(self, x: Tensor) -> bool:
        """Whether the block runs outside of compiled graphs, which pack gate and up instead."""
        return self.block.running and not torch.compiler.is_compiling()  # a compiled graph packs gate and up instead

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The projection of x by the module's own code, with the note on its output."""
        replay = Replay(x.device, self.module, self.habit.decisions(modules_of(self.module), (x,), {}))
        y, state = replay.run(lambda: self.original(x))
        if y.requires_grad:
            kept = found_or_held(x)  # what the layer itself keeps of x, if that is not all of it
            named = dict(self.module.named_parameters())
            names, parameters = tuple(named), tuple(named.values())

            def again(x: Tensor, *saved: Tensor) -> Tensor:
                # Those of forward: functional_call has others in their place, and takes them away again.
                with torch.no_grad(), ExitStack() as undo:
                    replay.again(saved[len(parameters) :], undo)
                    swap_parameters(self.module, dict(zip(names, saved, strict=False)), undo)
                    # Not through the module's hooks: those of FSDP2 gather parameters, which are there in backward.
                    y: Tensor = self.original(x)
                return y

            attach(y, derive(again, (kept,), (*parameters, *state), "recompute"))
        result: Tensor = y
        return result
