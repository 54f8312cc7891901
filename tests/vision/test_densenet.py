"""Dense networks: DenseNet as long as attention is even, weighted features otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.errors import ModelError
from laconic.vision import AFI, AFIDenseNet, afi_densenet121
from laconic.vision.densenet import _Block
from tests.vision.reference import images, with_opinions


def tiny(**changes: object) -> AFIDenseNet:
    return AFIDenseNet(5, depths=(1, 2, 4), growth=6, small_inputs=True, **changes)  # type: ignore[arg-type]


def dense_block(block: _Block, x: Tensor) -> Tensor:
    """The same layers without attention."""
    for layer in block.layers:
        x = torch.cat([x, layer(x)], 1)
    return x


def test_untrained_network_is_a_densenet() -> None:
    model, x = tiny().double().eval(), images().double()
    expected = model.stem(x)
    for part in model.blocks:
        expected = dense_block(part, expected) if isinstance(part, _Block) else part(expected)
    expected = model.classifier(F.relu(model.norm(expected)).mean((2, 3)))
    torch.testing.assert_close(model(x), expected)
    with_opinions(model)
    assert not torch.allclose(model(x), expected)


def test_layers_read_features_weighted_by_attention() -> None:
    block = next(part for part in tiny().blocks[::-1] if isinstance(part, _Block)).double().eval()
    with_opinions(block)
    x = torch.randn(2, block.out_channels - 4 * 6, 3, 3, dtype=torch.float64)
    features: list[Tensor] = []

    def side_by_side() -> Tensor:
        if not features:
            return x
        scores = torch.stack([block.afi.score(f) for f in features])
        exp = torch.exp(scores - scores.amax(0))
        weights = len(features) * exp / exp.sum(0)
        return torch.cat([x, *(w[..., None, None] * f for w, f in zip(weights, features, strict=True))], 1)

    for layer in block.layers:
        features.append(layer(side_by_side()))
    torch.testing.assert_close(block(x), side_by_side())


def test_densenet121_has_its_parameters_and_those_of_attention() -> None:
    with torch.device("meta"):
        model = afi_densenet121()
    attention = sum(p.numel() for m in model.modules() if isinstance(m, AFI) for p in m.parameters())
    assert attention == 256
    assert sum(p.numel() for p in model.parameters()) - attention == 7_978_856


def test_runs_in_all_ways() -> None:
    model, x = tiny(), images()
    with_opinions(model)
    F.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.training
    model.eval()
    expected = model(x)
    torch.testing.assert_close(model(x[:1]), expected[:1], rtol=1e-4, atol=1e-5)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    other = tiny().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    last = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    model, x = tiny().eval(), images()
    with_opinions(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_images_of_other_sizes_and_channels() -> None:
    model = AFIDenseNet(3, depths=(2, 2), growth=4, in_channels=1).eval()
    assert model(images(2, 48, 1)).shape == (2, 3)


@pytest.mark.parametrize("changes", [{"depths": ()}, {"depths": (2, 0)}, {"growth": 0}])
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"depths is .* growth is"):
        AFIDenseNet(**changes)  # type: ignore[arg-type]
