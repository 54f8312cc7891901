"""Residual networks: their definition, Hugging Face's conventions, and all ways in which torch runs a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel, AutoModelForImageClassification, ResNetForImageClassification

from laconic.errors import ModelError
from laconic.vision import AFIResNetForImageClassification, AFIResNetModel, AFIStage, afi_resnet50
from tests.inductor import needs_inductor
from tests.vision.reference import averages, images, tiny, tiny_config


def by_definition(stage: AFIStage, x: Tensor) -> Tensor:
    """x_i = relu(x_(i-1) + sum over j <= i of a_ij f_j), with all weights of a level computed anew."""
    features: list[Tensor] = []
    scores: list[Tensor] = []
    for block in stage.layers:
        features.append(block.layer(x))
        scores.append(stage.afi.score(features[-1]))
        x = torch.relu(block.shortcut(x) + averages(features, scores)[-1])
    return x


def logits(model: nn.Module, x: Tensor) -> Tensor:
    found = model(pixel_values=x).logits
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_stages_compute_their_definition(layer_type: str) -> None:
    model = tiny(layer_type=layer_type, depths=[2, 3, 4]).double().eval()
    x = images().double()
    stages = model.resnet.encoder.stages
    found = model(x, output_hidden_states=True)
    x = model.resnet.embedder(x)
    for stage, hidden in zip(stages, found.hidden_states[1:], strict=True):
        x = by_definition(stage, x)
        torch.testing.assert_close(hidden, x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.logits, model.classifier(x.mean((2, 3))), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [False, True])
def test_first_blocks_are_those_of_a_resnet(training: bool) -> None:
    config = tiny_config(depths=[1, 1, 1], small_inputs=False)
    model = AFIResNetForImageClassification(config).train(training)
    plain = ResNetForImageClassification(config).train(training)
    plain.load_state_dict(model.state_dict())
    x = images(size=32)
    assert torch.equal(logits(model, x), logits(plain, x))


@pytest.mark.parametrize(("size", "small"), [(32, False), (28, True), (33, True)])
def test_loss_has_a_finite_gradient_for_every_parameter(size: int, small: bool) -> None:
    model = tiny(small_inputs=small)
    model(pixel_values=images(size=size), labels=torch.tensor([0, 1, 2])).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_small_inputs_keep_the_resolution_of_the_images() -> None:
    x = images(size=28, channels=1)
    model = tiny(num_channels=1)
    assert model.resnet.embedder(x).shape[2:] == (28, 28)
    assert tiny(num_channels=1, small_inputs=False).resnet.embedder(x).shape[2:] == (7, 7)


def test_one_image_is_one_of_a_batch_in_eval() -> None:
    model, x = tiny().eval(), images(4)
    torch.testing.assert_close(logits(model, x[2:3]), logits(model, x)[2:3], rtol=1e-4, atol=1e-5)


def test_channels_last_gives_the_same_and_stays_channels_last() -> None:
    model, x = tiny().eval(), images()
    expected = logits(model, x)
    model = model.to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    stage = model.resnet.encoder.stages[1]
    hidden = stage(model.resnet.encoder.stages[0](model.resnet.embedder(x)))
    assert hidden.is_contiguous(memory_format=torch.channels_last)


def test_autocast_keeps_the_stream_in_bfloat16_and_scores_in_float32() -> None:
    model, x = tiny(), images()
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    stage = model.resnet.encoder.stages[2]
    stage.afi.register_forward_hook(lambda m, args, out: seen.append((out.average.dtype, out.log_sum.dtype)))
    expected = logits(model, x)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(pixel_values=x, labels=torch.tensor([0, 1, 2])).loss
        found = logits(model, x)
    loss.backward()
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert (found - expected).norm() < 0.1 * expected.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.ci
def test_compiles_into_one_graph() -> None:
    model, x = tiny(), images()
    labels = torch.tensor([0, 1, 2])
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for one in (model, compiled):
        one(pixel_values=x, labels=labels).loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor imports what torch itself deprecates
@needs_inductor
def test_inductor_gives_the_same() -> None:
    model, x = tiny(depths=[1, 1, 2]).eval(), images()  # each further block is a second of a C++ compiler's time
    torch.testing.assert_close(logits(torch.compile(model, fullgraph=True), x), logits(model, x), rtol=1e-4, atol=1e-5)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_finds_no_unused_parameters(world_of_one: None) -> None:
    model = DistributedDataParallel(tiny())
    for _ in range(2):  # the second forward refuses if a gradient of the first never came
        model(pixel_values=images(), labels=torch.tensor([0, 1, 2])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_and_state_dicts_hold_all(tmp_path: Path) -> None:
    model, x = tiny(reduction=5).eval(), images()
    expected = logits(model, x)
    other = tiny(reduction=5).eval()
    assert not torch.equal(logits(other, x), expected)
    other.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert type(base) is AFIResNetModel
    assert torch.equal(base(x).pooler_output, model.resnet(x).pooler_output)
    loaded: Any
    for loaded in (
        other,
        copy.deepcopy(model),
        AFIResNetForImageClassification.from_pretrained(tmp_path),
        AutoModelForImageClassification.from_pretrained(tmp_path),
    ):
        assert type(loaded) is AFIResNetForImageClassification
        assert loaded.config.reduction == 5
        assert not loaded.training
        assert torch.equal(logits(loaded, x), expected)


def test_resnet_of_the_same_depths_loads_and_gets_new_attention(tmp_path: Path) -> None:
    config = tiny_config(small_inputs=False)
    plain = ResNetForImageClassification(config)
    plain.save_pretrained(tmp_path)
    model = AFIResNetForImageClassification.from_pretrained(tmp_path, config=config)
    new = {name: p for name, p in model.named_parameters() if ".afi." in name}
    assert model.state_dict().keys() - new.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert len(new) == 4
    for name, parameter in new.items():
        assert parameter.any() == ("squeeze" in name), name


def test_new_networks_average_their_levels_evenly() -> None:
    model = AFIResNetForImageClassification(tiny_config())
    weights = [stage.afi.expand.weight for stage in model.modules() if isinstance(stage, AFIStage)]
    assert len(weights) == 2
    assert not any(weight.any() for weight in weights)


@pytest.mark.parametrize("depths", [(3, 4), (2, 0, 2, 2), ()])
def test_depths_that_are_none_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"depths is \[.*must be 4 numbers of at least 1"):
        afi_resnet50(depths=depths)


def test_constructors_take_depths_classes_channels_and_stem() -> None:
    model = afi_resnet50(7, depths=(1, 2), in_channels=1, small_inputs=True, hidden_sizes=[16, 32], embedding_size=8)
    assert logits(model.eval(), images(2, 28, 1)).shape == (2, 7)
    features = afi_resnet50(0, depths=(1, 2), hidden_sizes=[16, 32], embedding_size=8).eval()
    assert logits(features, images(2, 64)).shape == (2, 32)
