"""Some of a model's parameters where a module is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["Subset"]


class Subset(nn.Module):
    """Some of a model's parameters, as a module with their names; buffers are left out."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        known = {id(parameter) for parameter in parameters}
        self._held = {name: p for name, p in model.named_parameters() if id(p) in known}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the model."""
        return ((prefix + name, parameter) for name, parameter in self._held.items())
