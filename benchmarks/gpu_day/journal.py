"""What the driver keeps of all calls: one line of JSON for each record, written the moment it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = "gpu_day.jsonl"


@dataclass
class Attempt:
    """The latest run of a part."""

    call: dict[str, Any]
    """The call that it belongs to, as `Journal.begin` was given it."""
    tables: dict[str, str] = field(default_factory=dict)
    """Markdown by key."""
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Value and unit by name."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Section and reason."""
    seconds: float | None = None
    """None while it runs, and for ever if the driver was killed with it."""
    failure: str = ""
    """Why the process did not end well."""

    @property
    def has_ended(self) -> bool:
        """Whether the driver saw its end; a part that has not ended is run by the next call."""
        return self.seconds is not None


class Journal:
    """The attempts of all parts, in a file that a killed driver leaves readable.

    Args:
        folder: made if it is not there; an earlier journal in it is read.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / _NAME
        self.attempts: dict[str, Attempt] = {}
        self.calls: list[dict[str, Any]] = []
        self.is_cut = False
        """Whether a line of the file has no end: the driver was killed, or the disk was full."""
        self.lost = ""
        """Why records could not be written; the page that is printed has them all the same."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        with self.path.open("a", encoding="utf-8") as file:  # fails here where nothing can be written
            if text and not text.endswith("\n"):
                file.write("\n")
        for line in text.splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.is_cut = True

    def begin(self, call: dict[str, Any]) -> None:
        """A call of the driver: its command, date and machine."""
        self._put({"call": call})

    def start(self, part: str) -> None:
        """A part begins; what an earlier attempt left is no longer shown."""
        self._put({"part": part, "event": "start"})

    def add(self, part: str, record: dict[str, Any]) -> None:
        """A record of a part that runs."""
        self._put({"part": part, "event": "record", "record": record})

    def end(self, part: str, seconds: float, failure: str) -> None:
        """A part has ended."""
        self._put({"part": part, "event": "end", "seconds": round(seconds, 1), "failure": failure})

    def _put(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self.lost = self.lost or str(error)

    def _take(self, entry: dict[str, Any]) -> None:
        if "call" in entry:
            self.calls.append(entry["call"])
            return
        part, event = entry["part"], entry["event"]
        if event == "start":
            self.attempts[part] = Attempt(self.calls[-1] if self.calls else {})
            return
        attempt = self.attempts[part]
        if event == "end":
            attempt.seconds, attempt.failure = entry["seconds"], entry["failure"]
            return
        match entry["record"]:
            case {"table": markdown, "key": key}:
                attempt.tables[key] = markdown
            case {"figure": name, "value": value, "unit": unit}:
                attempt.figures[name] = value, unit
            case {"problem": section, "reason": reason}:
                attempt.problems.append((section, reason))
            case other:
                raise KeyError(f"a record that is not known: {other}")
