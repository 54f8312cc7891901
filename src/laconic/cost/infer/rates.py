"""Rates of attention and expert workers and of the links between them, measured or published, as data.

Everything is a line, seconds = alpha + beta * size (FinDEP 4.1). The paper's alpha of a matrix product contains the
reading of its weights, which all rows of a prompt share. In decode a product has few rows, and reading is most of its
time, so weights and cached keys and values have a rate of their own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laconic.cost.comm.rates import Line, read_line
from laconic.cost.hardware.rates_file import (
    cached_path,
    check_format,
    check_known,
    load_json,
    read_number,
    read_table,
    save_json,
)
from laconic.errors import ConfigError

_FORMAT, _VERSION = "laconic inference rates", 2


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
class InferenceRates:
    """What decides the seconds of every task."""

    gemm: Line
    """A matrix product, by multiply-adds (m * k * n)."""
    attention: Line
    """The attention kernel, by heads * (query, key) pairs * (d_k + d_v). Masked pairs do not count."""
    link: LinkPair
    """Between the workers of any split that `links` does not name."""
    read_seconds_per_byte: float = 0.0
    """Reading weights, cached keys and cached values, beside the arithmetic on them."""
    links: Mapping[str, LinkPair] = field(default_factory=dict)
    """By split, attention workers : expert workers, as "3:5"."""
    grouped: bool = True
    """Whether one call multiplies the rows of all experts of a worker; otherwise each active expert has its own."""
    exchange: ExchangeCosts = ExchangeCosts()
    """What messages take from the workers' computing; nothing where the links work alone."""
    source: str = ""
    """Author, time and method of the measurement."""

    def link_of(self, attention: int, experts: int) -> LinkPair:
        """Return the links of a split."""
        return self.links.get(f"{attention}:{experts}", self.link)

    def product_seconds(self, rows: float, parameters: float, num_products: float, item_nbytes: int) -> float:
        """Predict `num_products` matrix products of `rows` rows, whose weights have `parameters` values in all."""
        work = rows * parameters * self.gemm.seconds_per_byte
        return num_products * self.gemm.alpha_seconds + work + parameters * item_nbytes * self.read_seconds_per_byte

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> InferenceRates:
        """Read what `to_dict` returned.

        Raises:
            ConfigError: a value is missing or impossible; the message names it.
        """
        check_format(data, _FORMAT, _VERSION, "measure with laconic profile --infer")
        check_known(data, ("format", "version", *cls.__dataclass_fields__), "the file")
        gemm, attention = (read_line(read_table(data, name, ""), name) for name in ("gemm", "attention"))
        links = {name: _read_pair(pair, f"links.{name}") for name, pair in read_table(data, "links", "").items()}
        for name in links:
            sides = name.split(":")
            if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
                raise ConfigError(f"links names {name!r}, but it must be numbers of workers such as 3:5")
        grouped = data.get("grouped")
        if not isinstance(grouped, bool):
            raise ConfigError(
                f"grouped is {grouped!r}, but it must be true or false; run laconic profile --infer again"
            )
        return cls(
            gemm,
            attention,
            _read_pair(data.get("link"), "link"),
            read_number(data, "read_seconds_per_byte", "inference rates"),
            links,
            grouped,
            _read_exchange(data.get("exchange")),
            str(data.get("source", "")),
        )

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all."""
        save_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> InferenceRates:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_json(path, "inference rates", cls.from_dict)


def _read_pair(data: Any, where: str) -> LinkPair:
    table = read_table(data, None, where)
    return LinkPair(*(read_line(read_table(table, name, where), f"{where}.{name}") for name in ("dispatch", "combine")))


def _read_exchange(data: Any) -> ExchangeCosts:
    table = read_table(data, None, "exchange")
    ends = (read_line(read_table(table, name, "exchange"), f"exchange.{name}") for name in ("attention", "experts"))
    return ExchangeCosts(*ends)


def default_infer_path() -> Path:
    """Return the path of the rates: $LACONIC_INFER_RATES, or laconic/infer_rates.json in $XDG_CACHE_HOME (~/.cache)."""
    return cached_path("LACONIC_INFER_RATES", "infer_rates.json")
