"""Sites are found by what modules compute, in every supported family."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import find_sites
from laconic.activations.backward.functions import ACTIVATIONS
from laconic.activations.backward.norms import NormSpec
from laconic.activations.recognize.sites import LinearSpec, MlpSpec
from laconic.errors import ModelError
from tests.activations.models import make_model

# Per model of two layers: norms, linears (output projection included), feed-forward blocks.
EXPECTED = {
    "llama": (5, 15, 2),
    "mistral": (5, 15, 2),
    "qwen2": (5, 15, 2),
    "qwen3": (9, 15, 2),
    "olmo2": (9, 15, 2),
    "gemma2": (9, 15, 2),
    "phi3": (5, 9, 2),
    "gpt2": (5, 9, 2),
}


def test_every_norm_linear_and_mlp_is_found(family: str) -> None:
    kinds = Counter(site.kind for site in find_sites(make_model(family)))
    assert (kinds["norm"], kinds["linear"], kinds["mlp"]) == EXPECTED[family]


def test_sites_on_the_meta_device_are_the_same(family: str) -> None:
    model = make_model(family)
    assert find_sites(model) == find_sites(model.to("meta"))


def test_defaults_of_device_and_dtype_do_not_matter(family: str) -> None:
    model = make_model(family)
    expected = find_sites(model)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            laconic.compress_activations(twin := copy.deepcopy(model))
            assert find_sites(model) == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    laconic.decompress_activations(twin)


class Configurable(nn.Linear):
    """As torchtitan's: torch's own forward, with an attribute that it does not read."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.param_init = {"weight": nn.init.ones_}


class ConfigurableNorm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(8, eps=1e-5)
        self.param_init = {"weight": nn.init.ones_}


class ScaledByAttribute(Configurable):
    """Another forward, which reads the attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if "scale" in self.param_init else 1)


def test_a_subclass_with_torchs_forward_may_hold_anything() -> None:
    assert [site.kind for site in find_sites(nn.Sequential(Configurable(), ConfigurableNorm()))] == ["linear", "norm"]
    assert find_sites(nn.Sequential(ScaledByAttribute())) == []


def test_specs_tell_the_families_apart() -> None:
    def first(family: str, kind: str) -> object:
        return next(site.spec for site in find_sites(make_model(family)) if site.kind == kind)

    assert first("llama", "norm") == NormSpec("rms", 1e-6)
    assert first("gemma2", "norm") == NormSpec("rms", 1e-6, unit_offset=True)
    assert first("gpt2", "norm") == NormSpec("layer", 1e-5)
    assert first("gpt2", "linear") == LinearSpec(transposed=True)
    assert first("llama", "linear") == LinearSpec(transposed=False)
    assert first("llama", "mlp") == MlpSpec("gate_proj", "up_proj", "down_proj", "act_fn", "silu")
    assert first("gemma2", "mlp") == MlpSpec("gate_proj", "up_proj", "down_proj", "act_fn", "gelu_tanh")
    assert first("phi3", "mlp") == MlpSpec("gate_up_proj", None, "down_proj", "activation_fn", "silu", fused=True)
    assert first("gpt2", "mlp") == MlpSpec("c_fc", None, "c_proj", "act", "gelu_tanh")


def test_a_site_knows_its_layer_and_its_shape() -> None:
    sites = {site.name: site for site in find_sites(make_model("llama"))}
    assert sites["model.layers.1.mlp"].layer == 1
    assert sites["model.layers.1.mlp"].features == (2 * 160,)
    assert sites["model.layers.0.input_layernorm"].features == (64,)
    assert sites["model.layers.0.mlp.down_proj"].features == (160,)
    assert sites["lm_head"].layer is None


def test_the_head_is_what_stands_behind_the_stack(family: str) -> None:
    heads = [site.name for site in find_sites(make_model(family)) if site.head]
    assert heads == (["transformer.ln_f", "lm_head"] if family == "gpt2" else ["model.norm", "lm_head"])
    assert not any(site.head for site in find_sites(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))


class FamiliarNamesOnly(nn.Module):
    """Looks like a gated feed-forward block and multiplies twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
        return out


class ScaledNorm(nn.Module):
    """Calls itself a norm and normalizes to length two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.rms_norm(x, (8,), self.weight, self.eps)


def test_a_block_that_computes_something_else_is_left_alone() -> None:
    kinds = Counter(site.kind for site in find_sites(nn.ModuleList([FamiliarNamesOnly(), ScaledNorm()])))
    assert kinds == {"linear": 3, "activation": 1, "functions": 2}


class QuickGelu(nn.Module):
    """CLIP's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Recorder:
    """Notes what an activation reads."""

    def __init__(self) -> None:
        self.calls, self.largest = 0, list[float]()


