"""Finds the experts of Hugging Face models by the parameters of their modules, and the routers beside them.

Fused experts are common to all families (transformers' ExpertsInterface): a module with all experts in `gate_up_proj`
(or `up_proj`) and `down_proj`, flags for their layout, and the call
`experts(hidden_states [n, M], top_k_index [n, k], top_k_weights [n, k])`, which returns [n, M]. The rest of the block
(routers, correction biases, jitter, shared experts, norms between them) is the model's own code and stays. Class names
do not matter.

Llama 4 has such parameters without flags, and the call `experts(rows [E n, M])`: a row for each expert and token,
scaled by its weight, which is zero where the token did not choose the expert. LongCat has them without flags, too, and
more gates than experts: the numbers behind the experts' return their input. DBRX has all rows of all experts behind
each other, in `w1`, `v1` and `w2` [E I, M] of a child of its experts.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from laconic.errors import ModelError

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Flags by which transformers' ExpertsInterface describes the parameters and their layout."""


@dataclass(frozen=True)
class Block:
    """Fused experts of a model and their router, by module names."""

    experts: str
    num_experts: int
    router: str | None = None
    """A module beside the experts with a weight [num_experts, hidden]; None if there is none, or more than one."""
    top_k: int | None = None
    """Experts per token, where the router or the block says it."""


_NUMBERS = ("num_experts", "moe_num_experts")


def find_blocks(model: nn.Module, rows: bool = False) -> dict[str, Block]:
    """Find all fused experts of `model`, by module name, in the order of its modules.

    Args:
        model: a model of transformers.
        rows: find those of Llama 4, LongCat and DBRX, too, which `described` describes.

    Raises:
        ModelError: only a part of the experts is here, they are called with something else than hidden states, indices
            and weights, or their tokens take more experts than there are.
    """
    found: dict[str, Block] = {}
    for name, experts in model.named_modules():
        if not (is_fused_experts(experts) or (rows and _has_own_layout(experts))):
            continue
        num_experts = int(described(experts).num_experts)
        held = num_experts if lies_flat(experts) else len(experts.get_parameter("down_proj"))
        if held != num_experts:
            raise ModelError(
                f"{name} has num_experts = {num_experts}, but holds {held}, so it is parallelized already; load"
                " the model unsharded"
            )
        if len(arguments := inspect.signature(type(experts).forward).parameters) != 4 and not takes_rows(experts):
            raise ModelError(
                f"{name} is a {type(experts).__name__} called with ({', '.join(list(arguments)[1:])}), but fused"
                " experts get hidden states, indices and weights; put a laconic.moe.MoELayer there by hand"
            )
        owner, child = place_in_block(name)
        block = model.get_submodule(owner)
        _check_top_k(owner, block, num_experts + getattr(described(experts), "num_identities", 0))
        router = None if _has_own_layout(experts) else _router_beside(block, child, experts)
        says = (block,) if router is None else (block.get_submodule(router), block)
        top_k = next((k for one in says if isinstance(k := getattr(one, "top_k", None), int)), None)
        path = None if router is None else f"{owner}.{router}".lstrip(".")
        found[name] = Block(name, num_experts, path, top_k)
    return found


def place_in_block(experts: str) -> tuple[str, str]:
    """Return the name of the block that calls `experts`, and the name there; PEFT's adapters may lie in between."""
    while experts.endswith(".base_layer"):
        experts = experts.removesuffix(".base_layer")
    owner, _, child = experts.rpartition(".")
    return owner, child


def unknown_experts(model: nn.Module) -> list[str]:
    """List modules of `model` that seem to hold experts, but not as `find_blocks` expects: 'name (class): reason'.

    These are modules with stacks of weights, [experts, ., .] or, beside a number of experts, [experts * ., .], several
    or beside that number, and lists of modules under the name "experts".
    """
    found = []
    known = {module for experts in model.modules() if lies_flat(experts) for module in experts.modules()}
    for name, module in model.named_modules():
        if is_fused_experts(module) or _has_own_layout(module) or module in known or "layer" in module.__dict__:
            continue
        stacks = sum(p is not None and p.dim() == 3 and len(p) > 1 for p in module._parameters.values())
        number = next((n for n in (getattr(module, key, None) for key in _NUMBERS) if isinstance(n, int)), None)
        behind = [
            p for p in module._parameters.values() if p is not None and p.dim() == 2 and number and len(p) > number
        ]
        flat = len(behind) > 1 and all(len(p) % (number or 1) == 0 for p in behind)  # DBRX
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict) and name.endswith("experts") and len(module) > 1
        reason = (
            "its experts are modules of their own"
            if listed
            else "its experts lie behind each other in one dimension, and adapters are around them; call parallelize"
            " before PEFT"
            if flat and name.endswith(".base_layer")
            else "its experts lie behind each other in one dimension"
            if flat
            else f"its stacks have {' and '.join(map(str, sizes))} experts"
            if len(sizes := sorted({len(p) for p in module._parameters.values() if p is not None and p.dim() == 3})) > 1
            else "it follows no ExpertsInterface of transformers 5.8 or later"
            if stacks > 1 or (stacks and number is not None)
            else None
        )
        if reason is not None:
            found.append(f"{name} ({type(module).__name__}): {reason}")
    return found


