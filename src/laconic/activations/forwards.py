"""The forwards that take the place of a site's own; those of feed-forward blocks are in feedforward.py.

Wherever nothing has to be kept (no gradient wanted, in evaluation and generation, for frozen weights) the original code
runs as if we were not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations import functions
from laconic.activations.checkpoint import runs_twice
from laconic.activations.choice import Packing
from laconic.activations.derivatives import is_transformed
from laconic.activations.functions import NormSpec
from laconic.activations.replacement import Replacement
from laconic.activations.replay import forgetting
from laconic.activations.sites import LinearSpec, Site
from laconic.activations.trial import Settings
from laconic.ops import DTYPES

__all__ = ["LinearForward", "NormForward", "SiteForward"]


class SiteForward(Replacement):
    """Base of the forwards of sites.

    Args:
        module: whose forward is replaced.
        site: what it is.
        format: how a tensor is packed if this site has to pack it.

    `origin` says after a forward what the input was rebuilt from: "norm", "mlp", "linear" or "attention".
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module)
        self.site = site
        self.format = format
        self.origin: str | None = None

    def keeps(self, x: Tensor) -> bool:
        """Whether a call with this input has to keep something for backward."""
        return True

    def stays_exact(self) -> bool:
        """Whether what this call keeps is not worth packing, because it lives for one layer's backward only."""
        return runs_twice() or is_transformed()

    def run(self, x: Tensor) -> Any:
        """The forward of a call that keeps something."""
        raise TypeError(f"{type(self).__name__} has to define run")

    def value(self, x: Tensor) -> Tensor:
        """What the module's own code computes where a gradient is wanted, saving nothing for it."""
        with forgetting():
            result: Tensor = self.original(x)
        return result.detach()

    @staticmethod
    def ours(x: Any) -> bool:
        """Whether `x` is a tensor of a kind that can be packed."""
        return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in DTYPES

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.positional(args, kwargs)
        if len(args) != 1 or kwargs or not self.ours(args[0]) or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        x: Tensor = args[0]
        return self.run(x) if self.keeps(x) and not self.stays_exact() else self.original(x)

    def _noting_origin(self, y: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.origin = functions.origin_of(y)
        return y


class NormForward(SiteForward):
    """Keeps the packed input; the output, that is the input of what follows, is rebuilt from it."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.settings = Settings(module)

    def keeps(self, x: Tensor) -> bool:
        wanted = any(t.requires_grad for t in (x, *self.module.parameters(recurse=False)))
        return wanted and self.settings.hold(self.module)

    def run(self, x: Tensor) -> Tensor:
        spec = self.site.spec
        assert isinstance(spec, NormSpec)
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        return self._noting_origin(functions.norm(x, self.value(x), spec, self.format, weight=weight, bias=bias))


class LinearForward(SiteForward):
    """Keeps whatever can rebuild the input, for the gradient of the weight."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.settings = Settings(module)

    def keeps(self, x: Tensor) -> bool:
        return self.weight.requires_grad and self.settings.hold(self.module)

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
