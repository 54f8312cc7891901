"""Attention over the features of one stage, level by level in constant memory.

Level i of a stage has a feature f_i [B, C, H, W] and a score e_i [B, C]. The attention of level i is a softmax over the
levels so far, for every sample and channel on its own:

    a_ij = exp(e_j) / (exp(e_1) + ... + exp(e_i)),    A_i = a_i1 f_1 + ... + a_ii f_i

Written out, A_1 ... A_n cost n (n + 1) / 2 products of features. But all weights of level i are those of level i - 1
times one factor, so one average and one logarithm carry the stage's history:

    g_i = sigmoid(e_i - L_(i-1)),    A_i = A_(i-1) + g_i (f_i - A_(i-1)),    L_i = log(exp(L_(i-1)) + exp(e_i))

This is the sum of exp(e_j) f_j over the sum of exp(e_j), normalized at every step; `logaddexp` takes the larger score
out first, so no score overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ModelError


class Integrated(NamedTuple):
    """The levels of a stage so far, as one average."""

    average: Tensor
    """A_i [B, C, H, W] in the features' dtype: what level i adds to the stream, or hands on."""
    log_sum: Tensor
    """L_i [B, C] in the scores' dtype: logarithm of the sum of exp(e_j)."""


def integrate(feature: Tensor, score: Tensor, earlier: Integrated | None = None) -> Integrated:
    """Average the features of all levels so far, weighted by the softmax of their scores.

    Autograd keeps one tensor of a feature's size per level from the second on, f_i - A_(i-1); the averages themselves
    are not kept.

    Args:
        feature: f_i [B, C, H, W].
        score: e_i [B, C], any finite numbers.
        earlier: result of the level before; None at the first level, whose average is its feature.

    Returns:
        A_i and L_i; hand them to the next level.
    """
    if earlier is None:
        return Integrated(feature, score)
    share = torch.sigmoid(score - earlier.log_sum).to(feature.dtype)[..., None, None]
    average = torch.addcmul(earlier.average, share, feature - earlier.average)
    return Integrated(average, torch.logaddexp(earlier.log_sum, score))


def concatenate(first: Tensor, features: Sequence[Tensor], scores: Sequence[Tensor]) -> Tensor:
    """Concatenate a dense block's input and the features of its layers so far, these weighted by attention.

    With n features, feature j is multiplied by n a_nj: features of equal scores stay as they are.

    Args:
        first: the block's input [B, C_0, H, W], which is not weighted.
        features: n features [B, K, H, W].
        scores: their scores [B, K].

    Returns:
        [B, C_0 + n K, H, W].
    """
    if not features:
        return first
    weights = len(features) * torch.softmax(torch.stack(list(scores)), dim=0)
    weighted = (f * w.to(f.dtype)[..., None, None] for f, w in zip(features, weights.unbind(), strict=True))
    return torch.cat([first, *weighted], dim=1)


class LinearFromZero(nn.Linear):
    """A linear layer whose weight starts at zero, and which multiplies in float32 at least, under autocast too."""

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] in float32, or in float64 if x is."""
        wide, device = torch.promote_types(x.dtype, torch.float32), x.device.type
        has_autocast = torch.amp.is_autocast_available(device)  # the meta device has none
        with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
            return F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class AFI(nn.Module):
    """Attentive feature integration: scores the levels of one stage and averages them (reconstruction of 2105.04354).

    Of the paper (arXiv 2105.04354) only the abstract was available: features of all previous layers, weighted by
    attention, in residual, dense and plain networks. How they are scored is this library's reconstruction, chosen so
    that ResNet-152 ends at the parameters and operations that the abstract states:

        z_j = mean of f_j over height and width,    e_j = W_2 relu(W_1 z_j)

    with W_1 [ceil(C / reduction), C] and W_2 [C, ceil(C / reduction)] shared by the levels of a stage. W_2 starts at
    zero: an untrained stage averages its levels evenly.

    In a residual network level i computes x_i = relu(x_(i-1) + A_i), in a plain one x_i = A_i:

        levels = None
        for branch in branches:
            levels = afi(branch(x), levels)
            x = relu(x + levels.average)

    In a dense network it reads the weighted features side by side (`concatenate`, with the scores of `score`).

    Args:
        channels: C of every feature.
        reduction: channels per hidden unit.

    Raises:
        ModelError: channels or reduction is below 1.
    """

    def __init__(self, channels: int, reduction: int = 32) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("reduction", reduction)):
            if value < 1:
                raise ModelError(f"{name} is {value}, but it must be at least 1; 32 channels per hidden unit are usual")
        self.channels = channels
        hidden = -(-channels // reduction)
        self.squeeze = nn.Linear(channels, hidden, bias=False)
        self.expand = LinearFromZero(hidden, channels, bias=False)

    def score(self, feature: Tensor) -> Tensor:
        """Score a feature [B, C, H, W]; returns [B, C] in float32, or in float64 if the feature is.

        Raises:
            ModelError: the feature is no batch of maps with this module's channels.
        """
        if feature.dim() != 4 or feature.shape[1] != self.channels:
            raise ModelError(
                f"feature is {list(feature.shape)}, but it must be [batch, {self.channels}, height, width]; "
                f"levels that share an AFI have its channels"
            )
        # Differences of scores become weights: rounding e to bf16 would round a_ij by e times as much.
        score: Tensor = self.expand(F.relu(self.squeeze(feature.mean((2, 3)))))
        return score

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        """Take in the next level's feature [B, C, H, W]; `earlier` is the result of the level before."""
        return integrate(feature, self.score(feature), earlier)

    def extra_repr(self) -> str:
        """The channels, for `print`."""
        return f"channels={self.channels}"
