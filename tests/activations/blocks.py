"""Feed-forward blocks made of a few steps in any order, as strategies of hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

FEATURES, INSIDE = 32, 64

ACTIVATIONS = {"gelu": nn.GELU, "silu": nn.SiLU, "tanh_gelu": lambda: nn.GELU(approximate="tanh"), "tanh": nn.Tanh}

STEPS = ("dropout", "functional", "noise", "jitter", "scale", "bias", "twice", "view", "in_place", "cast")
PLACES = ("before", "gate", "up", "activated", "inside", "after")


@dataclass(frozen=True)
class Plan:
    """A block: kind "plain", "gated" or "fused"; steps by place; whether the input is added at the end."""

    kind: str
    act: str
    steps: dict[str, tuple[str, ...]]
    residual: bool
    swapped: bool


plans = st.builds(
    Plan,
    kind=st.sampled_from(("plain", "gated", "fused")),
    act=st.sampled_from(sorted(ACTIVATIONS)),
    steps=st.fixed_dictionaries({place: st.lists(st.sampled_from(STEPS), max_size=2).map(tuple) for place in PLACES}),
    residual=st.booleans(),
    swapped=st.booleans(),
)


class Block(nn.Module):
    """Runs a plan. What is random is drawn in training only, with `rate` as probability or size."""

    def __init__(self, plan: Plan, rate: float) -> None:
        super().__init__()
        self.plan, self.rate = plan, rate
        self.act = ACTIVATIONS[plan.act]()
        if plan.kind == "gated":
            self.gate_proj, self.up_proj = nn.Linear(FEATURES, INSIDE), nn.Linear(FEATURES, INSIDE)
        elif plan.kind == "fused":
            self.gate_up_proj = nn.Linear(FEATURES, 2 * INSIDE)
        else:
            self.up_proj = nn.Linear(FEATURES, INSIDE)
        self.down_proj = nn.Linear(INSIDE, FEATURES)
        self.drop = nn.Dropout(rate)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.25))

    def set_rate(self, rate: float) -> None:
        self.rate = self.drop.p = rate

    def through(self, place: str, x: Tensor) -> Tensor:
        for step in self.plan.steps[place]:
            x = self.step(step, x)
        return x

    def step(self, step: str, x: Tensor) -> Tensor:
        if step == "dropout":
            x = self.drop(x)
        elif step == "functional":
            x = F.dropout(x, self.rate, self.training)
        elif step == "noise" and self.training:
            x = x + self.rate * torch.randn_like(x)
        elif step == "jitter" and self.training:
            x = x * (1 + self.rate * torch.rand_like(x))
        elif step == "scale":
            x = x * self.scale
        elif step == "bias":
            x = x + self.bias
        elif step == "twice":
            x = x * x.sigmoid()  # a product of two tensors of one shape that is not the block's
        elif step == "view":
            x = x.reshape(-1, x.shape[-1]).view(x.shape)
        elif step == "in_place" and not x.is_leaf:
            x = x + 0.0
            x.mul_(1.25)
        elif step == "cast":
            x = x.double().to(x.dtype)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.through("before", x)
        if self.plan.kind == "plain":
            h = self.through("activated", self.act(self.through("gate", self.up_proj(h))))
        else:
            gate, up = (
                self.gate_up_proj(h).chunk(2, -1) if self.plan.kind == "fused" else (self.gate_proj(h), self.up_proj(h))
            )
            gate, up = self.through("gate", gate), self.through("up", up)
            h = self.through("activated", self.act(gate))
            h = up * h if self.plan.swapped else h * up
        h = self.through("after", self.down_proj(self.through("inside", h)))
        return h + x if self.plan.residual else h


class Model(nn.Module):
    """A norm and a block, twice."""

    def __init__(self, plan: Plan, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(FEATURES), "block": Block(plan, rate)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["block"](layer["norm"](x))
        return x


def run(model: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, random state after forward, and gradients by name of one training step ("x" is the input)."""
    given = x.clone().requires_grad_()
    torch.default_generator.manual_seed(seed)
    out = model(given)
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads["x"] = given.grad
    model.zero_grad(set_to_none=True)
    return out.detach(), state, grads
