"""All ways to run one layer on one grid, priced: what `laconic.moe.autotune` chooses from.

Where each process has tokens and whole experts of its own (N_MP = N_ESP = 1), rows travel in one exchange ("flat", with
their duplicates) or in levels without ("depth 1", "depth 2", ...). Else the routes are Parm's baseline, S1, S2 (and S1
one way, S2 the other) and FSMoE's exchange and gather ("sharded"). Each may travel in a code, and those that can be cut
are cut into chunks, forward and backward apart.

    seconds = gate + around the wires + wires + experts - what goes on at once

Gate and experts are those of the layer (`LayerWork`), wires the lines of their groups at the bytes of this routing, and
what is around them an `Overhead`. Chunks hide wires behind experts as the simulator says, as far as the processor does
both at once (`MoERates.hiding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from typing import TYPE_CHECKING, Any

from laconic.cost.comm.rates import Line
from laconic.cost.comm.seconds import MIN_GAIN, RAW
from laconic.cost.moe.chunks import hidden_in_chunks, in_chunks
from laconic.cost.moe.fsmoe import fsmoe_route, shares_a_wire
from laconic.cost.moe.hierarchy import RowCounts, rows_between, slowest_rows, wire_rows, world_of_stage
from laconic.cost.moe.layer_time import LayerWork
from laconic.cost.moe.parm import BASELINE, S1, S2, parm_routes
from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.routes import Route, Step
from laconic.cost.moe.shape import LayerShape, group_world
from laconic.errors import ConfigError
from laconic.topology import GridLayout, Levels, Stage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = [
    "FLAT",
    "SHARDED",
    "TIE",
    "AROUND",
    "UNEXPLAINED",
    "Candidate",
    "LayerPlan",
    "Pricing",
    "best_candidate",
    "best_plan",
    "overhead_size",
]

FLAT, SHARDED = "flat", "sharded"
AROUND = "around the wires"
UNEXPLAINED = "unexplained"

TIE = 0.02
"""Share of the time within which two ways count as equally fast."""

_DEGREES = (1, 2, 4, 8)
_ENTRY_NBYTES = 8
"""Of an assignment that travels with a row in levels: the expert's number and a weight in fp32."""


@dataclass(frozen=True, order=True)
class LayerPlan:
    """One way to run a layer."""

    path: str
    """flat, depth 1, depth 2, ..., baseline, s1, s2 or sharded: of forward."""
    backward_path: str = ""
    """Where it differs (s1 and s2 can be mixed)."""
    code: str = RAW
    """Of rows in all-to-alls, by the name of its codec."""
    degrees: tuple[int, int] = (1, 1)
    """Chunks in forward and backward."""
    inner_code: str = ""
    """Of rows inside nodes, where it differs: a path in levels may code what goes between them alone."""

    @property
    def back(self) -> str:
        """The path of backward."""
        return self.backward_path or self.path

    @property
    def depth(self) -> int | None:
        """Of a path in levels; None for others."""
        return int(self.path.removeprefix("depth ")) if self.path.startswith("depth ") else None

    @property
    def plainness(self) -> tuple[int, int, bool, bool, LayerPlan]:
        """Sorts plans: less machinery first."""
        stages = [self.code] + [self.inner_code or self.code] * ((self.depth or 1) > 1)
        num_coded = sum(code != RAW for code in stages)
        return max(self.degrees), num_coded, bool(self.backward_path), self.path != FLAT, self

    def uncut(self) -> LayerPlan:
        """The same in one piece."""
        return replace(self, degrees=(1, 1))

    @property
    def rows(self) -> str:
        """What rows travel in, as text: raw, tiered, or "tiered, raw inside"."""
        return f"{self.code}, {self.inner_code} inside" if self.inner_code not in ("", self.code) else self.code

    def __str__(self) -> str:
        mixed = f", backward {self.backward_path}" if self.backward_path else ""
        return f"{self.path}{mixed}"

    @property
    def chunks(self) -> str:
        """As text: 1, 4, 2/4."""
        return f"{self.degrees[0]}" if len({*self.degrees}) == 1 else f"{self.degrees[0]}/{self.degrees[1]}"


@dataclass(frozen=True)
class Candidate:
    """A plan and what it is predicted to take."""

    plan: LayerPlan
    forward: Route
    backward: Route

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.seconds + self.backward.seconds

    def plus(self, forward_seconds: float, backward_seconds: float) -> Candidate:
        """With what the model has missed in this layer, or counted too much."""
        routes = [
            replace(route, steps=(*route.steps, Step(UNEXPLAINED, seconds)))
            for route, seconds in ((self.forward, forward_seconds), (self.backward, backward_seconds))
        ]
        return Candidate(self.plan, *routes)


def best_candidate(candidates: Iterable[Candidate]) -> Candidate:
    """The one that `best_plan` takes by predicted seconds. Raises ConfigError for none."""
    found = {one.plan: one for one in candidates}
    return found[best_plan({plan: one.seconds for plan, one in found.items()})]


