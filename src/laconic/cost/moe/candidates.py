"""All ways to run one layer on one grid, priced: what `laconic.moe.autotune` chooses from.

Where each process has tokens and whole experts of its own (N_MP = N_ESP = 1), rows travel in one exchange ("flat", with
their duplicates) or in levels without ("depth 1", "depth 2", ...). Else the routes are Parm's baseline, S1, S2 (and S1
one way, S2 the other) and FSMoE's exchange and gather ("sharded"). Each may travel in a code, and those that can be cut
are cut into chunks, forward and backward apart.

    seconds = gate + around the wires + wires + experts - what goes on at once

Gate and experts are those of the layer (`LayerWork`), wires the lines of their groups at the bytes of this routing, and
what is around them an `Overhead`. Chunks hide wires behind experts as the simulator says, as far as the processor does
both at once (`LinkRates.overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from laconic.cost.moe.fsmoe import fsmoe_route
from laconic.cost.moe.hierarchy import Hierarchy, Level, RowCounts, rows_between, slowest_rows, wire_rows
from laconic.cost.moe.parm import BASELINE, S1, S2, parm_routes
from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.routes import Route, Step
from laconic.cost.moe.shape import GridShape, LayerShape
from laconic.cost.moe.work import LayerWork
from laconic.cost.wire.rates import Line
from laconic.cost.wire.seconds import MIN_GAIN, RAW
from laconic.errors import ConfigError
from laconic.schedule.moe import ChunkTime, LayerTimes, pipeline_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = [
    "FLAT",
    "SHARDED",
    "AROUND",
    "UNEXPLAINED",
    "Candidate",
    "LayerPlan",
    "Pricing",
    "best_candidate",
    "overhead_size",
]

FLAT, SHARDED = "flat", "sharded"
AROUND = "around the wires"
UNEXPLAINED = "unexplained"

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

    @property
    def back(self) -> str:
        """The path of backward."""
        return self.backward_path or self.path

    @property
    def depth(self) -> int | None:
        """Of a path in levels; None for others."""
        return int(self.path.removeprefix("depth ")) if self.path.startswith("depth ") else None

    def uncut(self) -> LayerPlan:
        """The same in one piece."""
        return replace(self, degrees=(1, 1))

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
    """The one that takes least; of equals the plainest. Raises ConfigError for none."""
    found = min(candidates, key=lambda one: (one.seconds, max(one.plan.degrees), one.plan), default=None)
    if found is None:
        raise ConfigError("candidates are empty, but one is needed to choose; allow at least one path and codec")
    return found


def overhead_size(
    path: str, shape: LayerShape, grid: GridShape, counts: RowCounts | None, load: float = 1.0
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
    levels = counts.hierarchy.levels(int(path.removeprefix("depth ")))
    handled = sum(wire_rows(counts, level).handled for level in levels)
    return (here + there) * len(levels), (handled + there) * shape.row_nbytes


@dataclass(frozen=True)
class Pricing:
    """Prices plans of one layer on one grid for one routing.

    counts: rows between ranks, where N_MP = N_ESP = 1; `RowCounts.uniform` if the routing is not known.
    load: rows of the busiest expert rank over the mean, elsewhere.
    Raises ConfigError if the grid does not divide the layer.
    """

    shape: LayerShape
    grid: GridShape
    rates: MoERates
    work: LayerWork
    counts: RowCounts | None = None
    load: float = 1.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.grid.check(self.shape)
        if (self.counts is not None) != (self.grid.mp == self.grid.esp == 1):
            raise ConfigError(
                f"counts are {'given' if self.counts is not None else 'missing'} with mp = {self.grid.mp} and esp ="
                f" {self.grid.esp}, but rows are counted by rank exactly where both are 1"
            )

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Forward's and backward's (empty: the same) on this grid."""
        if self.counts is not None:
            return [(FLAT, ""), *((f"depth {depth}", "") for depth in self.counts.hierarchy.depths)]
        mixed = [(S1, S2), (S2, S1)] if self.grid.mp > 1 else []
        return [(BASELINE, ""), (S1, ""), (S2, ""), *mixed, (SHARDED, "")]

    def candidates(self, codes: Sequence[str] = (RAW,), degrees: Sequence[int] = _DEGREES) -> list[Candidate]:
        """Every path in every code that was measured, with its best degrees, fastest first."""
        found = [
            self.candidate(LayerPlan(path, back, code), degrees) for (path, back), code in product(self.paths, codes)
        ]
        return sorted(found, key=lambda one: (one.seconds, one.plan))

    def candidate(self, plan: LayerPlan, degrees: Sequence[int] | None = None) -> Candidate:
        """A plan with the best of `degrees`, forward and backward apart; None: with its own. The first of them, unless
        another gains `MIN_GAIN`."""
        routes = []
        for number, path in enumerate((plan.path, plan.back)):
            tried = [plan.degrees[number]] if degrees is None or not self.can_be_cut(path) else degrees
            found = [self._route(path, plan.code, degree, number == 1) for degree in tried]
            best, plain = min(found, key=lambda route: (route.seconds, route.degree)), found[0]
            # As for codes: what is cut must not lose because predictions are a few per cent off.
            routes.append(best if best.seconds < (1 - MIN_GAIN) * plain.seconds else plain)
        forward, backward = routes
        return Candidate(replace(plan, degrees=(forward.degree, backward.degree)), forward, backward)

    def can_be_cut(self, path: str) -> bool:
        """Whether a path runs in chunks, and what a chunk costs is known."""
        return path not in (BASELINE, S2) and self.rates.overhead_of(path, per_chunk=True) is not None

    def _route(self, path: str, code: str, degree: int, backward: bool) -> Route:
        rates, direction = self.rates, "backward" if backward else "forward"
        overheads = rates.overhead_of(path, code)
        size = overhead_size(path, self.shape, self.grid, self.counts, self.load)
        if overheads is not None:
            around = overheads[direction].seconds(*size)
            rates = replace(rates, copy=Line(0.0, 0.0))
        else:
            around = 2 * rates.copy.seconds(size[1] / 2) if self.counts is not None else 0.0
        chunk = self.rates.overhead_of(path, code, per_chunk=True)
        if degree > 1 and chunk is not None:
            around += (degree - 1) * chunk[direction].seconds(*size)
        coding = None if code == RAW else Coding(code, self.dtype)
        shape, grid, load, work = self.shape, self.grid, self.load, self.work
        if self.counts is not None:
            route = self._counted(path, coding, degree, backward, self.counts)
        elif path == SHARDED:
            route = fsmoe_route(
                shape, grid, rates, degree=degree, backward=backward, coding=coding, load=load, work=work
            )
            route = replace(route, name=SHARDED)
            if degree > 1:
                route = replace(route, hidden_seconds=self._really(route.hidden_seconds, "ep"))
        else:
            found = parm_routes(shape, grid, rates, backward=backward, coding=coding, load=load, work=work)
            (route,) = (one for one in found if one.name == path)
            route = self._cut(route, degree, "joint", backward) if degree > 1 else route
        kept = tuple(step for step in route.steps if step.seconds or step.operation)
        wires = sum(step.seconds for step in kept if step.operation) - route.hidden_seconds
        around = max(around, -wires)  # a line that is followed far from where it was measured
        return replace(route, steps=(*kept, Step(AROUND, around)), degree=degree)

    def _counted(self, path: str, coding: Coding | None, degree: int, backward: bool, counts: RowCounts) -> Route:
        hierarchy, row_nbytes = counts.hierarchy, float(self.shape.row_nbytes)
        there = float(counts.assignments.sum(axis=0).max())
        if path == FLAT:
            (level,) = hierarchy.levels(1)
            wires = [self._wire(hierarchy, level, rows_between(counts, None), row_nbytes, coding, "ep")]
        else:
            entries = float(counts.assignments.sum()) / max(1.0, float(counts.rows[hierarchy.num_ranks].sum()))
            row_nbytes += 0 if backward else _ENTRY_NBYTES * entries / 2  # they go there, not back
            wires = [
                self._wire(hierarchy, level, rows_between(counts, level), row_nbytes, coding, level.name)
                for level in hierarchy.levels(int(path.removeprefix("depth ")))
            ]
        steps = [
            Step("gate", self.work.gate_seconds(self.shape.num_tokens, backward)),
            *(replace(wire, name=f"dispatch {wire.name}".strip()) for wire in wires),
            Step("experts", self.work.experts_line(backward).seconds(there)),
            *(replace(wire, name=f"combine {wire.name}".strip()) for wire in reversed(wires)),
        ]
        route = Route(path, tuple(steps))
        return self._cut(route, degree, "ep", backward) if degree > 1 else route

    def _wire(
        self,
        hierarchy: Hierarchy,
        level: Level,
        between: Table,
        row_nbytes: float,
        coding: Coding | None,
        group: str,
    ) -> Step:
        if level.num_peers == 1:
            return Step(level.name, 0.0)
        rows = slowest_rows(between, hierarchy, level, self.rates.sharing)
        nbytes = rows * row_nbytes * level.num_peers / (level.num_peers - 1)
        price = self.rates.price("all_to_all", group, hierarchy.world(level), nbytes, coding)
        name = "" if group == "ep" else level.name
        return Step(name, price.seconds, group, "all_to_all", price.sent_nbytes, price.code)

    def _cut(self, route: Route, degree: int, group: str, backward: bool) -> Route:
        """A route whose all-to-alls and experts overlap in `degree` chunks."""
        world = self.grid.world(group)
        alpha = self.rates.link(group, world).line("all_to_all").alpha_seconds
        times: dict[str, list[ChunkTime]] = {"dispatch": [], "experts": [], "combine": []}
        steps = []
        for step in route.steps:
            kind = step.name.split()[0]
            if kind in times and (step.operation or kind == "experts"):
                start = alpha if step.operation else self.work.experts_line(backward).alpha_seconds
                start = min(start, step.seconds)
                times[kind].append(ChunkTime(start, step.seconds - start))
                step = replace(step, seconds=times[kind][-1].seconds(degree) * degree)
            steps.append(step)
        first, inner = times["dispatch"][0], times["dispatch"][1:]  # levels: between nodes, then inside
        (experts,), last, outer = times["experts"], times["combine"][-1], times["combine"][:-1]
        layer = LayerTimes(first, experts, last, *((_sum(inner), _sum(outer)) if inner else ()))
        serial = sum(one.seconds(degree) for kind in times.values() for one in kind) * degree
        hidden = serial - pipeline_seconds(layer, degree)
        return replace(route, steps=tuple(steps), hidden_seconds=route.hidden_seconds + self._really(hidden, group))

    def _really(self, hidden: float, group: str) -> float:
        """What of it is hidden where wires take the processor's time."""
        return hidden * self.rates.link(group, self.grid.world(group)).overlap


def _sum(times: Sequence[ChunkTime]) -> ChunkTime:
    return ChunkTime(sum(one.alpha_seconds for one in times), sum(one.work_seconds for one in times))
