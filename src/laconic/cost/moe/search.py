"""Candidate configurations of one layer on one grid, with predicted seconds: `laconic.moe.autotune` chooses of them.

Where each process has tokens and whole experts of its own (N_MP = N_ESP = 1), rows are sent in one exchange ("flat",
with their duplicates) or in levels without ("depth 1", "depth 2", ...). Else the routes are Parm's baseline, S1 and S2
and FSMoE's exchange and gather ("sharded"). Each may send rows in a code.

    seconds = gate + experts + links + fixed overhead

Gate and experts are matrix products, links the lines of their groups at the bytes of this routing, and the rest of a
path's cost is an `Overhead`. Chunks are not priced: `autotune` runs the fastest candidates in chunks, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from laconic.cost.comm.rates import Line
from laconic.cost.comm.seconds import MIN_GAIN, RAW
from laconic.cost.moe.fsmoe import fsmoe_route
from laconic.cost.moe.hierarchy import RowCounts, busiest_rows, exchange_price, wire_rows
from laconic.cost.moe.parm import BASELINE, S1, S2, parm_routes
from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.routes import Route, RouteBuilder, Step
from laconic.cost.moe.shape import LayerShape
from laconic.errors import ConfigError
from laconic.topology import ExchangeStage, GridLayout, Levels

FLAT, _SHARDED = "flat", "sharded"
OVERHEAD = "fixed overhead"
UNEXPLAINED = "unexplained"

_TIE = 0.02
"""Share of the time within which two candidates count as equally fast."""

_ENTRY_NBYTES = 8
"""Bytes of an assignment sent with a row in levels: the expert's number and a weight in fp32."""


@dataclass(frozen=True, order=True)
class LayerPlan:
    """One configuration of a layer."""

    path: str
    """flat, depth 1, depth 2, ..., baseline, s1, s2 or sharded."""
    code: str = RAW
    """Codec name of rows in all-to-alls."""
    degree: int = 1
    """Number of chunks."""
    inner_code: str = ""
    """Codec name of rows inside nodes, where it differs: a path in levels may code rows between nodes only."""

    @property
    def depth(self) -> int | None:
        """Depth of a path in levels; None for others."""
        return int(self.path.removeprefix("depth ")) if self.path.startswith("depth ") else None

    @property
    def plainness(self) -> tuple[int, int, bool, LayerPlan]:
        """Sort key of plans: less machinery first."""
        stages = [self.code] + [self.inner_code or self.code] * ((self.depth or 1) > 1)
        num_coded = sum(code != RAW for code in stages)
        return self.degree, num_coded, self.path != FLAT, self

    @property
    def rows(self) -> str:
        """Codes of rows as text: raw, tiered, or "tiered, raw inside"."""
        return f"{self.code}, {self.inner_code} inside" if self.inner_code not in ("", self.code) else self.code

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class LayerCandidate:
    """A plan and its predicted seconds."""

    plan: LayerPlan
    forward: Route
    backward: Route

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward.seconds + self.backward.seconds

    def plus(self, forward_seconds: float, backward_seconds: float) -> LayerCandidate:
        """Add seconds that the model missed in this layer, or, if negative, counted too much."""
        routes = [
            replace(route, steps=(*route.steps, Step(UNEXPLAINED, seconds)))
            for route, seconds in ((self.forward, forward_seconds), (self.backward, backward_seconds))
        ]
        return LayerCandidate(self.plan, *routes)


def best_candidate(candidates: Iterable[LayerCandidate]) -> LayerCandidate:
    """Return the candidate that `best_plan` takes by predicted seconds.

    Raises:
        ConfigError: there are no candidates.
    """
    found = {one.plan: one for one in candidates}
    return found[best_plan({plan: one.seconds for plan, one in found.items()})]


def best_plan(seconds: Mapping[LayerPlan, float]) -> LayerPlan:
    """Return the plainest of the plans that are as fast as the fastest: whole within `MIN_GAIN`, else within `_TIE`.

    A more complicated plan has to win clearly, since neither predictions nor measurements are exact.
    """
    if not seconds:
        raise ConfigError("candidates are empty, but one is needed to choose; allow at least one path and codec")
    fastest = min(seconds, key=lambda plan: (seconds[plan], plan.plainness))

    def allowed(plan: LayerPlan) -> float:
        return MIN_GAIN if plan.degree == 1 < fastest.degree else _TIE

    near = (plan for plan in seconds if seconds[plan] <= (1 + allowed(plan)) * seconds[fastest])
    return min(near, key=lambda plan: plan.plainness)


