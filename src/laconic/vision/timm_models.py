"""Registers the AFI-Nets with timm: after importing this module, `timm.create_model("afi_resnet50")` builds one.

timm's models take images and return logits; these are the models of `laconic.vision` behind that interface
(`timm_interface`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from laconic.errors import ConfigError
from laconic.vision import densenet, resnet
from laconic.vision.timm_interface import TimmDenseNet, TimmModel, TimmResNet

try:
    from timm.models import build_model_with_cfg, register_model
except ImportError as error:
    raise ConfigError(f"laconic.vision.timm_models needs timm ({error}): pip install 'laconic[timm]'") from error

_OF_WEIGHTS = ("pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args", "cache_dir")
_OF_FEATURES = ("out_indices", "feature_cls")
_OF_THE_BUILDER = (
    *("model_cfg", "feature_cfg", "pruned", "kwargs_filter", "pretrained_strict", "pretrained_filter_fn"),
    *("model_cls", "variant"),
)

_PREPROCESSING = {
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "crop_pct": 0.95,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "num_classes": 1000,
}
"""What `timm.data.resolve_data_config` says of these models: as of timm's ResNets."""


def _build(
    kind: Callable[..., TimmModel], make: Callable[..., nn.Module], pretrained: bool, options: dict[str, Any]
) -> nn.Module:
    """Build a model as timm builds its own; what timm passes to every model and is unset (None) is dropped."""
    name = make.__name__
    if pretrained:
        raise ConfigError("pretrained is True, but it must be False: there are no trained weights of AFI-Nets")
    for option in _OF_WEIGHTS:
        if options.pop(option, None) is not None:
            raise ConfigError(f"{option} is set, but it must be left out: there are no trained weights of AFI-Nets")
    for option in _OF_THE_BUILDER:  # they would be read by timm's builder and by nobody behind it
        if option in options:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
    if not options.get("features_only"):
        for option in _OF_FEATURES:
            if option in options:
                raise ConfigError(f"{option} is set, but it is read with features_only=True only; set that as well")
    # timm's defaults are five levels; these networks may have any number of stages.
    feature_cfg: dict[str, Any] = {"feature_cls": "getter"}
    if "depths" in options:
        feature_cfg["out_indices"] = tuple(range(len(options["depths"]) + 1))
    built: nn.Module = build_model_with_cfg(
        partial(kind, make), name, False, _PREPROCESSING, feature_cfg=feature_cfg, **options
    )
    return built


@register_model
def afi_resnet50(pretrained: bool = False, **options: Any) -> nn.Module:
    """AFI-ResNet-50; `options` are those of `TimmResNet`, `laconic.vision.afi_resnet50` and timm's features_only."""
    return _build(TimmResNet, resnet.afi_resnet50, pretrained, options)


@register_model
def afi_resnet101(pretrained: bool = False, **options: Any) -> nn.Module:
    """AFI-ResNet-101; `options` are those of `TimmResNet`, `laconic.vision.afi_resnet101` and timm's features_only."""
    return _build(TimmResNet, resnet.afi_resnet101, pretrained, options)


@register_model
def afi_resnet152(pretrained: bool = False, **options: Any) -> nn.Module:
    """AFI-ResNet-152; `options` are those of `TimmResNet`, `laconic.vision.afi_resnet152` and timm's features_only."""
    return _build(TimmResNet, resnet.afi_resnet152, pretrained, options)


@register_model
def afi_densenet121(pretrained: bool = False, **options: Any) -> nn.Module:
    """AFI-DenseNet-121; `options` are those of `TimmDenseNet`, `laconic.vision.afi_densenet121` and features_only."""
    return _build(TimmDenseNet, densenet.afi_densenet121, pretrained, options)
