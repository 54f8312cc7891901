"""Which experts of a model are spread over processes, for those who train and save it."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from laconic.errors import ConfigError
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.layer import moe_layers


def spread_layers(model: nn.Module) -> list[ExpertsLayer]:
    """List the layers of a model whose experts `parallelize` has spread."""
    return [
        layer
        for layer in moe_layers(model).values()
        if isinstance(layer, ExpertsLayer) and any(isinstance(p, DTensor) for p in layer.experts.parameters())
    ]


def is_spread(model: nn.Module) -> bool:
    """Return whether each process has a part of the experts."""
    return bool(spread_layers(model))


def is_cut_otherwise(model: nn.Module) -> bool:
    """Return whether other parameters than spread experts are DTensors, as FSDP2 makes them."""
    experts = {id(p) for layer in spread_layers(model) for p in layer.experts.parameters()}
    return any(isinstance(p, DTensor) and id(p) not in experts for p in model.parameters())


def saved_by_host(model: nn.Module) -> None:
    """Note that the host that is going to wrap a model saves and loads spread experts, so that it is not refused.

    Processes of the grid that have the same tokens, while hosts give each process others, are a ConfigError.
    """
    for layer in spread_layers(model):
        if layer.num_mp > 1:
            raise ConfigError(
                f"mp is {layer.num_mp}, so that as many processes expect the same tokens, but this host gives each"
                " process others; make the Grid without mp, or train in a loop of your own"
            )
        layer.is_saved_by_host = True
