"""Forwards that replace those of norms and linear layers; those of feed-forward blocks are in feedforward.py.

Wherever nothing has to be saved (no gradient wanted, in evaluation and generation, for frozen weights) the original
code runs unchanged.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from laconic.activations.backward import functions
from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.backward.norms import NormSpec
from laconic.activations.backward.replay import FORGETTING
from laconic.activations.backward.saving import hooks_of_linear
from laconic.activations.forwards.checkpoint import is_plain, num_modes, runs_twice
from laconic.activations.forwards.replacement import Replacement
from laconic.activations.host.dtensors import has_whole_rows, is_packable, warn_exact
from laconic.activations.host.patched import overrides_functions
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.kept import keep, mark_as_linear
from laconic.activations.keep.witnesses import RUNNING
from laconic.activations.recognize.sites import LinearSpec, Site
from laconic.activations.recognize.trial import PlainAttributes
from laconic.ops import DTYPES


class BlockMode(TorchFunctionMode):
    """Base of modes that replace functions in a block's own code; the sites inside of the block run without them.

    torch calls a mode for each function, method and property of a tensor, and the code of sites asks for many.
    """


def _pop_block_modes(depth: int) -> list[Any]:
    """Take the innermost of `depth` modes off that are of this kind, and return them, the innermost first."""
    modes = []
    while depth and isinstance(mode := torch._C._get_function_stack_at(depth - 1), BlockMode):
        torch._C._pop_torch_function_stack()
        modes.append(mode)
        depth -= 1
    return modes


class SiteForward(Replacement):
    """Base of the forwards of sites.

    After a forward, `origin` says what the input was rebuilt from: "norm", "mlp", "linear" or "attention".

    Args:
        module: whose forward is replaced.
        site: its description.
        format: how a tensor is packed if this site has to pack it.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module)
        self.site = site
        self.format = format
        self.origin: str | None = None
        self._has_warned = False
        self._parameters = frozenset(name for name, p in module._parameters.items() if p is not None)

    def parameter(self, name: str) -> Tensor | None:
        """The module's parameter of this name, or what a hook computes in its place (weight norm, pruning)."""
        own: Tensor | None = self.module._parameters.get(name)
        return getattr(self.module, name) if own is None and name in self._parameters else own

    @property
    def is_parametrized(self) -> bool:
        """Whether torch.nn.utils.parametrize computes a parameter of the module, anew whenever it is asked for.

        That was done after the conversion, since parametrized modules are no sites; such a module runs its own code.
        """
        if "parametrizations" not in self.module._modules:
            return False
        if not self._has_warned and not torch.compiler.is_compiling():
            self._has_warned = True
            logging.getLogger("laconic").warning(
                "%s was parametrized after compress_activations, so it stays exact; call decompress_activations(model) "
                "and compress_activations(model) to have this in the report",
                self.site.name,
            )
        return True

    def keeps(self, x: Tensor) -> bool:
        """Whether a call with this input has to save something for backward."""
        return True

    def stays_exact(self) -> bool:
        """Whether the saved tensors are not worth packing, because they live for one layer's backward only."""
        return runs_twice() or is_transformed()

    def run(self, x: Tensor, is_traced: bool) -> Any:
        """The forward of a call that saves something, in a graph of torch.compile if `is_traced`."""
        raise TypeError(f"{type(self).__name__} has to define run")

    def value(self, x: Tensor, is_traced: bool) -> Tensor:
        """The output of the module's own code, where a gradient is wanted, without saving anything for it."""
        with torch.no_grad() if is_traced else FORGETTING:
            result: Tensor = self.original(x)
        return result if is_traced else result.detach()  # see `as_result`

    @staticmethod
    def ours(x: Any) -> bool:
        """Whether `x` is a tensor of a kind that can be packed."""
        if type(x) is Tensor:
            return x.dtype in DTYPES
        plain = isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in DTYPES
        return plain and not overrides_functions(x)

    def serves(self, x: Any) -> bool:
        """Whether an input of this kind can be packed here: a plain tensor, or a DTensor where the site knows how."""
        if not isinstance(x, DTensor):
            return self.ours(x)
        if torch.is_grad_enabled():
            warn_exact(self.site.kind, x)
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run` where the call has to save something that is worth packing, else the original forward."""
        depth, is_alone = num_modes(), len(args) == 1 and not kwargs
        if is_alone and not depth and is_plain() and type(x := args[0]) is Tensor and x.dtype in DTYPES:
            if not self.keeps(x):
                return self.left(x)
            RUNNING.site = self.site.name
            return self.run(x, False)
        is_traced = torch.compiler.is_compiling()
        if depth and not is_traced and (modes := _pop_block_modes(depth)):
            try:
                return self(*args, **kwargs)
            finally:
                for mode in reversed(modes):
                    torch._C._push_on_torch_function_stack(mode)
        if kwargs:
            args, kwargs = self.positional(args, kwargs)
        if len(args) != 1 or kwargs or not self.serves(args[0]) or not torch.is_grad_enabled():
            return self.left(*args, **kwargs)
        x = args[0]
        if self.stays_exact() or not self.keeps(x):
            return self.left(x)
        if not is_traced:
            RUNNING.site = self.site.name
        return self.run(x, is_traced)

    def left(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a call from which this site saves nothing of its own."""
        return self.original(*args, **kwargs)

    def _noting_origin(self, y: Tensor, is_traced: bool) -> Tensor:
        """`y`, an output of one of `functions`, with the kind of site whose saved tensors rebuild its input noted."""
        if not is_traced:
            node: Any = y.grad_fn  # the context of an autograd function is its node in the graph
            self.origin = node.origin
        return y


class NormForward(SiteForward):
    """Saves the packed input; the output, which is the input of the layers behind, is rebuilt from it."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.attributes = PlainAttributes(module)

    def serves(self, x: Any) -> bool:
        """Whether the input is a plain tensor, or a DTensor of which this rank holds whole rows."""
        if not isinstance(x, DTensor):
            return self.ours(x)
        parameters = (self.parameter(name) for name in ("weight", "bias"))
        return (is_packable(x) and x.dtype in DTYPES and has_whole_rows(x, *parameters)) or super().serves(x)

    def keeps(self, x: Tensor) -> bool:
        """Whether input or parameters need a gradient and the module still computes what was recognized."""
        module = self.module
        if "parametrizations" in module._modules and self.is_parametrized:
            return False
        wanted = x.requires_grad or any(p is not None and p.requires_grad for p in module._parameters.values())
        return wanted and self.attributes.unchanged(module)

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The norm of x, saving x packed."""
        spec = self.site.spec
        assert isinstance(spec, NormSpec)
        weight, bias = self.parameter("weight"), self.parameter("bias")
        y = functions.norm(x, self.value(x, is_traced), spec, self.format, weight=weight, bias=bias)
        return self._noting_origin(y, is_traced)


class LinearForward(SiteForward):
    """Saves whatever can rebuild the input, for the gradient of the weight."""

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.attributes = PlainAttributes(module)

    def serves(self, x: Any) -> bool:
        """Whether the input is a plain tensor, or a DTensor beside a weight on the same mesh."""
        if type(x) is Tensor or not isinstance(x, DTensor):
            return self.ours(x)
        weight = self.weight
        alike = isinstance(weight, DTensor) and weight.device_mesh == x.device_mesh
        return (alike and is_packable(x) and x.dtype in DTYPES) or super().serves(x)

    def keeps(self, x: Tensor) -> bool:
        """Whether the weight needs a gradient and the module still computes what was recognized."""
        module = self.module
        if "parametrizations" in module._modules and self.is_parametrized:
            return False
        weight = module._parameters.get("weight")
        return (self.weight if weight is None else weight).requires_grad and self.attributes.unchanged(module)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] or transposed; under FSDP2 the gathered one while forward runs."""
        weight = self.module._parameters.get("weight")
        computed = self.module.weight if weight is None else weight
        assert isinstance(computed, Tensor)
        return computed

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The linear layer of x, saving what rebuilds x."""
        weight: Tensor | None = self.module._parameters.get("weight")
        if weight is None:
            weight = self.weight
        hooks = None if is_traced else hooks_of_linear(x, weight)
        if hooks is not None:
            kept = keep(x, self.format, "linear")
            self.origin = kept.origin
            y: Tensor = hooks(x, kept, weight).around(self.original, x)
            mark_as_linear(y)
            return y
        if hooks is None and overrides_functions(weight):
            return self.left(x)
        spec = self.site.spec
        assert isinstance(spec, LinearSpec)
        bias = self.parameter("bias")
        y = functions.linear(x, weight, self.value(x, is_traced), spec.transposed, self.format, bias=bias)
        return self._noting_origin(y, is_traced)
