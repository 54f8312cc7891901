"""Mutation testing of what must never be wrong: python tools/mutation.py --report build/mutation.md.

Cosmic-ray changes one operator, number or branch at a time in a sample of the lines of each room, in place, and runs
the tests of that room. A mutant that no test notices survives and is printed with its line, for somebody to read: it
gets a test, or a reason. `make mutants` runs this in an environment that has cosmic-ray beside the one of `make test`.
"""

from __future__ import annotations

import argparse
import ast
import random
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parent.parent
SRC = "src/laconic"


@dataclass(frozen=True)
class Room:
    """Files whose mutants the same tests have to notice.

    Attributes:
        files: below src/laconic.
        tests: below tests.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "blockwise": Room(
        ("ops/reference/blockwise.py", "formats/blockwise.py"),
        ("ops/test_numerics.py", "ops/test_affine.py", "ops/test_native.py", "formats/test_blockwise.py"),
    ),
    "adamw": Room(("ops/reference/adamw.py",), ("ops/test_adamw.py", "ops/test_adamw_multi.py")),
    "other ops": Room(
        tuple(f"ops/reference/{name}.py" for name in ("accumulate", "bits", "gated", "reduce", "rows")),
        tuple(f"ops/test_{name}.py" for name in ("accumulate", "bits", "gated", "reduce", "rows")),
    ),
    "lossless": Room(
        ("ops/reference/lossless.py", "ops/reference/lossless_ranked.py", "formats/lossless.py"),
        (
            "ops/test_lossless.py",
            "ops/test_lossless_native.py",
            "formats/test_lossless.py",
            "formats/test_lossless_ranked.py",
        ),
    ),
    "activations": Room(
        tuple(f"activations/{name}.py" for name in ("functions", "gated", "kept", "norms")),
        tuple(
            f"activations/test_{name}.py"
            for name in (
                "hand_written",
                "norms",
                "gated_products",
                "notes",
                "witnesses",
                "compress",
                "attention",
                "blocks",
                "only_calls",
                "second_derivatives",
                "small_shapes",
                "computed_parameters",
            )
        ),
    ),
    "gradients": Room(
        ("gradients/store.py", "formats/coded_gradient.py", "formats/gradient.py"),
        ("gradients/test_store.py", "gradients/test_coded_gradient.py", "gradients/test_bound.py"),
    ),
    "coded sums": Room(("gradients/reduce.py",), ("gradients/test_bound.py", "gradients/test_store_ranks.py")),
    "dispatch": Room(
        tuple(f"moe/dispatch/{name}.py" for name in ("flat", "send_plan", "staged", "token_slices", "traffic")),
        tuple(f"moe/test_{name}.py" for name in ("flat", "order", "cuts", "traffic", "capacity", "legs")),
    ),
}


def main() -> int:
    """Run the sample of each room, print what survived and write the table of scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--mutants", type=int, default=40, help="of each room")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    parser.add_argument("--timeout", type=float, default=300, help="seconds; a mutant that hangs is noticed")
    parser.add_argument("--report", type=Path, default=ROOT / "build/mutation.md")
    args = parser.parse_args()
    if _git("status", "--porcelain", "--", SRC):
        parser.error(f"{SRC} has changes that are not committed; mutants are made in place, so commit or stash them")
    rows = []
    for name in args.rooms:
        try:
            rows.append(_run(name, ROOMS[name], args))
        finally:
            _git("checkout", "--", SRC)
        _write(args.report, rows, args)
    return 0


@dataclass(frozen=True)
class _Row:
    room: str
    noticed: int
    survived: tuple[str, ...]


def _run(name: str, room: Room, args: argparse.Namespace) -> _Row:
    files = [Path(SRC, file) for file in room.files]
    tests = [f"tests/{test}" for test in room.tests]
    command = [args.python, "-m", "pytest", "-n", "0", "-x", "-q", "--hypothesis-profile", "ci", *tests]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        raise SystemExit(f"the tests of {name} fail without any mutant: {shlex.join(command)}")
    config = ConfigDict(
        {
            "timeout": args.timeout,
            "excluded-modules": [],
            "test-command": shlex.join(command),
            "distributor": {"name": "local"},
        }
    )
    session = args.report.parent / f"mutation-{name.replace(' ', '-')}.sqlite"
    session.parent.mkdir(parents=True, exist_ok=True)
    with use_db(session, WorkDB.Mode.create) as db:
        init(files, db, {})
        items = [item for item in db.work_items if _changes_code(item)]
        chosen = set(
            random.Random(f"{args.seed} {name}").sample([item.job_id for item in items], min(args.mutants, len(items)))
        )
        for item in db.work_items:
            if item.job_id not in chosen:
                db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
        execute(db, config)
        results = [(job, result) for job, result in db.results if job in chosen]
        items_of = {item.job_id: item for item in db.work_items}
    survived = tuple(
        _described(items_of[job], result) for job, result in results if result.test_outcome == TestOutcome.SURVIVED
    )
    print(f"{name}: {len(results) - len(survived)} of {len(results)} noticed", flush=True)
    for line in survived:
        print(line, flush=True)
    return _Row(name, len(results) - len(survived), survived)


def _changes_code(item: WorkItem) -> bool:
    """Whether a mutant is neither in an annotation, which nobody runs, nor in an overload of a decorator."""
    [mutation] = item.mutations
    return mutation.start_pos[0] not in _lines_of_annotations(str(mutation.module_path)) or "BitOr" not in (
        mutation.operator_name
    )


def _lines_of_annotations(path: str, _cache: dict[str, set[int]] = {}) -> set[int]:  # noqa: B006
    if path not in _cache:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        _cache[path] = {
            line
            for annotation in _annotations(ast.walk(tree))
            for line in range(annotation.lineno, (annotation.end_lineno or annotation.lineno) + 1)
        }
    return _cache[path]


def _annotations(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield node.returns
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
        ):
            yield node.value  # an alias of types


def _described(item: WorkItem, result: WorkResult) -> str:
    [mutation] = item.mutations
    changed = [line for line in (result.diff or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(
        [
            f"- `{mutation.module_path}:{mutation.start_pos[0]}` {mutation.operator_name}",
            *(f"      {line}" for line in changed),
        ]
    )


def _write(report: Path, rows: list[_Row], args: argparse.Namespace) -> None:
    lines = [
        f"# Mutants at {_git('rev-parse', '--short', 'HEAD')}",
        "",
        f"`python tools/mutation.py --mutants {args.mutants} --seed {args.seed}`",
        "",
        "| room | mutants | noticed | survived |",
        "|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row.room} | {row.noticed + len(row.survived)} | {row.noticed} | {len(row.survived)} |")
    for row in rows:
        lines += ["", f"## {row.room}", "", *row.survived]
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
