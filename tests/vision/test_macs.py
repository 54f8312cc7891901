"""The budget of the paper by count, on the meta device; the counter against sums made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from laconic.errors import ModelError
from laconic.vision import afi_densenet121, afi_resnet50, afi_resnet101, afi_resnet152, count_macs
from tests.vision.reference import images, tiny

IMAGE = (1, 3, 224, 224)
DEPTHS = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def resnet(layers: int) -> nn.Module:
    with torch.device("meta"):
        return ResNetForImageClassification(ResNetConfig(depths=DEPTHS[layers], num_labels=1000))


@pytest.mark.ci
def test_afi_resnet152_meets_the_budget_of_the_paper() -> None:
    plain = resnet(152)
    with torch.device("meta"):
        model = afi_resnet152()
    assert parameters(plain) == 60_192_808
    assert parameters(model) == 54_674_984
    before = count_macs(plain, *IMAGE)
    assert round(before / 1e9, 3) == 11.514
    saved = 1 - count_macs(model, *IMAGE, attention="dense") / before
    assert 0.095 < saved < 0.105
    assert 1 - count_macs(model, *IMAGE) / before > saved


@pytest.mark.parametrize(("layers", "make"), [(50, afi_resnet50), (101, afi_resnet101)])
def test_smaller_networks_follow_the_same_rule(layers: int, make: type) -> None:
    with torch.device("meta"):
        model = make()
    plain = resnet(layers)
    assert parameters(model) < parameters(plain)
    saved = 1 - count_macs(model, *IMAGE, attention="dense") / count_macs(plain, *IMAGE)
    assert 0.09 < saved < 0.12


def test_densenet_pays_little_for_attention() -> None:
    with torch.device("meta"):
        model = afi_densenet121()
    macs = count_macs(model, *IMAGE)
    # DenseNet-121 has 2.834 GMAC. Layer i multiplies the features of i - 1 layers, and what follows a block all.
    products = sum(32 * n * (n + 1) // 2 * side**2 for n, side in ((6, 56), (12, 28), (24, 14), (16, 7)))
    scores = 64 * (6 + 12 + 24 + 16)
    assert round((macs - products - scores) / 1e9, 3) == 2.834


def test_counter_agrees_with_sums_made_by_hand() -> None:
    conv = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2)
    assert count_macs(nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()), 2, 6, 10, 10) == 2 * 8 * 5 * 5 * 3 * 9
    model = tiny()
    plain = tiny(depths=[1, 1, 1])
    # The second and third block of the last stage (40 channels at 3 x 3) and the second of the one before.
    blocks = 2 * 2 * 9 * 40 * 40 * 9 + 2 * 9 * 16 * 16 * 36
    scores = 3 * 2 * 40 * 2 + 2 * 2 * 16 * 1
    running = count_macs(model, 1, 3, 12, 12)
    assert running - count_macs(plain, 1, 3, 12, 12) == blocks + scores + 2 * 40 * 9 + 16 * 36
    assert count_macs(model, 1, 3, 12, 12, attention="dense") - running == 3 * 40 * 9 + 16 * 36


def test_counting_leaves_the_model_as_it_was() -> None:
    model = tiny()
    model.classifier.eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    count_macs(model, *images().shape)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_other_forms_of_attention_are_refused() -> None:
    with pytest.raises(ModelError, match="attention is 'sparse'"):
        count_macs(tiny(), 1, 3, 12, 12, attention="sparse")  # type: ignore[arg-type]
