"""What timm's users call on a model, on AFI-Nets, without timm: features, classifiers, drop rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from laconic.errors import ModelError
from laconic.vision import AFIDenseNet, AFIResNetForImageClassification, AFIStage, afi_densenet121, afi_resnet50
from laconic.vision.drop_path import DropPath
from laconic.vision.timm_interface import TimmDenseNet, TimmModel, TimmResNet
from tests.grid import few
from tests.vision.reference import images, with_opinions

WIDTHS = {"embedding_size": 8, "hidden_sizes": [8, 12, 16], "depths": [2, 3, 2], "reduction": 4}


def resnet(**changes: Any) -> TimmResNet:
    return TimmResNet(afi_resnet50, **{"num_classes": 5, "layer_type": "basic", **WIDTHS, **changes})


def densenet(**changes: Any) -> TimmDenseNet:
    make = partial(AFIDenseNet, depths=(2, 3, 2), growth=4)
    return TimmDenseNet(make, **{"num_classes": 5, **changes})


MODELS: dict[str, Callable[..., TimmModel]] = {
    "resnet": resnet,
    "resnet that halves first": partial(resnet, downsample_in_first_stage=True),
    "resnet for small images": partial(resnet, small_inputs=True),
    "densenet": densenet,
    "densenet for small images": partial(densenet, small_inputs=True),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def made(name: str, **changes: Any) -> TimmModel:
    model = MODELS[name](**changes)
    with_opinions(model)
    return model


@EVERY_MODEL
def test_logits_are_those_of_the_network(name: str) -> None:
    model, x = made(name).eval(), images(size=64)
    expected = model.model(x)
    assert torch.equal(model(x), expected if torch.is_tensor(expected) else expected.logits)
    assert model(x).shape == (len(x), model.num_classes) == (len(x), 5)
    assert torch.equal(model(x), model.forward_head(model.forward_features(x)))


@EVERY_MODEL
def test_every_level_is_what_its_module_gives(name: str) -> None:
    model, x = made(name).eval(), images(size=64)
    given: dict[str, torch.Tensor] = {}
    for level in model.feature_info:
        module = model.get_submodule(level["module"])
        module.register_forward_hook(lambda _, __, out, key=level["module"]: given.update({key: out}))
    last, found = model.forward_intermediates(x)
    assert len(found) == len(model.feature_info) == 4
    for features, level in zip(found, model.feature_info, strict=True):
        assert features.shape == (len(x), level["num_chs"], 64 // level["reduction"], 64 // level["reduction"])
        expected = given[level["module"]]
        assert torch.equal(features, torch.relu(expected) if level["module"] == "model.norm" else expected)
    assert torch.equal(last, model.forward_features(x))
    assert last.shape[1] == model.num_features == model.head_hidden_size


@EVERY_MODEL
@pytest.mark.parametrize("indices", few([None, [0], 1, [-1, 0], 3, [1, 2], [3], (-4,)], 3))
def test_pruned_models_give_the_same_features(name: str, indices: int | Sequence[int] | None) -> None:
    model, x = made(name).eval(), images(size=64)
    _, every = model.forward_intermediates(x)
    levels = (
        range(4)
        if indices is None
        else range(4 - indices, 4)
        if isinstance(indices, int)
        else sorted(index % 4 for index in indices)
    )
    found = model.forward_intermediates(x, indices, stop_early=True, intermediates_only=True)
    taken = model.prune_intermediate_layers(4 if indices is None else indices)
    assert sorted(taken) == [*levels]
    pruned = model.forward_intermediates(x, taken, intermediates_only=True)
    for level, early, late in zip(levels, found, pruned, strict=True):
        assert torch.equal(early, every[level])
        assert torch.equal(late, every[level])
    assert isinstance(model.get_classifier(), nn.Identity)


@EVERY_MODEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classifiers_are_replaced(name: str, dtype: torch.dtype) -> None:
    model, x = made(name).to(dtype).eval(), images(size=64).to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items() if "classifier" not in key}
    assert model.get_classifier().out_features == 5
    model.reset_classifier(7)
    assert model(x).shape == (len(x), 7)
    assert model(x).dtype == dtype
    pooled = model.forward_features(x).mean((2, 3))
    assert torch.equal(model(x), model.get_classifier()(pooled))
    assert torch.equal(model.forward_head(model.forward_features(x), pre_logits=True), pooled)
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.forward_features(x))
    model.reset_classifier(3, "avg")
    assert model(x).shape == (len(x), 3) == (len(x), model.num_classes)
    after = {key: value for key, value in model.state_dict().items() if "classifier" not in key}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(MODELS[name](num_classes=0).to(dtype).eval()(x)[0, :0], x[0, 0, 0, :0])


def test_without_classes_a_network_gives_pooled_features() -> None:
    for name in MODELS:
        model, x = made(name, num_classes=0).eval(), images(size=64)
        assert torch.equal(model(x), model.forward_features(x).mean((2, 3)))


@EVERY_MODEL
def test_dropout_is_drawn_before_the_classifier(name: str) -> None:
    model, x = made(name, drop_rate=0.5), images(size=64)
    features = model.eval().forward_features(x)
    pooled = features.mean((2, 3))
    assert torch.equal(model.forward_head(features, pre_logits=True), pooled)
    dropped = model.train().forward_head(features, pre_logits=True)
    kept = dropped != 0
    assert kept.any()
    assert not kept.all()
    torch.testing.assert_close(dropped[kept], 2 * pooled[kept])
    assert model.drop_rate == 0.5
    assert made(name).drop_rate == 0.0


@pytest.mark.parametrize("make", [afi_resnet50, partial(AFIDenseNet, depths=(2, 2), growth=4)])
def test_networks_themselves_drop_before_the_classifier(make: Callable[..., nn.Module]) -> None:
    small = WIDTHS if make is afi_resnet50 else {}
    model, x = make(num_classes=5, drop_rate=0.9, small_inputs=True, **small), images()
    plain = make(num_classes=5, small_inputs=True, **small)
    plain.load_state_dict(model.state_dict())  # the weights have the same names

    def logits(module: nn.Module) -> torch.Tensor:
        out = module(x)
        return out if torch.is_tensor(out) else out.logits

    assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(plain), logits(plain))
    assert torch.equal(logits(model.eval()), logits(plain.eval()))


def test_stochastic_depth_rises_to_its_rate() -> None:
    model = resnet(drop_path_rate=0.3)
    rates = [module.rate for module in model.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0.05 * i for i in range(7)])
    assert not [module for module in resnet().modules() if isinstance(module, DropPath)]


def test_stochastic_depth_leaves_branches_of_samples_out() -> None:
    """With rates close to 1 a stage hands on what its first shortcut gives, but for rare samples."""
    stage = resnet().model.resnet.encoder.stages[1]
    stage = AFIStage(stage.layers, 12, 4, [0.999999] * 3).train()
    x = images(64, 16, 8)
    with torch.no_grad():
        expected = torch.relu(stage.layers[0].shortcut(x))
        assert torch.equal(stage(x), expected)
        assert not torch.equal(stage.eval()(x), torch.relu(stage.layers[0].shortcut(x)))


def test_kept_samples_are_scaled() -> None:
    drop, x = DropPath(0.25), torch.ones(4000, 2, 1, 3)
    found = drop(x)
    per_sample = found[:, 0, 0, 0]
    assert torch.equal(found, per_sample[:, None, None, None].expand_as(found))
    assert set(per_sample.tolist()) == {0.0, (torch.ones(1) / 0.75).item()}
    assert found.mean().item() == pytest.approx(1.0, abs=0.05)
    assert drop.eval()(x) is x


def test_training_with_all_drops_reaches_every_weight() -> None:
    model = resnet(drop_rate=0.1, drop_path_rate=0.1)
    with_opinions(model)
    model(images(16, 64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {"drop_rate": 1.0}, "drop_rate is 1.0"),
        ("densenet", {"drop_rate": -0.1}, "drop_rate is -0.1"),
        ("resnet", {"drop_path_rate": 1.5}, "drop_path_rate is 1.5"),
        ("resnet", {"drop_path_rate": 0.1, "depths": [1, 3, 2]}, "stage of one block"),
        ("resnet", {"output_stride": 8}, "output_stride is 8, but it must be 16"),
        ("densenet", {"output_stride": 32}, "output_stride is 32, but it must be 16"),
        ("resnet", {"global_pool": "max"}, "global_pool is 'max'"),
        ("densenet", {"global_pool": ""}, "a classifier reads pooled"),
    ],
)
def test_what_is_not_honoured_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        MODELS[name](**options)


@pytest.mark.parametrize("indices", [0, 5, [4], [-5], []])
def test_levels_that_do_not_exist_are_refused(indices: int | list[int]) -> None:
    with pytest.raises(ModelError, match="there are 4 levels"):
        resnet().forward_intermediates(images(size=64), indices)


def test_output_strides_that_are_true_are_taken() -> None:
    with torch.device("meta"):
        assert TimmResNet(afi_resnet50, output_stride=32).feature_info[-1]["reduction"] == 32
        assert TimmDenseNet(afi_densenet121, output_stride=32).feature_info[-1]["reduction"] == 32
    model = TimmResNet(afi_resnet50, small_inputs=True, output_stride=4, **WIDTHS)
    assert isinstance(model.model, AFIResNetForImageClassification)