def overhead_size(
    path: str, shape: LayerShape, grid: GridLayout, counts: RowCounts | None, load: float = 1.0
) -> tuple[float, float]:
    """Return the rows and bytes that an `Overhead` of a path is a line of.

    Rows are the assignments at home and at the experts; bytes are those of the rows that are sorted, packed and copied.
    """
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
class CostModel:
    """Predicts the seconds of plans of one layer on one grid for one routing.

    Attributes:
        counts: rows between ranks, where N_MP = N_ESP = 1; `RowCounts.uniform` if the routing is not known.
        load: rows of the busiest expert rank over the mean, elsewhere.
    """

    shape: LayerShape
    grid: GridLayout
    rates: MoERates
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
    def paths(self) -> list[str]:
        """List the paths that differ on this grid."""
        if self.counts is not None:
            return [FLAT, *(f"depth {depth}" for depth in self.counts.levels.depths)]
        return [BASELINE, S1, S2, _SHARDED]

    def candidates(self, codes: Sequence[str] = (RAW,)) -> list[LayerCandidate]:
        """Price every path in every code that was measured, in levels also raw inside nodes, fastest first."""
        plans = [LayerPlan(path, code) for path, code in product(self.paths, codes)]
        plans += [replace(plan, inner_code=RAW) for plan in plans if (plan.depth or 1) > 1 and plan.code != RAW]
        return sorted(map(self.candidate, plans), key=lambda one: (one.seconds, one.plan))

    def candidate(self, plan: LayerPlan) -> LayerCandidate:
        """Price a plan as one chunk."""
        return LayerCandidate(plan, self._route(plan, backward=False), self._route(plan, backward=True))

    def _route(self, plan: LayerPlan, *, backward: bool) -> Route:
        rates, path = self.rates, plan.path
        overheads = rates.overhead_of(path, plan.rows)
        size = overhead_size(path, self.shape, self.grid, self.counts, self.load)
        if overheads is not None:
            overhead = (overheads["backward"] if backward else overheads["forward"]).seconds(*size)
            rates = replace(rates, copy=Line(0.0, 0.0))
        else:
            overhead = 2 * rates.copy.seconds(size[1] / 2) if self.counts is not None else 0.0
        coding = self._coding(plan.code)
        shape, grid, load = self.shape, self.grid, self.load
        if self.counts is not None:
            build = RouteBuilder(shape, grid, rates, backward=backward)
            route = self._counted(plan, build, self.counts)
        elif path == _SHARDED:
            route = fsmoe_route(shape, grid, rates, degree=1, backward=backward, coding=coding, load=load)
            route = replace(route, name=_SHARDED)
        else:
            found = parm_routes(shape, grid, rates, backward=backward, coding=coding, load=load)
            (route,) = (one for one in found if one.name == path)
        kept = tuple(step for step in route.steps if step.seconds or step.operation or step.name == "experts")
        links = sum(step.seconds for step in kept if step.operation) - route.overlapped_seconds
        overhead = max(overhead, -links)  # a line extrapolated far from its measurements
        return replace(route, steps=(*kept, Step(OVERHEAD, overhead)))

    def _coding(self, code: str) -> Coding | None:
        return None if code == RAW else Coding(code, self.dtype)

    def _counted(self, plan: LayerPlan, build: RouteBuilder, counts: RowCounts) -> Route:
        levels, row_nbytes = counts.levels, float(self.shape.row_nbytes)
        coding, inner = self._coding(plan.code), self._coding(plan.inner_code or plan.code)
        if plan.path == FLAT:
            (stage,) = levels.stages(1)
            sent = busiest_rows(counts.assignments) * row_nbytes
            exchanges = [self._exchange(levels, stage, sent, coding, "ep")]
        else:
            entries = float(counts.assignments.sum()) / max(1.0, float(counts.rows[levels.num_ranks].sum()))
            row_nbytes += 0 if build.backward else _ENTRY_NBYTES * entries / 2  # sent to the experts, not back
            stages = levels.stages(plan.depth or 1)
            exchanges = [
                self._exchange(levels, stage, wire_rows(counts, stage).busiest * row_nbytes, code, stage.name)
                for stage, code in zip(stages, (coding, *[inner] * (len(stages) - 1)), strict=True)
            ]
        return Route(
            plan.path,
            (
                build.gate(1.0),
                *(replace(one, name=f"dispatch {one.name}".strip()) for one in exchanges),
                build.experts_of(float(counts.assignments.sum(axis=0).max())),
                *(replace(one, name=f"combine {one.name}".strip()) for one in reversed(exchanges)),
            ),
        )

    def _exchange(
        self, levels: Levels, stage: ExchangeStage, sent_nbytes: float, coding: Coding | None, group: str
    ) -> Step:
        if stage.fanout == 1:
            return Step(stage.name, 0.0)
        price = exchange_price(levels, stage, sent_nbytes, self.rates, coding, group)
        name = "" if group == "ep" else stage.name
        return Step(name, price.seconds, group, "all_to_all", price.sent_nbytes, price.code)
