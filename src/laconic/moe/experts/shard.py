"""Shards of experts: the experts of one rank, each with a part of its hidden dimension."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError, TrainingError
from laconic.formats.shards import local_part
from laconic.moe.dispatch.staged import experts_of
from laconic.moe.experts.modules import GatedExperts, GptExperts
from laconic.moe.parallel.grid import Grid

AnyExperts = TypeVar("AnyExperts", GptExperts, GatedExperts)


def expert_shard(experts: AnyExperts, grid: Grid) -> AnyExperts:
    """Cut this rank's shard of `experts`, alike on all ranks: its own ones, with H / N_ESP hidden units each.

    A rank of an EP group has ceil(E / N_EP) experts, the last ones fewer. The outputs of the N_ESP shards add up to
    those of the whole. `down_bias` is therefore kept by the first shard only and None in the others. Parameters are
    copies, with the dtype, device and requires_grad of the whole's.

    Raises:
        RoutingError: there are fewer experts than N_EP.
        ConfigError: N_ESP does not divide the hidden dimension, or the class is not known.
    """
    layout = grid.layout
    numbers = experts_of(grid.ep.rank(), experts.num_experts, layout.ep)
    here = len(numbers)
    if experts.hidden_dim % layout.esp:
        raise ConfigError(
            f"esp is {layout.esp}, but it must divide the experts' hidden_dim, which is {experts.hidden_dim}; change"
            " one of them"
        )
    if type(experts) not in (GptExperts, GatedExperts):
        raise ConfigError(
            f"experts are {type(experts).__name__}, but only GptExperts and GatedExperts are known; cut others by hand"
        )
    mine = slice(numbers.start, numbers.stop)
    part = grid.esp.rank()

    def units(weight: Tensor, dim: int) -> Tensor:
        return weight[mine].chunk(layout.esp, dim)[part]

    hidden, model_dim, down = experts.hidden_dim // layout.esp, experts.model_dim, experts.down
    options: dict[str, Any] = {"activation": experts.activation, "device": down.device, "dtype": down.dtype}
    cut: GatedExperts | GptExperts
    with torch.no_grad():
        if isinstance(experts, GatedExperts):
            cut = GatedExperts(max(1, here), model_dim, hidden, **options)
            halves = [units(half, 2) for half in experts.gate_up.chunk(2, dim=2)]
            _fill(cut.gate_up, torch.cat(halves, dim=2), experts.gate_up)
        else:
            cut = GptExperts(max(1, here), model_dim, hidden, bias=experts.up_bias is not None, **options)
            _fill(cut.up, units(experts.up, 2), experts.up)
            if experts.up_bias is not None and cut.up_bias is not None:
                _fill(cut.up_bias, units(experts.up_bias, 1), experts.up_bias)
            if experts.down_bias is not None and cut.down_bias is not None:
                _fill(cut.down_bias, experts.down_bias[mine], experts.down_bias)
                cut.down_bias = None if part else cut.down_bias
        _fill(cut.down, units(down, 1), down)
        cut.num_experts = here
    assert isinstance(cut, type(experts))
    return cut


def _fill(parameter: nn.Parameter, values: Tensor, whole: Tensor) -> None:
    parameter.data = parameter.data[: len(values)]  # one too many where a rank has no expert
    parameter.copy_(values)
    parameter.requires_grad_(whole.requires_grad)


def local_weights(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, with which backward refuses to run once the parameter has changed.

    Autograd refuses that for plain parameters; the local part of a DTensor has no version in common with it.
    """
    held = local_part(parameter)
    if held is not parameter and held.requires_grad:
        held.register_hook(partial(_check_version, parameter, parameter._version))
    return held


def _check_version(parameter: Tensor, version: int, _: Tensor) -> None:
    """Refuse gradients by weights that were changed in place since the forward."""
    if parameter._version != version:
        raise TrainingError(
            f"weights of experts {list(parameter.shape)} were changed in place between a forward and its backward, so"
            " that gradients would be of other weights; call backward() before optimizer.step() and before weights are"
            " loaded or moved"
        )