def best_plan(seconds: Mapping[LayerPlan, float]) -> LayerPlan:
    """The plainest of those that are as fast as the fastest: in one piece within `MIN_GAIN`, else within `TIE`.

    What is more complicated has to win clearly, since neither predictions nor measurements are exact.
    Raises ConfigError for no plan.
    """
    if not seconds:
        raise ConfigError("candidates are empty, but one is needed to choose; allow at least one path and codec")
    fastest = min(seconds, key=lambda plan: (seconds[plan], plan.plainness))

    def allowed(plan: LayerPlan) -> float:
        return MIN_GAIN if max(plan.degrees) == 1 < max(fastest.degrees) else TIE

    near = (plan for plan in seconds if seconds[plan] <= (1 + allowed(plan)) * seconds[fastest])
    return min(near, key=lambda plan: plan.plainness)


def overhead_size(
    path: str, shape: LayerShape, grid: GridLayout, counts: RowCounts | None, load: float = 1.0
) -> tuple[float, float]:
    """Rows and bytes that an `Overhead` of a path is a line of: assignments at home and at the experts, and the bytes
    of the rows that are sorted, packed and copied."""
    if counts is None:
        home = shape.rows_per_token * shape.num_tokens
        whole = path in (BASELINE, S2)
        here = home * (1.0 if whole else 1 / grid.mp) * (grid.esp if path == BASELINE else 1)
        there = home * load * grid.esp / (1 if path == BASELINE else grid.mp)
        return here + there, (here + there) * shape.row_nbytes
    here, there = (float(counts.assignments.sum(axis=axis).max()) for axis in (1, 0))
    if path == FLAT:
        return here + there, (here + there) * shape.row_nbytes
    stages = counts.levels.stages(int(path.removeprefix("depth ")))
    handled = sum(wire_rows(counts, stage).handled for stage in stages)
    return (here + there) * len(stages), (handled + there) * shape.row_nbytes