class Recording(nn.Module):
    """SiLU that tells a recorder."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    def forward(self, x: Tensor) -> Tensor:
        self.recorder.calls += 1
        self.recorder.largest.append(float(x.detach().abs().max()))
        return F.silu(x)


def test_a_trial_is_not_recorded() -> None:
    recording = Recording()
    assert "activation" in [site.kind for site in find_sites(nn.Sequential(nn.Linear(8, 8), recording))]
    assert vars(recording.recorder) == {"calls": 0, "largest": []}


TRIED: list[float] = []


class Times(nn.Module):
    """A function times a scale that is kept in some place; SiLU where it is one."""

    def __init__(self, place: str, scale: float) -> None:
        super().__init__()
        if place == "buffer":
            self.register_buffer("scale", torch.tensor(scale))
        self.place, self.function = place, F.silu
        if place == "attribute":
            self.scale = scale
        elif place == "tuple":
            self.scale = (0, (scale,))
        elif place == "object":
            self.scale = Scale(scale)
        elif place == "function":
            self.scale = lambda x: x * scale

    def forward(self, x: Tensor) -> Tensor:
        TRIED.append(1)
        y = F.silu(x)
        match self.place:
            case "tuple":
                return y * self.scale[1][0]
            case "object":
                return y * self.scale.value
            case "function":
                return self.scale(y)
        return y * self.scale


class Scale:
    """A scale that a module holds as an object."""

    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("place", ["attribute", "tuple", "object", "function", "buffer"])
def test_modules_of_one_class_that_compute_something_else_are_told_apart(place: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Times(place, scale) for scale in (1.0, 2.0, 1.0, 0.5)))
    assert [site.name for site in find_sites(model) if site.kind == "activation"] == ["1", "3"]


def test_modules_that_are_alike_are_tried_once() -> None:
    counts = []
    for number in (1, 9):
        TRIED.clear()
        sites = find_sites(nn.Sequential(nn.Linear(8, 8), *(Times("attribute", 1.0) for _ in range(number))))
        assert [site.kind for site in sites] == ["linear", *["activation"] * number]
        counts.append(len(TRIED))
    find_sites(nn.Sequential(nn.Linear(8, 8), Times("attribute", 1.0)))  # nothing is known from another search
    assert [*counts, len(TRIED)] == [counts[0], counts[0], 2 * counts[0]]


class Clipped(nn.Module):
    """SiLU below a limit that few inputs reach, as GELU in transformers' `gelu_10`."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x).clamp(max=10)


class Plain(nn.Module):
    """A feed-forward block with an activation of choice."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(8, 16), nn.Linear(16, 8), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


@pytest.mark.parametrize(
    ("act", "activation"),
    [
        (nn.ReLU(), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (QuickGelu(), "quick_gelu"),
        (nn.ReLU(inplace=True), None),
        (nn.Tanh(), None),
        (Clipped(), None),
        (nn.PReLU(), None),
    ],
)
def test_activations_are_told_apart_and_those_in_place_left_alone(act: nn.Module, activation: str | None) -> None:
    specs = [site.spec for site in find_sites(nn.ModuleList([Plain(act)])) if site.kind == "mlp"]
    assert specs == ([] if activation is None else [MlpSpec("fc1", None, "fc2", "act", activation)])


class UnheardOf(nn.Module):
    """A norm of a class that nobody has heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(8)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (8,), 1 + self.weight.float(), self.variance_epsilon).to(x.dtype)


class HandWritten(nn.Module):
    """A norm whose epsilon is in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-6)


class ClippedNorm(nn.RMSNorm):
    """Normalizes what it has clipped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


class ClippedLinear(nn.Linear):
    """Multiplies what it has clipped."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


def test_what_clips_its_input_is_no_norm_and_no_linear_layer() -> None:
    assert find_sites(nn.Sequential(ClippedNorm(8, eps=1e-6), ClippedLinear(8, 8))) == []


class Guided(torch.autograd.Function):
    """ReLU whose backward passes positive gradients only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.relu() * (x > 0)


class GuidedRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Guided.apply(x)
        return y


class DetachedNorm(nn.RMSNorm):
    """Does not differentiate its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return x * (x.detach().square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Slow(nn.Linear):
    """Learns at half of the rate."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight + self.weight.detach()) / 2, self.bias)


def test_what_has_another_gradient_is_no_norm_no_linear_layer_and_no_activation() -> None:
    model = nn.Sequential(DetachedNorm(8, eps=1e-6), Slow(8, 8), nn.Linear(8, 8), GuidedRelu())
    assert [site.name for site in find_sites(model)] == ["2"]
    with torch.inference_mode():
        assert [site.name for site in find_sites(nn.Sequential(nn.RMSNorm(8, eps=1e-6), GuidedRelu()))] == ["0"]


