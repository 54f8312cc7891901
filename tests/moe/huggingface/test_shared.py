"""Which shared experts can be moved, of every family of transformers that has some; and promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.family_models import NotBuiltError, model_of
from laconic.errors import ModelError
from laconic.moe.huggingface.blocks import find_blocks
from laconic.moe.huggingface.shared_experts import Promise
from laconic.moe.huggingface.shared_recognition import find_shared_experts
from tests.activations.models import make_model
from tests.moe.huggingface.test_families import families_with_experts

PLACES = {
    **dict.fromkeys(["afmoe", "ernie4_5_moe", "hunyuan_v1_moe", "laguna", "qwen2_moe", "qwen3_5_moe_text"], "before"),
    **dict.fromkeys(["minimax_m3_vl_text", "qwen3_next"], "before"),
    **dict.fromkeys(["axk1", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "nemotron_h", "solar_open"], "input"),
    "cohere2_moe": "rows",
    "hy_v3": "rows",
    "aria_text": "view",
    # Not moved: called outside of the block, with more than hidden states.
    "granitemoeshared": None,
    "inkling_text": None,
    # None there.
    **dict.fromkeys(["mixtral", "qwen3_moe", "olmoe"], "no shared experts"),
}


def place_in(model: nn.Module) -> str | None:
    name = list(find_blocks(model))[-1]
    found = find_shared_experts(model, name)
    return "no shared experts" if found is None else found.place


@pytest.mark.slow
def test_every_family_with_shared_experts_is_recognized_in_both_modes() -> None:
    """In training and in evaluation mode, with the same bits of outputs and gradients: the recognition's own proof."""
    tried = {}
    for family in families_with_experts():
        if family.name not in PLACES:
            continue
        try:
            tried[family.name] = place_in(model_of(family))
        except NotBuiltError:
            continue
    assert tried == PLACES


@pytest.mark.parametrize(
    ("family", "dtype", "place"),
    [
        ("qwen2_moe", torch.float32, "before"),
        ("deepseek_v3", torch.bfloat16, "input"),
        ("qwen3_moe", torch.float32, "no shared experts"),
    ],
)
def test_places_are_found_without_a_trace(family: str, dtype: torch.dtype, place: str) -> None:
    model = make_model(family).to(dtype)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert place_in(model) == place
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {type(one).__mro__[1] for one in model.modules()} >= {nn.Module}


def test_on_the_meta_device_only_the_structure_is_looked_at() -> None:
    with torch.device("meta"):
        model = make_model("qwen2_moe")
    assert place_in(model) == "before"


def changed(family: str, change: Any) -> tuple[str | None, str]:
    model = make_model(family)
    block: Any = model.model.layers[-1].mlp
    block.__class__ = type("Changed", (type(block),), {"forward": change})
    found = find_shared_experts(model, "model.layers.1.mlp.experts")
    assert found is not None
    return found.place, found.reason


def read_first(self: Any, x: Tensor) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    shared = self.shared_expert(flat)
    total = shared.sum()
    _, weights, chosen = self.gate(flat)
    out = self.experts(flat, chosen, weights) + shared + total
    return out.view(x.shape)


def feeds_the_experts(self: Any, x: Tensor) -> Tensor:
    flat = self.shared_expert(x.view(-1, x.shape[-1]))
    _, weights, chosen = self.gate(flat)
    return self.experts(flat, chosen, weights).view(x.shape)


def after_the_experts_with_their_output(self: Any, x: Tensor) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    _, weights, chosen = self.gate(flat)
    return self.shared_expert(self.experts(flat, chosen, weights)).view(x.shape)


def twice(self: Any, x: Tensor) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    _, weights, chosen = self.gate(flat)
    return (self.experts(flat, chosen, weights) + self.shared_expert(flat) + self.shared_expert(flat)).view(x.shape)


def only_in_training(self: Any, x: Tensor) -> Tensor:
    flat = x.view(-1, x.shape[-1])
    _, weights, chosen = self.gate(flat)
    out = self.experts(flat, chosen, weights)
    return (out + self.shared_expert(flat) if self.training else out).view(x.shape)


def written_into(self: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]) * 1
    _, weights, chosen = self.gate(flat)
    out = self.experts(flat, chosen, weights)
    return (out + self.shared_expert(flat)).view(x.shape)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (read_first, "its output is read before the routed experts are called"),
        (feeds_the_experts, "its output is read before"),
        (after_the_experts_with_their_output, "something else than the block's input"),
        (twice, "called more than once"),
        (only_in_training, "otherwise in training than in evaluation"),
        (written_into, "something else than the block's input"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_do_otherwise_are_named_with_the_reason(change: Any, reason: str) -> None:
    place, why = changed("qwen2_moe", change)
    assert place is None
    assert reason in why


def test_dropout_by_a_function_is_found() -> None:
    model = make_model("qwen2_moe")
    shared: Any = model.model.layers[-1].mlp.shared_expert
    inner = shared.act_fn

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(inner(x), 0.2, self.training)

    shared.act_fn = Noisy()
    found = find_shared_experts(model, "model.layers.1.mlp.experts")
    assert found is not None
    assert found.place is None
    assert "draws random numbers" in found.reason


# --- promises ---


def promised(x: Tensor, ran: list[int]) -> Promise:
    def compute() -> Tensor:
        ran.append(1)
        return x * 2

    return Promise.of(x, x.dtype, compute)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 0,
        lambda p: p.requires_grad,
        lambda p: p.grad_fn,
        lambda p: torch.cat([p, p]),
        lambda p: p.tolist(),
        lambda p: torch.stack([*p.view(3, 2)]),
        lambda p: torch.where(torch.ones(2, 3, dtype=torch.bool), p, p),
        lambda p: nn.functional.linear(torch.ones(1, 3), p),
        lambda p: repr(p),
        lambda p: p.mul_(1),
        lambda p: torch.einsum("ab,cb->ac", p, torch.ones(2, 3)),
    ],
)
def test_whoever_reads_a_promise_fills_it_once(read: Any) -> None:
    x, ran = torch.randn(2, 3, requires_grad=True), list[int]()
    promise = promised(x, ran)
    view = promise.view(-1)
    assert promise.shape == (2, 3)
    assert view.shape == (6,)
    assert not ran
    read(promise)
    assert ran == [1]
    assert type(promise) is type(view) is Tensor
    assert torch.equal(promise, x * 2)
    assert torch.equal(view, (x * 2).view(-1))
    view.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))
    assert ran == [1]


def test_a_promise_of_another_kind_is_refused() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ModelError, match=r"returned torch.float64 \[2, 3\], but torch.float32 \[2, 3\] was expected"):
        Promise.of(x, x.dtype, lambda: x.double()).sum()
