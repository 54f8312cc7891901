"""What a module does beyond the formula it is recognized by is done: dropout, noise and whatever is set later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic import BlockFormat
from laconic.activations import Recompute, Site, find_sites, uniform
from laconic.activations.keep.choice import Choice
from tests.activations.blocks import FEATURES, STEPS, Block, Model, Plan, plans, run
from tests.activations.models import make_ids, make_model, relative_error
from tests.grid import grid

INT8 = BlockFormat("int8")


def recomputed(site: Site) -> Choice:
    return Recompute() if site.kind == "mlp" else INT8


def assert_alike(model: nn.Module, twin: nn.Module, x: Tensor, bound: float = 0.06) -> None:
    """Bits of forward, random state after it, and gradients up to eight bits of each kept tensor."""
    for training in (True, False):
        (out, state, grads), (got, got_state, got_grads) = (run(each.train(training), x) for each in (model, twin))
        assert torch.equal(got, out)
        assert torch.equal(got_state, state)
        assert got_grads.keys() == grads.keys()
        # What many terms of both signs leave of a scalar's gradient is measured by the gradients around it.
        least = 0.04 * torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            assert (got_grads[name] - grad).norm() < bound * max(grad.norm(), least), name


def sample() -> Tensor:
    return torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("policy", [uniform(INT8), recomputed])
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans, rates=st.sampled_from([(0.3, 0.3), (0.0, 0.3), (0.3, 0.0)]))
def test_a_block_of_any_steps_computes_and_draws_what_it_did(
    policy: Callable[[Site], Choice], plan: Plan, rates: tuple[float, float]
) -> None:
    """Whatever stands where in the block, and whether its rates are set before or after the conversion."""
    model = Model(plan, rates[0])
    twin = copy.deepcopy(model)
    report = laconic.compress_activations(twin, policy=policy, example_inputs={"x": sample()})
    listed = {row.name for row in report.rows}
    for each in (model, twin):
        for layer in each.layers:
            layer["block"].set_rate(rates[1])
    assert_alike(model, twin, sample())
    # What is not recognized is left exact and listed.
    blocks = {f"layers.{index}.block" for index in range(2)}
    assert all(any(name.startswith(block) for name in listed) for block in blocks)


def a_plan(**steps: tuple[str, ...]) -> Plan:
    places = dict.fromkeys(("before", "gate", "up", "activated", "inside", "after"), ())
    return Plan("plain", "gelu", {**places, **steps}, residual=False, swapped=False)


@pytest.mark.parametrize(
    ("place", "step"),
    grid(
        ["before", "gate", "activated", "after"],
        [step for step in STEPS if step in ("dropout", "functional", "noise", "jitter")],
        strength=1,
    ),
)
def test_a_block_that_is_random_in_training_is_a_site_and_stays_random(step: str, place: str) -> None:
    model = Model(a_plan(**{place: (step,)}), 0.3)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, example_inputs={"x": sample()})
    assert {site.name for site in find_sites(model) if site.kind == "mlp"} == {"layers.0.block", "layers.1.block"}
    assert_alike(model, twin, sample())
    torch.manual_seed(1)
    once = twin.train()(sample())
    assert not torch.equal(once, twin(sample()))


def test_two_dropouts_of_one_block_are_both_drawn() -> None:
    model = Model(a_plan(activated=("dropout",), after=("dropout",)), 0.5)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    assert_alike(model, twin, sample())


def test_blocks_may_share_an_activation_and_keep_it_differently() -> None:
    model = Model(a_plan(), 0.0)
    model.layers[1]["block"].act = model.layers[0]["block"].act
    twin = copy.deepcopy(model)
    formats = {"layers.0.block": INT8}
    report = laconic.compress_activations(
        twin, policy=lambda site: formats.get(site.name), example_inputs={"x": sample()}
    )
    kept = {row.name: (row.before_nbytes_per_token, row.after_nbytes_per_token) for row in report.rows}
    assert kept["layers.0.block"][1] < kept["layers.0.block"][0]
    assert kept["layers.1.block"][1] == kept["layers.1.block"][0]
    assert_alike(model, twin, sample())


@pytest.mark.parametrize("family", ["starcoder2", "gpt2"])
def test_dropout_of_a_model_is_drawn_also_if_it_is_turned_on_later(family: str) -> None:
    rates = {"starcoder2": ("residual_dropout", "embedding_dropout"), "gpt2": ("resid_pdrop", "embd_pdrop")}[family]
    model = make_model(family, **dict.fromkeys(rates, 0.0))
    twin, ids = copy.deepcopy(model), make_ids()
    laconic.compress_activations(twin, bits=8)
    for rate in (0.0, 0.4):
        for each in (model, twin):
            for module in each.modules():
                if isinstance(module, nn.Dropout):
                    module.p = rate
                if hasattr(module, "residual_dropout"):
                    module.residual_dropout = rate
        losses = []
        for each in (model, twin):
            torch.manual_seed(0)
            losses.append((each(input_ids=ids, labels=ids, use_cache=False).loss, torch.get_rng_state()))
        assert torch.equal(losses[0][0], losses[1][0])
        assert torch.equal(losses[0][1], losses[1][1])
        for loss, _ in losses:
            loss.backward()
        expected, got = (
            torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]) for each in (model, twin)
        )
        assert relative_error(got, expected) < 0.02
        model.zero_grad()
        twin.zero_grad()


class Functional(nn.Module):
    """Has an activation module and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def test_a_block_that_does_not_use_its_activation_module_is_left_exact_and_listed() -> None:
    model = nn.Sequential(nn.LayerNorm(FEATURES), Functional())
    report = laconic.compress_activations(model, example_inputs={"input": sample()})
    assert {row.kind for row in report.rows} == {"norm", "linear", "activation", "functions"}
    assert all(row.kind != "mlp" for row in report.rows)


