"""Fragments of a model's parameters: what local steps synchronize together, in flat fp32 tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.collectives.runtime.background import Work
from laconic.errors import ConfigError

MAX_BLOCK_SIZE = 128
"""Parameters and fragments are filled up to whole blocks of every format: no block has values of two parameters, and
ranks cut at the same places whatever their number."""


@dataclass(slots=True)
class Pending:
    """A synchronization that has begun."""

    number: int
    """Of the fragment."""
    began: int
    merge_at: int
    reports: Work[Tensor] | None
    """int64 [W, 7]: first parameter that is not finite, or -1; steps; fragment; whether other parameters have taken the
    place of those of the start; whether values have changed; checksums of the difference and of what is common. None
    once checked."""
    average: Work[Tensor]
    """Of the differences, fp32 flat."""
    start: dict[str, Tensor]
    """This rank's parameters when it began; empty without a delay."""


class Fragment:
    """Parameters that are synchronized together, each filled up to whole blocks in flat fp32 tensors."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], offset: int, multiple: int, feedback: bool) -> None:
        self.offset = offset
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        numel = sum(map(_filled, self.shapes.values()))
        device = next(iter(parameters.values())).device
        self.common = torch.zeros(-(-numel // multiple) * multiple, dtype=torch.float32, device=device)
        for name, x in self.views(self.common).items():
            x.copy_(parameters[name])
        self.momentum = torch.zeros_like(self.common)
        self.error = torch.zeros_like(self.common) if feedback else None
        self.pending: Pending | None = None
        self.met: int | None = None
        """Steps after which all ranks last had the common point as their parameters."""

    def is_due(self, step: int, every: int) -> bool:
        """Whether it is synchronized when `step` steps are done."""
        return step > 0 and (step - self.offset) % every == 0

    def checksum(self) -> Tensor:
        """An int64 of the bits of common point and momentum, which are the same on all ranks."""
        return self.common.view(torch.int32).sum() + 3 * self.momentum.view(torch.int32).sum()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor by name, in the shapes of the parameters."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            found[name] = flat[start : start + shape.numel()].view(shape)
            start += _filled(shape)
        return found


def _filled(shape: torch.Size) -> int:
    """Elements of a parameter, filled up to whole blocks."""
    return -(-shape.numel() // MAX_BLOCK_SIZE) * MAX_BLOCK_SIZE


def cut(parameters: Mapping[str, nn.Parameter], num: int) -> Iterator[dict[str, nn.Parameter]]:
    """Consecutive parameters in `num` parts, about equally large and none empty.

    Raises:
        ConfigError: there are fewer parameters than parts.
    """
    if num > len(parameters):
        raise ConfigError(
            f"num_fragments is {num}, but it must be at most the number of trainable parameters ({len(parameters)})"
        )
    total, left, reached = sum(p.numel() for p in parameters.values()), list(parameters.items()), 0
    for number in range(num):
        part: dict[str, nn.Parameter] = {}
        share = total * (number + 1) // num  # elements that should be in this part and those before
        while not part or (len(left) >= num - number and reached + left[0][1].numel() / 2 < share):
            name, parameter = left.pop(0)
            part[name] = parameter
            reached += parameter.numel()
        yield part
