"""Tables as text in columns: the one writer of all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[int] | Literal["all"] = (0,),
    *,
    rule: bool = True,
) -> str:
    """Align cells in columns, two spaces apart, without spaces at the ends of lines.

    Args:
        header: the first line.
        rows: the others, as long as the header.
        left: numbers of the columns that are aligned left; the others are aligned right.
        rule: whether a line of dashes, as long as the longest line, follows the header.
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    formats = [f"{{:{'<' if left == 'all' or number in left else '>'}{width}}}" for number, width in enumerate(widths)]
    lines = ["  ".join(formats).format(*row).rstrip() for row in table]
    if rule:
        lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
