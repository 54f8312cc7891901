"""Sites of convolutional networks: layers that run their own code while what it saves is packed.

Nothing is put in the place of a convolution, a norm over channels, an activation, pooling or dropout. Its own code runs
under a `Packer`, which knows what backward of each function of torch reads, so a subclass that does more (standardized
weights, blur, layer scale) is as good as the plain class. Of the layers that networks have most it is known beforehand
what they save, so that nothing is watched (`_KNOWN`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.backward.saving import InsteadOfImage, InsteadOfNormed
from laconic.activations.forwards.checkpoint import is_plain, runs_twice
from laconic.activations.forwards.replacement import Replacement
from laconic.activations.keep.choice import Packing, block_format_of
from laconic.activations.keep.exact_codes import MemoryLayout, mask_of_bits
from laconic.activations.keep.function_rules import ENOUGH, batch_norm_again, relu_again, standard_of_channels
from laconic.activations.keep.kept import found
from laconic.activations.keep.masked_relu import masked_relu, may_be_masked
from laconic.activations.keep.packer import MIN_NUMEL, Packer, keep_image, note, running_packer
from laconic.activations.keep.witnesses import RUNNING
from laconic.ops import DTYPES


class LeafForward(Replacement):
    """Runs the layer's own code under a packer.

    Args:
        module: whose forward is replaced.
        site: its description.
        format: how tensors are packed that are rounded.
    """

    origin: str | None = None

    def __init__(self, module: nn.Module, site: Any, format: Packing) -> None:
        super().__init__(module)
        self.site = site
        self.format = format

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward; where gradients are wanted, with what it saves packed."""
        if not (is_ordinary := is_plain()) and torch.compiler.is_compiling():
            _compiled_is_exact()
            return self.original(*args, **kwargs)
        return run_packed(self, self.format, is_ordinary, *args, **kwargs)


def run_packed(forward: Replacement, format: Packing, is_ordinary: bool, *args: Any, **kwargs: Any) -> Any:
    """The forward that `forward` has replaced; where gradients are wanted, with what it saves packed in `format`.

    Args:
        forward, args, kwargs: it, and its arguments.
        format: how tensors are packed that are rounded.
        is_ordinary: `is_plain()`.
    """
    if not is_ordinary:
        if not torch.is_grad_enabled() or runs_twice() or is_transformed():
            return forward.original(*args, **kwargs)
        packer = running_packer()
        if packer is not None:
            with packer.packing_as(format):
                packer.leave_out(forward.module)
                return forward.original(*args, **kwargs)
    known = _KNOWN.get(type(forward.module))
    if known is not None and _is_as_known(forward, known, args, kwargs):
        y = known.run(forward, args[0], format)
        if y is not None:
            return y
    with Packer(format, checked=False).active(forward.module):
        return forward.original(*args, **kwargs)


def _is_as_known(forward: Replacement, known: _Known, args: Any, kwargs: Any) -> bool:
    """Whether a layer of torch's own classes runs the code of its class on an image of values that can be packed."""
    if len(args) != 1 or kwargs or forward.replaced is not None:
        return False
    if type(forward.module).forward is not known.forward or _F.get(known.name) is not known.function:
        return False
    # Functions of torch are others for subclasses of Tensor, and casts of autocast are what is saved.
    x = args[0]
    if type(x) is not Tensor or x.dim() != 4 or x.dtype not in DTYPES or x.numel() < MIN_NUMEL:
        return False
    return (x.is_cpu or x.is_cuda) and x.layout is torch.strided and not torch._C._is_any_autocast_enabled()


def _convolution(forward: Any, x: Tensor, format: Packing) -> Any:
    module = forward.module
    weight = module._parameters.get("weight")
    # Without a gradient of its weight it saves nothing that is packed, and padding may be a function of its own.
    if type(weight) not in (nn.Parameter, Tensor) or not weight.requires_grad or "_conv_forward" in module.__dict__:
        return None
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    RUNNING.site = forward.site.name
    return InsteadOfImage(x, keep_image(x, format)).around(nn.Conv2d.forward, module, x)


def _batch_norm(forward: Any, x: Tensor, format: Packing) -> Any:
    module = forward.module
    parameters, buffers = module._parameters, module._buffers
    try:
        mean, variance = buffers["running_mean"], buffers["running_var"]
        weight, bias = parameters["weight"], parameters["bias"]
    except KeyError:  # somebody computes one of them
        return None
    if not any([tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]):
        return None
    RUNNING.site = forward.site.name
    training = module.training or (mean is None and variance is None)
    if x.numel() < ENOUGH * x.shape[1]:
        kept = None if x.is_leaf else found(x)
        y = nn.BatchNorm2d.forward(module, x)
    elif training:
        instead = InsteadOfNormed(x, weight, mean, variance)
        y = instead.around(nn.BatchNorm2d.forward, module, x)
        kept = keep_image(x, format, partial(standard_of_channels, eps=module.eps, statistics=instead.statistics))
        instead.keep(kept)
    else:
        kept = keep_image(x, format, partial(standard_of_channels, eps=module.eps, running=(mean, variance)))
        y = InsteadOfImage(x, kept).around(nn.BatchNorm2d.forward, module, x)
    if kept is not None:
        given, unbiased = (mean, variance, weight, bias), block_format_of(format).is_stochastic
        note(y, kept, batch_norm_again(x, given, training, module.eps, unbiased), makes_new=True)
    return y


def _relu(forward: Any, x: Tensor, format: Packing) -> Any:
    in_place = forward.module.inplace
    if not may_be_masked(x, in_place):
        return None
    kept = None if x.is_leaf else found(x)  # before the call, which may work in place
    y, bits = masked_relu(x, in_place)
    if kept is not None:
        unbiased = block_format_of(format).is_stochastic
        note(y, kept, relu_again(mask_of_bits(bits, MemoryLayout.of(y), 1.0, 0.0) if unbiased else None))
    return y


class _Known(NamedTuple):
    """A layer of which it is known what it saves.

    Attributes:
        forward: of its class.
        name, function: what that calls in torch.nn.functional.
        run: what runs it instead; a result of None leaves that to a packer.
    """

    forward: Callable[..., Any]
    name: str
    function: Callable[..., Any]
    run: Callable[[Any, Tensor, Packing], Any]


_F = vars(F)
_KNOWN: dict[type[nn.Module], _Known] = {
    layer: _Known(layer.forward, name, _F[name], run)
    for layer, name, run in (
        (nn.Conv2d, "conv2d", _convolution),
        (nn.BatchNorm2d, "batch_norm", _batch_norm),
        (nn.ReLU, "relu", _relu),
    )
    # A host may have put code of its own in their place before.
    if getattr(layer.forward, "__globals__", None) is vars(sys.modules[layer.__module__])
    and getattr(_F[name], "__globals__", _F) is _F
}
"""Layers of which networks have most."""


_SAID: list[str] = []


@torch.compiler.assume_constant_result
def _compiled_is_exact() -> bool:
    """Say so once. Dynamo calls it while it traces, and not in the graph."""
    if not _SAID:
        _SAID.append(
            "convolutions, norms over channels, activations, pooling and dropout in a compiled graph keep what the "
            "graph keeps, exactly; leave them out of torch.compile to keep them packed"
        )
        logging.getLogger("laconic").warning(_SAID[0])
    return True
