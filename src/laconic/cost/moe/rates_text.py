"""Rates of mixture-of-experts layers as text, with the quality of every fit."""

from __future__ import annotations

from laconic.cost.comm.explain import format_seconds
from laconic.cost.comm.rates import Line
from laconic.cost.moe.rates import MoERates
from laconic.text_columns import columns


def moe_rates_text(rates: MoERates) -> str:
    """Format tables of groups, work within a rank, codecs and routes.

    `worst fit` is the largest relative error of a line at the sizes that were measured.
    """
    parts = [rates.source] if rates.source else []
    rows = [
        [group, str(link.world), name, format_seconds(line.alpha_seconds), _per_second(line), f"{line.error:.0%}"]
        for group, link in rates.groups.items()
        for name, line in link.operations.items()
    ]
    if rows:
        header = ["group", "ranks", "operation", "alpha", "GB/s", "worst fit"]
        parts.append(f"groups\n\n{columns(header, rows, left=(0, 2))}")
    work = {"products, by multiply-adds": rates.gemm, "copies, by bytes": rates.copy}
    rows = [
        [name, format_seconds(line.alpha_seconds), _per_second(line), f"{line.error:.0%}"]
        for name, line in work.items()
    ]
    parts.append(f"work of a rank\n\n{columns(['work', 'alpha', '10^9/s', 'worst fit'], rows)}")
    dtypes = dict.fromkeys([*rates.wire.codecs, *rates.codecs])
    known = {dtype: {**rates.wire.codecs.get(dtype, {}), **rates.codecs.get(dtype, {})} for dtype in dtypes}
    rows = [
        [dtype, name, f"{codec.ratio:.3f}", *(_per_second(line) for line in (codec.encode, codec.decode))]
        for dtype, codecs in known.items()
        for name, codec in codecs.items()
    ]
    if rows:
        header = ["dtype", "code", "ratio", "encode GB/s", "decode GB/s"]
        parts.append(f"codecs\n\n{columns(header, rows, left=(0, 1))}")
    rows = [
        [
            name,
            way,
            format_seconds(one.alpha_seconds),
            format_seconds(1000 * one.seconds_per_row),
            format_seconds(1e6 * one.seconds_per_byte),
            f"{one.error:.0%}",
        ]
        for name, both in rates.overheads.items()
        for way, one in (("forward", both["forward"]), ("backward", both["backward"]))
    ]
    if rows:
        header = ["route", "direction", "alpha", "1000 rows", "1 MB", "worst fit"]
        title = "fixed overhead, beside what lines of groups say; errors are shares of the whole time"
        parts.append(f"{title}\n\n{columns(header, rows, left=(0, 1))}")
    parts.append(f"an operation inside nodes hides by {rates.overlap:.0%} behind one between nodes")
    return "\n\n".join(parts)


def _per_second(line: Line) -> str:
    return f"{1e-9 / line.seconds_per_byte:.3f}" if line.seconds_per_byte else "-"
