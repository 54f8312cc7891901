"""Balances experts by the biases that routers add to scores before the choice, by a call in any training loop.

DeepSeek-V3 (2024), section 2.1.2: after each step the bias of an overloaded expert falls, that of another rises.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.formats.shards import local_part, local_runs, taken
from laconic.moe.gates.losses import FirstRuns, load_step, summed_counts
from laconic.moe.gates.sigmoid import SigmoidGate
from laconic.moe.layer import MoELayer, moe_layers
from laconic.moe.routing import Routing

_NAME = "e_score_correction_bias"
"""In all families of Hugging Face transformers that are balanced like this."""


class CountedBias:
    """The bias, of E values, of a Hugging Face model's router, and what its experts got since the last update."""

    def __init__(self, owner: nn.Module, num_experts: int) -> None:
        self._owner, self._num_experts = owner, num_experts
        self._load: Tensor | None = None
        self._runs = FirstRuns()

    @classmethod
    def of_block(cls, block: nn.Module, num_experts: int) -> CountedBias | None:
        """Find the bias in a block of experts; None if there is none, or more than one."""
        owners = [part for part in block.modules() if isinstance(getattr(part, _NAME, None), Tensor)]
        owners = [part for part in owners if getattr(part, _NAME).numel() == num_experts]
        return cls(owners[0], num_experts) if len(owners) == 1 else None

    def count(self, routing: Routing) -> None:
        """Add the tokens of each expert in a forward in training."""
        if self._runs.is_first():
            load = routing.counts()
            self._load = load if self._load is None else self._load + load

    @property
    def key(self) -> int:
        """The same for all that count for one bias, as blocks do that share a router."""
        return id(self._owner)

    def take(self) -> Tensor:
        """Return what was counted, int64 [E] on the bias's device, and begin anew."""
        load, self._load = self._load, None
        self._runs.forget()
        device = getattr(self._owner, _NAME).device
        return torch.zeros(self._num_experts, dtype=torch.int64, device=device) if load is None else load.to(device)

    def follow(self, load: Tensor, rate: float) -> None:
        """Move the bias by the load int64 [E] of all processes."""
        bias = getattr(self._owner, _NAME)
        step = load_step(load, rate, bias.dtype).view(bias.shape)
        if bias is not (local := local_part(bias)):
            step = taken(step, local_runs(bias.shape, bias.device_mesh, bias.placements))
        local += step


@torch.no_grad()
def update_router_biases(model: nn.Module, *, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
    """Move the biases of a model's routers by rate * sign(mean load - load) of their experts.

    Call it on all processes once per optimizer step, before or after it, as in
    `optimizer.register_step_post_hook(lambda *_: update_router_biases(model))`. Loads are the tokens that experts were
    given since the last call, in training, over all micro-batches and processes.

    Args:
        model: with layers of `parallelize` whose routers have an `e_score_correction_bias` (DeepSeek-V3, GLM-4, ERNIE
            4.5, ...), or with MoELayers whose gate is a SigmoidGate; other layers stay as they are.
        rate: of Hugging Face routers; a SigmoidGate has its own `bias_rate`.
        group: processes whose tokens are counted; None: those of the grid's dp, without a grid all processes.

    Raises:
        ConfigError: no router has such a bias, or the layers are not there yet.
        RoutingError: biases are in 16 bits, in which steps are lost.
    """
    layers = moe_layers(model)
    found = [(layer, bias) for layer in layers.values() if (bias := _bias_of(layer)) is not None]
    shared: dict[int, list[CountedBias | SigmoidGate]] = {}
    for _, bias in found:
        shared.setdefault(bias.key if isinstance(bias, CountedBias) else id(bias), []).append(bias)
    if not found:
        missing = (
            f"no router of {type(model).__name__} has an {_NAME} of as many values as experts; balance it by a loss, as"
            " router_aux_loss_coef"
        )
        raise ConfigError(missing if layers else f"{type(model).__name__} has no layers yet; call parallelize first")
    loads = [
        torch.stack([one.take() for one in biases if isinstance(one, CountedBias)]).sum(0)
        if isinstance(biases[0], CountedBias)
        else biases[0].load
        for biases in shared.values()
    ]
    grid = getattr(found[0][0], "grid", None)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD if grid is None else grid.dp
    if group is not None:
        loads = [*summed_counts(torch.cat(loads), group).split([len(load) for load in loads])]
    for (bias, *_), load in zip(shared.values(), loads, strict=True):
        if isinstance(bias, CountedBias):
            bias.follow(load, rate)
        else:
            bias.bias += load_step(load, bias.bias_rate, bias.bias.dtype)
            bias.forget_load()


def _bias_of(layer: MoELayer) -> CountedBias | SigmoidGate | None:
    found: CountedBias | None = getattr(layer, "router_bias", None)
    return found or (layer.gate if isinstance(layer.gate, SigmoidGate) else None)
