"""The inside of a layer in pieces, so that one piece travels while another is computed.

PipeMoE's and FSMoE's pipeline, cut along tokens: r pieces of neighboring tokens, each dispatched, computed and combined
on its own, in the order D_1 ... D_r, then X_i and C_i in turn. All assignments of a token are in one piece, so the sums
are the same sums; only the sizes of the experts' products change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.moe.layer import MoELayer
from laconic.moe.routing import Routing
from laconic.moe.thread_state import thread_state
from laconic.schedule.execute import InlineStream, Stream, ThreadStream, execute
from laconic.schedule.streams import StreamPlan, Task

__all__ = ["Pipelined", "pieces", "thread_streams"]


class Pipelined:
    """A `Schedule` of r pieces on two streams, "wire" and "compute".

    Ranks of one dispatcher have the same degree; their numbers of tokens may differ, and pieces may be empty.
    """

    def __init__(self, degree: int, streams: Mapping[str, Stream] | None = None) -> None:
        """Make the plan once.

        Arguments:
            degree: number of pieces r.
            streams: "wire" and "compute"; None runs all tasks in the caller's thread, one after the other.
                `thread_streams()` gives the wire a thread of its own.

        Raises ConfigError if the degree is below 1.
        """
        if degree < 1:
            raise ConfigError(f"degree = {degree} of a pipelined layer must be at least 1")
        inline = InlineStream()
        self.degree = degree
        self.streams: Mapping[str, Stream] = streams or {"wire": inline, "compute": inline}
        self.plan = plan_of(degree)

    def run(self, layer: MoELayer, batch: dict[str, Any]) -> Tensor:
        """See `Schedule.run`."""
        actions: dict[str, Callable[[], object]] = {}
        for i, piece in enumerate(pieces(batch, self.degree)):
            actions[f"dispatch {i}"] = partial(layer.dispatch, piece)
            actions[f"experts {i}"] = partial(layer.compute, piece)
            actions[f"combine {i}"] = partial(layer.combine, piece)
        results = execute(self.plan, actions, self.streams).results
        return torch.cat([cast(Tensor, results[f"combine {i}"]) for i in range(self.degree)])


def plan_of(degree: int) -> StreamPlan:
    """Tasks `dispatch i`, `experts i` and `combine i`, i from 0, without times."""
    tasks = [Task(f"dispatch {i}", "wire", 0.0) for i in range(degree)]
    for i in range(degree):
        tasks.append(Task(f"experts {i}", "compute", 0.0, (f"dispatch {i}",)))
        tasks.append(Task(f"combine {i}", "wire", 0.0, (f"experts {i}",)))
    return StreamPlan(tuple(tasks))


def pieces(batch: Mapping[str, Any], degree: int) -> list[dict[str, Any]]:
    """batch["x"] [n, M] and batch["routing"] cut into `degree` runs of neighboring tokens, even within one."""
    x, routing = batch["x"], batch["routing"]
    assert isinstance(routing, Routing)
    bounds = [i * routing.num_tokens // degree for i in range(degree + 1)]
    # Entries are sorted by token; one search finds all cuts, and waits for a GPU once.
    cuts = torch.searchsorted(routing.tokens, torch.tensor(bounds, device=routing.tokens.device)).tolist()
    parts = []
    for i in range(degree):
        tokens, entries = slice(bounds[i], bounds[i + 1]), slice(cuts[i], cuts[i + 1])
        part = replace(
            routing,
            tokens=routing.tokens[entries] - bounds[i],
            experts=routing.experts[entries],
            weights=routing.weights[entries],
            num_tokens=bounds[i + 1] - bounds[i],
            losses={},
            num_dropped=0,
        )
        parts.append({**batch, "x": x[tokens], "routing": part})
    return parts


def thread_streams() -> dict[str, Stream]:
    """The wire in a thread of its own, the experts in the caller's: for CPUs."""
    return {"wire": ThreadStream("laconic-moe-wire", around=thread_state), "compute": InlineStream()}
