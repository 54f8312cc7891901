"""Gates against their formulas, token by token, and against the Hugging Face routers of the models that use them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import RoutingError
from laconic.moe import (
    CosineGate,
    ExpertChoiceGate,
    Gate,
    GatedExperts,
    GShardGate,
    MoELayer,
    Routing,
    SigmoidGate,
    SinkhornGate,
    SoftmaxGate,
    SoftMoEGate,
    TokenChoiceGate,
)
from laconic.moe.gates.sinkhorn import sinkhorn
from tests.moe.reference import expert_output, layer_output

EXPERTS, DIM = 8, 16


def every_gate(top_k: int = 2, **options: Any) -> list[TokenChoiceGate]:
    torch.manual_seed(0)
    kinds = [SoftmaxGate, GShardGate, SigmoidGate, SinkhornGate, CosineGate]
    return [kind(EXPERTS, DIM, top_k, **options) for kind in kinds]


def table(routing: Routing) -> Tensor:
    """Weights [n, E] of a routing; 0 where a token does not go."""
    return routing.weights.new_zeros(routing.num_tokens, routing.num_experts).index_put(
        (routing.tokens, routing.experts), routing.weights
    )


def best(scores: Tensor, k: int) -> Tensor:
    """`scores` [E] with all but the k highest set to 0."""
    kept = torch.zeros_like(scores)
    for index in sorted(range(len(scores)), key=scores.tolist().__getitem__, reverse=True)[:k]:
        kept[index] = scores[index]
    return kept


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_softmax_gate_keeps_the_best_probabilities(top_k: int, normalize: bool) -> None:
    gate = SoftmaxGate(EXPERTS, DIM, top_k, normalize=normalize, scale=2.5, dtype=torch.float64)
    x = torch.randn(20, DIM, dtype=torch.float64)
    rows = [best((gate.weight @ row).softmax(0), top_k) for row in x]
    expected = torch.stack([row / row.sum() if normalize else row for row in rows]) * 2.5
    routing = gate(x)
    routing.check()
    torch.testing.assert_close(table(routing), expected)


def test_gshard_gate_adds_noise_in_training_only_and_takes_softmax_over_the_chosen() -> None:
    gate = GShardGate(EXPERTS, DIM, 2, dtype=torch.float64)
    with torch.no_grad():
        gate.noise_weight.normal_()
    x = torch.randn(20, DIM, dtype=torch.float64)
    for training in (False, True):
        gate.train(training)
        torch.manual_seed(7)
        noise = torch.randn(20, EXPERTS, dtype=torch.float64) * training
        logits = x @ gate.weight.T + noise * F.softplus(x @ gate.noise_weight.T)
        lowest = logits.topk(2).values[:, -1:]
        expected = logits.masked_fill(logits < lowest, -math.inf).softmax(-1)
        torch.manual_seed(7)
        torch.testing.assert_close(table(gate(x)), expected)


def test_sigmoid_gate_chooses_with_the_bias_and_weighs_without() -> None:
    gate = SigmoidGate(EXPERTS, DIM, 2, normalize=False, dtype=torch.float64)
    gate.bias.copy_(torch.tensor([3.0, -3, 0, 0, 0, 0, 0, 0]))
    x = torch.randn(20, DIM, dtype=torch.float64)
    weights = table(gate(x))
    scores = (x @ gate.weight.T).sigmoid()
    assert bool((weights[:, 0] > 0).all())
    assert not bool(weights[:, 1].any())
    torch.testing.assert_close(weights, torch.where(weights > 0, scores, 0))


@pytest.mark.parametrize("kind", [SoftmaxGate, SigmoidGate])
def test_group_limit_leaves_the_best_groups(kind: type[TokenChoiceGate]) -> None:
    gate = kind(12, DIM, 3, normalize=False, num_groups=4, top_groups=2, dtype=torch.float64)
    x = torch.randn(40, DIM, dtype=torch.float64)
    weights = table(gate(x))
    scores = gate.scores(gate.logits(x))
    for token in range(40):
        groups = scores[token].view(4, 3)
        worth = groups.topk(2).values.sum(-1) if kind is SigmoidGate else groups.amax(-1)
        chosen = worth.topk(2).indices.tolist()
        limited = torch.stack([groups[g] if g in chosen else torch.zeros(3, dtype=torch.float64) for g in range(4)])
        torch.testing.assert_close(weights[token], best(limited.flatten(), 3))


def test_sinkhorn_gate_chooses_evenly_in_training_and_the_best_in_evaluation() -> None:
    """Against Megatron-Core's loop; weights are sigmoids with one expert per token, else a softmax over all."""

    def megatron(logits: Tensor) -> Tensor:
        cost = logits.exp()
        d0, d1, error = cost.new_ones(len(cost)), cost.new_ones(EXPERTS), 1.0
        while error > 1e-4:
            d0 = 1 / len(cost) / ((d1 * cost).sum(1) + 1e-8)
            before, d1 = d1, 1 / EXPERTS / ((d0[:, None] * cost).sum(0) + 1e-8)
            error = float((before - d1).abs().mean())
        return d1 * cost * d0[:, None]

    torch.manual_seed(0)
    x = torch.randn(200, DIM, dtype=torch.float64) + 0.4
    for top_k in (1, 2):
        gate = SinkhornGate(EXPERTS, DIM, top_k, dtype=torch.float64)
        with torch.no_grad():
            gate.weight[3] += 1.0  # an expert that many like
        logits = (x @ gate.weight.T).detach()
        scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
        even = sinkhorn(logits)
        torch.testing.assert_close(even.sum(0), torch.full_like(even[0], 1 / EXPERTS))
        for routing, wanted in ((gate(x), megatron(logits)), (gate.eval()(x), scores)):
            chosen = wanted.topk(top_k, dim=-1).indices
            assert torch.equal(routing.experts, chosen.flatten())
            torch.testing.assert_close(routing.weights, scores.gather(1, chosen).flatten())
        load = gate.train()(x).counts().double()
        assert load.max() < 1.5 * load.mean() < gate.eval()(x).counts().max()
    assert gate.train()(x[:0]).num_tokens == 0
    assert bool(gate(100 * x).weights.isfinite().all())


