"""Make the figures that pages cite again: python tools/figures.py --only optim side-by-side (make figures ARGS="...").

A report of benchmarks/results begins with the command that made it, or says that none makes it again, and why. The
chosen commands run one after the other, on a machine that should do nothing else, and write into build/figures; each
figure that moved by more than 5 % and its spread is printed with the places that cite its report.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from laconic.text_columns import columns  # noqa: E402
from tools.report_commands import NOT_AGAIN, command_of, complaint, words_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "build" / "figures"
_CITED = re.compile(r"\b[a-z]\w+_20\d{4}\.\w+")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_BEHIND = re.compile(r"(?<=.)\([^)]*\)")
"""What a cell says behind a figure: its spread, error or range."""
_LEAST = 0.05
"""Share by which a figure has to move to be named; two runs without repetitions differ by as much."""


@dataclass(frozen=True)
class Report:
    """A Markdown file of results.

    Attributes:
        name: of the file.
        command: as `command_of` finds it.
        minutes: that it took; 0 if the report does not say.
        machine: the processor it names, "-" without.
        places: where it, or a picture or data of its name, is cited: "docs/optim.md:25".
    """

    name: str
    command: str | None
    minutes: float
    machine: str
    places: tuple[str, ...]

    def is_meant(self, name: str) -> bool:
        """Whether --only chooses it by `name`: its benchmark, or the beginning of its file's name."""
        return f" benchmarks.run {name} " in f"{self.command} " or self.name.startswith(name.replace("-", "_"))


def citations() -> dict[str, list[str]]:
    """Where pages and the site's charts, which leave suffixes out, name each file of results."""
    found: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tools" / "site_charts.py"):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            names = _CITED.findall(line)
            if page.suffix == ".py":
                names = [f"{name}.md" for name in re.findall(r'"([a-z]\w+_20\d{4})"', line)]
            for name in names:
                found.setdefault(name, []).append(f"{page.relative_to(ROOT)}:{number}")
    return found


def read_report(path: Path, cited: Mapping[str, Sequence[str]]) -> Report:
    """What a file of results says of itself, and who cites it."""
    text = path.read_text(encoding="utf-8")
    minutes = sum(map(float, re.findall(r"^All of it took ([\d.]+) minutes\.$", text, re.MULTILINE)))
    machine = re.search(r"^20\d\d-\d\d-\d\d, (.*?)(?:, torch|$)", text, re.MULTILINE)
    places = tuple(place for name, found in cited.items() if Path(name).stem == path.stem for place in found)
    return Report(path.name, command_of(text), minutes, "-" if machine is None else machine[1][:48], places)


def faults(found: Sequence[Report], cited: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with pages and results: files that are not there, and commands that no program takes."""
    there, stems = {path.name for path in RESULTS.iterdir()}, {Path(report.name).stem for report in found}
    wrong = [f"{places[0]} cites {name}, which is not there" for name, places in cited.items() if name not in there]
    wrong += [f"{name} has no report beside it" for name in sorted(there) if Path(name).stem not in stems]
    for report in found:
        if report.command is None:
            wrong.append(f"{report.name} names no command that makes it, nor says: {NOT_AGAIN}")
        elif report.command and (why := complaint(report.command)) is not None:
            wrong.append(f"{report.name}: {report.command}: {why}")
    return wrong


def left_out(report: Report) -> str | None:
    """Why a report is not made again here; None if it is."""
    if not report.command:
        return "no command makes it"
    lacking = [
        name for name, value in words_of(report.command)[0].items() if _is_named(value) and name not in os.environ
    ]
    return f"it needs {lacking[0]} in the environment" if lacking else None


def _is_named(value: str) -> bool:
    """Whether a report's value of a variable stands for one that each machine has for itself."""
    return value.startswith("path/to")


def remake(report: Report) -> Path | None:
    """Run the command of a report that is not `left_out`; returns the new report, None if the command failed."""
    assert report.command
    variables, words = words_of(report.command)
    given = {name: value for name, value in variables.items() if not _is_named(value)}
    words = [word.replace("benchmarks/results", str(OUT)) for word in words]
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "laconic"]
    made, began = OUT / report.name, time.monotonic()
    made.unlink(missing_ok=True)
    printed = made.with_suffix(".out")
    with printed.open("w", encoding="utf-8") as output:
        code = subprocess.run(words, stdout=output, cwd=ROOT, env=os.environ | given).returncode
    print(f"{report.name}: {(time.monotonic() - began) / 60:.1f} minutes, exit code {code}", flush=True)
    if code == 0 and not made.exists():  # its program only prints
        printed.rename(made)
    return made if code == 0 else None


