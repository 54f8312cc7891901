"""Copies of hot experts in training: on further ranks, chosen by measured loads, for one forward and its backward.

[Note: a copy lasts for one forward]
Parameters, gradients and optimizer state of an expert are in its home slot alone. A forward fetches the weights of
copies from their homes, one all-to-all, and its backward sends their gradients home, where they are added. So a copy
has its expert's bits in every forward, whatever changed them, and optimizers, clipping, state dicts and moves meet each
expert once. Making and dropping copies changes a table, and sends nothing. (FasterMoE's shadow experts, PPoPP 2022.)

The tokens pass the fetch, too, unchanged: so its backward comes on every rank, also where no row came, and always
between the same two exchanges of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from laconic.collectives import api
from laconic.errors import ConfigError
from laconic.formats.shards import local_part
from laconic.moe.dispatch.flat import FlatDispatcher
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.staged import experts_of, experts_per_rank
from laconic.moe.experts.shard import local_weights
from laconic.moe.layer import MoELayer
from laconic.moe.parallel.grid import Grid
from laconic.moe.placement.consensus import first_answer
from laconic.moe.placement.expert_map import Placement, placement_of
from laconic.moe.placement.search import hot_copies
from laconic.moe.routing import Routing
from laconic.moe.row_ops import accumulation_dtype


@dataclass(frozen=True)
class Copied:
    """Copies of one layer's experts; the same on all ranks."""

    copies: tuple[tuple[int, int], ...]
    """(expert as the gate numbers it, expert-parallel rank) of each copy beside its home."""
    busiest_before: float
    """Rows of the busiest rank over the mean of all ranks, by the loads and without copies."""
    busiest_after: float


