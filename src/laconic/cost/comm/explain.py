"""Rates and choices as text."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

from laconic.cost.comm.rates import CODES, ITEM_NBYTES, Line, WireRates
from laconic.cost.comm.seconds import RAW, AlgorithmCandidate, AlgorithmChoice, GroupShape, candidates, decide
from laconic.cost.sizes import format_nbytes
from laconic.errors import ConfigError
from laconic.text_columns import columns

SWEEP_NBYTES = tuple(1 << power for power in range(12, 31, 2))
"""Sizes of `explain_sweep`: 4 KiB to 1 GiB."""


def explain_one(operation: str, nbytes: int, dtype: str, group: GroupShape, rates: WireRates) -> str:
    """Every candidate for one message, best first, and the choice.

    Args:
        nbytes: of the input of one rank, see `decide`.

    Raises:
        ConfigError: the operation or dtype is not known.
    """
    choice, found = _decided(operation, nbytes, dtype, group, rates)
    rows = [
        [
            c.codec + (", ring" if c.ring else ""),
            str(c.num_chunks),
            str(c.levels),
            format_seconds(c.seconds),
            f"{choice.raw_seconds / c.seconds:.2f}x",
        ]
        for c in found
    ]
    title = f"{operation} of {format_nbytes(nbytes)} per rank, {dtype}, {_group_text(group)}"
    table = columns(["codec", "chunks", "levels", "predicted", "over raw"], rows)
    return f"{title}\n\n{table}\n\nchoice: {_choice_text(choice)}"


def explain_sweep(operation: str, dtype: str, group: GroupShape, rates: WireRates) -> str:
    """For each size the best prediction with each codec, and the choice.

    Raises:
        ConfigError: the operation or dtype is not known.
    """
    rows = []
    for nbytes in SWEEP_NBYTES:
        choice, found = _decided(operation, nbytes, dtype, group, rates)
        best = [next((c.seconds for c in found if c.codec == codec), None) for codec in (RAW, *CODES)]
        cells = ["-" if seconds is None else format_seconds(seconds) for seconds in best]
        rows.append([format_nbytes(nbytes), *cells, _choice_text(choice)])
    title = f"{operation}, {dtype}, {_group_text(group)}; sizes are those of one rank's input"
    return f"{title}\n\n{columns(['size', RAW, *CODES, 'choice'], rows, left=(4,))}"


def explained(operation: str, nbytes: int, dtype: str, group: GroupShape, rates: WireRates) -> dict[str, Any]:
    """The same as `explain_one` as data: operation, nbytes, choice and candidates, best first."""
    choice, found = _decided(operation, nbytes, dtype, group, rates)
    return {
        "operation": operation,
        "nbytes": nbytes,
        "choice": dataclasses.asdict(choice),
        "candidates": [candidate._asdict() for candidate in found],
    }


def rates_text(rates: WireRates) -> str:
    """The measured rates: a table of links and one of codecs."""
    parts = [rates.source] if rates.source else []
    for kind, link in rates.links.items():
        rows = [
            [
                name,
                format_seconds(line.alpha_seconds),
                _gigabytes(line),
                f"{line.error:.0%}",
                format_seconds(link.extra[name].alpha_seconds) if name in link.extra else "-",
            ]
            for name, line in link.operations.items()
        ]
        header = ["raw operation", "alpha", "GB/s", "worst fit", "when coded"]
        title = f"links, {kind}: {link.world} ranks; coding and wire overlap by {link.overlap:.0%}"
        parts.append(f"{title}\n\n{columns(header, rows)}")
    rows = [
        [dtype, code, f"{codec.ratio:.3f}", *map(_gigabytes, (codec.encode, codec.decode, codec.decode_add))]
        for dtype, codes in rates.codecs.items()
        for code, codec in codes.items()
    ]
    if rows:
        header = ["dtype", "code", "ratio", "encode GB/s", "decode GB/s", "decode and add GB/s"]
        parts.append(f"codecs, on Gaussian data, one thread or GPU\n\n{columns(header, rows, left=(0, 1))}")
    return "\n\n".join(parts)


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and a unit: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _decided(
    operation: str, nbytes: int, dtype: str, group: GroupShape, rates: WireRates
) -> tuple[AlgorithmChoice, list[AlgorithmCandidate]]:
    if dtype not in ITEM_NBYTES:
        raise ConfigError(f"dtype is {dtype!r}, but it must be one of {', '.join(ITEM_NBYTES)}; others are never coded")
    numel = nbytes // ITEM_NBYTES[dtype]
    found = candidates(operation, numel, dtype, group, rates, levels=(1, 2))
    return decide(operation, numel, dtype, group, rates, levels=(1, 2)), sorted(found, key=attrgetter("seconds"))


def _gigabytes(line: Line) -> str:
    return f"{1e-9 / line.seconds_per_byte:.3f}" if line.seconds_per_byte else "-"


def _group_text(group: GroupShape) -> str:
    return f"{group.num_ranks} ranks on {group.num_nodes} node{'s' * (group.num_nodes > 1)}"


def _choice_text(choice: AlgorithmChoice) -> str:
    way = choice.codec
    if choice.codec != RAW:
        way += f", {choice.num_chunks} chunk{'s' * (choice.num_chunks > 1)}"
    if choice.levels == 2:
        way += ", two levels"
    gain = f" ({choice.raw_seconds / choice.predicted_seconds:.2f}x)" if choice.codec != RAW else ""
    return f"{way}{gain}: {choice.reason}"