def cells(text: str) -> dict[tuple[str, str, int, str], str]:
    """Cells of a report's tables, by title, first cell of the row, which of the rows that begin so, and column."""
    found: dict[tuple[str, str, int, str], str] = {}
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
        seen: Counter[str] = Counter()
        for first, *row in lines[2:]:
            seen[first] += 1
            pairs = zip(lines[0][1:], row, strict=False)
            found |= {(title, first, seen[first], head): cell for head, cell in pairs}
    return found


def _is_another(before: str, after: str, share: float) -> bool:
    """Whether two numbers differ by more than a share of the first, and more than its last digit rounds."""
    was, is_now = (float(number.replace(",", "")) for number in (before, after))
    digits = len(before.partition("e")[0].partition(".")[2])
    return abs(is_now - was) > max(share * abs(was), 0 if "e" in before else 1.5 * 10.0**-digits)


def moved(old: str, new: str) -> list[str]:
    """The figures of a report that are others in a new one, a line each; what its last digit rounds moves none."""
    usual = re.search(r"the\s+median\): ([\d.]+)% in the middle", old)
    then, now = cells(old), cells(new)
    lines = [f"{key[0]} / {key[1]} / {key[3]}: {then[key]} -> nothing" for key in then if key not in now]
    for key in then.keys() & now.keys():
        before, after = (_NUMBER.findall(_BEHIND.sub("", cell)) for cell in (then[key], now[key]))
        spread = re.search(r"\(([\d.]+) ?%\)", then[key]) or usual
        share = max(_LEAST, float(spread[1]) / 100 if spread else 0.0)
        if len(before) != len(after) or any(_is_another(*pair, share) for pair in zip(before, after, strict=True)):
            lines.append(f"{key[0]} / {key[1]} / {key[3]}: {then[key]} -> {now[key]}")
    return sorted(lines)


def main(arguments: Sequence[str]) -> int:
    """List, or run and compare; returns 1 if a command failed, or pages and results have faults."""
    parser = argparse.ArgumentParser(prog="python tools/figures.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="benchmarks, or beginnings of file names")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args(arguments)
    cited = citations()
    found = [read_report(path, cited) for path in sorted(RESULTS.glob("*.md"))]
    for name in options.only:
        if not any(report.is_meant(name) for report in found):
            parser.error(f"--only {name}: no report's benchmark has this name, and no file's name begins so")
    chosen = [one for one in found if not options.only or any(map(one.is_meant, options.only))]
    wrong = faults(found, cited)
    for line in [*wrong, *(f"{one.name} is cited by no page" for one in found if not one.places)]:
        print(line)
    if options.list:
        rows = [[one.name, f"{one.minutes or '-'}", one.machine, one.command or "-"] for one in chosen]
        print(columns(["report", "minutes", "machine", "command"], rows, left=(0, 2, 3)))
        return bool(wrong)
    OUT.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for report in chosen:
        if (why := left_out(report)) is not None:
            print(f"{report.name}: left out, as {why}")
            continue
        made = remake(report)
        if made is None:
            num_failed += 1
            continue
        if (machine := read_report(made, {}).machine) != report.machine:
            print(f"  on {machine}, the old one on {report.machine}: times are not comparable")
        for line in moved((RESULTS / report.name).read_text(), made.read_text()):
            print(f"  {line}; cited by {', '.join(report.places) or 'no page'}", flush=True)
    return bool(num_failed or wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
