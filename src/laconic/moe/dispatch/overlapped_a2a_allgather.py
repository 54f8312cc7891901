"""All-to-all overlapped with all-gather (Parm's SAA, arXiv 2407.00599): outputs come home and go on to the MP peers.

[Note: steps of SAA]
In step i each rank sends the rows that came from EP rank e + i (its own is e) back to it and gets those of its own
from e - i, N_ESP partial sums of each; it adds these up and gives the sums to its MP peers while step i + 1 is under
way. The exchanges run in the background executor of the joint group, the gathers in the foreground on the MP group.
With a seconds per exchange and g per gather that is (steps - 1) max(a, g) + a + g instead of steps (a + g).

The release's kernel exchanges single chunks between streams; here a step may take several EP ranks, because on slow
networks each collective costs a round trip. All ranks know the whole routing, so no numbers of rows are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import api
from laconic.collectives.codec import Codec
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.moe.dispatch.chunking import Chunk
from laconic.moe.dispatch.flat import added_up
from laconic.moe.dispatch.staged import experts_per_rank
from laconic.moe.parallel.grid import Grid
from laconic.moe.routing import Routing


@dataclass(frozen=True, eq=False)
class SaaPlan:
    """Rows that each rank sends to each other in each step, and their positions. The same numbers on all MP ranks."""

    joint: dist.ProcessGroup
    mp: dist.ProcessGroup
    num_shards: int
    """N_ESP."""
    ep_of_peer: tuple[int, ...]
    """EP rank of each MP peer."""
    steps: tuple[tuple[int, ...], ...]
    """Offsets between EP ranks that each step takes."""
    positions: tuple[tuple[Tensor, ...], ...]
    """int64 [peer][EP rank]: positions, in all rows sorted by expert, of the peer's rows for the EP rank's experts."""
    codec: Codec | str

    @staticmethod
    def make(grid: Grid, routing: Routing, entries: list[int], num_steps: int, codec: Codec | str) -> SaaPlan:
        """Plan at most `num_steps` steps for a routing of all MP ranks' tokens, alike on all of them.

        `entries` says how many of the routing's entries, in order, belong to each MP rank.
        """
        layout = grid.layout
        device = routing.experts.device
        owners = torch.arange(layout.mp, device=device).repeat_interleave(
            torch.tensor(entries, device=device), output_size=len(routing)
        )
        keys = owners * layout.ep + routing.experts // experts_per_rank(routing.num_experts, layout.ep)
        sizes = torch.zeros(layout.mp * layout.ep, dtype=torch.int64, device=device)
        sizes.scatter_add_(0, keys, torch.ones_like(keys))
        # Rows are sorted by expert; a stable sort by key keeps that within each owner and EP rank.
        parts = torch.argsort(keys[routing.by_expert], stable=True).split(sizes.tolist())
        positions = tuple(tuple(parts[p * layout.ep : (p + 1) * layout.ep]) for p in range(layout.mp))
        eps = tuple(rank % layout.joint // layout.esp for rank in registered_ranks(grid.mp))
        per_step = -(-layout.ep // min(num_steps, layout.ep))
        steps = tuple(tuple(range(at, min(at + per_step, layout.ep))) for at in range(0, layout.ep, per_step))
        return SaaPlan(grid.joint, grid.mp, layout.esp, eps, steps, positions, codec)

    @property
    def num_rows(self) -> int:
        """a: rows of all MP ranks."""
        return sum(len(index) for of_peer in self.positions for index in of_peer)

    @property
    def num_places(self) -> int:
        """N_EP."""
        return len(self.positions[0])

    def rows_of(self, peer: int) -> Tensor:
        """Return the indices, int64, of that MP rank's rows among all rows sorted by expert."""
        return torch.cat(self.positions[peer])

    def sources(self, peer: int, step: tuple[int, ...]) -> list[int]:
        """List the EP ranks from which `peer` gets its rows in `step`, ascending."""
        return sorted((self.ep_of_peer[peer] - offset) % self.num_places for offset in step)

    def targets(self, step: tuple[int, ...]) -> list[int]:
        """List the EP ranks to which this rank sends in `step`, ascending."""
        return sorted((self.ep_of_peer[self.mp.rank()] + offset) % self.num_places for offset in step)

    def places(self, eps: list[int]) -> set[int]:
        """Return the places in the joint group of these EP ranks."""
        return {ep * self.num_shards + shard for ep in eps for shard in range(self.num_shards)}


def gather_home(rows: Tensor, plan: SaaPlan, chunk: Chunk) -> Tensor:
    """Return all rows [a, M] of the MP group, sorted by expert, of outputs [q, M] in the order their inputs arrived.

    Equals `FlatTransport.send_back` followed by a gather over the MP group. All MP ranks get the same rows.
    """
    sent, received = chunk.splits, chunk.received
    segments, me = rows.split(received), plan.mp.rank()
    under_way = []
    for step in plan.steps:
        targets, sources = plan.places(plan.targets(step)), plan.places(plan.sources(me, step))
        into = [size if place in targets else 0 for place, size in enumerate(received)]
        out = [size if place in sources else 0 for place, size in enumerate(sent)]
        outgoing = torch.cat([segment for place, segment in enumerate(segments) if place in targets])
        incoming = rows.new_empty(sum(out), rows.shape[1])
        under_way.append(api.all_to_all(incoming, outgoing, out, into, plan.joint, codec=plan.codec, async_op=True))
    result = rows.new_empty(plan.num_rows, rows.shape[1])
    for step, work in zip(plan.steps, under_way, strict=True):
        sizes = [len(plan.positions[me][source]) for source in plan.sources(me, step)]
        _give(added_up(work.wait(), sizes, plan.num_shards), plan, step, result)
    return result


def _give(mine: Tensor, plan: SaaPlan, step: tuple[int, ...], result: Tensor) -> None:
    """Exchange this step's rows with the MP peers and put all of them at their positions in `result`."""
    places = [
        torch.cat([plan.positions[peer][source] for source in plan.sources(peer, step)])
        for peer in range(plan.mp.size())
    ]
    most = max(map(len, places))
    padded = mine if len(mine) == most else torch.cat([mine, mine.new_zeros(most - len(mine), mine.shape[1])])
    everybody = mine.new_empty(plan.mp.size(), most, mine.shape[1])
    api.all_gather(everybody, padded, plan.mp, codec=plan.codec)
    for index, rows in zip(places, everybody, strict=True):
        result.index_copy_(0, index, rows[: len(index)])
