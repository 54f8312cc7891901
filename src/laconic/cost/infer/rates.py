"""Rates of attention and expert workers and of the links between them, measured or published, as data.

Everything is a line, seconds = alpha + beta * size (FinDEP 4.1). The paper's alpha of a matrix product contains the
reading of its weights, which all rows of a prompt share. In decode a product has few rows, and reading is most of its
time, so weights and cached keys and values have a rate of their own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from laconic.cost.comm.rates import Line, NonNegative
from laconic.cost.hardware.rates_file import cached_path, load_json, read_rates, save_json
from laconic.errors import ConfigError

_FORMAT, _VERSION = "laconic inference rates", 2
OF_EXPERTS = "; expert workers: "
"""Between the sources of attention workers' and of expert workers' rates."""


@dataclass(frozen=True)
class LinkPair:
    """Lines of the two directions, by bytes that the busier end sends or receives; they do not slow each other."""

    dispatch: Line
    """From attention workers to expert workers."""
    combine: Line
    """Home."""


_FREE = Line(0.0, 0.0)


@dataclass(frozen=True)
class ExchangeCosts:
    """Processor seconds of one message and its answer at each end, by bytes of the message.

    Packing, system calls, copies and threads that wake up take them from the core that computes. FinDEP has no such
    term: its link works beside its workers.
    """

    attention: Line = _FREE
    """Sending rows and receiving their sums."""
    experts: Line = _FREE
    """Receiving rows and sending their sums."""


@dataclass(frozen=True)
class WorkerRates:
    """What decides the seconds of routed experts on machines of another kind than those of attention."""

    gemm: Line
    """A matrix product, by multiply-adds."""
    read_seconds_per_byte: NonNegative = 0.0
    """Reading weights."""
    grouped: bool = True
    """As in InferenceRates."""
    exchange: Line = _FREE
    """Processor seconds of receiving rows and sending their sums."""


@dataclass(frozen=True)
class InferenceRates:
    """What decides the seconds of every task."""

    gemm: Line
    """A matrix product, by multiply-adds (m * k * n)."""
    attention: Line
    """The attention kernel, by heads * (query, key) pairs * (d_k + d_v). Masked pairs do not count."""
    link: LinkPair
    """Between the workers of any split that `links` does not name."""
    read_seconds_per_byte: NonNegative = 0.0
    """Reading weights, cached keys and cached values, beside the arithmetic on them."""
    links: Mapping[Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")], LinkPair] = field(default_factory=dict)
    """By split, attention workers : expert workers, as "3:5"."""
    grouped: bool = True
    """Whether one call multiplies the rows of all experts of a worker; otherwise each active expert has its own."""
    exchange: ExchangeCosts = ExchangeCosts()
    """What messages take from the workers' computing; nothing where the links work alone."""
    source: str = ""
    """Author, time and method of the measurement."""
    experts: WorkerRates | None = None
    """Of expert workers; None: their machines are like those of attention workers."""

    @property
    def of_experts(self) -> WorkerRates:
        """Rates of expert workers, whichever machines they are."""
        if self.experts is not None:
            return self.experts
        return WorkerRates(self.gemm, self.read_seconds_per_byte, self.grouped, self.exchange.experts)

    @property
    def without_experts(self) -> InferenceRates:
        """Rates of attention workers in both roles."""
        return self if self.experts is None else replace(self, experts=None)

    @property
    def are_of_two_kinds(self) -> bool:
        """Whether expert workers have other rates than attention workers."""
        return self.of_experts != self.without_experts.of_experts

    def with_experts(self, measured: InferenceRates) -> InferenceRates:
        """Return these rates with expert workers on machines of another kind; links stay.

        Raises:
            ConfigError: one of both says already what expert workers are.
        """
        for of, rates in (("attention", self), ("expert", measured)):
            if rates.experts is not None:
                raise ConfigError(
                    f"the rates of {of} workers have `experts` already, but two files are put together only as laconic"
                    " profile --infer writes them; leave the expert workers' file out, or measure again"
                )
        return replace(self, experts=measured.of_experts, source=f"{self.source}{OF_EXPERTS}{measured.source}")

    def link_of(self, attention: int, experts: int) -> LinkPair:
        """Return the links of a split."""
        return self.links.get(f"{attention}:{experts}", self.link)

    def product_seconds(self, rows: float, parameters: float, num_products: float, item_nbytes: int) -> float:
        """Predict `num_products` matrix products of `rows` rows, whose weights have `parameters` values in all."""
        work = rows * parameters * self.gemm.seconds_per_byte
        return num_products * self.gemm.alpha_seconds + work + parameters * item_nbytes * self.read_seconds_per_byte

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        values = asdict(self)
        if self.experts is None:
            del values["experts"]
        return {"format": _FORMAT, "version": _VERSION, **values}

    @classmethod
    def from_dict(cls, data: Any) -> InferenceRates:
        """Read what `to_dict` returned.

        Raises:
            ConfigError: a value is missing or impossible; the message names it.
        """
        if isinstance(data, dict):  # files leave it out where there is none
            data = {"experts": None} | data
        return read_rates(cls, data, _FORMAT, _VERSION, "measure with laconic profile --infer")

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all."""
        save_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path, expert_path: str | Path | None = None) -> InferenceRates:
        """Read what `save` wrote.

        Args:
            expert_path: of the file of expert workers, if they are machines of another kind.

        Raises:
            ConfigError: a file cannot be read, or see `with_experts`.
        """
        remedy = "measure with laconic profile --infer, or name another file"
        rates = load_json(path, "inference rates", cls.from_dict, remedy)
        return rates if expert_path is None else rates.with_experts(cls.load(expert_path))


def default_infer_path() -> Path:
    """Return the path of the rates: $LACONIC_INFER_RATES, or laconic/infer_rates.json in $XDG_CACHE_HOME (~/.cache)."""
    return cached_path("LACONIC_INFER_RATES", "infer_rates.json")
