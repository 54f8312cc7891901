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
from laconic.activations.functions import ACTIVATIONS, NormSpec
from laconic.activations.kept import Kept, attach, derive, keep
from laconic.activations.sites import LinearSpec, MlpSpec, Site
from laconic.formats import BlockFormat
from laconic.ops import DTYPES

__all__ = ["SiteForward", "forward_for"]


class SiteForward:
    """Base of the replaced forwards.

    Args:
        module: whose forward is replaced.
        site: what it is.
        format: how a tensor is packed if this site has to pack it.

    `origin` says after a forward what the input was rebuilt from: "norm", "mlp", "linear" or "attention".
    """

    def __init__(self, module: nn.Module, site: Site, format: BlockFormat) -> None:
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

    def run(self, x: Tensor) -> Tensor:
        """The forward of a call that keeps something."""
        raise TypeError(f"{type(self).__name__} has to define run")

    # torch.compile compiles what lies between the sites and runs the sites as they are: same values, same saved bytes.
    @torch.compiler.disable(reason="laconic: saved activations are packed outside of compiled graphs")
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        ours = isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in DTYPES
        if ours and torch.is_grad_enabled() and not args and not kwargs and self.keeps(x):
            return self.run(x)
        return self.original(x, *args, **kwargs)


class NormForward(SiteForward):
    """Keeps the packed input; the output, that is the input of what follows, is rebuilt from it."""

    def keeps(self, x: Tensor) -> bool:
        return any(t.requires_grad for t in (x, *self.module.parameters(recurse=False)))

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, NormSpec)
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        kept = keep(x, self.format, "norm")
        self.origin = kept.origin
        y = functions.norm(x, weight, bias, kept, spec, self.original)
        parameters = tuple(p for p in (weight, bias) if p is not None)
        dtype = y.dtype

        def rebuild(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
            return functions.normalize(x, weight, bias, spec).to(dtype)

        attach(y, derive(rebuild, (kept,), parameters, "norm"))
        return y


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
        kept = keep(x, self.format, "linear")
        self.origin = kept.origin
        bias = self.module._parameters["bias"]
        return functions.linear(x, self.weight, bias, kept, spec.transposed, self.original)


class MlpForward(SiteForward):
    """Keeps packed gate and up projections; the input of the down projection is rebuilt from them."""

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, MlpSpec)
        child: Callable[[str], nn.Module] = self.module.get_submodule
        act = child(spec.act)
        gate: Tensor = child(spec.gate)(x)
        up: Tensor | None = None if spec.up is None else child(spec.up)(x)
        inside = self._inside(spec, act, gate, up)
        out: Tensor = child(spec.down)(inside)
        return out if spec.dropout is None else child(spec.dropout)(out)

    def _inside(self, spec: MlpSpec, act: nn.Module, gate: Tensor, up: Tensor | None) -> Tensor:
        """act(gate) * up (up may be None, or the second half of gate), noting how to rebuild it."""

        def forward(gate: Tensor, up: Tensor | None = None) -> Tensor:
            if spec.fused:
                gate, up = gate.chunk(2, -1)
            value: Tensor = act(gate)
            return value if up is None else value * up

        if not (gate.requires_grad or (up is not None and up.requires_grad)):
            return forward(gate, up)
        first = keep(gate, self.format, "mlp")
        self.origin = first.origin
        kept_gate, kept_up = first, None if up is None else keep(up, self.format, "mlp")
        if spec.fused:
            kept_gate, kept_up = (derive(_half(index), (first,), (), "mlp") for index in (0, 1))
        kept_act = derive(ACTIVATIONS[spec.activation].forward, (kept_gate,), (), "mlp")
        kept: tuple[Kept, ...]
        if kept_up is None:
            kept, product = (kept_gate,), kept_act
        else:
            # Both the down projection's input and the gradient of up want act(gate), so it is rebuilt once for the two.
            kept, product = (kept_gate, kept_up, kept_act), derive(torch.mul, (kept_act, kept_up), (), "mlp")
        z = functions.activate(gate, up, kept, spec.activation, forward)
        attach(z, product)
        return z


def _half(index: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.chunk(2, -1)[index]


def forward_for(module: nn.Module, site: Site, format: BlockFormat) -> SiteForward:
    """The forward that serves a site."""
    classes: dict[str, type[SiteForward]] = {"norm": NormForward, "linear": LinearForward, "mlp": MlpForward}
    return classes[site.kind](module, site, format)
