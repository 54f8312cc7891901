"""Two bits per value: right on average, other random numbers in each step, and none of the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import ActivationPlan, Site, find_sites, seed_rounding, uniform
from laconic.activations.keep.rounding import quantized
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from tests.activations.models import loss_of, make_ids, make_model
from tests.grid import grid

FORMAT = BlockFormat("uint2", block_size=256)


@pytest.fixture(autouse=True)
def fresh_seeds() -> None:
    seed_rounding(None)


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator)


def gradient(model: nn.Module) -> Tensor:
    pixels, labels = images()
    model.zero_grad()
    F.cross_entropy(model(pixels), labels).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def test_forward_and_random_state_are_the_unmodified_models() -> None:
    plain, packed = network(0.3), network(0.3)
    laconic.compress_activations(packed, 2, block_size=256)
    pixels, _ = images()
    outputs, states = [], []
    for model in (plain, packed):
        torch.manual_seed(7)
        outputs.append([model(pixels) for _ in range(2)])
        states.append(torch.get_rng_state())
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*states)


def test_gradients_of_a_convolutional_network_are_right_on_average() -> None:
    exact, packed = network(), network()
    laconic.compress_activations(packed, 2, block_size=256)
    truth = gradient(exact)
    single, total = [], torch.zeros_like(truth)
    count = 60
    for seed in range(count):
        seed_rounding(seed)
        found = gradient(packed)
        single.append(float((found - truth).square().sum()))
        total += found
    # The squared error of the mean of independent estimates without bias is the mean squared error over their number.
    # A relu or the statistics of a norm taken from the rounded input make it 20 times that in the second convolution.
    of_one, of_mean = sum(single) / count, float((total / count - truth).square().sum())
    assert of_one > 0.02 * float(truth.square().sum())
    assert of_mean < 2 * of_one / count


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh(x, -0.5, 1.0)


@pytest.mark.parametrize(
    ("activation", "norm"),
    grid(
        [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.ReLU6(), Clamped()],
        [nn.BatchNorm2d(16), nn.GroupNorm(4, 16)],
        strength=1,
    ),
)
def test_what_is_computed_again_behind_norm_and_activation_is_right_on_average(
    activation: nn.Module, norm: nn.Module
) -> None:
    exact = nn.Sequential(nn.Conv2d(3, 16, 3), norm, activation, nn.Conv2d(16, 4, 3))
    packed = copy.deepcopy(exact)
    laconic.compress_activations(packed, 2, block_size=256, mode="combined")
    pixels, weight = images()[0], (lambda model: model[3].weight)
    cotangent = torch.randn(8, 4, 12, 12, generator=torch.Generator().manual_seed(1))
    (truth,) = torch.autograd.grad(exact(pixels), weight(exact), cotangent)
    found = []
    for seed in range(24):
        seed_rounding(seed)
        found += torch.autograd.grad(packed(pixels), weight(packed), cotangent)
    of_one = sum(float((one - truth).square().sum()) for one in found) / 24
    of_mean = float((torch.stack(found).mean(0) - truth).square().sum())
    assert of_one > 0
    assert of_mean < 2 * of_one / 24


def test_rounding_to_nearest_would_not_be_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, packed = network(), network()
    laconic.compress_activations(packed, 2, block_size=256)
    monkeypatch.setattr("laconic.activations.keep.kept.quantized", lambda x, format: format.quantize(x))
    assert float((gradient(packed) - gradient(exact)).norm() / gradient(exact).norm()) > 0.1


def test_two_steps_and_two_tensors_round_differently() -> None:
    x = torch.randn(64, 256)
    torch.manual_seed(1)
    first, second = quantized(x, FORMAT), quantized(x, FORMAT)
    assert not torch.equal(first.codes, second.codes)
    torch.manual_seed(2)  # as a trainer does for its next step
    third = quantized(x, FORMAT)
    assert not torch.equal(third.codes, first.codes)
    torch.manual_seed(1)
    assert torch.equal(quantized(x, FORMAT).codes, first.codes)
    assert torch.equal(quantized(x, FORMAT).codes, second.codes)


def test_seeds_are_reproducible_and_other_formats_take_none() -> None:
    model = network()
    laconic.compress_activations(model, 2, block_size=256)
    results = []
    for seed in (5, 6, 5):
        seed_rounding(seed)
        quantized(torch.ones(4), BlockFormat("int8"))  # to nearest: takes no number
        results.append(gradient(model))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_measuring_takes_no_numbers() -> None:
    x = torch.randn(64, 256)
    seed_rounding(9)
    first = quantized(x, FORMAT)
    second = quantized(x, FORMAT)
    seed_rounding(9)
    assert torch.equal(quantized(x, FORMAT).codes, first.codes)
    pixels, _ = images()
    report = laconic.compress_activations(network(), 2, block_size=256, example_inputs={"input": pixels})
    assert report.unmeasured is None
    assert torch.equal(quantized(x, FORMAT).codes, second.codes)


@pytest.mark.parametrize("seed", [1.5, True, 1 << 63, "1"])
def test_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(ModelError, match=r"seed is .*, but it must be None or an integer that fits in 64 bits, signed"):
        seed_rounding(seed)  # type: ignore[arg-type]


def test_plan_keeps_two_bits() -> None:
    model = network()
    plan = ActivationPlan.make(find_sites(model), uniform(FORMAT))
    again = ActivationPlan.from_json(plan.to_json())
    assert again == plan
    laconic.compress_activations(model, plan=again)
    seed_rounding(4)
    found = gradient(model)
    other = network()
    laconic.compress_activations(other, policy=lambda site: FORMAT)
    seed_rounding(4)
    assert torch.equal(gradient(other), found)


def test_reader_that_asks_for_more_bits_does_not_read_two() -> None:
    model = network()
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]

    def policy(site: Site) -> BlockFormat | None:
        return BlockFormat("int8") if site.name in convolutions else FORMAT

    laconic.compress_activations(model, policy=policy)
    seed_rounding(0)
    first = gradient(model)
    assert first.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
def test_llama_trains_in_every_mode(mode: str) -> None:
    model = make_model("llama")
    laconic.compress_activations(model, 2, block_size=32, mode=mode)
    loss_of(model, make_ids()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_large_float16_values_stay_finite() -> None:
    # bf16 scales round the minimum of fp16 to a number that fp16 does not have.
    layer = nn.Linear(64, 64).half()
    x = torch.full((64, 64), -65504.0).half()
    x[:, ::2] = 65504.0
    laconic.compress_activations(layer, 2, example_inputs={"input": torch.zeros(2, 64).half()})
    x.requires_grad_()
    layer(x).float().mul(1e-4).sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_no_compiled_graph_repeats_the_random_numbers() -> None:
    layer = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    laconic.compress_activations(layer, 2, example_inputs={"input": torch.randn(4, 64)})
    x = torch.randn(32, 64)

    torch.compiler.reset()

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        seed_rounding(2)
        return [torch.autograd.grad(function(x).square().sum(), layer[1].weight)[0] for _ in range(2)]

    # The graph breaks at the site, whose code runs as it would without torch.compile.
    eager, compiled = gradients(layer), gradients(torch.compile(layer, backend="eager"))
    assert not torch.equal(*eager)
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)
