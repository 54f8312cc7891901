"""The modules of a model that a host may call in place of the model itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def largest_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The model, its child with more than half of its parameters, that one's, and so on.

    Trainers of preferences and losses computed in pieces call a language model's decoder, adapters wrap it again.
    """
    yield model
    total = sum(map(numel_of, model.parameters()))
    for child in model.children():
        if 2 * sum(map(numel_of, child.parameters())) > total:
            yield from largest_parts(child)


def numel_of(parameter: Tensor) -> int:
    """Elements of a parameter; 0 of one that gets its shape in the first forward."""
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()
