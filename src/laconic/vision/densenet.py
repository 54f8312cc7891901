"""Dense networks with attentive feature integration.

The paper (arXiv 2105.04354, abstract) names dense networks among those that it improves; where attention enters them is
not public. In this reconstruction every layer of a dense block reads the features of the layers before it weighted by
attention, and so does what follows the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ModelError
from laconic.vision.drop_path import check_rate
from laconic.vision.integration import AFI, concatenate


class _Layer(nn.Module):
    """Bottleneck layer of a dense block: [B, C, H, W] -> [B, growth, H, W]."""

    def __init__(self, in_channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.relu(self.norm1(x)))
        x = self.conv2(F.relu(self.norm2(x)))
        return x


class _Block(nn.Module):
    """Dense block whose layers share an `AFI`: [B, C, H, W] -> [B, C + depth growth, H, W]."""

    def __init__(self, in_channels: int, depth: int, growth: int, bottleneck: int, reduction: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(in_channels + i * growth, growth, bottleneck) for i in range(depth))
        self.afi = AFI(growth, reduction)
        self.out_channels = in_channels + depth * growth

    def forward(self, x: Tensor) -> Tensor:
        features: list[Tensor] = []
        scores: list[Tensor] = []
        for layer in self.layers:
            feature = layer(concatenate(x, features, scores))
            features.append(feature)
            scores.append(self.afi.score(feature))
        return concatenate(x, features, scores)


class _Transition(nn.Module):
    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.conv = nn.Conv2d(in_channels, in_channels // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class AFIDenseNet(nn.Module):
    """DenseNet (arXiv 1608.06993, bottleneck layers, compression 1/2) with attention over the features of each block.

    Layer i of a block reads the block's input and the features f_1 ... f_(i-1) of the layers before it, f_j multiplied
    by (i - 1) a_(i-1)j (`concatenate`). As W_2 of an `AFI` starts at zero, an untrained network computes what a
    DenseNet computes.

    Args:
        depths: layers per block, at least 1 each.
        growth: channels of each layer's feature.
        bottleneck: channels inside a layer, as a multiple of growth.
        small_inputs: a stem for images of about 32 x 32: a 3 x 3 convolution of stride 1 without pooling.
        reduction: channels per hidden unit of a block's `AFI`.
        drop_rate: probability of dropout before the classifier, in [0, 1).

    Raises:
        ModelError: there is no block, or a depth or the growth is below 1; drop_rate is not in [0, 1).
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        depths: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        bottleneck: int = 4,
        in_channels: int = 3,
        small_inputs: bool = False,
        reduction: int = 32,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_rate("drop_rate", drop_rate)
        if min(depths, default=0) < 1 or growth < 1:
            raise ModelError(
                f"depths is {list(depths)} and growth is {growth}, but there must be a block, and each number must be "
                f"at least 1; DenseNet-121 has depths (6, 12, 24, 16) and growth 32"
            )
        channels = 2 * growth
        kernel, stride = (3, 1) if small_inputs else (7, 2)
        conv = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.stem = nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())
        if not small_inputs:
            self.stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.blocks = nn.Sequential()
        for i, depth in enumerate(depths):
            if i > 0:
                self.blocks.append(_Transition(channels))
                channels //= 2
            block = _Block(channels, depth, growth, bottleneck, reduction)
            self.blocks.append(block)
            channels = block.out_channels
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(drop_rate) if drop_rate else nn.Identity()
        self.classifier = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        if isinstance(self.classifier, nn.Linear):
            nn.init.zeros_(self.classifier.bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[B, in_channels, H, W] -> logits [B, num_classes]."""
        x = F.relu(self.norm(self.blocks(self.stem(pixel_values))))
        logits: Tensor = self.classifier(self.drop(x.mean((2, 3))))
        return logits


def afi_densenet121(
    num_classes: int = 1000, *, in_channels: int = 3, small_inputs: bool = False, drop_rate: float = 0.0
) -> AFIDenseNet:
    """AFI-DenseNet-121: DenseNet-121 with attention over the features of each block, 256 parameters more.

    A reconstruction (see `AFIDenseNet`); no number of the paper is about it.

    Raises:
        ModelError: drop_rate is not in [0, 1).
    """
    return AFIDenseNet(num_classes, in_channels=in_channels, small_inputs=small_inputs, drop_rate=drop_rate)
