"""Routes of a layer: the operations of one rank in one direction and their seconds; choice of the fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laconic.cost.moe.rates import Coding, MoERates
from laconic.cost.moe.shape import LayerShape, group_shape
from laconic.errors import ConfigError
from laconic.schedule.moe_pipeline import ChunkTime
from laconic.topology import GridLayout


@dataclass(frozen=True)
class Step:
    """One operation of a route."""

    name: str
    seconds: float
    group: str = ""
    """Name of the group of ranks; empty for work within a rank."""
    operation: str = ""
    sent_nbytes: float = 0.0
    """Sent by one process, before coding."""
    code: str = "raw"
    start_seconds: float = 0.0
    """Part of `seconds` that each of several chunks would pay."""

    @property
    def chunk_time(self) -> ChunkTime:
        """Return the step's time as a function of the number of chunks."""
        start = min(self.start_seconds, self.seconds)
        return ChunkTime(start, self.seconds - start)


@dataclass(frozen=True)
class Route:
    """One path through the layer."""

    name: str
    steps: tuple[Step, ...]
    overlapped_seconds: float = 0.0
    """Seconds of the steps that overlap with others."""
    degree: int = 1
    """Number of chunks that its inner steps are cut into."""

    @property
    def seconds(self) -> float:
        """Seconds of the layer: of all steps, less what overlaps."""
        return sum(step.seconds for step in self.steps) - self.overlapped_seconds

    @property
    def sent_nbytes(self) -> float:
        """Bytes sent by one process, before coding."""
        return sum(step.sent_nbytes for step in self.steps)


def fastest(routes: Iterable[Route]) -> Route:
    """Return the fastest route; the first of equals.

    Raises:
        ConfigError: there are no routes.
    """
    found = min(routes, key=lambda route: route.seconds, default=None)
    if found is None:
        raise ConfigError("routes are empty, but one is needed to choose; name at least one")
    return found


@dataclass(frozen=True)
class RouteBuilder:
    """Prices the steps of a layer on a grid.

    Attributes:
        load: rows of the busiest expert rank over the mean of all; 1 is balanced.
        backward: matrix products count twice (dX and dW); transposing an operation between ranks is the caller's task.
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
        """Price an operation of a group; nbytes: of one rank's input. Only all_to_all is coded."""
        coding = self.coding if operation == "all_to_all" else None
        members = group_shape(self.grid, group)
        price, start = (self.rates.price(operation, group, members, size, coding) for size in (nbytes, 0.0))
        return Step(name, price.seconds, group, operation, price.sent_nbytes, price.code, start.seconds)

    def gate(self, share: float) -> Step:
        """Price the scores of all experts for `share` times the rank's tokens."""
        shape = self.shape
        multiply_adds = self._directions * share * shape.num_tokens * shape.model_dim * shape.num_experts
        return Step("gate", self.rates.products_seconds(multiply_adds, self._directions))

    def order(self, name: str, share: float) -> Step:
        """Price sorting, gathering or summing `share` times the rows of the rank's tokens."""
        return Step(name, self.rates.copy.seconds(share * self.shape.rows_nbytes))

    def experts(self, share: float) -> Step:
        """Price the products of `share` times all rows of the rank's tokens, whole experts counted."""
        return self.experts_of(share * self.load * self.shape.rows_per_token * self.shape.num_tokens)

    def experts_of(self, num_rows: float) -> Step:
        """Price the products of `num_rows` rows, whole experts counted."""
        shape, products = self.shape, self._directions * self.shape.num_gemms
        multiply_adds = products * num_rows * shape.model_dim * shape.hidden_dim
        local = shape.num_experts // self.grid.ep
        whole, start = (self.rates.products_seconds(size, products, local) for size in (multiply_adds, 0.0))
        return Step("experts", whole, start_seconds=start)

    @property
    def _directions(self) -> int:
        return 2 if self.backward else 1