def test_cosine_gate_is_a_cosine_over_a_temperature() -> None:
    gate = CosineGate(EXPERTS, DIM, EXPERTS, projection_dim=4, dtype=torch.float64)
    x = torch.randn(5, DIM, dtype=torch.float64)
    for logarithm, temperature in ((math.log(2.0), 0.5), (math.log(10.0), 0.1), (9.0, 0.01)):
        with torch.no_grad():
            gate.log_inverse_temperature.fill_(logarithm)
        cosine = F.cosine_similarity((x @ gate.projection.T)[:, None], gate.embeddings[None], dim=-1)
        torch.testing.assert_close(gate.logits(x), cosine / temperature)
    assert gate(3 * x).experts.tolist() == gate(x).experts.tolist()


def test_expert_choice_gives_every_expert_its_best_tokens() -> None:
    gate = ExpertChoiceGate(EXPERTS, DIM, 1.5, dtype=torch.float64)
    x = torch.randn(21, DIM, dtype=torch.float64)
    routing = gate(x)
    routing.check()
    scores = (x @ gate.weight.T).softmax(-1)
    expected = torch.stack([best(scores[:, e], 4) for e in range(EXPERTS)], dim=1)  # ceil(21 * 1.5 / 8) = 4
    torch.testing.assert_close(table(routing), expected)
    assert routing.counts().tolist() == [4] * EXPERTS
    assert gate(x[:0]).counts().tolist() == [0] * EXPERTS
    assert gate(x[:1]).counts().tolist() == [1] * EXPERTS


