"""Forwards for mixture-of-experts blocks: routing exact, experts run again in backward.

[Note: experts] Routing is saved, never recomputed: the indices and weights that the router made stay as they are, and
so does everything between its logits and them. The router's linear layer is like any other: the gradient of its weight
takes the input from what is kept for the norm in front.

The experts keep the same packed input, so a block of experts costs no bytes of its own. Backward dequantizes it and
runs the module's own code again, with the same indices and weights, one layer at a time (`SecondRun`). That serves
whatever they compute and however they are run (a loop, grouped or batched products; biases, clamps, norms inside), at
the price of one more forward of the experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laconic.activations.backward import functions
from laconic.activations.backward.decisions import Habit
from laconic.activations.backward.replay import Replay, forgetting
from laconic.activations.backward.rerun import graft, rebuilt
from laconic.activations.backward.saving import BoundFunction, SecondRun
from laconic.activations.forwards.base import SiteForward
from laconic.activations.host.modules import modules_of
from laconic.activations.host.patched import NATIVE, unpatched
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import keep
from laconic.activations.keep.witnesses import RUNNING
from laconic.activations.recognize.sites import Site


class RouterForward(SiteForward):
    """Runs the router's own code; its linear layer keeps what rebuilds the input."""

    def keeps(self, x: Tensor) -> bool:
        """Whether the router's weight needs a gradient."""
        weight = self.module.weight
        return isinstance(weight, Tensor) and weight.requires_grad

    def run(self, x: Tensor, is_traced: bool) -> Any:
        """The router's own forward, whose linear layer saves what rebuilds its input."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        if not is_traced:
            self.origin = keep(x, self.format, "router").origin
        with _LinearOf(weight.shape, self.format):
            return self.original(x)


_CASTS = (Tensor.to, Tensor.type, Tensor.float)


class _LinearOf(TorchFunctionMode):
    """Lets the product with a weight of a given shape keep its input packed, also when the input was cast before."""

    def __init__(self, shape: torch.Size, format: Packing) -> None:
        super().__init__()
        self._shape = shape
        self._format = format

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) not in NATIVE:
            func = unpatched(func)
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[1].shape == self._shape:
            x, weight, *bias = args
            with forgetting():
                value = func(*args)
            return functions.linear(x, weight, value, False, self._format, bias=bias[0] if bias else None)
        result = func(*args, **kwargs)
        return functions.cast(args[0], result) if func in _CASTS and result is not args[0] else result


class ExpertsForward(SiteForward):
    """Saves what rebuilds the tokens' hidden states; backward recomputes the rest.

    Where parameters have come or gone since the conversion (adapters of expert weights parametrize them while forward
    runs; pruning), the module's own code runs: in backward they may not be there.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self._names = [name for name, _ in module.named_parameters()]
        self.habit = Habit(site.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; in training, one that saves the packed hidden states only."""
        args, kwargs = self.positional(args, kwargs)
        if not args:
            return self.original(**kwargs)
        return self._run(*args, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.serves(x) or self.stays_exact():
            return self.original(x, *args, **kwargs)
        own = dict(self.module.named_parameters())
        call, others = BoundFunction.of(self.original, 1, args, kwargs)
        if not any(t.requires_grad for t in (x, *own.values(), *others)) or list(own) != self._names:
            return self.original(x, *args, **kwargs)
        if torch.compiler.is_compiling():  # see laconic.activations.backward.rerun
            with torch.no_grad():
                result = self.original(x, *args, **kwargs)
            again = self.original(rebuilt(x, self.format, "experts", True), *args, **kwargs)
            return graft(result, again, "experts")
        RUNNING.site = self.site.name
        kept = keep(x, self.format, "experts")
        self.origin = kept.origin
        run = SecondRun(
            self.site.name,
            call,
            (kept,),
            self.module,
            own,
            Replay(x.device, self.module, self.habit.decisions(modules_of(self.module), args, kwargs)),
        )
        return run.first(x, *others)
