"""Gates of laconic.moe in the place of a Hugging Face model's routers, from Python and from TOML."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import ConfigError, ModelError, RoutingError
from laconic.moe import (
    ExpertChoiceGate,
    Gate,
    SoftmaxGate,
    auxiliary_losses,
    make_gate,
    moe_layers,
    parallelize,
)
from laconic.options import GATES
from laconic.train.config.schema import MoEConfig
from tests.activations.models import make_ids, make_model

IDS = make_ids(2, 8, 1)


def tiny(family: str = "mixtral") -> nn.Module:
    return make_model(family, experts_implementation="eager").double()


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return loss


@pytest.mark.parametrize("name", GATES)
def test_every_name_makes_the_gate_of_its_file(name: str) -> None:
    gate = make_gate(name, 4, 16, 2)
    assert isinstance(gate, Gate)
    assert type(gate).__module__ == f"laconic.moe.gates.{name}"
    assert gate(torch.randn(5, 16)).num_tokens == 5
    assert MoEConfig(expert_parallel=1, gate=name).gate == name  # type: ignore[arg-type]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="gate is 'top1', but it must be one of softmax, gshard"):
        make_gate("top1", 4, 16)
    with pytest.raises(ConfigError, match=r"moe\.gate is 'top1'"):
        MoEConfig(expert_parallel=1, gate="top1")  # type: ignore[arg-type]


def test_the_softmax_gate_decides_as_the_routers_of_mixtral() -> None:
    """With their weights, which get the same gradients."""
    reference, model = tiny(), tiny()
    names = [*model.state_dict()]
    parallelize(model, gate="softmax")
    assert [*model.state_dict()] == names
    expected, got = loss_of(reference), loss_of(model)
    assert torch.allclose(got, expected, rtol=1e-7, atol=0)
    expected.backward()
    got.backward()
    for (name, parameter), one in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(one.grad, Tensor)
        assert isinstance(parameter.grad, Tensor), name
        # Routers of Hugging Face have their softmax in fp32.
        assert torch.allclose(parameter.grad, one.grad, rtol=1e-4, atol=1e-7), name


def test_expert_choice_gives_each_expert_its_share() -> None:
    model = tiny("qwen3_moe")
    parallelize(model, gate="expert_choice")
    layer = next(iter(moe_layers(model).values()))
    loss_of(model).backward()
    assert layer.load is not None
    assert layer.load.tolist() == [IDS.numel() * 2 // 4] * 4
    router = model.model.layers[0].mlp.gate
    assert router.weight.grad.abs().max() > 0


def test_a_gate_reads_the_weight_that_the_router_has_now() -> None:
    seen: list[Any] = []

    def gate(*sizes: int) -> Gate:
        seen.append(sizes)
        return SoftmaxGate(*sizes, balance_coef=0.5, jitter=0.0)

    model, other = tiny(), tiny()
    parallelize(model, gate=gate)
    assert seen == [(4, 64, 2)] * 2
    for one in (model, other):
        torch.manual_seed(3)
        router = one.model.layers[0].mlp.gate
        router.weight = nn.Parameter(torch.randn(router.weight.shape, dtype=torch.float64))
    model.float().double()
    assert torch.allclose(loss_of(model), loss_of(other.float().double()), rtol=1e-12)
    assert set(auxiliary_losses(model)) == {"balance"}
    model.eval()
    loss_of(model)
    assert not next(iter(moe_layers(model).values())).gate.gate.training  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("gate", "what"),
    [("gshard", "noise_weight"), ("sigmoid", "bias"), ("cosine", "embeddings"), ("soft", "scale, slots")],
)
def test_gates_with_more_than_the_routers_weight_are_refused(gate: str, what: str) -> None:
    model = tiny()
    with pytest.raises(ModelError, match=f"has {what}.* where the model's checkpoints have only model.layers.0.mlp"):
        parallelize(model, gate=gate)  # type: ignore[arg-type]
    assert not moe_layers(model)


def test_a_number_of_experts_that_changes_after_the_gate_is_made_is_refused() -> None:
    model = tiny()
    parallelize(model, gate="softmax")
    model.model.layers[1].mlp.gate.top_k = 1
    with pytest.raises(RoutingError, match=r"layers.1.mlp.gate takes 1 experts per token, .* was made for 2; set"):
        loss_of(model)


def test_gates_of_another_width_are_refused() -> None:
    with pytest.raises(ModelError, match=r"reads a weight \[4, 8\] and nothing else; leave gate out"):
        parallelize(tiny(), gate=lambda *_: ExpertChoiceGate(4, 8))


def test_nothing_else_balances_a_gate() -> None:
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "bias_rate"):
        with pytest.raises(ConfigError, match=rf"moe\.{name} is 0\.1, but it must be left out with moe\.gate"):
            MoEConfig(expert_parallel=1, gate="softmax", **{name: 0.1})
    with pytest.raises(ConfigError, match=r"moe\.gate is 'softmax', but it must be left out without"):
        MoEConfig(gate="softmax")
