"""Derivatives of gradients: of every kind of site, in every way that programs ask for them.

With sites that keep exact copies they are the unmodified model's to rounding, at 8 bits to the error of the format.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import laconic
from laconic.activations import checkpoint
from laconic.activations.forwards import attention
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.keep import kept, packer
from laconic.activations.keep.kept import Kept, Memo
from laconic.errors import ModelError
from tests.activations.models import Gated, make_model, relative_error
from tests.distributed.processes import run_joined
from tests.grid import grid

WIDTH = 16


class Written(nn.Module):
    """Calls functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(nn.functional.layer_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.second(nn.functional.dropout(nn.functional.gelu(a) * b, 0.1, self.training))


class SquaredRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(nn.functional.relu(self.first(x)) ** 2)
        return y


class Layers(nn.Module):
    """A decoder of Hugging Face from embeddings to hidden states."""

    def __init__(self, family: str, implementation: str = "eager", dropout: float = 0.1) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": dropout}
        if family == "gpt2":
            sizes, heads = {"n_embd": WIDTH, "n_layer": 1}, {"n_head": 2, "attn_pdrop": dropout}
        model: Any = make_model(family, **sizes, **heads, attn_implementation=implementation)
        if family == "mixtral":
            model.set_experts_implementation("eager")
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state
        return hidden


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x)
        return y


def perceptron(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, 3))


def critic() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(nn.Unflatten(-1, (3, 16, 16)), *layers, nn.Linear(8 * 49, 1))


_LAYERS: dict[str, Callable[..., nn.Module]] = {
    "llama": partial(Layers, "llama"),
    "llama, torch's attention": partial(Layers, "llama", "sdpa"),
    "gpt2": partial(Layers, "gpt2"),
    "experts": partial(Layers, "mixtral"),
}

KINDS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda activation=activation: perceptron(activation())  # type: ignore[misc]
        for name, activation in (
            ("tanh", nn.Tanh),
            ("silu", nn.SiLU),
            ("softplus", nn.Softplus),
            ("gelu", nn.GELU),
            ("relu", nn.ReLU),
            ("dropout", lambda: nn.Dropout(0.2)),
        )
    },
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2)
    ),
    "gated": lambda: nn.Sequential(nn.LayerNorm(WIDTH), Gated(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2)),
    "functions": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Written(), nn.Linear(WIDTH, 2)),
    "squared relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), SquaredRelu()),
    "critic": critic,
    "checkpoint": Checkpointed,
    **_LAYERS,
}

BATCHED: dict[str, Callable[[], nn.Module]] = {  # what draws in a second run has no batched gradients
    **{kind: make for kind, make in KINDS.items() if kind not in ("checkpoint", "critic", *_LAYERS)},
    **{f"{kind}, no dropout": partial(make, dropout=0.0) for kind, make in _LAYERS.items()},
}


def inputs_of(kind: str) -> Tensor:
    shape = (2, 3 * 16 * 16) if kind == "critic" else (2, 4, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Each way gives a tensor of what it finds, from a model and a batch.


def graph(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A batch that wants a gradient, the gradient of the model's sum there, and the parameters."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return x, slope, [p for p in model.parameters() if p.requires_grad]


def flat(grads: Any, *like: Tensor) -> Tensor:
    pairs = zip(grads, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).detach().flatten() for g, p in pairs])


def of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return flat(torch.autograd.grad(slope.square().sum(), x), x)


def of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    _, slope, parameters = graph(model, x)
    return flat(torch.autograd.grad(slope.square().sum(), parameters, allow_unused=True), *parameters)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (y.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()).backward()
    parameters = list(model.parameters())
    return flat([p.grad for p in parameters], *parameters)


