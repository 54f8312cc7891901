"""Rates of a cluster for mixture-of-experts layers: links by group, matrix products, copies.

Everything is a line, seconds = alpha + beta * size (FSMoE 4.1, HierMoE 3.2). The size of an operation between ranks is
the bytes one process sends, as in laconic.cost.comm, so that groups of different sizes can share a line; that of a
matrix product is its multiply-adds. Published constants count other things and have to be converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from laconic.cost.comm.rates import CodecRates, Dtype, Line, LinkRates, Share, WireRates, check_links
from laconic.cost.comm.seconds import RAW, GroupShape, chunk_numbers, coded_seconds, pays, sent_nbytes
from laconic.cost.hardware.rates_file import cached_path, check_format, load_json, read_rates, save_json
from laconic.cost.moe.overhead import BothWays
from laconic.errors import ConfigError
from laconic.topology import GROUPS

_FORMAT, _VERSION = "laconic moe rates", 1
_Group = Annotated[str, Field(pattern=rf"^({'|'.join(GROUPS)}|inter[1-9][0-9]*|intra[0-9]+)$")]
_NOTHING = Line(0.0, 0.0)


@dataclass(frozen=True)
class Coding:
    """Code of an operation's rows in transit."""

    code: str
    """A measured code (window, tiered, or one of `MoERates.codecs`), or `auto`: the fastest one if it gains enough
    over raw.
    """
    dtype: str = "bfloat16"
    """Name of the rows' dtype."""
    ratio: float | None = None
    """Original over message bytes; None: that of Gaussian data."""


@dataclass(frozen=True)
class Price:
    """Predicted seconds and bytes of one operation."""

    seconds: float
    sent_nbytes: float
    """Sent by one process, before coding."""
    code: str = RAW
    num_chunks: int = 1


@dataclass(frozen=True)
class MoERates:
    """Measured rates that all choices about mixture-of-experts layers depend on."""

    wire: WireRates
    """Links by kind of group, and codecs."""
    gemm: Line
    """A matrix product, by multiply-adds (m*k*n)."""
    copy: Line = _NOTHING
    """Moving rows within a rank (sort, gather, sum), by bytes of the rows."""
    groups: Mapping[_Group, LinkRates] = field(default_factory=dict)
    """Links of groups that were measured themselves, by name: those of GROUPS, and the levels inter1, inter2, ...,
    intra0 (all ranks), intra1, ... Other groups take the line of their kind."""
    codecs: Mapping[Dtype, Mapping[str, CodecRates]] = field(default_factory=dict)
    """By dtype and name, beside the lossless ones of `wire`: 8-bit blocks, for example."""
    overlap: Share = 1.0
    """Share of the shorter operation that overlaps when one inside nodes and one between nodes run at once."""
    grouped: bool = True
    """Whether one call multiplies the rows of all experts of a rank; otherwise there is a call for each."""
    source: str = ""
    """Author, time and method of the measurement."""
    overheads: Mapping[str, BothWays] = field(default_factory=dict)
    """Fixed overhead of routes beside their links, by name (see `overhead_of`) and by direction, forward and backward.
    Where a route has none, sorting and summing rows are priced by `copy`.
    """

    @classmethod
    def of_lines(
        cls, lines: Mapping[str, Mapping[str, Line]], gemm: Line, *, world: int = 2, **others: Any
    ) -> MoERates:
        """Make rates from raw lines by kind of group and operation, measured with `world` ranks of each; no codecs."""
        links = {kind: LinkRates(world, table, 0.0, 0.0) for kind, table in lines.items()}
        return cls(WireRates(links, {}), gemm, **others)

    def link(self, group: str, group_shape: GroupShape) -> LinkRates:
        """Return the rates of a group: its own, or those of its kind."""
        return (self.groups.get(group) or self.wire.link(group_shape.kind)).at(group_shape.num_ranks)

    def price(
        self, operation: str, group: str, group_shape: GroupShape, nbytes: float, coding: Coding | None = None
    ) -> Price:
        """Predict one operation of a group.

        Args:
            nbytes: of the input of one rank, as in `laconic.cost.comm.seconds.decide`.

        Raises:
            ConfigError: the code was not measured on that dtype.
        """
        if group_shape.num_ranks == 1:
            return Price(0.0, 0.0)
        link, sent = self.link(group, group_shape), sent_nbytes(operation, nbytes, group_shape.num_ranks)
        raw = Price(link.line(operation).seconds(sent), sent)
        if coding is None:
            return raw
        found = []
        for code, codec in self._codecs(coding).items():
            ratio = codec.ratio if coding.ratio is None else coding.ratio
            for chunks in chunk_numbers(sent):
                seconds = coded_seconds(operation, nbytes, group_shape.num_ranks, link, codec, ratio, chunks)
                found.append(Price(seconds, sent, code, chunks))
        coded = min(found, key=lambda price: price.seconds, default=raw)
        gains = pays(coded.seconds, raw.seconds, link.line(operation).alpha_seconds)
        return coded if gains or coding.code != "auto" else raw

    def overhead_of(self, route: str, code: str = RAW) -> BothWays | None:
        """Return the overhead, by direction, of a route whose rows are sent in a code; None if it was not measured.

        A code that was not measured counts as the one between nodes, else as raw.
        """
        names = (f"{route} {one}" for one in (code, code.split(",")[0], RAW))
        return next((self.overheads[name] for name in names if name in self.overheads), None)

    def products_seconds(self, multiply_adds: float, num_products: int, num_experts: int = 1) -> float:
        """Predict `num_products` matrix products for each of `num_experts` experts, `multiply_adds` in all."""
        calls = num_products * (1 if self.grouped else num_experts)
        return calls * self.gemm.alpha_seconds + multiply_adds * self.gemm.seconds_per_byte

    def _codecs(self, coding: Coding) -> Mapping[str, CodecRates]:
        known = {**self.wire.codecs.get(coding.dtype, {}), **self.codecs.get(coding.dtype, {})}
        if coding.code == "auto":
            return known
        if coding.code not in known:
            rule = f"measured on {coding.dtype}: {', '.join(known) or 'none is'}; or auto"
            raise ConfigError(f"code is {coding.code!r}, but it must be one that was {rule}; run laconic profile --moe")
        return {coding.code: known[coding.code]}

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        return {"format": _FORMAT, "version": _VERSION, **asdict(self), "wire": self.wire.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> MoERates:
        """Read what `to_dict` returned.

        Raises:
            ConfigError: a value is missing or impossible; the message names it.
        """
        remedy = "measure with laconic profile --moe"
        wire = WireRates.from_dict(check_format(data, _FORMAT, _VERSION, remedy).get("wire"))
        bare = {name: value for name, value in data["wire"].items() if name not in ("format", "version")}
        rates = read_rates(cls, data | {"wire": bare}, _FORMAT, _VERSION, remedy)
        check_links(rates.groups, "groups")
        return replace(rates, wire=wire)

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all."""
        save_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> MoERates:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read.
        """
        return load_json(path, "moe rates", cls.from_dict, "measure with laconic profile --moe, or name another file")


def default_moe_path() -> Path:
    """Return the path of the rates: $LACONIC_MOE_RATES, or laconic/moe_rates.json in $XDG_CACHE_HOME (~/.cache)."""
    return cached_path("LACONIC_MOE_RATES", "moe_rates.json")
