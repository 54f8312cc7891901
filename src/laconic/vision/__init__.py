"""Image classifiers whose layers attend over the features of all earlier layers: AFI-Nets (arXiv 2105.04354).

The public names are loaded when they are first used: the residual networks need `transformers`, the rest needs only
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.vision.densenet import AFIDenseNet, afi_densenet121
    from laconic.vision.integration import AFI, Integrated, concatenate, integrate
    from laconic.vision.macs import count_macs
    from laconic.vision.resnet import (
        AFIResNetConfig,
        AFIResNetForImageClassification,
        AFIResNetModel,
        AFIStage,
        afi_resnet50,
        afi_resnet101,
        afi_resnet152,
    )

__all__ = [
    "AFI",
    "Integrated",
    "integrate",
    "concatenate",
    "AFIStage",
    "AFIResNetConfig",
    "AFIResNetForImageClassification",
    "AFIResNetModel",
    "afi_resnet50",
    "afi_resnet101",
    "afi_resnet152",
    "AFIDenseNet",
    "afi_densenet121",
    "count_macs",
]

_HOME = {
    "AFI": "integration",
    "Integrated": "integration",
    "integrate": "integration",
    "concatenate": "integration",
    "AFIStage": "resnet",
    "AFIResNetConfig": "resnet",
    "AFIResNetForImageClassification": "resnet",
    "AFIResNetModel": "resnet",
    "afi_resnet50": "resnet",
    "afi_resnet101": "resnet",
    "afi_resnet152": "resnet",
    "AFIDenseNet": "densenet",
    "afi_densenet121": "densenet",
    "count_macs": "macs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'laconic.vision' has no attribute {name!r}")
    return getattr(import_module(f"laconic.vision.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