def is_fused_experts(module: nn.Module) -> bool:
    """Return whether a module's parameters hold all experts of a block, as in transformers' ExpertsInterface."""
    down = module._parameters.get("down_proj")
    num_experts = getattr(module, "num_experts", None)
    return (
        down is not None
        and down.dim() == 3
        and isinstance(num_experts, int)
        and "layer" not in module.__dict__  # a layer's already
        and all(isinstance(getattr(module, flag, None), bool) for flag in FLAGS)
    )


def takes_rows(experts: nn.Module) -> bool:
    """Return whether experts are called with a row for each expert and token, as those of Llama 4."""
    stacks = [p for p in experts._parameters.values() if p is not None]
    return hasattr(experts, "_takes_rows") or (
        {*experts._parameters} == {"gate_up_proj", "down_proj"}
        and [p.dim() for p in stacks] == [3, 3]
        and callable(getattr(experts, "act_fn", None))
        and not any(hasattr(experts, flag) for flag in FLAGS)
        and len(inspect.signature(type(experts).forward).parameters) == 2
    )


def has_identities(experts: nn.Module) -> bool:
    """Return whether experts are those of LongCat, of which the last numbers return their input."""
    stacks = {name: len(p) for name, p in experts._parameters.items() if p is not None}
    real, more = (getattr(experts, name, None) for name in ("num_routed_experts", "zero_expert_num"))
    return (
        isinstance(real, int)
        and isinstance(more, int)
        and stacks == {"gate_up_proj": real + more, "down_proj": real}
        and isinstance(getattr(experts, "identity_expert", None), nn.Identity)
        and callable(getattr(experts, "act_fn", None))
        and "layer" not in experts.__dict__  # a layer's already
    )


FLAT = ("w1", "v1", "w2")
"""Gates, up and down projections of DBRX, [E I, M] each."""


def lies_flat(experts: nn.Module) -> bool:
    """Return whether the experts of a module are those of DBRX, behind each other in one dimension."""
    inner, number = experts._modules.get("mlp"), getattr(experts, "num_experts", None)
    stacks = [] if inner is None else [p for p in inner._parameters.values() if p is not None]
    return (
        inner is not None
        and isinstance(number, int)
        and not [*experts._parameters]
        and {*inner._parameters} == {*FLAT}
        and len({p.shape for p in stacks}) == 1
        and stacks[0].dim() == 2
        and len(stacks[0]) % number == 0
        and callable(getattr(inner, "activation_fn", None))
        and "layer" not in inner.__dict__  # a layer's already
    )


def _has_own_layout(experts: nn.Module) -> bool:
    return takes_rows(experts) or has_identities(experts) or lies_flat(experts)


def described(experts: nn.Module) -> Any:
    """Return experts as they are, or a copy of those of another layout with the interface's flags and gating.

    `num_identities` is the number of those that return their input, behind `num_experts` others, where there are such.
    Of DBRX it is a copy of the child that has the parameters.
    """
    if hasattr(experts, "_is_described") or not _has_own_layout(experts):
        return experts
    is_flat = lies_flat(experts)
    copied: Any = copy.copy(experts.mlp if is_flat else experts)
    copied._is_described = True
    copied.has_gate, copied.has_bias, copied.is_transposed, copied.is_concatenated = True, False, False, not is_flat
    if is_flat:
        copied.num_experts = experts.num_experts
        return copied
    copied._apply_gate = partial(_gated, experts.act_fn)
    if takes_rows(experts):
        copied._takes_rows = True
        copied.is_transposed = copied.gate_up_proj.shape[1] == copied.down_proj.shape[2]
    else:
        copied.num_experts, copied.num_identities = experts.num_routed_experts, experts.zero_expert_num
    return copied


def _gated(activation: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gated: Tensor = up * activation(gate)
    return gated


def _check_top_k(name: str, block: nn.Module, num_experts: int) -> None:
    for child, part in block.named_children():
        top_k = getattr(part, "top_k", None)
        if isinstance(top_k, int) and top_k > num_experts:
            raise ModelError(
                f"{name}.{child} has top_k = {top_k}, but a token takes at most all {num_experts} experts; lower"
                " num_experts_per_tok in the model's configuration"
            )


def _router_beside(block: nn.Module, child_of_experts: str, experts: Any) -> str | None:
    """Return the name of the only child with a weight [E, M] and none [M, E]: hidden states to a value per expert."""
    down = experts.get_parameter("down_proj")
    num_experts, hidden = len(down), down.shape[2 if experts.is_transposed else 1]
    routers = []
    for name, child in block.named_children():
        shapes = {tuple(p.shape) for p in child.parameters()}
        into, back = (num_experts, hidden), (hidden, num_experts)
        if name != child_of_experts and into in shapes and (into == back or back not in shapes):
            routers.append(name)
    return routers[0] if len(routers) == 1 else None
