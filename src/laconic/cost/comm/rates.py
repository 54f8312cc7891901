"""Rates of a cluster's links and codecs: what `laconic profile` measures, as data that prints, saves and loads.

A link is a line, seconds = alpha + beta * bytes, per operation and kind of group (Hockney's model). A codec is three
such lines, for encoding, decoding and decoding into a sum, and the ratio it reaches on Gaussian data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from laconic.cost.hardware.rates_file import cached_path, load_json, read_rates, save_json
from laconic.errors import ConfigError

SEND = "send"
RING = "ring"
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", SEND)
GROUP_KINDS = ("all", "node", "across")
"""`all`: several nodes with several ranks each; `node`: ranks of one node; `across`: one rank of each node."""

CODES = ("window", "tiered")

ITEM_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Dtypes that are worth a code, by name, and bytes per element. Integers (ids, counts, quantized codes) are not."""

_FORMAT, _VERSION = "laconic wire rates", 1
_PATH_VARIABLE = "LACONIC_WIRE_RATES"

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def _one_of(names: Iterable[str]) -> Any:
    return Field(pattern=f"^({'|'.join(names)})$")


Dtype = Annotated[str, _one_of(ITEM_NBYTES)]
_Lines = Mapping[Annotated[str, _one_of(OPERATIONS)], "Line"]


@dataclass(frozen=True)
class Line:
    """seconds(nbytes) = alpha_seconds + seconds_per_byte * nbytes."""

    alpha_seconds: NonNegative
    seconds_per_byte: NonNegative
    error: NonNegative = 0.0
    """Largest relative error of the line at the measured sizes."""

    def seconds(self, nbytes: float) -> float:
        """Predicted time of `nbytes`."""
        return self.alpha_seconds + self.seconds_per_byte * nbytes


@dataclass(frozen=True)
class LinkRates:
    """Rates of one kind of group, measured with `world` ranks.

    Bytes count what one process sends, see `sent_nbytes` in laconic.cost.comm.seconds.
    """

    world: Annotated[int, Field(ge=2)]
    operations: _Lines
    """Raw operations of the backend."""
    chunk_seconds: NonNegative
    """Fixed overhead of each further chunk of a message: calls, latency that is not overlapped, and the exchange of
    lengths where one is needed."""
    overlap: Share
    """Share of the shorter of coding and transfer that overlaps the longer: 0 where they use the same core, 1 where
    they are independent."""
    extra: _Lines = field(default_factory=dict)
    """Seconds of a coded operation that its phases do not explain, by raw bytes sent."""
    travels: Mapping[Annotated[str, _one_of((*OPERATIONS, RING))], Line] = field(default_factory=dict)
    """Transport of coded messages: `all_to_all`, ... as exchanges between every two ranks, and `RING`, one message to
    the next rank and one from the previous. Where one is missing, `operations` has the closest line."""

    def at(self, world: int) -> LinkRates:
        """Rates for a group of `world` ranks: latency grows with the number of peers, time per byte does not."""
        if world == self.world:
            return self
        scale = (world - 1) / (self.world - 1)

        def scaled(lines: Mapping[str, Line]) -> dict[str, Line]:
            # Point to point: the number of ranks does not matter.
            return {
                name: line if name in (SEND, RING) else replace(line, alpha_seconds=line.alpha_seconds * scale)
                for name, line in lines.items()
            }

        operations, extra, travels = scaled(self.operations), scaled(self.extra), scaled(self.travels)
        return LinkRates(world, operations, self.chunk_seconds * scale, self.overlap, extra, travels)

    def line(self, operation: str) -> Line:
        """The operation's line; that of all_to_all for an operation that was not measured."""
        return self.operations.get(operation) or self.operations["all_to_all"]

    def travel(self, operation: str) -> Line:
        """The line of an operation's coded messages."""
        return self.travels.get(operation) or self.line(operation)


