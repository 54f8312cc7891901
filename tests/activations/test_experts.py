"""Mixture-of-experts blocks: routing exact, experts from the packed input of the norm in front."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker, find_sites
from laconic.moe.huggingface import parallelize
from tests.activations.models import MIXTURES, both_gradients, compressed, loss_of, make_ids, make_model, relative_error
from tests.grid import few, slow_but


@pytest.fixture(params=slow_but(sorted(MIXTURES), "deepseek_v3", "gpt_oss", "mixtral"))
def mixture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_routers_and_experts_are_found(mixture: str) -> None:
    model = make_model(mixture)
    kinds = Counter(site.kind for site in find_sites(model))
    blocks = 1 if mixture.startswith("deepseek") else 2
    assert (kinds["router"], kinds["experts"]) == (blocks, blocks)
    assert find_sites(model.to("meta")) == find_sites(make_model(mixture))


def test_forward_and_routing_are_bit_identical(mixture: str) -> None:
    model = make_model(mixture).bfloat16()
    twin, ids = compressed(model, attention="exact"), make_ids()
    choices: list[list[Tensor]] = []
    routers = {site.name for site in find_sites(model) if site.kind == "router"}
    for each in (model, twin):
        seen: list[Tensor] = []
        for name, module in each.named_modules():
            if name in routers:
                module.register_forward_hook(lambda module, args, out, seen=seen: seen.extend(out))
        choices.append(seen)
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    assert len(choices[0]) == len(choices[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*choices, strict=True))


@pytest.mark.usefixtures("nothing_is_packed")
def test_backward_is_right_when_nothing_is_packed(mixture: str) -> None:
    model = make_model(mixture)
    expected, got = both_gradients(model, compressed(model, attention="exact"), make_ids())
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 2e-5, name


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_way_to_run_experts_is_served(implementation: str) -> None:
    model = make_model("mixtral", experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    twin, ids = compressed(model, bits=8), make_ids()
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    expected, got = both_gradients(model, twin, ids)
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.parametrize(
    "mixture", few(sorted(set(MIXTURES) - {"gpt_oss"}), 2)
)  # whose block laconic.moe does not know
def test_experts_on_sorted_rows_are_run_again(mixture: str) -> None:
    model = make_model(mixture)
    parallelize(model)
    sites = [site.name for site in find_sites(model) if site.kind == "experts"]
    assert len(sites) == (1 if mixture.startswith("deepseek") else 2)
    laconic.compress_activations(model, attention="exact")
    expected, got = both_gradients(parallelized(mixture), model, make_ids())
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 2e-5, name


def test_experts_on_sorted_rows_keep_only_codes() -> None:
    model, ids = parallelized("mixtral"), make_ids()
    laconic.compress_activations(model, attention="exact")
    with SavedTensorTracker(model) as tracker:
        loss_of(model, ids)
    for layer in range(2):
        kept = tracker.by_module[f"model.layers.{layer}.mlp.experts"]
        # 64 values a row, two rows a token: codes of 4 bits, one scale of 2 bytes; and the experts' counts.
        assert kept == ids.numel() * 2 * (64 // 2 + 2) + 4 * 8


def parallelized(family: str) -> nn.Module:
    return parallelize(make_model(family)).model


def test_experts_keep_nothing_but_what_the_router_said() -> None:
    model = make_model("mixtral")
    twin, ids = compressed(model, attention="exact"), make_ids()
    with SavedTensorTracker(twin) as tracker:
        loss_of(twin, ids)
    tokens, choices, experts = ids.numel(), 2, 4
    for layer in range(2):
        norm = tracker.by_module[f"model.layers.{layer}.post_attention_layernorm"]
        assert norm == tokens * (64 // 2 + 64 // 64 * 2)  # codes of 4 bits and one scale of 2 bytes per 64
        router = tracker.by_module[f"model.layers.{layer}.mlp.gate"]
        # All probabilities, the indices of those chosen, their probabilities before the division, and their sum: exact.
        assert router == tokens * (experts * 4 + choices * 8 + choices * 4 + 4)
        assert tracker.by_module[f"model.layers.{layer}.mlp.experts"] == tokens * choices * 4  # the routing weights


def test_the_report_has_a_row_for_routers_and_experts() -> None:
    model = make_model("deepseek_v3").bfloat16()  # its router casts to fp32 before it multiplies
    rows = {row.name: row for row in laconic.compress_activations(model).rows}
    router, experts = rows["model.layers.1.mlp.gate"], rows["model.layers.1.mlp.experts"]
    assert (router.kind, router.origin, router.shape) == ("router", "norm", (64,))
    assert (experts.kind, experts.origin, experts.shape) == ("experts", "norm", (64,))
    assert experts.before_nbytes_per_token is not None
    assert experts.after_nbytes_per_token is not None
    assert experts.after_nbytes_per_token < experts.before_nbytes_per_token / 20


def test_experts_without_tokens_get_a_gradient_of_zero() -> None:
    model = make_model("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[2:] = layer.mlp.gate.weight[0]  # a tie that the first two win or both lose
            layer.mlp.gate.weight[1] = layer.mlp.gate.weight[0]
    twin, ids = compressed(model, bits=8), make_ids()
    expected, got = both_gradients(model, twin, ids)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    empty = [expert for expert in range(4) if not expected[name][expert].any()]
    assert empty
    assert all(not got[name][expert].any() for expert in empty)
    assert relative_error(got[name], expected[name]) < 0.03


def test_frozen_experts_still_pass_the_gradient_on() -> None:
    model = make_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    twin, ids = compressed(model, bits=8), make_ids()
    expected, got = both_gradients(model, twin, ids)
    assert got.keys() == expected.keys()
    assert not any("mlp" in name for name in got)
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name


class Multiplied(nn.Module):
    """Has the parts of experts and multiplies them in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = x
        for k in range(index.shape[1]):
            expert = index[:, k]
            inside = torch.relu(torch.bmm(self.up[expert], out.unsqueeze(-1)))
            out = torch.bmm(self.down[expert], inside).squeeze(-1) * weights[:, k, None]
        return out


class Chooser(nn.Module):
    """Looks like a router and chooses by something else than the logits of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, index = F.linear(x, self.weight).tanh().topk(2)
        return scores, index


def test_a_block_that_computes_something_else_is_left_alone() -> None:
    assert find_sites(nn.ModuleList([Multiplied(), Chooser()])) == []