@pytest.mark.parametrize("slots", [1, 3])
def test_soft_gate_mixes_all_tokens(slots: int) -> None:
    gate = SoftMoEGate(EXPERTS, DIM, slots, dtype=torch.float64)
    experts = GatedExperts(EXPERTS, DIM, 4, dtype=torch.float64)
    layer = MoELayer(gate, experts)
    x = torch.randn(6, DIM, dtype=torch.float64, requires_grad=True)
    logits = F.normalize(x, dim=1) @ F.normalize(gate.slots, dim=1).T * gate.scale
    inputs = logits.softmax(0).T @ x
    outputs = torch.stack([expert_output(experts, s // slots, row) for s, row in enumerate(inputs)])
    expected = logits.softmax(1) @ outputs
    out = layer(x)
    torch.testing.assert_close(out, expected)
    assert layer.load is not None
    assert layer.load.tolist() == [slots] * EXPERTS
    leaves = [x, *layer.parameters()]
    grad = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert layer(x[:0]).shape == (0, DIM)


@settings(max_examples=60)
@given(
    kind=st.sampled_from([SoftmaxGate, GShardGate, SigmoidGate, SinkhornGate, CosineGate]),
    num_tokens=st.integers(0, 9),
    top_k=st.integers(1, EXPERTS),
    seed=st.integers(0, 1 << 16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_every_token_has_k_different_experts_and_weights_that_sum_to_one(
    kind: type[TokenChoiceGate], num_tokens: int, top_k: int, seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    routing = kind(EXPERTS, DIM, top_k, normalize=True, dtype=dtype)(torch.randn(num_tokens, DIM, dtype=dtype))
    routing.check()
    assert routing.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    chosen = routing.experts.view(num_tokens, top_k).tolist()
    assert all(len(set(row)) == top_k for row in chosen)
    weights = routing.weights.view(num_tokens, top_k)
    torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[:, 0]))
    assert routing.counts().sum() == num_tokens * top_k


def test_choices_come_best_first() -> None:
    for gate in every_gate(4, normalize=False):
        weights = gate.eval()(torch.randn(10, DIM)).weights.view(10, 4)
        assert bool((weights[:, 1:] <= weights[:, :-1]).all()), type(gate).__name__


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    x = torch.randn(6, DIM)
    x[4, 3] = bad
    gates: list[Gate] = [*every_gate(), ExpertChoiceGate(EXPERTS, DIM), SoftMoEGate(EXPERTS, DIM)]
    for gate in gates:
        with pytest.raises(RoutingError, match=r"router logits of \d+ of 6 tokens are not finite"):
            gate(x)
    with pytest.raises(RoutingError, match="1 of 6 tokens are not finite, the first is token 4"):
        SoftmaxGate(EXPERTS, DIM, 2)(x)
    SoftmaxGate(EXPERTS, DIM, 2, check_logits=False)(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k = 9 must be from 1 to num_experts = 8"),
        ({"top_k": 0}, "top_k = 0 must be from 1"),
        ({"num_groups": 3}, "num_groups = 3 must divide num_experts = 8"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups = 5 must be from 1 to num_groups = 4"),
        ({"top_k": 3, "num_groups": 4, "top_groups": 1}, "leave at least top_k = 3 experts; a group has 2"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0 must be positive"),
        ({"eval_capacity_factor": math.nan}, "eval_capacity_factor = nan must be positive"),
        ({"jitter": 1.0}, "jitter = 1.0 must be in"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        SoftmaxGate(EXPERTS, DIM, **{"top_k": 2, **options})


@pytest.mark.parametrize("make", [SoftmaxGate, SigmoidGate, GShardGate])
def test_tokens_of_another_width_are_refused(make: type[TokenChoiceGate]) -> None:
    with pytest.raises(RoutingError, match=rf"tokens \[3, {DIM + 1}\] are {DIM + 1} wide, but model_dim .* is {DIM};"):
        make(EXPERTS, DIM, 2)(torch.randn(3, DIM + 1))


def test_drop_policies_have_only_two_names() -> None:
    gate = SoftmaxGate(EXPERTS, DIM, 2, capacity_factor=1.0, drop_policy="random")  # type: ignore[arg-type]
    with pytest.raises(RoutingError, match='must be "position" or "probability"'):
        gate(torch.randn(4, DIM))


def test_jitter_is_for_training_only() -> None:
    gate = SoftmaxGate(EXPERTS, DIM, 2, jitter=0.2)
    x = torch.randn(10, DIM)
    assert not torch.equal(gate(x).weights, gate(x).weights)
    gate.eval()
    assert torch.equal(gate(x).weights, gate(x).weights)


def test_gradients_reach_all_parameters_of_every_gate() -> None:
    for gate in every_gate():
        gate(torch.randn(30, DIM)).weights.square().sum().backward()
        for name, parameter in gate.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()), name


def test_bias_follows_the_load_until_it_is_even() -> None:
    torch.manual_seed(0)
    gate = SigmoidGate(EXPERTS, DIM, 2, bias_rate=0.02)
    with torch.no_grad():
        gate.weight[3] += 1.0  # an expert that many like
    x = torch.randn(512, DIM) + 0.5

    def unevenness() -> float:
        load = gate(x).counts().double()
        return float(load.max() / load.mean())

    before = unevenness()
    gate.load.zero_()
    for _ in range(60):
        gate(x)
        gate.update_bias()
    assert before > 2.5
    assert unevenness() < 1.3
    gate.load.zero_()
    gate.eval()(x)
    assert not bool(gate.load.any()), "in evaluation nothing is counted"


def test_one_bias_update_by_hand() -> None:
    gate = SigmoidGate(4, DIM, 1, bias_rate=0.5)
    gate.load.copy_(torch.tensor([5, 3, 3, 1]))
    gate.update_bias()
    assert gate.bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
    assert gate.load.tolist() == [0, 0, 0, 0]
    assert set(gate.state_dict()) == {"weight", "bias"}


def test_softmax_gates_route_as_the_hugging_face_routers_do() -> None:
    from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes: dict[str, Any] = {"hidden_size": DIM, "num_experts_per_tok": 3}
    routers = [
        (MixtralTopKRouter(MixtralConfig(num_local_experts=EXPERTS, **sizes)), True),
        (Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=EXPERTS, norm_topk_prob=True, **sizes)), True),
        (OlmoeTopKRouter(OlmoeConfig(num_experts=EXPERTS, norm_topk_prob=False, **sizes)), False),
    ]
    x = torch.randn(50, DIM)
    for router, normalize in routers:
        torch.nn.init.normal_(router.weight)
        gate = SoftmaxGate(EXPERTS, DIM, 3, normalize=normalize)
        gate.load_state_dict(router.state_dict())
        _, weights, experts = router(x)
        routing = gate(x)
        assert torch.equal(routing.experts, experts.flatten())
        torch.testing.assert_close(routing.weights, weights.flatten())


def test_softmax_gate_routes_as_the_deepseek_v2_router_does() -> None:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=DIM,
        num_attention_heads=1,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    gate = SoftmaxGate(12, DIM, 3, normalize=False, num_groups=4, top_groups=2, scale=1.5)
    gate.load_state_dict({"weight": router.weight})
    x = torch.randn(50, DIM)
    _, weights, experts = router(x)
    torch.testing.assert_close(table(gate(x)), torch.zeros(50, 12).scatter(1, experts, weights))


def test_sigmoid_gate_routes_as_the_deepseek_router_does() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=DIM,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.normal_(std=0.1)
    gate = SigmoidGate(12, DIM, 3, num_groups=4, top_groups=2, scale=2.5)
    gate.load_state_dict({"weight": router.weight, "bias": router.e_score_correction_bias})
    x = torch.randn(50, DIM)
    _, weights, experts = router(x)
    expected = torch.zeros(50, 12).scatter(1, experts, weights)
    torch.testing.assert_close(table(gate(x)), expected)


@pytest.mark.parametrize("kind", [SoftmaxGate, GShardGate, SigmoidGate, SinkhornGate, CosineGate])
def test_layer_with_any_gate_equals_every_token_on_its_own_gate_gradients_included(kind: type[TokenChoiceGate]) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"projection_dim": 4} if kind is CosineGate else {}
    options |= {"num_groups": 4, "top_groups": 2, "balance_coef": 0.1, "z_coef": 0.01}
    gate = kind(EXPERTS, DIM, 3, **options, dtype=torch.float64)
    layer = MoELayer(gate, GatedExperts(EXPERTS, DIM, 4, dtype=torch.float64)).eval()
    x = torch.randn(9, DIM, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    loss = out.square().sum() + sum(layer.losses.values())
    routing = gate(x)
    expected = layer_output(layer.experts, x, routing)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    truth = expected.square().sum() + sum(routing.losses.values())
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, leaves, allow_unused=True, materialize_grads=True) for y in (loss, truth))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)

    def weights_and_losses(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        names = [name for name, _ in gate.named_parameters()]
        routed = torch.func.functional_call(gate, dict(zip(names, parameters, strict=True)), (x,))
        return routed.weights, *routed.losses.values()

    assert torch.autograd.gradcheck(weights_and_losses, (x[:3].detach().requires_grad_(), *gate.parameters()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_k", 9, "top_k = 9 must be from 1 to num_experts = 8"),
        ("top_k", 0, "top_k = 0 must be from 1"),
        ("top_k", 3, "top_groups = 1 must be from 1 to num_groups = 4 and leave at least top_k = 3 experts"),
        ("top_groups", 5, "top_groups = 5 must be from 1 to num_groups = 4"),
        ("num_groups", 3, "num_groups = 3 must divide num_experts = 8"),
        ("capacity_factor", 0.0, "capacity_factor = 0.0 must be positive"),
        ("eval_capacity_factor", -1.0, "eval_capacity_factor = -1.0 must be positive"),
    ],
)
def test_what_is_changed_later_is_checked_too(name: str, value: float, message: str) -> None:
    """More experts than the open groups have would be closed ones; no capacity would drop every token."""
    gate = SoftmaxGate(8, 16, 2, num_groups=4, top_groups=1)
    gate(torch.randn(3, 16))
    setattr(gate, name, value)
    with pytest.raises(RoutingError, match=message):
        gate(torch.randn(3, 16))