@dataclass(frozen=True)
class CodecRates:
    """One code on one dtype, on the slowest rank while all ranks code. Bytes are those of the original."""

    encode: Line
    decode: Line
    decode_add: Line
    ratio: Annotated[float, Field(ge=0.01, le=1e6)]
    """Original bytes over message bytes, on Gaussian data."""


@dataclass(frozen=True)
class WireRates:
    """Everything that a choice depends on; the same on all ranks of a group."""

    links: Mapping[Annotated[str, _one_of(GROUP_KINDS)], LinkRates]
    """By kind of group."""
    codecs: Mapping[Dtype, Mapping[Annotated[str, _one_of(CODES)], CodecRates]]
    """By dtype and code."""
    device: str = "cpu"
    """Type of the device whose tensors were sent."""
    layout: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (0, 0)
    """Nodes and ranks per node that were measured."""
    hosts: tuple[str, ...] = ()
    """Names of the machines it was measured on."""
    source: str = ""
    """Who measured it, when and how."""

    def link(self, kind: str) -> LinkRates:
        """The rates of that kind of group, or of the most similar one that was measured."""
        order = {
            "all": ("all", "across", "node"),
            "across": ("across", "all", "node"),
            "node": ("node", "all", "across"),
        }
        return next(self.links[name] for name in order[kind] if name in self.links)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ when anything that choices depend on differs."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The rates as JSON values."""
        values = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return values | {"layout": list(self.layout), "hosts": list(self.hosts)}

    @classmethod
    def from_dict(cls, data: Any) -> WireRates:
        """The inverse of `to_dict`."""
        rates = read_rates(cls, data, _FORMAT, _VERSION)
        if not rates.links:
            raise ConfigError("links is empty, but one kind of group must have been measured; run laconic profile")
        check_links(rates.links, "links")
        return rates

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all."""
        save_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> WireRates:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or is not valid.
        """
        return load_json(path, "wire rates", cls.from_dict, "measure with laconic profile, or name another file")


def default_path() -> Path:
    """The file that `laconic profile` writes and choices read.

    $LACONIC_WIRE_RATES, or laconic/wire_rates.json in $XDG_CACHE_HOME (~/.cache).
    """
    return cached_path(_PATH_VARIABLE, "wire_rates.json")


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (nbytes, seconds) with alpha, beta >= 0 and the least squared *relative* errors.

    Relative, so that the small sizes, which decide alpha, count as much as the large ones. With two unknowns the
    constrained optimum is the free one or one of those on the two edges.
    """
    kept = [(nbytes, seconds) for nbytes, seconds in points if seconds > 0]
    if not kept:
        raise ValueError("points are empty or all 0 s, but a line needs one with a positive time")
    # No powers: libm's differ between machines, and ranks that fit the same points must get the same line.
    one = math.fsum(1 / (s * s) for _, s in kept)
    x = math.fsum(n / (s * s) for n, s in kept)
    xx = math.fsum(n * n / (s * s) for n, s in kept)
    t = math.fsum(1 / s for _, s in kept)
    xt = math.fsum(n / s for n, s in kept)
    candidates = [(t / one, 0.0)]
    if xx > 0:
        candidates.append((0.0, xt / xx))
    determinant = one * xx - x * x
    if determinant > 1e-12 * one * xx:
        candidates.append(((t * xx - xt * x) / determinant, (one * xt - x * t) / determinant))
    allowed = [(alpha, beta) for alpha, beta in candidates if alpha >= 0 and beta >= 0]

    def errors(line: tuple[float, float]) -> Sequence[float]:
        return [(line[0] + line[1] * n) / s - 1 for n, s in kept]

    alpha, beta = min(allowed, key=lambda line: math.fsum(error * error for error in errors(line)))
    return Line(alpha, beta, max(map(abs, errors((alpha, beta)))))


def check_links(links: Mapping[str, LinkRates], where: str) -> None:
    """Check that links can carry coded messages."""
    for name, link in links.items():
        if "all_to_all" not in link.operations:
            raise ConfigError(
                f"{where}.{name}.operations has no all_to_all, by which coded messages travel; run laconic profile"
            )