@dataclass(frozen=True)
class Pricing:
    """Prices plans of one layer on one grid for one routing.

    counts: rows between ranks, where N_MP = N_ESP = 1; `RowCounts.uniform` if the routing is not known.
    load: rows of the busiest expert rank over the mean, elsewhere.
    Raises ConfigError if the grid does not divide the layer.
    """

    shape: LayerShape
    grid: GridLayout
    rates: MoERates
    work: LayerWork
    counts: RowCounts | None = None
    load: float = 1.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.shape.check(self.grid)
        if (self.counts is not None) != (self.grid.mp == self.grid.esp == 1):
            raise ConfigError(
                f"counts are {'given' if self.counts is not None else 'missing'} with mp = {self.grid.mp} and esp ="
                f" {self.grid.esp}, but rows are counted by rank exactly where both are 1"
            )

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Forward's and backward's (empty: the same) on this grid."""
        if self.counts is not None:
            return [(FLAT, ""), *((f"depth {depth}", "") for depth in self.counts.levels.depths)]
        mixed = [(S1, S2), (S2, S1)] if self.grid.mp > 1 else []
        return [(BASELINE, ""), (S1, ""), (S2, ""), *mixed, (SHARDED, "")]

    def candidates(self, codes: Sequence[str] = (RAW,), degrees: Sequence[int] = _DEGREES) -> list[Candidate]:
        """Every path in every code that was measured, in levels also raw inside nodes, with its best degrees, fastest
        first."""
        plans = [LayerPlan(path, back, code) for (path, back), code in product(self.paths, codes)]
        plans += [replace(plan, inner_code=RAW) for plan in plans if (plan.depth or 1) > 1 and plan.code != RAW]
        return sorted((self.candidate(plan, degrees) for plan in plans), key=lambda one: (one.seconds, one.plan))

    def candidate(self, plan: LayerPlan, degrees: Sequence[int] | None = None) -> Candidate:
        """A plan with the best of `degrees`, forward and backward apart; None: with its own. The first of them both
        ways, unless others gain `MIN_GAIN`."""
        there, back = ([degree] for degree in plan.degrees)
        if degrees is not None:
            there, back = ([*degrees] if self.can_be_cut(path) else [1] for path in (plan.path, plan.back))
        found = [self._candidate(replace(plan, degrees=pair)) for pair in product(there, back)]
        best, plain = min(found, key=lambda one: (one.seconds, one.plan.degrees)), found[0]
        # As for codes: what is cut must not lose because predictions are a few per cent off.
        return best if best.seconds < (1 - MIN_GAIN) * plain.seconds else plain

    def can_be_cut(self, path: str) -> bool:
        """Whether what a chunk of the path costs is known."""
        return self.rates.overhead_of(path, per_chunk=True) is not None

    def _candidate(self, plan: LayerPlan) -> Candidate:
        num_slices = lcm(*plan.degrees)
        routes = [
            self._route(path, plan, degree, num_slices, backward)
            for path, degree, backward in zip((plan.path, plan.back), plan.degrees, (False, True), strict=True)
        ]
        return Candidate(plan, *routes)

    def _route(self, path: str, plan: LayerPlan, degree: int, num_slices: int, backward: bool) -> Route:
        """One direction, in `degree` chunks; experts run in `num_slices`, those of both directions."""
        rates, direction = self.rates, "backward" if backward else "forward"
        overheads = rates.overhead_of(path, plan.rows)
        size = overhead_size(path, self.shape, self.grid, self.counts, self.load)
        if overheads is not None:
            around = overheads[direction].seconds(*size)
            rates = replace(rates, copy=Line(0.0, 0.0))
        else:
            around = 2 * rates.copy.seconds(size[1] / 2) if self.counts is not None else 0.0
        coding = self._coding(plan.code)
        shape, grid, load, work = self.shape, self.grid, self.load, self.work
        if self.counts is not None:
            route = self._counted(path, plan, backward, self.counts)
        elif path == SHARDED:
            route = fsmoe_route(shape, grid, rates, degree=1, backward=backward, coding=coding, load=load, work=work)
            route = replace(route, name=SHARDED)
        else:
            found = parm_routes(shape, grid, rates, backward=backward, coding=coding, load=load, work=work)
            (route,) = (one for one in found if one.name == path)
        if num_slices > 1:
            hiding = self.rates.hiding_of(path, plan.rows)
            group = "joint" if path in (S1, S2) else "ep"
            share = rates.link(group, group_world(grid, group)).overlap if hiding is None else hiding[direction]
            cut = in_chunks(route, degree, num_slices, share, one_wire=self._on_one_wire(path))
            chunk = self.rates.overhead_of(path, plan.rows, per_chunk=True)
            # Starts of lines may say too much, but beside what it hides no chunk comes for less than nothing.
            starts = sum(step.seconds for step in cut.steps) - sum(step.seconds for step in route.steps)
            further = 0.0 if chunk is None else (num_slices - 1) * chunk[direction].seconds(*size)
            route, around = cut, around + max(further, -starts)
        kept = tuple(step for step in route.steps if step.seconds or step.operation or step.name == "experts")
        wires = sum(step.seconds for step in kept if step.operation) - route.hidden_seconds
        around = max(around, -wires)  # a line that is followed far from where it was measured
        return replace(route, steps=(*kept, Step(AROUND, around)), degree=degree)

    def hidden_seconds(self, plan: LayerPlan, experts_seconds: tuple[float, float]) -> tuple[float, float]:
        """What the simulator hides of a plan in chunks, forward and backward, if experts take so long in all."""
        forward, backward = (
            hidden_in_chunks(
                self._route(path, plan.uncut(), 1, 1, way == 1).with_experts(experts_seconds[way]),
                plan.degrees[way],
                lcm(*plan.degrees),
                one_wire=self._on_one_wire(path),
            )
            for way, path in enumerate((plan.path, plan.back))
        )
        return forward, backward

    def _on_one_wire(self, path: str) -> bool:
        return path == SHARDED and shares_a_wire(self.grid)

    def _coding(self, code: str) -> Coding | None:
        return None if code == RAW else Coding(code, self.dtype)

    def _counted(self, path: str, plan: LayerPlan, backward: bool, counts: RowCounts) -> Route:
        levels, row_nbytes = counts.levels, float(self.shape.row_nbytes)
        coding, inner = self._coding(plan.code), self._coding(plan.inner_code or plan.code)
        there = float(counts.assignments.sum(axis=0).max())
        if path == FLAT:
            (stage,) = levels.stages(1)
            wires = [self._wire(levels, stage, rows_between(counts, None), row_nbytes, coding, "ep")]
        else:
            entries = float(counts.assignments.sum()) / max(1.0, float(counts.rows[levels.num_ranks].sum()))
            row_nbytes += 0 if backward else _ENTRY_NBYTES * entries / 2  # they go there, not back
            stages = levels.stages(int(path.removeprefix("depth ")))
            wires = [
                self._wire(levels, stage, rows_between(counts, stage), row_nbytes, code, stage.name)
                for stage, code in zip(stages, (coding, *[inner] * (len(stages) - 1)), strict=True)
            ]
        line = self.work.experts_line(backward)
        return Route(
            path,
            (
                Step("gate", self.work.gate_seconds(self.shape.num_tokens, backward)),
                *(replace(wire, name=f"dispatch {wire.name}".strip()) for wire in wires),
                Step("experts", line.seconds(there), start_seconds=line.alpha_seconds),
                *(replace(wire, name=f"combine {wire.name}".strip()) for wire in reversed(wires)),
            ),
        )

    def _wire(
        self,
        levels: Levels,
        stage: Stage,
        between: Table,
        row_nbytes: float,
        coding: Coding | None,
        group: str,
    ) -> Step:
        if stage.fanout == 1:
            return Step(stage.name, 0.0)
        rows = slowest_rows(between, levels, stage, self.rates.sharing)
        nbytes = rows * row_nbytes * stage.fanout / (stage.fanout - 1)
        world = world_of_stage(levels, stage)
        price, start = (self.rates.price("all_to_all", group, world, size, coding) for size in (nbytes, 0.0))
        name = "" if group == "ep" else stage.name
        return Step(name, price.seconds, group, "all_to_all", price.sent_nbytes, price.code, start.seconds)
