"""Layers in chunks over slow links: what degrees gain, and what the simulator says.

Two hosts of two ranks: fast inside, slow between. The experts' hidden dimension is chosen so that they compute about as
long as their rows travel, which is where chunks matter. `moe-steps` has whole steps.

The simulator knows the parts one by one, each timed alone (`benchmarks.kit.chunk_times`). What is outside of the plan
(routing, order, who gets how many) is what the layer in one chunk takes more than its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kit.chunk_times import layer_times, parts_alone
from benchmarks.kit.timing import Case, Timing, seconds_of
from benchmarks.registry import Options, Table, benchmark
from benchmarks.slow_links import as_rank, in_lab, networks, slowest_rank
from laconic.collectives import Raw
from laconic.moe import (
    ChunkedSchedule,
    Dispatcher,
    FlatDispatcher,
    GatedExperts,
    Grid,
    HierarchicalDispatcher,
    MoELayer,
    SoftmaxGate,
)
from laconic.schedule.moe import pipeline_seconds

_NUM_HOSTS, _RANKS_PER_HOST = 2, 2
_MODEL_DIM, _TOP_K, _EXPERTS_PER_RANK = 256, 2, 1
_DEGREES = (1, 2, 3, 4, 6)


@benchmark("moe-pipeline-lab")
@in_lab("Layers in chunks over slow links")
def moe_pipeline_lab(options: Options) -> list[Table]:
    """For each rate: layers by degree."""
    tables = []
    for network in networks(options, _NUM_HOSTS, (100e6, 1e9), ranks_per_host=_RANKS_PER_HOST):
        num_tokens = 8 if options.smoke else 256 if network.rate < 5e8 else 1024
        rounds = 1 if options.smoke else max(3, options.rounds)
        found = network.run(__name__, {"num_tokens": num_tokens, "rounds": rounds})
        where = f"2 nodes of 2 ranks, {network.rate_text}"
        tables += [_layer_table(where, one) for one in found["layers"]]
    return tables


def _layer_table(where: str, found: dict[str, Any]) -> Table:
    def columns(direction: str) -> list[tuple[str, Callable[[int], str]]]:
        measured, predicted = found["measured"][direction], found["predicted"][direction]
        return [
            (f"{direction} ms", lambda degree: f"{1e3 * measured[str(degree)]:.1f}"),
            (f"{direction} gain", lambda degree: f"{measured['1'] / measured[str(degree)]:.2f}x"),
            (f"{direction} predicted", lambda degree: f"{1e3 * predicted[str(degree)]:.1f}"),
            (f"{direction} off by", lambda degree: f"{predicted[str(degree)] / measured[str(degree)] - 1:+.0%}"),
        ]

    parts = "; ".join(
        f"{direction}: " + ", ".join(f"{step} {1e3 * seconds:.1f}" for step, seconds in of_steps.items())
        for direction, of_steps in found["parts"].items()
    )
    return Table.of(
        f"{found['name']}, {where}",
        _DEGREES,
        [("degree", str), *columns("forward"), *columns("backward")],
        f"{found['num_tokens']} tokens of {_MODEL_DIM} a rank, top {_TOP_K} of {4 * _EXPERTS_PER_RANK} experts, hidden"
        f" dimension {found['hidden']}. Parts in one chunk, alone, ms: {parts}. Without a schedule"
        f" {1e3 * found['plain']['forward']:.1f} and {1e3 * found['plain']['backward']:.1f} ms. The prediction for"
        " degree 1 is exact by construction.",
    )


# --- what each rank does ---


@dataclass(frozen=True)
class _Rank:
    grid: Grid
    num_tokens: int
    rounds: int
    smoke: bool

    def layers(self) -> list[dict[str, Any]]:
        dispatchers: dict[str, Dispatcher] = {
            "Flat": FlatDispatcher(self.grid.ep, codec=Raw()),
            "Hierarchical": HierarchicalDispatcher(self.grid.levels, codec=Raw()),
        }
        return [self.layer(name, dispatcher) for name, dispatcher in dispatchers.items()]

    def layer(self, name: str, dispatcher: Dispatcher) -> dict[str, Any]:
        hidden = 64 if self.smoke else self.balanced_hidden(dispatcher)
        layer = self.made(dispatcher, hidden)
        times, alone = layer_times(layer, self.batch, self.rounds)
        cases: dict[str, ChunkedSchedule | None] = {"plain": None}
        cases |= {str(degree): ChunkedSchedule(degree) for degree in _DEGREES}
        measured = self.timed(layer, cases)
        predicted = {}
        for direction, found in times.items():
            outside = measured[direction]["1"] - pipeline_seconds(found, 1)
            predicted[direction] = {str(d): outside + pipeline_seconds(found, d) for d in _DEGREES}
        return {
            "name": name,
            "num_tokens": self.num_tokens,
            "hidden": hidden,
            "plain": {direction: found.pop("plain") for direction, found in measured.items()},
            "measured": measured,
            "predicted": predicted,
            "parts": alone,
        }

    def made(self, dispatcher: Dispatcher, hidden: int) -> MoELayer:
        torch.manual_seed(0)
        gate = SoftmaxGate(self.grid.layout.ep * _EXPERTS_PER_RANK, _MODEL_DIM, _TOP_K)
        return MoELayer(gate, GatedExperts(_EXPERTS_PER_RANK, _MODEL_DIM, hidden), None, dispatcher)

    def balanced_hidden(self, dispatcher: Dispatcher) -> int:
        """Such that forward's experts take about as long as their rows on both ways, as every rank knows it."""
        probe = 256
        parts = parts_alone(self.made(dispatcher, probe), self.batch, 1, self.rounds)["forward"]
        ratio = (parts["dispatch"] + parts["combine"]) / parts["experts"]
        return min(8192, max(64, round(probe * ratio / 64) * 64))

    def batch(self) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randn(self.num_tokens, _MODEL_DIM, generator=generator).requires_grad_()

    def timed(self, layer: MoELayer, schedules: dict[str, ChunkedSchedule | None]) -> dict[str, dict[str, Timing]]:
        """The slowest rank's seconds by direction and schedule."""
        made: dict[str, Tensor] = {}

        def forward() -> None:
            made["out"] = layer(made["x"])

        def backward() -> None:
            made["loss"].backward()

        def before(case: str) -> None:
            direction, name = case.split(maxsplit=1)
            if direction == "forward":
                layer.schedule = schedules[name]
                layer.zero_grad()
                made["x"] = self.batch()
            else:
                made["loss"] = made["out"].sum()

        cases: dict[str, Case] = {}
        for name in schedules:
            cases |= {f"forward {name}": forward, f"backward {name}": backward}
        seconds = seconds_of(cases, self.rounds, before=before, clock=slowest_rank)
        return {way: {name: seconds[f"{way} {name}"] for name in schedules} for way in ("forward", "backward")}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures."""
    grid = Grid(levels=(_NUM_HOSTS,), device_type="cpu")
    rank = _Rank(grid, task["num_tokens"], task["rounds"], task["smoke"])
    return {"layers": rank.layers()}


if __name__ == "__main__":
    as_rank(measure)
