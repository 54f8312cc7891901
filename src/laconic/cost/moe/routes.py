"""A route: the operations of one layer on one rank in one direction, what each takes, and which route is fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.shape import LayerShape, group_world
from laconic.errors import ConfigError
from laconic.schedule.moe_pipeline import ChunkTime
from laconic.topology import GridLayout

__all__ = ["Route", "RouteBuilder", "Step", "fastest"]


@dataclass(frozen=True)
class Step:
    """One operation of a route."""

    name: str
    seconds: float
    group: str = ""
    """Of ranks; empty for work within a rank."""
    operation: str = ""
    sent_nbytes: float = 0.0
    """By one process, before coding."""
    code: str = "raw"
    start_seconds: float = 0.0
    """Of `seconds`, what each of several chunks would pay."""

    @property
    def chunk_time(self) -> ChunkTime:
        """Cut into chunks."""
        start = min(self.start_seconds, self.seconds)
        return ChunkTime(start, self.seconds - start)


@dataclass(frozen=True)
class Route:
    """A way through the layer."""

    name: str
    steps: tuple[Step, ...]
    hidden_seconds: float = 0.0
    """Of the steps, behind others."""
    degree: int = 1
    """Number of chunks that its inner steps are cut into."""

    @property
    def seconds(self) -> float:
        """Of the layer."""
        return sum(step.seconds for step in self.steps) - self.hidden_seconds

    @property
    def sent_nbytes(self) -> float:
        """By one process, before coding."""
        return sum(step.sent_nbytes for step in self.steps)


def fastest(routes: Iterable[Route]) -> Route:
    """The route that takes least; the first of equals. Raises ConfigError for none."""
    found = min(routes, key=lambda route: route.seconds, default=None)
    if found is None:
        raise ConfigError("routes are empty, but one is needed to choose; name at least one")
    return found


@dataclass(frozen=True)
class RouteBuilder:
    """Prices the steps of a layer on a grid.

    load: rows of the busiest expert rank over the mean of all; 1 is balanced.
    backward: matrix products count twice (dX and dW); transposing an operation between ranks is the caller's part.
    """

    shape: LayerShape
    grid: GridLayout
    rates: MoERates
    coding: Coding | None = None
    load: float = 1.0
    backward: bool = False

    def __post_init__(self) -> None:
        self.shape.check(self.grid)
        if not 1 <= self.load < float("inf"):
            raise ConfigError(f"load is {self.load}, but the busiest rank has at least the mean: it must be 1 or more")

    def between(self, name: str, operation: str, group: str, nbytes: float) -> Step:
        """An operation of a group; nbytes: of one rank's input. Only all_to_all is coded."""
        coding = self.coding if operation == "all_to_all" else None
        world = group_world(self.grid, group)
        price, start = (self.rates.price(operation, group, world, size, coding) for size in (nbytes, 0.0))
        return Step(name, price.seconds, group, operation, price.sent_nbytes, price.code, start.seconds)

    def gate(self, share: float) -> Step:
        """Scores of all experts for `share` times the rank's tokens."""
        shape = self.shape
        multiply_adds = self._directions * share * shape.num_tokens * shape.model_dim * shape.num_experts
        return Step("gate", self.rates.products_seconds(multiply_adds, self._directions))

    def order(self, name: str, share: float) -> Step:
        """Sorting, gathering or summing `share` times the rows of the rank's tokens."""
        return Step(name, self.rates.copy.seconds(share * self.shape.rows_nbytes))

    def experts(self, share: float) -> Step:
        """The products of `share` times all rows of the rank's tokens, whole experts counted."""
        return self.experts_of(share * self.load * self.shape.rows_per_token * self.shape.num_tokens)

    def experts_of(self, num_rows: float) -> Step:
        """The products of so many rows, whole experts counted."""
        shape, products = self.shape, self._directions * self.shape.num_gemms
        multiply_adds = products * num_rows * shape.model_dim * shape.hidden_dim
        local = shape.num_experts // self.grid.ep
        whole, start = (self.rates.products_seconds(size, products, local) for size in (multiply_adds, 0.0))
        return Step("experts", whole, start_seconds=start)

    @property
    def _directions(self) -> int:
        return 2 if self.backward else 1
