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


def __getattr__(name: str) -> Any:
    for home in ("macs", "integration", "densenet", "resnet") if name in __all__ else ():
        module = import_module(f"laconic.vision.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'laconic.vision' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