@pytest.mark.parametrize(
    ("norm", "spec"),
    [
        (UnheardOf(), NormSpec("rms", 1e-5, unit_offset=True)),
        (nn.RMSNorm(8, eps=1e-6), NormSpec("rms", 1e-6)),
        (nn.LayerNorm(8), NormSpec("layer", 1e-5)),
        (nn.LayerNorm(8, bias=False), NormSpec("layer", 1e-5)),
        (nn.LayerNorm(8, elementwise_affine=False), NormSpec("layer", 1e-5)),
        (nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), NormSpec("rms", 1e-6)),
        (HandWritten(), NormSpec("layer", 1e-6)),
    ],
)
def test_a_norm_is_recognized_by_its_values(norm: nn.Module, spec: NormSpec) -> None:
    (site,) = find_sites(nn.Sequential(norm))
    assert site.spec == spec


class Named(nn.Linear):
    """Multiplies, as Falcon's does, by code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Quantized(nn.Linear):
    """Multiplies by rounded weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round(decimals=1), self.bias)


class Noisy(nn.Linear):
    """Multiplies by noisy weights in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + torch.randn_like(self.weight) if self.training else self.weight, self.bias)


class Scaled(nn.Linear):
    """Has a parameter more."""

    def __init__(self, features: int) -> None:
        super().__init__(features, features)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_of_another_class_is_recognized_by_its_values(bias: bool) -> None:
    (site,) = find_sites(nn.Sequential(Named(4, 6, bias=bias)))
    assert (site.spec, site.features) == (LinearSpec(transposed=False), (4,))


def test_linears_that_do_more_are_left_alone() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert find_sites(nn.Sequential(Quantized(4, 4), Noisy(4, 4), Scaled(4), normed)) == []


class ChannelsFirst(nn.Module):
    """A norm over the second of four dimensions, and over the last of any other number."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self(x.permute(0, 2, 3, 1).flatten(1, 2)).unflatten(1, (x.shape[2], x.shape[3])).permute(0, 3, 1, 2)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("features", [3, 5, 8])
@pytest.mark.parametrize(
    "norm",
    [
        lambda features: nn.GroupNorm(1, features),
        lambda features: nn.InstanceNorm1d(features, affine=True),
        lambda features: nn.BatchNorm1d(features, track_running_stats=False),
        ChannelsFirst,
    ],
)
def test_a_norm_over_other_dimensions_than_the_last_is_none(norm: Callable[[int], nn.Module], features: int) -> None:
    assert all(site.kind in ("channel_norm", "functions") for site in find_sites(nn.Sequential(norm(features))))


class OfAnyLength(nn.Module):
    """A norm over the last dimension, whatever its length, with a scale and an offset for all of it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * self.weight + self.bias


@pytest.mark.parametrize("features", [1, 8])
def test_a_norm_with_parameters_of_one_element_stays_exact(features: int) -> None:
    exact = nn.Sequential(nn.Linear(8, 8), OfAnyLength(features), nn.Linear(8, 8))
    assert [site.kind for site in find_sites(exact)] == ["linear", "functions", "linear"]
    kept = copy.deepcopy(exact)
    laconic.compress_activations(kept)
    x = torch.randn(4, 8)
    for model in (exact, kept):
        model(x).square().sum().backward()
    torch.testing.assert_close(kept[1].weight.grad, exact[1].weight.grad)
    torch.testing.assert_close(kept[1].bias.grad, exact[1].bias.grad)


def test_a_module_that_gets_its_shape_later_is_no_site() -> None:
    assert find_sites(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4)))[0].name == "2"


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_derivative_of_an_activation_is_that_of_autograd(name: str) -> None:
    x = torch.linspace(-6, 6, 401, dtype=torch.float64).requires_grad_()
    grad = torch.randn(401, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(ACTIVATIONS[name].forward(x), x, grad)
    torch.testing.assert_close(ACTIVATIONS[name].backward(grad, x.detach()), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of another category from torch to torch
def test_what_torch_jit_has_compiled_is_no_site_and_runs_inside_of_a_model() -> None:
    inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model, x = nn.Sequential(nn.LayerNorm(64), torch.jit.script(inner), nn.Linear(64, 64)), torch.randn(32, 64)
    with pytest.raises(ModelError, match=r"compiled by torch.jit, whose forward cannot be replaced"):
        laconic.compress_activations(model[1])
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    report = laconic.compress_activations(model, bits=8, example_inputs={"input": x})
    assert report.unmeasured is None
    assert [row.name for row in report.rows if row.is_site] == ["0", "2"]
    for a, b in zip(torch.autograd.grad(model(x).square().sum(), [*model.parameters()]), expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
