"""Expert metrics of a training step: load of each expert, dropped assignments, rows and bytes sent at each level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.collectives.codec import Blockwise, Codec, Lossless
from laconic.moe.dispatch.base import LocalDispatcher, row_nbytes
from laconic.moe.dispatch.hierarchical import HierarchicalDispatcher
from laconic.moe.dispatch.staged import experts_per_rank
from laconic.moe.gates.capacity import capacity_of, dropped
from laconic.moe.hooks import Hook
from laconic.moe.layer import MoELayer
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.moe.routing import RoutedTokens, Routing
from laconic.topology import Levels
from laconic.train.distributed.world import World


@dataclass(frozen=True)
class ExpertUse:
    """Expert metrics of one step, over all processes and layers."""

    loads: tuple[tuple[int, ...], ...]
    """Tokens of each expert, by layer; zeros of a layer that did not run."""
    num_dropped: int
    """Assignments dropped by a capacity factor."""
    num_entries: int
    """Assignments to processes: rows that would travel without de-duplication."""
    num_rows: int
    """Distinct (token, group) pairs at the outermost level: rows left by de-duplication."""
    level_nbytes: tuple[int, ...]
    """Bytes of rows that left their group at each level on the way to the experts, encoded by the dispatch codec, but
    before lossless coding."""
    num_processes: int
    """Processes of an EP group."""

    @property
    def load_ratio(self) -> float:
        """Tokens of the busiest expert divided by the mean over experts; averaged over layers that ran."""
        return sum(ratios := self._ratios()) / len(ratios)

    @property
    def worst_load_ratio(self) -> float:
        """The load ratio of the least even layer."""
        return max(self._ratios())

    def _ratios(self) -> list[float]:
        return [max(load) * len(load) / sum(load) for load in self.loads if any(load)] or [1.0]

    @property
    def duplicate_rate(self) -> float:
        """Share of assignments whose token has another expert in the same group, at the outermost level."""
        return 1 - self.num_rows / self.num_entries if self.num_entries else 0.0

    def to_metrics(self) -> dict[str, float | int]:
        """Return the fields of a row of metrics.jsonl; traffic only where experts are spread over processes."""
        fields: dict[str, float | int] = {
            "moe_load_ratio": self.load_ratio,
            "moe_load_ratio_worst": self.worst_load_ratio,
            "moe_dropped": self.num_dropped,
        }
        if self.num_processes > 1:
            fields["moe_duplicate_rate"] = self.duplicate_rate
            fields |= {f"moe_level{i}_nbytes": nbytes for i, nbytes in enumerate(self.level_nbytes, 1)}
        return fields


class ExpertMeter(Hook):
    """Hook that counts tokens, rows and bytes in the training forwards of its layers, until `take`.

    Args:
        num_processes: size of an EP group.
        levels: numbers of groups of an EP group at each level, without the first and the last.
    """

    def __init__(self, world: World, num_processes: int, levels: Sequence[int] = ()) -> None:
        self._world = world
        self.num_processes = num_processes
        self._groups = (*Levels.of_groups(num_processes, levels).num_groups, num_processes)
        self._place = world.rank % num_processes
        self._loads: dict[MoELayer, Tensor] = {}
        # Dropped assignments, assignments, rows at the outermost level, then bytes by level.
        self._counts = torch.zeros(3 + self.num_levels, dtype=torch.int64, device="cpu")

    @property
    def num_levels(self) -> int:
        """Number of levels at which bytes are counted; the last is between processes."""
        return len(self._groups) - 1

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> None:
        """Count a training forward; others, and tokens without a `Routing`, are not counted."""
        routing = tokens.routing
        if not layer.training or not isinstance(routing, Routing):
            return
        if torch._C._current_graph_task_id() == -1:  # in backward a checkpoint sends the same tokens' rows again
            load = routing.counts().cpu()
            self._loads[layer] = self._loads[layer] + load if layer in self._loads else load
            self._counts[0] += routing.num_dropped
        if self.num_processes == 1:
            return
        slots = layer.by_slot(routing)
        ranks = slots.experts // experts_per_rank(slots.num_experts, self.num_processes)
        outermost = self._groups[1]
        group = ranks // (self.num_processes // outermost)
        dispatcher = layer.dispatcher
        depth = dispatcher.depth if isinstance(dispatcher, HierarchicalDispatcher) else None
        moved = torch.tensor(moved_rows(routing.tokens, ranks, self._place, self._groups, depth), device="cpu")
        self._counts[1] += len(ranks)
        self._counts[2] += len(_distinct(routing.tokens * outermost + group))
        self._counts[3:] += moved * row_nbytes(dispatcher, tokens.x)

    def take(self, layers: Iterable[MoELayer]) -> ExpertUse | None:
        """Return the counts since the last call, summed over all processes, and reset them; None if no layer ran.

        All processes call it together, with all layers in the order in which their loads are wanted.
        """
        # Layers may run on some processes only, and sums are of equally many numbers everywhere.
        loads = [
            self._loads.get(layer, torch.zeros(layer.gate.num_experts, dtype=torch.int64, device="cpu"))
            for layer in layers
        ]
        num_ran = torch.tensor([len(self._loads)], device="cpu")
        total = self._world.sum(torch.cat([*loads, self._counts, num_ran]).to(self._world.device)).cpu()
        *by_layer, counts, num_ran = total.split([*map(len, loads), len(self._counts), 1])
        if not num_ran:
            return None
        self.clear()
        num_dropped, num_entries, num_rows, *nbytes = counts.tolist()
        by_expert = tuple(tuple(load.tolist()) for load in by_layer)
        return ExpertUse(by_expert, num_dropped, num_entries, num_rows, tuple(nbytes), self.num_processes)

    def clear(self) -> None:
        """Reset all counts."""
        self._loads.clear()
        self._counts.zero_()


class Capacity(Hook):
    """Hook that drops assignments beyond an expert's capacity.

    Args:
        training, evaluation: capacity of an expert in that mode, as a multiple of its even share of a process's
            assignments; the first tokens in order are kept. None drops nothing.
    """

    def __init__(self, training: float | None, evaluation: float | None) -> None:
        self._training, self._evaluation = training, evaluation

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> RoutedTokens | None:
        """Return `tokens` with the assignments that fit; None without a capacity or a `Routing`."""
        routing, factor = tokens.routing, self._training if layer.training else self._evaluation
        if factor is None or not isinstance(routing, Routing):
            return None
        capacity = capacity_of(factor, len(routing), routing.num_experts)
        return replace(tokens, routing=dropped(routing, capacity, "position"))


def schedule_of(layer: MoELayer) -> str:
    """Describe how a layer runs, in a few words: "depth 2 of 2, lossless, 2 chunks forward and 4 backward"."""
    dispatcher, schedule = layer.dispatcher, layer.schedule
    if isinstance(dispatcher, LocalDispatcher):
        return "all of them on every process"
    words = ["one all-to-all", _name_of(getattr(dispatcher, "codec", "raw"))]
    if isinstance(dispatcher, HierarchicalDispatcher):
        words[0] = f"depth {dispatcher.depth} of {dispatcher.levels.max_depth}"
        words[1] += " between nodes" if dispatcher.inner_codec is not dispatcher.codec else ""
    if isinstance(schedule, ChunkedSchedule):
        words.append(f"{schedule.forward} chunks forward and {schedule.backward} backward")
    return ", ".join(words)


def _name_of(codec: Codec | str) -> str:
    if isinstance(codec, Blockwise):
        return codec.format.code
    if isinstance(codec, Lossless):
        return "lossless"
    return "lossless where it pays" if codec == "auto" else "raw"


def moved_rows(tokens: Tensor, ranks: Tensor, place: int, groups: Sequence[int], depth: int | None) -> list[int]:
    """Count the rows of a process's tokens that leave their group at each level on their way.

    Rows that other processes forward are counted too: a row enters another group at the process whose position there is
    that of its own process. The sum over processes is therefore what all of them send.

    Args:
        tokens, ranks: int64 [a], assignments of tokens to processes of the EP group.
        place: position of the process in its EP group.
        groups: numbers of groups at each level, from 1 to the number of processes.
        depth: number of stages of the hierarchical all-to-all; each but the last crosses one level, and a row goes once
            to each group. None: one all-to-all, in which every assignment is a row.

    Returns:
        Rows at each level, the outermost first; one entry less than `groups`.
    """
    size, begin, moved = groups[-1], 0, []
    ends = [len(groups) - 1] if depth is None else [*range(1, depth), len(groups) - 1]
    for end in ends:
        inside, target = size // groups[begin], ranks // (size // groups[end])
        goal = ranks if depth is None else ranks[_distinct(tokens * groups[end] + target)]
        here = goal // inside * inside + place % inside
        for num_groups in groups[begin + 1 : end + 1]:
            leaves = goal // (size // num_groups) != here // (size // num_groups)
            moved.append(int(leaves.sum()))
            goal, here = goal[~leaves], here[~leaves]
        begin = end
    return moved


def _distinct(keys: Tensor) -> Tensor:
    """Position of the first occurrence of each distinct key, int64, in order of the keys."""
    ordered, places = keys.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return places[first]
