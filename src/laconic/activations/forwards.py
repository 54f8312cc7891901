"""The forwards that take the place of a site's own.

Each is a small callable object stored as the module's `forward`, so parameters, names, hooks and checkpoints of the
module stay untouched, and a model with such forwards can be copied and pickled. Wherever nothing has to be kept (no
gradient wanted, in evaluation and generation, for frozen weights) the original code runs as if we were not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations import functions
from laconic.activations.checkpoint import runs_twice
from laconic.activations.choice import Packing
from laconic.activations.functions import NormSpec
from laconic.activations.kept import attach, derive, found_or_held
from laconic.activations.replay import Replay
from laconic.activations.sites import LinearSpec, MlpSpec, Site
from laconic.formats import BlockFormat
from laconic.ops import DTYPES

__all__ = ["LinearForward", "MlpForward", "NormForward", "SiteForward"]


class SiteForward:
    """Base of the replaced forwards.

    Args:
        module: whose forward is replaced.
        site: what it is.
        format: how a tensor is packed if this site has to pack it.

    `origin` says after a forward what the input was rebuilt from: "norm", "mlp", "linear" or "attention".
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        self.module = module
        self.site = site
        self.format = format
        self.origin: str | None = None
        self.replaced = module.__dict__.get("forward")

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def keeps(self, x: Tensor) -> bool:
        """Whether a call with this input has to keep something for backward."""
        return True

    def stays_exact(self) -> bool:
        """Whether what this call keeps is not worth packing, because it lives for one layer's backward only."""
        return runs_twice()

    def run(self, x: Tensor) -> Any:
        """The forward of a call that keeps something."""
        raise TypeError(f"{type(self).__name__} has to define run")

    def value(self, x: Tensor) -> Tensor:
        """What the module's own code computes, saving nothing for backward."""
        with torch.no_grad():
            result: Tensor = self.original(x)
        return result

    @staticmethod
    def ours(x: Any) -> bool:
        """Whether `x` is a tensor of a kind that can be packed."""
        return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in DTYPES

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not args and not kwargs
        if self.ours(x) and torch.is_grad_enabled() and plain and self.keeps(x) and not self.stays_exact():
            return self.run(x)
        return self.original(x, *args, **kwargs)

    def _noting_origin(self, y: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.origin = functions.origin_of(y)
        return y


class NormForward(SiteForward):
    """Keeps the packed input; the output, that is the input of what follows, is rebuilt from it."""

    def keeps(self, x: Tensor) -> bool:
        return any(t.requires_grad for t in (x, *self.module.parameters(recurse=False)))

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, NormSpec)
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        return self._noting_origin(functions.norm(x, self.value(x), spec, self.format, weight=weight, bias=bias))


class LinearForward(SiteForward):
    """Keeps whatever can rebuild the input, for the gradient of the weight."""

    def keeps(self, x: Tensor) -> bool:
        return self.weight.requires_grad

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] or transposed; under FSDP2 the gathered one while forward runs."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, LinearSpec)
        bias = self.module._parameters["bias"]
        y = functions.linear(x, self.weight, self.value(x), spec.transposed, self.format, bias=bias)
        return self._noting_origin(y)


class MlpForward(SiteForward):
    """Keeps packed gate and up projections; the input of the down projection is rebuilt from them."""

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, MlpSpec)
        child: Callable[[str], nn.Module] = self.module.get_submodule
        gate = self.project(x, child(spec.gate))
        up = None if spec.up is None else self.project(x, child(spec.up))
        inside = self._inside(spec, child(spec.act), gate, up)
        out: Tensor = child(spec.down)(inside)
        return out if spec.dropout is None else child(spec.dropout)(out)

    def project(self, x: Tensor, layer: nn.Module) -> Tensor:
        """gate or up of x."""
        y: Tensor = layer(x)
        return y

    def _inside(self, spec: MlpSpec, act: nn.Module, gate: Tensor, up: Tensor | None) -> Tensor:
        """act(gate) * up (up may be None, or the second half of gate), noting how to rebuild it."""

        def forward(gate: Tensor, up: Tensor | None = None) -> Tensor:
            if spec.fused:
                gate, up = gate.chunk(2, -1)
            value: Tensor = act(gate)
            return value if up is None else value * up

        if not (gate.requires_grad or (up is not None and up.requires_grad)):
            return forward(gate, up)
        with torch.no_grad():
            value = forward(gate, up)
        return self._noting_origin(functions.activate(gate, value, spec.activation, spec.fused, self.format, up=up))


class RecomputedMlpForward(MlpForward):
    """Keeps neither gate nor up: backward projects the rebuilt input again, which takes two products of matrices."""

    def __init__(self, module: nn.Module, site: Site) -> None:
        super().__init__(module, site, BlockFormat())

    def project(self, x: Tensor, layer: nn.Module) -> Tensor:
        if torch.compiler.is_compiling():  # a compiled graph packs gate and up instead
            return super().project(x, layer)
        replay = Replay(x.device)
        y, random_state = replay.run(lambda: layer(x))
        if y.requires_grad:
            kept = found_or_held(x)  # what the layer itself keeps of x, if that is not all of it
            parameters = tuple(layer.parameters())

            def again(x: Tensor, *saved: Tensor) -> Tensor:
                with torch.no_grad(), replay.again(saved[len(parameters) :]):
                    # Not through the module's hooks: those of FSDP2 gather parameters, which are there in backward.
                    y: Tensor = layer.forward(x)
                return y

            attach(y, derive(again, (kept,), (*parameters, *random_state), "recompute"))
        result: Tensor = y
        return result
