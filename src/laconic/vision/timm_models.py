"""Registers the AFI-Nets with timm: after importing this module, `timm.create_model("afi_resnet50")` builds one.

timm's models take images and return logits; these are the models of `laconic.vision` behind that interface.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.vision import densenet, resnet

try:
    from timm.models import register_model
except ImportError as error:
    raise ConfigError(f"laconic.vision.timm_models needs timm ({error}): pip install 'laconic[timm]'") from error

__all__ = ["LogitsOf", "afi_densenet121", "afi_resnet101", "afi_resnet152", "afi_resnet50"]


class LogitsOf(nn.Module):
    """A Hugging Face image classifier as a function from images to logits.

    Args:
        model: called with `pixel_values`.
        num_classes: width of its logits.
    """

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.model = model
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> logits [B, num_classes]."""
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


def _resnet(make: Any, pretrained: bool, num_classes: int, in_chans: int, options: dict[str, Any]) -> nn.Module:
    _refuse(pretrained, options)
    return LogitsOf(make(num_classes, in_channels=in_chans, **options), num_classes)


def _refuse(pretrained: bool, options: dict[str, Any]) -> None:
    """Refuse what timm passes to every model and these do not have; unset (None) options are dropped.

    Raises:
        ConfigError: pretrained weights are asked for, or their configuration is given.
    """
    if pretrained:
        raise ConfigError("pretrained is True, but it must be False: there are no trained weights of AFI-Nets")
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        if options.pop(name, None) is not None:
            raise ConfigError(f"{name} is set, but it must be left out: there are no trained weights of AFI-Nets")


@register_model
def afi_resnet50(pretrained: bool = False, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> nn.Module:
    """AFI-ResNet-50 (`laconic.vision.afi_resnet50`); `options` are that function's."""
    return _resnet(resnet.afi_resnet50, pretrained, num_classes, in_chans, options)


@register_model
def afi_resnet101(pretrained: bool = False, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> nn.Module:
    """AFI-ResNet-101 (`laconic.vision.afi_resnet101`); `options` are that function's."""
    return _resnet(resnet.afi_resnet101, pretrained, num_classes, in_chans, options)


@register_model
def afi_resnet152(pretrained: bool = False, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> nn.Module:
    """AFI-ResNet-152 (`laconic.vision.afi_resnet152`); `options` are that function's."""
    return _resnet(resnet.afi_resnet152, pretrained, num_classes, in_chans, options)


@register_model
def afi_densenet121(pretrained: bool = False, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> nn.Module:
    """AFI-DenseNet-121 (`laconic.vision.afi_densenet121`); `options` are that function's."""
    _refuse(pretrained, options)
    return densenet.afi_densenet121(num_classes, in_channels=in_chans, **options)
