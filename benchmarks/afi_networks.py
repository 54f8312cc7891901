"""The networks of the AFI study: residual networks of one depth that differ in what is done with a block's feature.

All have basic blocks of 16, 32 and 64 channels for images of 28 x 28. ResNet-20 has blocks 3-3-3; the others have one
block less where AFI-ResNet-50 has one block less than ResNet-50, in the second stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.vision import (
    AFIResNetConfig,
    AFIResNetForImageClassification,
    AFIStage,
    Integrated,
    integrate,
)

_FULL, _SHORTER = (3, 3, 3), (3, 2, 3)
_WIDTHS = (16, 32, 64)
REDUCTION = 4
"""Channels per hidden unit, of AFI and of squeeze and excitation."""


class _Last(nn.Module):
    """In place of an AFI: the last level alone, which is a ResNet."""

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        return Integrated(feature, feature.new_zeros(()))


class _Even(nn.Module):
    """In place of an AFI: all levels alike."""

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        return integrate(feature, feature.new_zeros(feature.shape[:2]), earlier)


class _SqueezeExcite(nn.Module):
    """Squeeze and excitation (arXiv 1709.01507): the channels of one block's feature [B, C, H, W], weighted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // REDUCTION)
        self.excite = nn.Linear(channels // REDUCTION, channels)

    def forward(self, feature: Tensor) -> Tensor:
        weight = torch.sigmoid(self.excite(F.relu(self.squeeze(feature.mean((2, 3))))))
        return feature * weight[..., None, None]


class _EfficientChannelAttention(nn.Module):
    """ECA (arXiv 1910.03151): a channel's weight from its neighbours' means, by one convolution over channels.

    Its width is the odd number that the paper's equation 12 gives for gamma = 2, b = 1.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = int((log2(channels) + 1) / 2) | 1
        self.neighbours = nn.Conv1d(1, 1, width, padding=width // 2, bias=False)

    def forward(self, feature: Tensor) -> Tensor:
        weight = torch.sigmoid(self.neighbours(feature.mean((2, 3)).unsqueeze(1))).squeeze(1)
        return feature * weight[..., None, None]


def stages(model: nn.Module) -> list[AFIStage]:
    """The stages of a network of this module, first to last."""
    return [module for module in model.modules() if isinstance(module, AFIStage)]


def _afi(depths: Sequence[int]) -> AFIResNetForImageClassification:
    config = AFIResNetConfig(
        num_labels=10,
        num_channels=1,
        embedding_size=_WIDTHS[0],
        hidden_sizes=list(_WIDTHS),
        depths=list(depths),
        layer_type="basic",
        downsample_in_first_stage=True,
        small_inputs=True,
        reduction=REDUCTION,
    )
    return AFIResNetForImageClassification(config)


def _with(integration: type[nn.Module], depths: Sequence[int]) -> nn.Module:
    model = _afi(depths)
    for stage in stages(model):
        stage.afi = integration()  # type: ignore[assignment]
    return model


def _with_channel_attention(attention: Callable[[int], nn.Module], depths: Sequence[int]) -> nn.Module:
    model = _with(_Last, depths)
    for stage, width in zip(stages(model), _WIDTHS, strict=True):
        for block in stage.layers:
            block.layer.append(attention(width))
    return model


AFI_NAME = f"AFI, {'-'.join(map(str, _SHORTER))}"
AFI_FAST = f"{AFI_NAME}, attention at 100 x the rate"
AT_BUDGET = f"ResNet, {'-'.join(map(str, _SHORTER))} (AFI's budget)"
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    f"ResNet-20, {'-'.join(map(str, _FULL))}": lambda: _with(_Last, _FULL),
    AT_BUDGET: lambda: _with(_Last, _SHORTER),
    "even average of the levels": lambda: _with(_Even, _SHORTER),
    "squeeze and excitation": lambda: _with_channel_attention(_SqueezeExcite, _SHORTER),
    "efficient channel attention": lambda: _with_channel_attention(_EfficientChannelAttention, _SHORTER),
    AFI_NAME: lambda: _afi(_SHORTER),
    AFI_FAST: lambda: _afi(_SHORTER),
}


def build(name: str, seed: int) -> nn.Module:
    """A network of `NETWORKS`; those of a seed start from the same weights wherever they have the same parameter."""
    torch.manual_seed(seed)
    common = _with(_Last, _FULL).state_dict()
    model = NETWORKS[name]()
    own = model.state_dict()
    model.load_state_dict(own | {key: value for key, value in common.items() if key in own})
    return model
