"""Modules that are nothing but attention: their forward takes query, key and value and has no parameters.

torchtitan's FlexAttention, VarlenAttention and ScaledDotProductAttention are such; the projections around them are
modules of their own. The whole forward runs again in backward (see [Note: compressed attention]), with whatever it does
around the kernel: masks in blocks, packed sequences, transposes, its choice of kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laconic.activations.forwards.attention import AttentionCore
from laconic.activations.forwards.base import SiteForward
from laconic.activations.keep.choice import Packing
from laconic.activations.recognize.sites import InnerAttentionSpec, Site


class InnerAttentionForward(SiteForward):
    """Keeps packed query, key and value; the module's own code runs again in backward.

    A compiled graph runs the module's own code as it is. So does a call with a function among its arguments that holds
    parameters, which a second run would not give their gradients.

    Args:
        module: nothing but attention.
        site: its description.
        format: how query, key and value are packed, along the head dimension, the last one.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        assert isinstance(site.spec, InnerAttentionSpec)
        self.names = site.spec.names
        self.core = AttentionCore(module, site, format)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; with gradients enabled, from packed tensors in backward."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.stays_exact():
            return self.original(*args, **kwargs)
        if any(_holds_parameters(leaf) for leaf in tree_leaves((args, kwargs)) if callable(leaf)):
            return self.original(*args, **kwargs)
        named = [name for name in self.names[len(args) :] if name in kwargs]
        args = (*args, *(kwargs.pop(name) for name in named))
        return self.core(self._attend, self.module, *args, **kwargs)[0]

    def _attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any]:
        return (self.original(*args, **kwargs),)


def _holds_parameters(function: Any) -> bool:
    """Whether a function is a module's, or refers to tensors that want a gradient."""
    if isinstance(function, Tensor):
        return False
    if isinstance(function, nn.Module) or isinstance(getattr(function, "__self__", None), nn.Module):
        return True
    if not inspect.isfunction(function):
        return False
    held = inspect.getclosurevars(function).nonlocals.values()
    return any(isinstance(x, nn.Module) or (isinstance(x, Tensor) and x.requires_grad) for x in held)
