"""What these networks keep for backward, and what is left of it in four bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.vision import AFI, AFIStage, Integrated
from tests.vision.reference import averages, images, tiny, with_opinions


class Last(nn.Module):
    """The last level alone: with it a stage is a ResNet's."""

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        return Integrated(feature, feature)


class Written(nn.Module):
    """Attention as its definition is written: every level multiplies all features."""

    def __init__(self, afi: AFI) -> None:
        super().__init__()
        self.afi = afi

    def forward(self, feature: Tensor, earlier: tuple[list[Tensor], list[Tensor]] | None = None) -> Integrated:
        features, scores = ([], []) if earlier is None else earlier[1]  # type: ignore[misc]
        features, scores = [*features, feature], [*scores, self.afi.score(feature)]
        return Integrated(averages(features, scores)[-1], (features, scores))  # type: ignore[arg-type]


def kept(stage: nn.Module, x: Tensor) -> int:
    with SavedTensorTracker(stage) as tracker:
        stage(x)
    return tracker.nbytes


@pytest.mark.parametrize("depth", [2, 5])
def test_running_form_keeps_one_feature_per_level_from_the_second_on(depth: int) -> None:
    stage = tiny(depths=[1, 1, depth]).resnet.encoder.stages[2]
    assert isinstance(stage, AFIStage)
    x = images(4, 48, 16)
    feature = 4 * 40 * 24 * 24 * 4
    score = 4 * 40 * 4
    afi = stage.afi
    running = kept(stage, x)
    stage.afi = Written(afi)  # type: ignore[assignment]
    written = kept(stage, x)
    stage.afi = Last()  # type: ignore[assignment]
    plain = kept(stage, x)
    # Scores, shares and the like are [batch, channels]: a few per level, and of pairs of levels in the written form.
    assert (depth - 1) * feature <= running - plain <= (depth - 1) * feature + 8 * depth * score
    assert depth * feature <= written - plain <= depth * feature + 4 * (depth + depth**2) * score


def trained(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, labels = images(8, 24), torch.arange(8) % 5
    losses = []
    for _ in range(steps):
        loss = model(pixel_values=x, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("bits", "cosine", "factor"), [(4, 0.85, 5), (8, 0.98, 3)])
@pytest.mark.ci
def test_hooks_pack_what_convolutions_norms_and_attention_keep(bits: int, cosine: float, factor: float) -> None:
    model = tiny(layer_type="bottleneck", hidden_sizes=[32, 64, 96])
    with_opinions(model, scale=0.3)
    inputs = {"pixel_values": images(8, 24), "labels": torch.arange(8) % 5}
    exact = copy.deepcopy(model)
    report = laconic.compress_activations(model, bits, mode="hooks", example_inputs=inputs)
    assert report.before_nbytes_per_token is not None
    assert report.after_nbytes_per_token is not None
    assert report.before_nbytes_per_token > factor * report.after_nbytes_per_token
    gradients = []
    losses = []
    for one in (exact, model):
        loss = one(**inputs).loss
        loss.backward()
        losses.append(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]))
    assert torch.equal(*losses)
    assert torch.cosine_similarity(*gradients, dim=0) > cosine
    torch.manual_seed(1)
    straight = trained(exact, 12)
    torch.manual_seed(1)
    packed = trained(model, 12)
    assert straight[-1] < 0.6 * straight[0]
    assert packed[-1] < straight[-1] + 0.1 * straight[0]


def test_layers_are_sites_and_so_is_the_relu_of_the_integration() -> None:
    model = tiny()
    inputs = {"pixel_values": images(8, 24), "labels": torch.arange(8) % 5}
    exact = copy.deepcopy(model)
    report = laconic.compress_activations(model, example_inputs=inputs)
    converted = {row.name for row in report.rows if row.format != "exact"}
    # The relu between squeeze and expand is called in the code of AFI itself.
    layers = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Linear, AFI)
    assert converted >= {name for name, module in model.named_modules() if type(module) in layers}
    assert torch.equal(model(**inputs).loss, exact(**inputs).loss)
