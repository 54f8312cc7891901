"""Mutation testing of what must never be wrong: python tools/mutation.py --report build/mutation.md.

Cosmic-ray changes one operator, number or branch at a time in a sample of the lines of each room, in place, and runs
the tests of that room. A mutant that no test notices survives and is printed with its line, for somebody to read: it
gets a test, or a reason (docs/reliability.md). A test that fails, an import that fails and a run that takes longer than
--timeout notice a mutant alike. `make mutants` runs this in an environment that has cosmic-ray beside the one of
`make test`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult
from mutation_rooms import ROOMS

ROOT = Path(__file__).resolve().parent.parent
SRC = "src/laconic"


@dataclass(frozen=True)
class Score:
    """What became of the mutants of a room.

    Attributes:
        noticed: how many made a test fail.
        survived: the others, each with its place and its lines as a diff.
    """

    room: str
    noticed: int
    survived: tuple[str, ...]


def main() -> int:
    """Run the sample of each room, print what survived and write the table of scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--mutants", type=int, default=40, help="drawn of each room; what is not Python is left out")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--timeout", type=float, default=300, help="seconds; a mutant that hangs is noticed")
    parser.add_argument("--report", type=Path, default=ROOT / "build/mutation.md")
    args = parser.parse_args()
    if _git("status", "--porcelain", "--", SRC):
        parser.error(f"{SRC} has changes that are not committed; mutants are made in place, so commit or stash them")
    where = [args.python, "-c", "import laconic; print(laconic.__file__)"]
    imported = subprocess.run(where, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(imported).is_relative_to(ROOT / SRC):
        parser.error(f"--python {args.python} imports {imported}, which no mutant changes; install this checkout in it")
    args.report.parent.mkdir(parents=True, exist_ok=True)
    scores = []
    for name in args.rooms:
        try:
            scores.append(_run(name, args))
        finally:  # cosmic-ray restores what it changed; a process that is killed does not
            _git("checkout", "--", SRC)
        _write(args.report, scores, args)
    return 0


def _run(name: str, args: argparse.Namespace) -> Score:
    room = ROOMS[name]
    command = [args.python, "-m", "pytest", "-n", "0", "-x", "-q", "--hypothesis-profile", "ci"]
    command += [f"tests/{test}" for test in room.tests]
    _check_baseline(name, command)
    session = args.report.parent / f"mutation-{name.replace(' ', '-')}.sqlite"
    with use_db(session, WorkDB.Mode.create) as db:
        init([Path(SRC, file) for file in room.files], db, {})
        mutations = {item.job_id: item.mutations[0] for item in db.work_items}
        live = [job for job, mutation in mutations.items() if not _is_for_types(mutation)]
        drawn = random.Random(f"{args.seed} {name}").sample(live, min(args.mutants, len(live)))
        chosen = {job for job in drawn if _is_python(mutations[job])}
        for job in mutations.keys() - chosen:
            db.set_result(job, WorkResult(WorkerOutcome.SKIPPED))
        config = {"timeout": args.timeout, "test-command": shlex.join(command), "distributor": {"name": "local"}}
        execute(db, ConfigDict(config))
        results = {job: result for job, result in db.results if job in chosen}
    survived = []
    for job, result in results.items():
        if result.worker_outcome != WorkerOutcome.NORMAL or result.test_outcome == TestOutcome.INCOMPETENT:
            raise SystemExit(f"a mutant of {name} was not made or not tested:\n{mutations[job]}\n{result.output}")
        if result.test_outcome == TestOutcome.SURVIVED:
            survived.append(_described(mutations[job], result.diff))
    print(f"{name}: {len(results) - len(survived)} of {len(results)} noticed", *survived, sep="\n", flush=True)
    return Score(name, len(results) - len(survived), tuple(survived))


def _check_baseline(name: str, command: list[str]) -> None:
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the tests of {name} fail without any mutant: {shlex.join(command)}\n{done.stdout[-2000:]}")
    print(f"{name}: its tests take {time.monotonic() - started:.0f} s", flush=True)


def _is_for_types(mutation: MutationSpec) -> bool:
    """Whether nobody runs what was changed: `from __future__ import annotations` holds in all of src."""
    spans = _for_types(ROOT / mutation.module_path)
    return any(start <= tuple(mutation.start_pos) < end for start, end in spans)


def _is_python(mutation: MutationSpec) -> bool:
    """Whether a mutant can be parsed; `*` between arguments, changed as if it were a product, cannot."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    code = (ROOT / mutation.module_path).read_text(encoding="utf-8")
    try:
        ast.parse(mutate_code(code, operator, mutation.occurrence))
    except SyntaxError:
        return False
    return True


@functools.cache
def _for_types(path: Path) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """First and last position (line, column) of each annotation, alias of types and overload in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in _for_types_in(tree)
    )


def _for_types_in(tree: ast.Module) -> Iterator[ast.expr | ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "overload" for one in node.decorator_list):
            yield from (node, *node.decorator_list)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_capwords(node.targets[0].id):
            yield node.value  # an alias of types


def _is_capwords(name: str) -> bool:
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def _described(mutation: MutationSpec, diff: str | None) -> str:
    changed = [line for line in (diff or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    place = f"- `{mutation.module_path}:{mutation.start_pos[0]}` {mutation.operator_name}"
    return "\n".join([place, *(f"      {line}" for line in changed)])


def _write(report: Path, scores: list[Score], args: argparse.Namespace) -> None:
    lines = [
        f"# Mutants at {_git('rev-parse', '--short', 'HEAD')}",
        "",
        f"`python tools/mutation.py --mutants {args.mutants} --seed {args.seed}`",
        "",
        "| room | mutants | noticed | survived |",
        "|---|---|---|---|",
    ]
    for score in scores:
        made = score.noticed + len(score.survived)
        lines.append(f"| {score.room} | {made} | {score.noticed} | {len(score.survived)} |")
    for score in scores:
        if score.survived:
            lines += ["", f"## {score.room}", "", *score.survived]
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
