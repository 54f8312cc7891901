"""Recognizes the mixture-of-experts blocks of Hugging Face transformers by what they consist of and what they compute.

A block has one child that is a router (its weight [experts, hidden]; it returns logits, weights and indices), one that
holds all experts in fused parameters (transformers' ExpertsInterface: `gate_up_proj` and `down_proj`, with flags that
say how they lie), and perhaps experts that every token visits. No class name is looked at. What a block does with its
children is tried with stand-ins in their place, so a trial costs nothing whatever the model's size, and works on
the meta device.

    y = experts(x, indices, weights)  [+ shared(x)]  or  [+ sigmoid(shared_gate(x)) * shared(x)]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ModelError

__all__ = ["Block", "find_blocks"]


@dataclass(frozen=True)
class Block:
    """The parts of a block, by the names of its children."""

    router: str
    experts: str
    num_experts: int
    top_k: int
    shared: str | None = None
    """What every token visits besides."""
    shared_gate: str | None = None
    """A linear layer with one output, whose sigmoid weighs `shared`."""


def find_blocks(model: nn.Module) -> dict[str, Block]:
    """All mixture-of-experts blocks of `model` by module name, in the order of its modules.

    Raises ModelError for a block with fused experts that does something else with them than this module knows, or
    whose tokens take more experts than there are.
    """
    found: dict[str, Block] = {}
    for name, module in model.named_modules():
        experts = [child for child, part in module.named_children() if is_fused_experts(part)]
        if not experts:
            continue
        _check_top_k(name, module, int(module.get_submodule(experts[0]).num_experts))
        block, reason = _block_of(module, experts)
        if block is None:
            raise ModelError(
                f"{name} is a {type(module).__name__}, which holds fused experts, but {reason}; put a"
                " laconic.moe.MoELayer in its place by hand"
            )
        found[name] = block
    return found


def is_fused_experts(module: nn.Module) -> bool:
    """Whether all experts of a block lie in this module's parameters, the way transformers' ExpertsInterface has it."""
    down = module._parameters.get("down_proj")
    num_experts = getattr(module, "num_experts", None)
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
    return (
        down is not None
        and down.dim() == 3
        and isinstance(num_experts, int)
        and all(isinstance(getattr(module, flag, None), bool) for flag in flags)
    )


def _check_top_k(name: str, module: nn.Module, num_experts: int) -> None:
    """A router that cannot choose cannot be tried either, so this comes first."""
    for child, part in module.named_children():
        top_k = getattr(part, "top_k", None)
        if isinstance(top_k, int) and top_k > num_experts:
            raise ModelError(
                f"{name}.{child} has top_k = {top_k}, but a token takes at most all {num_experts} experts; lower"
                " num_experts_per_tok in the model's configuration"
            )


def _block_of(module: nn.Module, experts: list[str]) -> tuple[Block | None, str]:
    """The parts, or what is wrong."""
    if len(experts) > 1:
        return None, f"there are {len(experts)} of them ({', '.join(experts)})"
    held = module.get_submodule(experts[0])
    num_experts = int(held.num_experts)  # type: ignore[arg-type]  # checked in is_fused_experts
    down = held._parameters["down_proj"]
    assert down is not None
    if len(down) != num_experts:
        return None, f"only {len(down)} of its {num_experts} experts lie here, so it is parallelized already"
    choices = {name: _top_k(child, num_experts) for name, child in module.named_children() if name != experts[0]}
    routers = {name: top_k for name, top_k in choices.items() if top_k is not None}
    if len(routers) != 1:
        return None, f"it has {len(routers)} routers where there must be one"
    ((router, top_k),) = routers.items()
    others = [name for name in choices if name != router]
    gates = [name for name in others if getattr(module.get_submodule(name), "out_features", None) == 1]
    main = [name for name in others if name not in gates]
    if len(main) > 1 or len(gates) > len(main):
        return None, f"it has other children that are not known: {', '.join(others)}"
    block = Block(router, experts[0], num_experts, top_k, *main, *gates)
    return (
        (block, "") if _computes(module, block) else (None, "its output is not that of its experts and shared experts")
    )


def _top_k(router: nn.Module, num_experts: int) -> int | None:
    """Experts per token that a router chooses, or None if the module is no router.

    It is run, on three random rows, without its hooks.
    """
    weight = router._parameters.get("weight")
    if weight is None or weight.dim() != 2 or len(weight) != num_experts or isinstance(router, nn.Linear):
        return None
    x = torch.zeros(3, weight.shape[1], dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            logits, weights, indices = router.forward(x)
    except (TypeError, ValueError, RuntimeError):  # it takes or returns something else
        return None
    known = logits.shape == (3, num_experts) and weights.shape == indices.shape and indices.dtype == torch.int64
    return int(indices.shape[1]) if known and indices.dim() == 2 and len(indices) == 3 else None


def _computes(module: nn.Module, block: Block) -> bool:
    """Whether the block's own forward is the formula above, in training and in evaluation."""
    if set(inspect.signature(type(module).forward).parameters) - {"self", "hidden_states", "kwargs"}:
        return False
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, routed, shared, gate = random(2, 3, 4), random(6, 4), random(2, 3, 4), random(2, 3, 1)
    logits, weights = random(6, block.num_experts), random(6, block.top_k)
    indices = torch.randint(block.num_experts, (6, block.top_k), generator=generator)
    given: list[tuple[Tensor, ...]] = []

    def experts(*args: Tensor) -> Tensor:
        given.append(args)
        return routed.clone()

    stand_ins: dict[str, Callable[..., Any]] = {
        block.router: lambda _: (logits, weights, indices),
        block.experts: experts,
    }
    expected = routed.view(2, 3, 4)
    if block.shared is not None:
        # A block may flatten x before its shared experts.
        stand_ins[block.shared] = lambda rows: shared.view(*rows.shape[:-1], 4)
        expected = expected + (shared if block.shared_gate is None else torch.sigmoid(gate) * shared)
    if block.shared_gate is not None:
        stand_ins[block.shared_gate] = lambda rows: gate.view(*rows.shape[:-1], 1)

    for training in (True, False):
        given.clear()
        with _in_place(module, stand_ins, training), torch.no_grad():
            y = module.forward(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape or not torch.allclose(y, expected, rtol=1e-12, atol=1e-12):
            return False
        if len(given) != 1 or len(given[0]) != 3 or not torch.equal(given[0][0], x.view(6, 4)):
            return False
        if not torch.equal(given[0][1], indices) or not torch.equal(given[0][2], weights):
            return False
    return True


@contextmanager
def _in_place(module: nn.Module, forwards: dict[str, Callable[..., Any]], training: bool) -> Iterator[None]:
    """Other forwards for the children of a block, and no random factors, for a while."""
    attributes = [module.__dict__, *(module.get_submodule(name).__dict__ for name in forwards)]
    before = [dict(each) for each in attributes]
    try:
        module.training = training
        if "jitter_noise" in module.__dict__:
            module.__dict__["jitter_noise"] = 0.0
        for each, forward in zip(attributes[1:], forwards.values(), strict=True):
            each["forward"] = forward
        yield
    finally:
        for each, old in zip(attributes, before, strict=True):
            each.clear()
            each.update(old)
