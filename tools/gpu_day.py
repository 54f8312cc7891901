"""The first hour on a GPU: builds, proves the bits, measures, and writes a page. `make gpu` runs it.

    python tools/gpu_wheels.py wheels --laconic               # beforehand, where there is a network
    python tools/gpu_day.py --wheels wheels --call 1          # on the machine, at most 9 minutes each
    python tools/gpu_day.py --wheels wheels --call 2
    python tools/gpu_day.py --parts layer kernels             # these again
    python tools/gpu_day.py --rehearse                        # all of it on the CPU, tiny: nothing is measured
    python tools/gpu_day.py --page                            # the page once more, after explaining predictions

Parts run in order of worth, each a process with a limit; its tables are written the moment they are known, to
REPORT/gpu_day.md and to the journal beside it, from which a later call goes on: it runs the parts that have not ended.
Exits with 0 if all that ran ended well and every prediction that is off by more than a fifth is explained, 1 if not, 2
if something is missing and nothing was started, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day import page, preflight, record  # noqa: E402
from benchmarks.gpu_day.journal import Journal  # noqa: E402
from benchmarks.gpu_day.parts import PARTS, DayPart  # noqa: E402
from benchmarks.kit.isolated_parts import run_part  # noqa: E402

_MINUTES, _REHEARSAL_MINUTES = 9.0, 60.0
_REHEARSAL_FACTOR = 10
"""Times as long as on a device: interpreted kernels, two cores."""
_LEAST_SECONDS = 10
"""A part is not begun with less."""


def main(
    arguments: Sequence[str],
    parts: Sequence[DayPart] = PARTS,
    check: Callable[[Path, dict[str, str], bool], preflight.Findings] = preflight.check,
) -> int:
    """Run the day; returns the exit code.

    Args:
        arguments: of the command line.
        parts, check: others than those of the day, for tests.
    """
    options = _parser(parts).parse_args(arguments)
    options.report = options.report or Path("build/gpu_day_rehearsal" if options.rehearse else "build/gpu_day")
    try:
        journal = Journal(options.report)
    except OSError as error:
        return _refuse([f"{options.report} cannot be written to ({error.strerror}): name another folder with --report"])
    day = _Day(options, journal, parts)
    if options.page:
        day.write_page()
        return day.exit_code()
    if any(call["rehearses"] != options.rehearse for call in journal.calls):
        kind = "measured" if options.rehearse else "rehearsed"
        return _refuse([f"{options.report} holds a day that was {kind}: name another folder with --report"])
    with tempfile.TemporaryDirectory(prefix="gpu_day_") as folder:
        site = Path(folder)
        environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
            "LACONIC_GPU_DAY_JOURNAL": str(journal.path.resolve()),
            "LACONIC_GPU_DAY_INFERENCE": str(site / preflight.INFERENCE),
        }
        if options.rehearse:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        if stops := preflight.unpack(options.wheels, site, ROOT):
            return _refuse(stops)
        findings = check(ROOT, environment, options.rehearse)
        if findings.stops:
            return _refuse(findings.stops)
        if not findings.has_kernels:
            print("laconic is built here, which takes minutes on few cores", flush=True)
            if stops := preflight.build(ROOT, site):
                return _refuse(stops)
        print(*(f"note: {note}\n" for note in findings.notes), sep="", end="", flush=True)
        return day.run(shlex.join(["python", "tools/gpu_day.py", *arguments]), findings, environment)


def _refuse(stops: Sequence[str]) -> int:
    print("Nothing was started, because something is missing:", *stops, sep="\n- ", flush=True)
    return 2


class _Interrupted(BaseException):
    """A signal asks to end."""


class _Day:
    """The chosen parts, one after the other."""

    def __init__(self, options: argparse.Namespace, journal: Journal, parts: Sequence[DayPart]) -> None:
        self._options, self._journal, self._parts = options, journal, parts
        self._page_error = ""
        self._began = time.monotonic()

    def chosen(self) -> list[DayPart]:
        """Parts that are named; else those of the call that have not ended, as of a call that was cut off."""
        if self._options.parts:
            return [part for part in self._parts if part.name in self._options.parts]
        last = self._options.call or 2
        return [
            part
            for part in self._parts
            if part.call <= last
            and not (part.name in self._journal.attempts and self._journal.attempts[part.name].has_ended)
        ]

    def run(self, command: str, findings: preflight.Findings, environment: dict[str, str]) -> int:
        """Run them; returns the exit code."""
        options = self._options
        minutes = options.minutes or (_REHEARSAL_MINUTES if options.rehearse else _MINUTES)
        end = self._began + 60 * minutes
        self._journal.begin(
            {
                "command": command,
                "date": str(datetime.date.today()),
                "rehearses": options.rehearse,
                "facts": findings.facts,
                "notes": findings.notes,
            }
        )
        before = [(number, signal.signal(number, _interrupt)) for number in (signal.SIGTERM, signal.SIGINT)]
        skipped = []
        try:
            for part in self.chosen():
                seconds = min(part.seconds * (_REHEARSAL_FACTOR if options.rehearse else 1), end - time.monotonic())
                if seconds < min(_LEAST_SECONDS, part.seconds):
                    skipped.append(part.name)
                    continue
                self._run_one(part, seconds, environment)
        except _Interrupted as interrupted:
            self.write_page()
            print(f"ended by {interrupted}: the same command goes on with the parts that have not ended", flush=True)
            return 128 + getattr(signal, str(interrupted))
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        if skipped:
            print(f"{minutes:g} minutes are over; a further call runs {', '.join(skipped)}", flush=True)
        self.write_page()
        return self.exit_code() or (1 if skipped else 0)

    def _run_one(self, part: DayPart, seconds: float, environment: dict[str, str]) -> None:
        print(f"== {part.name}: {part.title}, at most {seconds:.0f} s", flush=True)
        self._journal.start(part.name)
        began = time.monotonic()

        def take(line: str) -> None:
            try:
                found = record.parse(line)
            except ValueError:
                found = {"problem": "a table that was cut off", "reason": "The part ended while it wrote it."}
            if found is None:
                print(line, end="", flush=True)
                return
            if "figure" not in found:
                print(f"{part.name}: {found.get('key') or found}", flush=True)
            self._journal.add(part.name, found)
            self.write_page()

        ended = run_part(part.name, part.command(part.name, self._options.rehearse), seconds, take, environment)
        self._journal.end(part.name, time.monotonic() - began, ended.failure)
        print(*self._journal.attempts[part.name].tables.values(), sep="\n")
        print(f"== {part.name}: {ended.failure or 'done'}, {time.monotonic() - began:.0f} s", flush=True)
        self.write_page()

    def write_page(self) -> None:
        """The page as it is known so far; a page that cannot be written is printed at the end."""
        text = page.render(self._journal, self._parts)
        path = self._options.report / "gpu_day.md"
        try:
            draft = path.with_suffix(".tmp")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
            self._page_error = ""
        except OSError as error:
            self._page_error = str(error)

    def exit_code(self) -> int:
        """0 if all is well; says what is not."""
        found = page.failures(self._journal, self._parts)
        if self._page_error:
            found.append(f"the page could not be written ({self._page_error}); here it is")
        print(*found, sep="\n", flush=True)
        if self._page_error:
            print(page.render(self._journal, self._parts))
        return 1 if found else 0


def _interrupt(number: int, _: FrameType | None) -> None:
    raise _Interrupted(signal.Signals(number).name)


def _parser(parts: Sequence[DayPart]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_day.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts]
    parser.add_argument(
        "--call", type=int, choices=(1, 2), help="1: the first four; 2 (the default): all without an end"
    )
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=f"these, again: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, help=f"for all parts, {_MINUTES:g} by default")
    parser.add_argument("--wheels", type=Path, help="folder that tools/gpu_wheels.py filled")
    parser.add_argument(
        "--report", type=Path, help="folder of page and journal (build/gpu_day, build/gpu_day_rehearsal)"
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny sizes; measures nothing")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the journal")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
