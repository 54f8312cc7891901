"""Sites of convolutional networks: layers that run their own code while what it saves is packed.

Nothing is put in the place of a convolution, a norm over channels, an activation, pooling or dropout. Its own code runs
under a `Packer`, which knows what backward of each function of torch reads, so a subclass that does more (standardized
weights, blur, layer scale) is as good as the plain class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.forwards.checkpoint import runs_twice
from laconic.activations.forwards.replacement import Replacement
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.function_rules import Call
from laconic.activations.keep.packer import Packer, running_packer


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
        if torch.compiler.is_compiling():
            _compiled_is_exact()
            return self.original(*args, **kwargs)
        return run_packed(self, self.format, *args, **kwargs)


def run_packed(forward: Replacement, format: Packing, *args: Any, **kwargs: Any) -> Any:
    """The forward that `forward` has replaced; where gradients are wanted, with what it saves packed in `format`."""
    if not torch.is_grad_enabled() or runs_twice() or is_transformed():
        return forward.original(*args, **kwargs)
    packer = running_packer()
    if packer is None:
        packer, call = Packer(format, checked=False), _only_call(forward, args, kwargs)
        if call is not None:
            return packer.run_one(call, forward.module, forward.original, args[0])
        with packer.active(forward.module):
            return forward.original(*args, **kwargs)
    with packer.packing_as(format):
        packer.leave_out(forward.module)
        return forward.original(*args, **kwargs)


def _only_call(forward: Replacement, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The one call of a function of torch for which a layer of torch's own classes saves; None for any other layer."""
    module = forward.module
    forward_of_class, call_of = _CALLS.get(type(module), (None, None))
    if call_of is None or type(module).forward is not forward_of_class or forward.replaced is not None:
        return None
    # Functions of torch are others for subclasses of Tensor, and a method that an instance shadows may be anything.
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or "_conv_forward" in module.__dict__:
        return None
    return call_of(module, args[0])


def _call_of_convolution(module: Any, x: Tensor) -> Call | None:
    if module.padding_mode != "zeros":  # padded by a function of its own
        return None
    return Call(F.conv2d, (x, module.weight), {})


def _call_of_batch_norm(module: Any, x: Tensor) -> Call:
    has_statistics = module.running_mean is not None or module.running_var is not None
    given = {name: getattr(module, name) for name in ("weight", "bias", "eps")}
    given["training"] = module.training or not has_statistics
    if not module.training or module.track_running_stats:
        given |= {name: getattr(module, name) for name in ("running_mean", "running_var")}
    return Call(F.batch_norm, (x,), given)


def _call_of_relu(module: Any, x: Tensor) -> Call:
    return Call(F.relu, (x, module.inplace), {})


_CALLS: dict[type[nn.Module], tuple[Callable[..., Any], Callable[[Any, Tensor], Call | None]]] = {
    nn.Conv2d: (nn.Conv2d.forward, _call_of_convolution),
    nn.BatchNorm2d: (nn.BatchNorm2d.forward, _call_of_batch_norm),
    nn.ReLU: (nn.ReLU.forward, _call_of_relu),
}
"""Layers of which networks have most: the forward that is known, and the call that it makes."""


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
