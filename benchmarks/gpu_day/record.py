"""How the process of a part tells the driver what it knows: one line of JSON for each table, figure or problem."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MARK = "@gpu-day "
"""Begins the lines that are records; all other lines of a part are its log."""

Record = dict[str, Any]


class Report:
    """What a part says while it runs.

    Args:
        write: takes one line; standard output by default.
        is_fatal: whether nothing can run in this process after an error, as after a fault on a device.
    """

    def __init__(
        self,
        write: Callable[[str], object] = lambda line: print(line, flush=True),
        is_fatal: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._write = write
        self._is_fatal = is_fatal
        self.problems: list[str] = []
        """Sections that have no result, or not the one that they should have."""

    def table(self, markdown: str, key: str = "") -> None:
        """A table, Markdown with a title; one with the same key takes the place of the earlier one."""
        self._put({"table": markdown, "key": key or markdown.splitlines()[0]})

    def figure(self, name: str, value: float, unit: str) -> None:
        """A measured figure, named as in predictions.py."""
        self._put({"figure": name, "value": value, "unit": unit})

    def figures(self, values: Mapping[str, float], unit: str) -> None:
        """Several of one unit."""
        for name, value in values.items():
            self.figure(name, value, unit)

    def problem(self, section: str, reason: str) -> None:
        """A section without the result that it should have: the part fails at its end."""
        self.problems.append(section)
        self._put({"problem": section, "reason": reason})

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error inside costs this section alone, unless the process cannot go on."""
        try:
            yield
        except Exception as error:
            self.problem(name, reason_of(error))
            if self._is_fatal(error):
                raise

    def _put(self, record: Record) -> None:
        self._write(MARK + json.dumps(record))


def reason_of(error: BaseException) -> str:
    """The error and where it came from, in a few lines."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} in {frame.name}" for frame in frames]
    text = str(error).strip() or "no message"
    lines = text.splitlines()
    return "\n".join([f"{type(error).__name__}: {lines[0]}", *lines[1:8], *where])


def parse(line: str) -> Record | None:
    """The record of a line; None for a line of the log.

    Raises:
        ValueError: the line is a record that was cut off.
    """
    if not line.startswith(MARK):
        return None
    record = json.loads(line[len(MARK) :])
    if not line.endswith("\n") or not isinstance(record, dict):
        raise ValueError("a record without its end")
    return record
