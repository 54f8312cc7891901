"""Parameters that are computed from others after the conversion keep their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import laconic
from tests.activations.models import both_gradients, make_ids, make_model, relative_error
from tests.grid import few


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def halved(name: str) -> Callable[[nn.Module], object]:
    return lambda module: parametrize.register_parametrization(module, name, Half())


# What is done, and to which modules of a model.
CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "norm": (halved("weight"), "norm"),
    "pruned norm": (lambda module: prune.l1_unstructured(module, "weight", amount=0.3), "norm"),
    "weight": (halved("weight"), "proj"),
    "pruned weight": (lambda module: prune.l1_unstructured(module, "weight", amount=0.3), "proj"),
    "weight norm": (parametrizations.weight_norm, "proj"),
    "bias": (halved("bias"), "q_proj"),
    "pruned bias": (lambda module: prune.l1_unstructured(module, "bias", amount=0.3), "q_proj"),
    "experts": (halved("gate_up_proj"), "experts"),
    "pruned experts": (lambda module: prune.l1_unstructured(module, "down_proj", amount=0.3), "experts"),
}


@pytest.mark.parametrize("name", few(CHANGES, 4))
def test_a_parameter_that_is_computed_later_has_its_gradient(name: str) -> None:
    change, suffix = CHANGES[name]
    model = make_model("qwen2_moe")
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        places = [module for path, module in each.named_modules() if path.endswith(suffix)]
        assert places
        for module in places:
            change(module)
    expected, got = both_gradients(model, twin, make_ids())
    assert got.keys() == expected.keys()
    assert all(relative_error(got[path], gradient) < 0.1 for path, gradient in expected.items())


def test_a_parametrized_weight_is_computed_as_often_as_without_us(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    twin, x = copy.deepcopy(model), torch.randn(16, 64)
    laconic.compress_activations(twin, bits=8, example_inputs={"input": x})
    for each in (model, twin):
        torch.manual_seed(1)
        parametrizations.spectral_norm(each[1])  # one more step of its power iteration each time
        for _ in range(3):
            each(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    (record,) = [record for record in caplog.records if "parametrized" in record.message]
    assert record.message.startswith("1 was parametrized after compress_activations, so it stays exact")


def test_every_model_says_once_that_it_was_parametrized(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(16, 64)
        laconic.compress_activations(model, bits=8, example_inputs={"input": x})
        parametrizations.spectral_norm(model[0])
        for _ in range(2):
            model(x).sum().backward()
    assert len([record for record in caplog.records if "parametrized" in record.message]) == 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks the old way
def test_an_adapter_that_parametrizes_experts_while_they_run_is_trained() -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    gradients = []
    for compressed in (False, True):
        model = make_model("qwen2_moe")
        if compressed:
            laconic.compress_activations(model, bits=8)
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj"], init_lora_weights=False))
        adapted(input_ids=make_ids(), labels=make_ids()).loss.backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) >= 4
    for name, gradient in gradients[0].items():
        got = gradients[1][name]
        assert gradient is not None
        assert got is not None, name
        assert relative_error(got, gradient) < 0.1
