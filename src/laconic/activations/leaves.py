"""Sites of convolutional networks: layers that run their own code while what it saves is packed.

Nothing is put in the place of a convolution, a norm over channels, an activation, pooling or dropout. Its own code runs
under a `Packer`, which knows what backward of each function of torch reads, so a subclass that does more (standardized
weights, blur, layer scale) is as good as the plain class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.activations.checkpoint import runs_twice
from laconic.activations.choice import Packing
from laconic.activations.derivatives import is_transformed
from laconic.activations.function_rules import Call
from laconic.activations.packer import Packer, running_packer
from laconic.activations.replacement import Replacement

__all__ = ["LeafForward", "LeafKind", "LeafSpec", "leaf_of", "run_packed"]

LeafKind = Literal["conv", "channel_norm", "activation", "pool", "dropout"]

_CLASSES: dict[LeafKind, tuple[type[nn.Module], ...]] = {
    "conv": (nn.modules.conv._ConvNd,),
    "channel_norm": (nn.modules.batchnorm._NormBase, nn.GroupNorm),
    "pool": (
        nn.modules.pooling._MaxPoolNd,
        nn.modules.pooling._AvgPoolNd,
        nn.modules.pooling._AdaptiveAvgPoolNd,
    ),
    "dropout": (nn.modules.dropout._DropoutNd,),
}
_MASKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid)
_ACTIVATION_HOMES = ("torch.nn.modules.activation", "transformers.activations", "timm.layers.activations")
_NOT_ELEMENTWISE = (nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)


@dataclass(frozen=True)
class LeafSpec:
    """A layer whose own code runs while what it saves is packed.

    Attributes:
        kind: of the layer.
        features: channels of the input that is packed; () where they are not known.
        exact: bits and name of the exact code of what it saves; None if that is rounded.
    """

    kind: LeafKind
    features: tuple[int, ...]
    exact: tuple[int, str] | None = None


def leaf_of(module: nn.Module) -> LeafSpec | None:
    """The description of a layer of one of these kinds; None for any other module."""
    if isinstance(module, nn.SyncBatchNorm) or type(module).forward is nn.Module.forward:
        return None  # a function of its own, whose saved tensors stay as they are
    for kind, classes in _CLASSES.items():
        if isinstance(module, classes):
            return LeafSpec(kind, _features_of(module), _exact_code_of(kind, module))
    if _is_activation(module):
        return LeafSpec("activation", (), (1, "mask") if isinstance(module, _MASKED) else None)
    return None


def _is_activation(module: nn.Module) -> bool:
    if any(True for _ in module.children()) or isinstance(module, _NOT_ELEMENTWISE):
        return False
    return any(base.__module__ in _ACTIVATION_HOMES for base in type(module).__mro__)


def _features_of(module: nn.Module) -> tuple[int, ...]:
    found = (getattr(module, name, None) for name in ("in_channels", "num_features", "num_channels"))
    return next(((value,) for value in found if isinstance(value, int)), ())


def _exact_code_of(kind: LeafKind, module: nn.Module) -> tuple[int, str] | None:
    if kind == "dropout":
        return 1, "mask"
    if kind != "pool":
        return None
    if not isinstance(module, nn.MaxPool2d):
        return (64, "indices") if isinstance(module, nn.modules.pooling._MaxPoolNd) else (0, "shape")
    size = module.kernel_size if isinstance(module.kernel_size, int) else max(module.kernel_size)
    return (4 if size <= 4 else 8), "offsets"


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