# Modules that a formula stands for: a random one is none, and one that changes later stays right.


class Leaf(nn.Module):
    """A norm or an activation whose result is scaled and made noisy on demand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "norm":
            self.weight, self.eps = nn.Parameter(torch.ones(FEATURES)), 1e-6
        self.kind, self.factor, self.noise, self.p = kind, 1.0, 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, (FEATURES,), self.weight, self.eps) if self.kind == "norm" else F.silu(x)
        if self.training and self.noise:
            y = y * (1 + self.noise * torch.randn_like(y))
        return F.dropout(y, self.p, self.training) * self.factor


class Around(nn.Module):
    """A norm, and a block with an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = Leaf("norm")
        self.block = Block(a_plan(), 0.0)
        self.block.act = Leaf("act")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


@pytest.mark.parametrize(
    ("before", "leaf", "attribute"), grid([True, False], ["norm", "block.act"], ["factor", "noise", "p"])
)
def test_a_norm_or_activation_that_does_more_is_right(attribute: str, leaf: str, before: bool) -> None:
    model, x = Around(), sample()
    if before:
        setattr(model.get_submodule(leaf), attribute, 0.5)
    kinds = {site.name: site.kind for site in find_sites(model)}
    found = kinds.get("norm") == "norm" if leaf == "norm" else kinds.get("block") == "mlp"
    assert found is not before
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    if not before:
        assert_alike(model, twin, x)
        for each in (model, twin):
            setattr(each.get_submodule(leaf), attribute, 0.5)
    assert_alike(model, twin, x)


@pytest.mark.parametrize("held", [nn.Dropout(0.0), {"p": 0.0}, [[], {}], torch.tensor(0.0)])
def test_an_activation_with_parts_that_may_change_unseen_is_none(held: Any) -> None:
    model = Around()
    model.block.act.held = held
    assert {site.kind for site in find_sites(model) if site.name in ("block", "block.act")} == {"functions"}


class Config:
    """What hand-written modules often hold."""

    def __init__(self) -> None:
        self.rate = 0.0


class Configured(Leaf):
    """An activation with a rate in its configuration and one in a list."""

    def __init__(self) -> None:
        super().__init__("act")
        self.config, self.rates = Config(), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.config.rate + self.rates[0], self.training)


@pytest.mark.parametrize("where", ["config", "list"])
def test_a_rate_in_a_configuration_or_a_list_may_be_set_later(where: str) -> None:
    model, x = Around(), sample()
    model.block.act = Configured()
    assert "block" in {site.name for site in find_sites(model)}
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        if where == "config":
            each.block.act.config.rate = 0.5
        else:
            each.block.act.rates[0] = 0.5
    assert_alike(model, twin, x)


def test_code_that_runs_again_runs_in_the_mode_it_ran_in() -> None:
    model = make_model("llama", attention_dropout=0.3, attn_implementation="eager")
    twin, ids = copy.deepcopy(model), make_ids()
    laconic.compress_activations(twin, bits=8, attention="int8")
    grads = []
    for each in (model, twin):
        torch.manual_seed(0)
        loss = each.train()(input_ids=ids, labels=ids, use_cache=False).loss
        each.eval()  # a look at the model between forward and backward
        loss.backward()
        assert not any(module.training for module in each.modules())
        grads.append(torch.cat([p.grad.flatten() for p in each.parameters()]))
    assert relative_error(grads[1], grads[0]) < 0.02


def test_noise_in_front_of_a_router_is_drawn_once() -> None:
    model = make_model("mixtral", router_jitter_noise=0.3)
    twin, ids = copy.deepcopy(model), make_ids()
    laconic.compress_activations(twin, bits=8)
    found = []
    for each in (model, twin):
        torch.manual_seed(0)
        loss = each(input_ids=ids, labels=ids, use_cache=False).loss
        state = torch.get_rng_state()
        loss.backward()
        found.append((loss, state, torch.cat([p.grad.flatten() for p in each.parameters()])))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert relative_error(found[1][2], found[0][2]) < 0.03


class Conv1D(nn.Module):
    """GPT-2's linear layer with dropout of its weight."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.nf, self.p = FEATURES, p
        self.weight, self.bias = nn.Parameter(torch.randn(FEATURES, FEATURES)), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, F.dropout(self.weight, self.p, self.training))


def test_a_linear_that_drops_weights_is_right() -> None:
    torch.manual_seed(0)
    assert all(site.kind != "linear" for site in find_sites(nn.Sequential(Conv1D(0.5))))
    model = nn.Sequential(Conv1D(0.0))
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        each[0].p = 0.5
    assert_alike(model, twin, sample())


class Counting(nn.Module):
    """A feed-forward block that remembers its calls in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES), nn.GELU()
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.shapes, self.sums, self.last = 0, [], torch.zeros(1), None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        self.sums.add_(1)
        self.last = x.detach()
        self.mean.mul_(0.9).add_(0.1)
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


def test_looking_at_a_model_changes_nothing_in_it() -> None:
    model = nn.Sequential(Counting(), nn.Dropout())
    calls: list[object] = []
    model[0].fc1.register_forward_hook(lambda *args: calls.append(args))
    state = torch.get_rng_state()
    assert {site.kind for site in find_sites(model)} == {"mlp", "linear", "dropout"}
    block = model[0]
    assert (block.calls, block.shapes, block.sums.item(), block.last, block.mean.sum().item()) == (0, [], 0, None, 0)
    assert not calls
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
