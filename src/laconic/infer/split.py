"""Who holds what: every expert worker a range of each layer's experts, every attention worker all the rest."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.schedule.slices import slice_ranges


@dataclass(frozen=True)
class EngineSplit:
    """Workers of an engine; ranks are those of attention workers, then those of expert workers.

    Attributes:
        attention: number of attention workers, at least 1.
        experts: number of expert workers; with 0, attention workers hold whole models.

    Raises:
        ConfigError: a number is too small.
    """

    attention: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        for name, least in (("attention", 1), ("experts", 0)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}, but the number of such workers must be at least {least}")

    @property
    def num_workers(self) -> int:
        """Number of all workers."""
        return self.attention + self.experts

    def role(self, rank: int) -> tuple[str, int]:
        """Return "attention" or "expert" and the number among the workers of this role."""
        return ("attention", rank) if rank < self.attention else ("expert", rank - self.attention)

    def expert_range(self, worker: int, num_experts: int) -> range:
        """Return the experts of a layer that expert worker `worker` holds; ranges differ in length by at most one.

        More expert workers than experts are a ConfigError.
        """
        if self.experts > num_experts:
            raise ConfigError(
                f"experts is {self.experts}, but a layer of this model has {num_experts} experts, and every expert"
                f" worker needs one; start at most {num_experts} expert workers"
            )
        return slice_ranges(num_experts, self.experts)[worker]
