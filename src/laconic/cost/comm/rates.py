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
from typing import Any

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


@dataclass(frozen=True)
class Line:
    """seconds(nbytes) = alpha_seconds + seconds_per_byte * nbytes."""

    alpha_seconds: float
    seconds_per_byte: float
    error: float = 0.0
    """Largest relative error of the line at the measured sizes."""

    def seconds(self, nbytes: float) -> float:
        """Predicted time of `nbytes`."""
        return self.alpha_seconds + self.seconds_per_byte * nbytes


@dataclass(frozen=True)
class LinkRates:
    """Rates of one kind of group, measured with `world` ranks.

    Bytes count what one process sends, see `sent_nbytes` in laconic.cost.comm.seconds.
    """

    world: int
    operations: Mapping[str, Line]
    """Raw operations of the backend."""
    chunk_seconds: float
    """Fixed overhead of each further chunk of a message: calls, latency that is not overlapped, and the exchange of
    lengths where one is needed."""
    overlap: float
    """Share of the shorter of coding and transfer that overlaps the longer: 0 where they use the same core, 1 where
    they are independent."""
    extra: Mapping[str, Line] = field(default_factory=dict)
    """Seconds of a coded operation that its phases do not explain, by raw bytes sent."""
    travels: Mapping[str, Line] = field(default_factory=dict)
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
    ratio: float
    """Original bytes over message bytes, on Gaussian data."""


@dataclass(frozen=True)
class WireRates:
    """Everything that a choice depends on; the same on all ranks of a group."""

    links: Mapping[str, LinkRates]
    """By kind of group."""
    codecs: Mapping[str, Mapping[str, CodecRates]]
    """By dtype and code."""
    device: str = "cpu"
    """Type of the device whose tensors were sent."""
    layout: tuple[int, int] = (0, 0)
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
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a field is missing or impossible; the message names it.
        """
        check_format(data, _FORMAT, _VERSION)
        check_known(data, ("format", "version", *cls.__dataclass_fields__), "the file")
        links = {kind: read_link(value, f"links.{kind}") for kind, value in read_table(data, "links", "").items()}
        codecs = read_codecs(data)
        check_known(links, GROUP_KINDS, "links")
        check_known(codecs, ITEM_NBYTES, "codecs")
        for dtype, codes in codecs.items():
            check_known(codes, CODES, f"codecs.{dtype}")
        if not links:
            raise ConfigError("links is empty, but one kind of group must have been measured; run laconic profile")
        layout = data.get("layout", [0, 0])
        if not (isinstance(layout, list) and len(layout) == 2 and all(type(n) is int and n >= 0 for n in layout)):
            raise ConfigError(f"layout is {layout!r}, but it must be nodes and ranks per node; run laconic profile")
        hosts = data.get("hosts", [])
        if not (isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)):
            raise ConfigError(f"hosts is {hosts!r}, but it must be a list of names; run laconic profile")
        device, source = (str(data.get(name, default)) for name, default in (("device", "cpu"), ("source", "")))
        return cls(links, codecs, device, (layout[0], layout[1]), tuple(hosts), source)

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all."""
        save_json(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> WireRates:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or is not valid.
        """
        return load_json(path, "wire rates", cls.from_dict)


def default_path() -> Path:
    """The file that `laconic profile` writes and choices read.

    $LACONIC_WIRE_RATES, or laconic/wire_rates.json in $XDG_CACHE_HOME (~/.cache).
    """
    return cached_path(_PATH_VARIABLE, "wire_rates.json")


def fit_line(points: Iterable[tuple[float, float]]) -> Line:
    """The line through (nbytes, seconds) with alpha, beta >= 0 and the least squared *relative* errors.

    Relative, so that the small sizes, which decide alpha, count as much as the large ones. With two unknowns the
    constrained optimum is the free one or one of those on the two edges.

    Raises:
        ValueError: no point has a positive time.
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


# --- reading untrusted JSON ---


def read_line(data: Any, where: str) -> Line:
    """The line at `where` in a file.

    Raises:
        ConfigError: a number is missing or out of range.
    """
    alpha, beta, error = (read_number(data, name, where) for name in ("alpha_seconds", "seconds_per_byte", "error"))
    return Line(alpha, beta, error)


def read_link(data: Any, where: str) -> LinkRates:
    """The link at `where` in a file.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    tables = {}
    for name in ("operations", "extra", "travels"):
        lines = read_table(data, name, where)
        check_known(lines, (*OPERATIONS, RING) if name == "travels" else OPERATIONS, f"{where}.{name}")
        tables[name] = {key: read_line(value, f"{where}.{name}.{key}") for key, value in lines.items()}
    if "all_to_all" not in tables["operations"]:
        raise ConfigError(f"{where}.operations has no all_to_all, by which coded messages travel; run laconic profile")
    world = data.get("world")
    if type(world) is not int or world < 2:
        raise ConfigError(f"{where}.world is {world!r}, but it must be a whole number from 2 on; run laconic profile")
    chunk_seconds, overlap = read_number(data, "chunk_seconds", where), read_number(data, "overlap", where, most=1.0)
    return LinkRates(world, tables["operations"], chunk_seconds, overlap, tables["extra"], tables["travels"])


def read_codecs(data: Any) -> dict[str, dict[str, CodecRates]]:
    """The table `codecs` of a file of rates: by dtype and name.

    Raises:
        ConfigError: a field is missing or impossible.
    """
    return {
        dtype: {
            name: _read_codec(value, f"codecs.{dtype}.{name}") for name, value in read_table(table, None, dtype).items()
        }
        for dtype, table in read_table(data, "codecs", "").items()
    }


def _read_codec(data: Any, where: str) -> CodecRates:
    """The codec at `where`."""
    names = ("encode", "decode", "decode_add")
    encode, decode, add = (read_line(read_table(data, name, where), f"{where}.{name}") for name in names)
    return CodecRates(encode, decode, add, read_number(data, "ratio", where, least=0.01, most=1e6))
