"""The running average is the softmax over all levels: values and gradients, whatever the scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import ModelError
from laconic.vision import AFI, Integrated, concatenate, integrate
from tests.vision.reference import averages, with_opinions


def running(features: list[Tensor], scores: list[Tensor]) -> list[Tensor]:
    levels: Integrated | None = None
    found = []
    for feature, score in zip(features, scores, strict=True):
        levels = integrate(feature, score, levels)
        found.append(levels.average)
    return found


@given(
    depth=st.integers(1, 7),
    batch=st.integers(1, 2),
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 800.0, 1e5, 1e300]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80)
def test_running_average_is_the_softmax_over_all_levels(
    depth: int, batch: int, channels: int, size: tuple[int, int], spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(depth)]

    features = [f.requires_grad_() for f in draw(batch, channels, *size)]
    scores = [(spread * e).requires_grad_() for e in draw(batch, channels)]
    weights = draw(batch, channels, *size)
    found, expected = running(features, scores), averages(features, scores)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

    def gradients(levels: list[Tensor]) -> tuple[Tensor, ...]:
        loss = sum((w * a).sum() for w, a in zip(weights, levels, strict=True))
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, [*features, *scores], allow_unused=True, materialize_grads=True)

    for a, b in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_scores_at_the_ends_of_float32_leave_all_finite() -> None:
    largest = torch.finfo(torch.float32).max
    features = [torch.randn(1, 2, 2, 2, requires_grad=True) for _ in range(4)]
    scores = [torch.full((1, 2), e, requires_grad=True) for e in (-largest, largest, -largest, largest)]
    found = running(features, scores)
    torch.testing.assert_close(found[-1], (features[1] + features[3]) / 2)
    found[-1].sum().backward()
    for tensor in (*features, *scores):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_average_in_bfloat16_stays_near_the_exact_one_over_36_levels() -> None:
    features = [torch.randn(2, 4, 5, 5) for _ in range(36)]
    scores = [torch.randn(2, 4) for _ in range(36)]
    exact = running(features, scores)[-1]
    rounded = running([f.bfloat16() for f in features], scores)[-1]
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_gradients_of_the_module_are_those_of_finite_differences() -> None:
    afi = AFI(3, reduction=2).double()
    with_opinions(afi, scale=1.0)
    parameters = tuple(p.detach().clone().requires_grad_() for p in afi.parameters())
    names = [name for name, _ in afi.named_parameters()]
    features = [torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def last(*tensors: Tensor) -> Tensor:
        values = dict(zip(names, tensors[3:], strict=True))
        levels = None
        for feature in tensors[:3]:
            levels = torch.func.functional_call(afi, values, (feature, levels))
        assert levels is not None
        return levels.average

    assert torch.autograd.gradcheck(last, (*features, *parameters))


@pytest.mark.parametrize(
    ("channels", "reduction", "hidden"), [(1, 32, 1), (31, 32, 1), (33, 32, 2), (64, 32, 2), (7, 1, 7)]
)
def test_hidden_units_round_up(channels: int, reduction: int, hidden: int) -> None:
    afi = AFI(channels, reduction)
    assert sum(p.numel() for p in afi.parameters()) == 2 * channels * hidden
    assert afi.score(torch.randn(2, channels, 3, 3)).shape == (2, channels)


def test_untrained_stage_averages_its_levels_evenly() -> None:
    afi = AFI(4)
    features = torch.randn(5, 2, 4, 3, 3)
    levels = None
    for n, feature in enumerate(features, 1):
        levels = afi(feature, levels)
        torch.testing.assert_close(levels.average, features[:n].mean(0))


def test_score_is_the_formula_and_never_in_bfloat16() -> None:
    afi = AFI(6, reduction=2)
    with_opinions(afi)
    feature = torch.randn(2, 6, 3, 4)
    w1, w2 = afi.squeeze.weight, afi.expand.weight
    expected = torch.relu(feature.sum((2, 3)) / 12 @ w1.T) @ w2.T
    torch.testing.assert_close(afi.score(feature), expected)
    assert afi.double().score(feature.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        scores = [afi.float().score(feature)]
    scores.append(afi.bfloat16().score(feature.bfloat16()))
    for score in scores:
        assert score.dtype == torch.float32
        assert not torch.equal(score, score.bfloat16().float())


@pytest.mark.parametrize(("arguments", "match"), [((0,), "channels is 0.*at least 1"), ((8, 0), "reduction is 0")])
def test_sizes_that_make_no_sense_are_refused(arguments: tuple[int, ...], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        AFI(*arguments)


@pytest.mark.parametrize("shape", [(2, 5, 3, 3), (2, 4), (4, 3, 3)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"feature is \[.*must be \[batch, 4, height, width\]"):
        AFI(4)(torch.randn(shape))


def test_concatenation_weights_features_by_their_number_times_their_attention() -> None:
    first, features = torch.randn(2, 3, 2, 2), list(torch.randn(4, 2, 5, 2, 2))
    assert concatenate(first, [], []) is first
    even = concatenate(first, features, list(torch.zeros(4, 2, 5)))
    torch.testing.assert_close(even, torch.cat([first, *features], 1))
    scores = list(torch.randn(4, 2, 5))
    weighted = concatenate(first, features, scores)
    torch.testing.assert_close(weighted[:, :3], first)
    parts = weighted[:, 3:].split(5, 1)
    torch.testing.assert_close(sum(parts) / 4, averages(features, scores)[-1])
    ratio = parts[1] / features[1] / (parts[0] / features[0])
    torch.testing.assert_close(ratio, torch.exp(scores[1] - scores[0])[..., None, None].expand_as(ratio))