def copy_hot_experts(
    layers: Sequence[MoELayer], grid: Grid, num_per_rank: int, *, loads: Sequence[Tensor] | None = None
) -> list[Copied]:
    """Hold the experts that have most to do on further ranks, too, from the next forward on; drop earlier copies.

    All ranks call it together, between a backward and the next forward. Outputs and gradients stay what they are up to
    the rounding of sums. A rank sends rows to a copy of its own, if it has one, and shares the others among all copies
    in turn. Each forward fetches the copies' weights, and each backward sends their gradients home.

    Args:
        layers: with a FlatDispatcher or HierarchicalDispatcher; one without a placement gets a Placement.
        grid: whose ep the experts are spread over, without mp.
        num_per_rank: copies of each layer that a rank holds at most; fewer are made where more would not shorten the
            time of the busiest rank. 0 drops all.
        loads: of each layer the tokens of this rank by expert, [E] numbers; they are added up over all ranks. None:
            those of each layer's last forward, `layer.load`.

    Returns:
        What was copied, by layer.

    Raises:
        ConfigError: num_per_rank is negative, loads are missing or none, or a layer cannot have copies: its experts are
            sharded by FSDP2, have adapters, or tensors that are not split by expert, or it runs by a schedule or
            another dispatcher. Nothing has changed then.
    """
    if num_per_rank < 0:
        raise ConfigError(f"num_per_rank is {num_per_rank}, but it must be at least 0, which drops all copies")
    if not layers:
        raise ConfigError("layers are empty, but there must be experts to copy; give at least one MoELayer")
    if grid.layout.mp > 1:
        raise ConfigError(
            f"mp is {grid.layout.mp}, but copies need ranks with tokens of their own; make the Grid without"
        )
    placements = [placement_of(layer, number) for number, layer in enumerate(layers)]
    for number, layer in enumerate(layers):
        _check(layer, grid.ep, f"layer {number}")
        _check_split(layer, grid.ep, f"layer {number}")
    given = [layer.load for layer in layers] if loads is None else [*loads]
    totals = _added_up(given, placements, grid.dp)
    found = []
    for placement, total in zip(placements, totals, strict=True):
        most = experts_per_rank(placement.num_experts, grid.layout.ep)
        homes = [slot // most for slot in placement.slots.tolist()]
        found.append(Copied(*hot_copies(total, homes, grid.layout.ep, num_per_rank)))
    found = first_answer(found, grid.dp)
    for placement, one in zip(placements, found, strict=True):
        placement.copies = ExpertCopies(one.copies, grid.ep, placement.slots.tolist()) if one.copies else None
    return found


def _added_up(
    given: Sequence[Tensor | None], placements: Sequence[Placement], group: dist.ProcessGroup
) -> list[list[float]]:
    """Add loads up over all ranks, each of which raises if one rank's are wrong."""
    sizes, wrong = [one.num_experts for one in placements], None
    try:
        loads = torch.cat([row.cpu() for row in _checked(given, sizes)])
    except ConfigError as error:
        wrong, loads = error, torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
    total = torch.cat([loads, loads.new_tensor([float(wrong is not None)])]).to(placements[0].slots.device)
    dist.all_reduce(total, group=group)
    if wrong is not None:
        raise wrong
    if total[-1]:
        raise ConfigError("the loads of another rank are none, which its own error names; nothing has changed here")
    return [row.tolist() for row in total[:-1].cpu().split(sizes)]


def _checked(given: Sequence[Tensor | None], sizes: Sequence[int]) -> list[Tensor]:
    """Return this rank's loads, fp64 [E] of each layer."""
    if len(given) != len(sizes):
        raise ConfigError(f"loads are those of {len(given)} layers, but there are {len(sizes)}; give one each")
    rows = []
    for number, (load, size) in enumerate(zip(given, sizes, strict=True)):
        if load is None:
            raise ConfigError(
                f"layer {number} has not run yet, so there are no loads to choose experts by; call it after a forward,"
                " or give loads"
            )
        row = torch.as_tensor(load).detach().to(torch.float64)
        if row.shape != (size,) or not bool((row.isfinite() & (row >= 0)).all()):
            raise ConfigError(
                f"loads of layer {number} are {row.tolist()}, but they must be {size} numbers from 0 on, tokens of each"
                " expert"
            )
        rows.append(row)
    return rows


def _check(layer: MoELayer, group: dist.ProcessGroup, name: str) -> None:
    dispatcher, experts = layer.dispatcher, layer.experts
    if isinstance(dispatcher, FlatDispatcher):
        num_places = dispatcher.num_places
    elif isinstance(dispatcher, HierarchicalDispatcher):
        num_places = dispatcher.levels.num_ranks
    else:
        raise ConfigError(
            f"{name} has a {type(dispatcher).__name__}, but copies of experts need a FlatDispatcher (path joint) or a"
            " HierarchicalDispatcher; build it with one"
        )
    if num_places != group.size():
        raise ConfigError(
            f"the experts of {name} are spread over {num_places} places, but the grid's ep is {group.size()}; pass the"
            " grid that it was made with"
        )
    if layer.schedule is not None:
        raise ConfigError(
            f"{name} runs by a {type(layer.schedule).__name__}, which knows no copies; leave schedule out"
        )
    if getattr(experts, "adapters", ()):
        raise ConfigError(f"the experts of {name} have adapters, which are of all experts; train them without copies")
    if any(isinstance(module, FSDPModule) for module in experts.modules()):
        raise ConfigError(
            f"FSDP2 shards the experts of {name}, so no rank has whole ones to copy; use reduce_gradients, or DDP"
        )


def _check_split(layer: MoELayer, group: dist.ProcessGroup, name: str) -> None:
    experts = layer.experts
    here = len(experts_of(group.rank(), layer.gate.num_experts, group.size()))
    shapes = {key: list(local_part(one.detach()).shape) for key, one in experts.named_parameters()}
    others = [key for key, shape in shapes.items() if shape[:1] != [here]]
    others += [key for key, _ in experts.named_buffers() if not key.startswith("placement.")]
    if others:
        raise ConfigError(
            f"{', '.join(others)} of {name} cannot be copied with an expert: only parameters that begin with the {here}"
            " experts of this rank can, and no buffers; leave copies out"
        )


class ExpertCopies:
    """Where the copies of a layer's experts are, and how they are fetched; see [Note: a copy lasts for one forward].

    A rank has ceil(E / N_EP) home slots, as without copies, and behind them slots of its copies, as many as the rank
    with most.
    """

    def __init__(self, copies: Iterable[tuple[int, int]], group: dist.ProcessGroup, homes: Sequence[int]) -> None:
        """Make the table of copies (expert, rank); those on the expert's home, `Placement.slots`, do nothing."""
        self.copies, self.group = tuple(copies), group
        rank, world, num_experts = group.rank(), group.size(), len(homes)
        most = experts_per_rank(num_experts, world)
        self._num_homes, self._first = len(experts_of(rank, num_experts, world)), most
        """Home slots that this rank uses, and its first slot of a copy."""
        wanted = {(expert, place) for expert, place in copies if homes[expert] // most != place}
        # In the order in which they come: by the rank of the home, then by expert.
        held = [sorted((homes[e] // most, e) for e, p in wanted if p == place) for place in range(world)]
        self._num_copies, size = len(held[rank]), most + max(map(len, held))
        slots = [[home // most * size + home % most] for home in homes]
        for place, ones in enumerate(held):
            for number, (_, expert) in enumerate(ones):
                slots[expert].append(place * size + most + number)
        nearest = [[slot for slot in ones if slot // size == rank] or ones for ones in slots]
        width = max(map(len, nearest))
        self._slots = torch.tensor([ones + ones[:1] * (width - len(ones)) for ones in nearest], device="cpu")
        self._choices = torch.tensor([*map(len, nearest)], device="cpu")
        self.num_slots = world * size
        self._leaving = torch.tensor(
            [homes[e] % most for ones in held for source, e in ones if source == rank], dtype=torch.int64, device="cpu"
        )
        """Home slots, in the order in which their weights leave."""
        self._table = [[sum(one == source for one, _ in ones) for ones in held] for source in range(world)]
        self._sent, self._received = self._table[rank], [row[rank] for row in self._table]

    def at(self, homes: Sequence[int]) -> ExpertCopies:
        """Return the same copies of experts in other home slots."""
        return ExpertCopies(self.copies, self.group, homes)

    def routing(self, routing: Routing) -> Routing:
        """Return the routing by slot, copies included: each expert's rows are shared among its copies in turn."""
        experts = routing.experts
        if self._slots.device != experts.device:
            self._slots, self._choices = self._slots.to(experts.device), self._choices.to(experts.device)
        counts = routing.counts()
        turn = routing.row_of_entry - (counts.cumsum(0) - counts)[experts] + self.group.rank()
        slots = self._slots[experts, turn % self._choices[experts]]
        return replace(routing, experts=slots, num_experts=self.num_slots)

    def begin(
        self, layer: MoELayer, x: Tensor, routing: Routing
    ) -> tuple[Tensor, Routing, Callable[[Tensor, Tensor], Tensor]]:
        """Fetch the weights of copies; return what to dispatch, and what to call in the place of the experts.

        All ranks of the group call it together. A layer that has become one that cannot have copies is a ConfigError.
        """
        _check(layer, self.group, "a layer with copies of experts")
        named = dict(layer.experts.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad and torch.is_grad_enabled()}
        frozen = {name: p for name, p in named.items() if name not in trained}
        mean = layer.mean_of_forward()
        through = trained.values() if mean is None else mean.through(trained.values())
        homes = dict(zip(trained, map(local_weights, through), strict=True))
        copies: dict[str, Tensor] = {}
        if homes:
            x, *both = _Fetch.apply(self, False, x, *homes.values())
            homes, copies = (dict(zip(homes, part, strict=True)) for part in (both[: len(homes)], both[len(homes) :]))
        still = [local_part(p) for p in frozen.values()]
        homes |= dict(zip(frozen, still, strict=True))
        copies |= dict(zip(frozen, self.fetched(still), strict=True))
        return x, routing, partial(self._call, layer.experts, homes, copies)

    def _call(
        self, experts: nn.Module, homes: dict[str, Tensor], copies: dict[str, Tensor], rows: Tensor, counts: Tensor
    ) -> Tensor:
        """Return the outputs [q, M] of experts at home, and of copies, for rows [q, M] sorted by slot."""
        own = counts[: self._num_homes]
        if not self._num_copies:
            return functional_call(experts, homes, (rows, own))
        at = int(own.sum())
        further = counts[self._first : self._first + self._num_copies]
        parts = [(homes, rows[:at], own), (copies, rows[at:], further)]
        return torch.cat([functional_call(experts, held, (some, number)) for held, some, number in parts])

    # --- transport ---

    def fetched(self, homes: Sequence[Tensor]) -> list[Tensor]:
        """Return copies [copies here, ...] of tensors [experts here, ...] of their homes."""
        leaving = self._leaving.to(homes[0].device) if homes else self._leaving
        return self._exchanged([one.index_select(0, leaving) for one in homes], self._num_copies, back=False)

    def returned(self, homes: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors [experts here, ...] and of their copies', whose transpose `fetched` is."""
        leaving = self._leaving.tolist()
        came = self._exchanged(copies, len(leaving), back=True)
        return [_with_added(home, leaving, parts) for home, parts in zip(homes, came, strict=True)]

    def _exchanged(self, tensors: Sequence[Tensor], num_arriving: int, *, back: bool) -> list[Tensor]:
        """Send tensors [m, ...] by their first dimension, one message for each dtype."""
        arriving: list[Tensor] = [*tensors]
        sent, received, table = self._sent, self._received, self._table
        if back:
            sent, received, table = received, sent, [list(row) for row in zip(*table, strict=True)]
        for dtype in dict.fromkeys(one.dtype for one in tensors):
            numbers = [number for number, one in enumerate(tensors) if one.dtype == dtype]
            widths = [math.prod(tensors[number].shape[1:]) for number in numbers]
            flat = [tensors[number].reshape(sum(sent), w) for number, w in zip(numbers, widths, strict=True)]
            leaving = torch.cat(flat, 1)
            rows = leaving.new_empty(num_arriving, sum(widths))
            api.all_to_all(rows, leaving, received, sent, self.group, table=table)
            for number, part in zip(numbers, rows.split(widths, 1), strict=True):
                arriving[number] = part.reshape(num_arriving, *tensors[number].shape[1:])
        return arriving


def _with_added(home: Tensor, slots: Sequence[int], parts: Tensor) -> Tensor:
    """Add parts[i] to home[slots[i]], in fp32 (fp64 for fp64), in the order of ranks, rounded once."""
    if not slots:
        return home
    home, dtype = home.clone(), accumulation_dtype(home.dtype)
    for slot in dict.fromkeys(slots):
        total = home[slot].to(dtype)
        for part in (part for one, part in zip(slots, parts, strict=True) if one == slot):
            total = total + part.to(dtype)
        home[slot] = total.to(home.dtype)
    return home


class _Fetch(torch.autograd.Function):
    """(tokens, homes) to (tokens, homes, copies), and its transpose, each the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, copies: ExpertCopies, back: bool, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.transpose = copies, not back
        if not back:
            return x.view_as(x), *(one.view_as(one) for one in tensors), *copies.fetched(tensors)
        half = len(tensors) // 2
        return x.view_as(x), *copies.returned(tensors[:half], tensors[half:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Through apply, so that gradients of gradients travel as well.
        return None, None, *_Fetch.apply(*ctx.transpose, *grads)
