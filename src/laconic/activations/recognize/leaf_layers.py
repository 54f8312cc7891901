"""Recognizes layers of convolutional networks by their classes; their own code runs (forwards.leaves)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

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
_EXACT = (
    *(nn.MultiheadAttention, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d),
    *(nn.Sigmoid, nn.Tanh, nn.LogSigmoid),  # they save results that saturate (see keep.tolerant)
)


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
    if any(True for _ in module.children()) or isinstance(module, _EXACT):
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
