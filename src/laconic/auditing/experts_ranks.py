"""Where the experts of a layer are, and plain collectives of torch over the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.moe.dispatch.base import Dispatcher, LocalDispatcher
from laconic.moe.dispatch.expert_sharded import ShardedDispatcher
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.parm import BaselineDispatcher, S1Dispatcher, S2Dispatcher


@dataclass(frozen=True)
class ExpertRanks:
    """Where the experts of a layer are.

    Attributes:
        groups: whose ranks, over one after the other, hold every expert once (or all parts of it).
        place: of this rank among those that hold different experts.
        num_places: how many of these there are.
        differ: whether all these ranks have tokens of their own.
        codecs: of rows.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    place: int = 0
    num_places: int = 1
    differ: bool = True
    codecs: tuple[Codec | str, ...] = ()

    @property
    def size(self) -> int:
        """All ranks that hold the experts."""
        return math.prod(group.size() for group in self.groups)

    @property
    def index(self) -> int:
        """This rank's place in the order of `gathered`."""
        place = 0
        for group in reversed(self.groups):
            place = place * group.size() + group.rank()
        return place

    @property
    def is_lossy(self) -> bool:
        """Whether rows change on their way."""
        return any(map(_is_lossy, self.codecs))

    @property
    def is_coarse(self) -> bool:
        """Whether they travel in codes of fewer than eight bits."""
        return any(map(_is_coarse, self.codecs))


def ranks_of_experts(dispatcher: Dispatcher) -> ExpertRanks | None:
    """Where the experts of a dispatcher of laconic's are; None for others."""
    if isinstance(dispatcher, LocalDispatcher):
        return ExpertRanks()
    if isinstance(dispatcher, FlatDispatcher):
        group, shards = dispatcher.group, dispatcher.num_shards
        return ExpertRanks(_larger(group), group.rank() // shards, dispatcher.num_places, True, (dispatcher.codec,))
    if isinstance(dispatcher, HierarchicalDispatcher):
        group = dispatcher.group
        return ExpertRanks(_larger(group), group.rank(), group.size(), True, dispatcher.codecs)
    if isinstance(dispatcher, ShardedDispatcher):
        ep = dispatcher.exchange.group
        return ExpertRanks(_larger(ep, dispatcher.esp), ep.rank(), ep.size(), True, (dispatcher.codec,))
    if isinstance(dispatcher, S1Dispatcher):
        return ranks_of_experts(dispatcher.inner)
    if isinstance(dispatcher, S2Dispatcher):
        found = ranks_of_experts(dispatcher.exchange)
        assert found is not None
        return replace(found, differ=dispatcher.grid.layout.mp == 1)
    if isinstance(dispatcher, BaselineDispatcher):
        grid = dispatcher.grid
        differ = grid.layout.mp == grid.layout.esp == 1
        return ExpertRanks(_larger(grid.joint), grid.ep.rank(), grid.layout.ep, differ, (dispatcher.codec,))
    return None


def _larger(*groups: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    return tuple(group for group in groups if group.size() > 1)


def gathered(x: Tensor, groups: Sequence[dist.ProcessGroup], sizes: Tensor | None = None) -> Tensor:
    """Rows of x [n, ...] of all ranks of the groups' product, by rank; of sizes[rank] each, of which None is alike."""
    if not groups:
        return x
    counts = None if sizes is None else sizes.tolist()
    most = len(x) if counts is None else max(1, *counts)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x.detach()
    bits = padded.view(torch.uint8)[None]  # any dtype
    for group in groups:
        parts = [torch.empty_like(bits) for _ in range(group.size())]
        dist.all_gather(parts, bits, group=group)
        bits = torch.cat(parts)
    rows = bits.view(x.dtype)
    if counts is None:
        return rows.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])


def summed(groups: Sequence[dist.ProcessGroup], x: Tensor) -> Tensor:
    """Its sum over the ranks of the groups' product."""
    for group in groups:
        dist.all_reduce(x, group=group)
    return x


def _is_lossy(codec: Codec | str) -> bool:
    return not isinstance(codec, str) and not codec.lossless


def _is_coarse(codec: Codec | str) -> bool:
    kind = getattr(codec, "format", None)
    return _is_lossy(codec) and (kind is None or kind.bits < 8)