def hvp(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = functional.hvp(lambda x: model(x).square().sum(), x, x.cos())[1]  # type: ignore[no-untyped-call]
    return found


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = functional.hessian(lambda part: model(_joined(part, x)).square().sum(), _part(x))  # type: ignore[no-untyped-call]
    return found


def hessian_at_once(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = functional.hessian(  # type: ignore[no-untyped-call]
        lambda part: model(_joined(part, x)).square().sum(), _part(x), vectorize=True
    )
    return found


def jacobian_at_once(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = functional.jacobian(lambda x: model(x).sum(-1).flatten(), x, vectorize=True)  # type: ignore[no-untyped-call]
    return found


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x).sum(-1).flatten()
    return torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(len(y)))


def inner_and_outer_step(model: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    first = functional_call(model, parameters, (x,)).square().mean()
    grads = torch.autograd.grad(first, list(parameters.values()), create_graph=True, allow_unused=True)
    stepped = {
        name: p if grad is None else p - 0.1 * grad for (name, p), grad in zip(parameters.items(), grads, strict=True)
    }
    outer = functional_call(model, stepped, (x.flip(0),)).square().mean()
    return flat(torch.autograd.grad(outer, list(parameters.values()), allow_unused=True), *parameters.values())


def third(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return flat(torch.autograd.grad(bend.square().sum(), x), x)


def again_and_again(model: nn.Module, x: Tensor) -> Tensor:
    """Backward with a graph, without one, of the first gradient, and again."""
    x, parameters = x.clone().requires_grad_(), list(model.parameters())
    loss = model(x).square().sum()
    loss.backward(create_graph=True, inputs=[x])
    assert x.grad is not None
    slope, x.grad = x.grad, None
    loss.backward(retain_graph=True)
    slope.square().sum().backward(retain_graph=True)
    loss.backward()
    return flat([p.grad for p in (x, *parameters)], x, *parameters)


def on_the_host(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return of_parameters(model, x)


def _part(x: Tensor) -> Tensor:
    return x.flatten()[:6].clone()


def _joined(part: Tensor, x: Tensor) -> Tensor:
    return torch.cat((part, x.flatten()[6:])).view_as(x)


WAYS = (of_inputs, of_parameters, penalty, hvp, hessian, inner_and_outer_step, third, again_and_again, on_the_host)
FEW_WAYS = (of_inputs, of_parameters, penalty, hvp, inner_and_outer_step)
AT_ONCE = (hessian_at_once, jacobian_at_once, mapped)


def found(way: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """What a way finds, from the same random state each time."""
    torch.manual_seed(3)
    model.zero_grad()
    # torch's fused attention has no second derivatives.
    with sdpa_kernel(SDPBackend.MATH):
        return way(model, x).detach()


def pair(kind: str, **arguments: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    """The unmodified model, one with the same parameters compressed, and a batch."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append({**KINDS, **BATCHED}[kind]().train())
    x = inputs_of(kind)
    name = "input" if isinstance(models[1], nn.Sequential) else "x"
    laconic.compress_activations(models[1], example_inputs={name: x}, **arguments)
    assert kind == "checkpoint" or any(True for part in models[1].modules() for _ in replacements_of(part))
    return models[0], models[1], x


@pytest.fixture
def exact_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every site keep an exact copy in the place of codes."""

    def pack(x: Tensor, format: Any, origin: str, layout: Any = None, quantize: Any = None, **_: Any) -> Kept:
        def rebuild(tensors: tuple[Tensor, ...], after: Tensor | None) -> Tensor:
            return tensors[0].clone() if layout is None else layout.unflatten(tensors[0].clone())

        return Kept((x.detach().clone(),), Memo(rebuild), origin, 8)

    for module in (kept, attention, packer):
        monkeypatch.setattr(module, "pack", pack)
    regions = sys.modules["laconic.activations.forwards.checkpoint"]
    monkeypatch.setattr(regions, "packed_inputs", lambda *_: contextlib.nullcontext(lambda function: function))


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True
@pytest.mark.usefixtures("exact_copies")
@pytest.mark.parametrize(("kind", "way"), grid(list(KINDS), WAYS, strength=1))
def test_they_are_those_of_the_unmodified_model(kind: str, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, twin, x = pair(kind, bits=8)
    expected, got = found(way, model, x), found(way, twin, x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert expected.abs().max() > 0


@pytest.mark.usefixtures("exact_copies")
@pytest.mark.parametrize(("kind", "way"), grid(list(BATCHED), AT_ONCE, strength=1))
def test_batched_gradients_are_those_of_the_unmodified_model(
    kind: str, way: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    model, twin, x = pair(kind, bits=8)
    if way is mapped and "no dropout" in kind:
        with pytest.raises(ModelError, match=r"torch\.func\.vmap runs a backward"):
            found(way, twin, x)
        return
    expected, got = found(way, model, x), found(way, twin, x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("way", [hessian_at_once, jacobian_at_once], ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", _LAYERS)
def test_batched_gradients_of_a_second_run_that_draws_are_refused(
    kind: str, way: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    _, twin, x = pair(kind, bits=8)
    with pytest.raises(ModelError, match=r"batched gradients .* set the dropout to 0"):
        found(way, twin, x)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("kind", "way", "bits", "error"),
    grid(
        list(KINDS),
        [of_inputs, of_parameters, penalty, hvp, inner_and_outer_step],
        [pytest.param(8, 0.05, id="8"), pytest.param(4, 0.6, id="4")],
        strength=1,
    ),
)
def test_codes_move_them_by_the_error_of_the_format(
    kind: str, way: Callable[[nn.Module, Tensor], Tensor], bits: int, error: float
) -> None:
    model, twin, x = pair(kind, bits=bits)
    assert relative_error(found(way, twin, x), found(way, model, x)) < error


@pytest.mark.ci
def test_of_dtensors_a_second_derivative_is_refused_on_every_way() -> None:
    run_joined(refused_of_dtensors, (), 2)


def refused_of_dtensors(world: object) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
    laconic.compress_activations(model, bits=8, example_inputs={"input": torch.randn(2, 4, WIDTH)})
    parallelize_module(model, mesh, {"1": SequenceParallel(), "2": ColwiseParallel(input_layouts=Shard(1))})
    x = torch.randn(2, 4, WIDTH).requires_grad_()
    for wanted in (x, model[0].weight, model[1].weight, model[2].weight):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(ModelError, match="reaches a DTensor that laconic keeps packed"):
            torch.autograd.grad(slope.sum(), wanted, allow_unused=True)
