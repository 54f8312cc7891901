"""Run the tests of what changed: python tools/changed_tests.py --since main -- ARGUMENTS_OF_PYTEST (make test-changed).

A changed module of laconic reaches the tests that import it: themselves, through other modules of its wing
(laconic.moe, laconic.cost, ...), or through modules of the tests. What other wings make of it is left to `make test`,
or to --far. A file that is no module reaches the tests that name it; one that no test names runs every test.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grimp

from laconic import _HOME

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"laconic": "src/laconic", "tests": "tests", "benchmarks": "benchmarks", "netlab": "netlab"}
STARTERS = ("tests.distributed.processes", "tests.distributed.forked", "tests.conftest")
"""They start processes for tests of anything, and import for these what no test of theirs is about."""
READERS = (
    "tests/pages/",
    "tests/test_docs.py",
    "tests/test_figures.py",
    "tests/test_site.py",
    "tests/trust/test_reliability_page.py",
)
"""They read every page."""
EVERYTHING = ["tests/"]


def module_of(path: str) -> str | None:
    """The module of a Python file of `PACKAGES`, as "laconic.moe.layer"; None for another file."""
    for package, folder in PACKAGES.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            name = path[len(folder) : -len(".py")].replace("/", ".")
            return f"{package}{name.removesuffix('.__init__')}"
    return None


def wing(module: str) -> str:
    """Two names of a module of laconic, one of any other."""
    return ".".join(module.split(".")[: 2 if module.startswith("laconic.") else 1])


def import_graph(sources: Mapping[str, str], far: bool = False) -> grimp.ImportGraph:
    """Imports between the modules of `PACKAGES`, with those that are named in strings and as `laconic.encode`.

    Args:
        sources: the text of each module.
        far: whether to keep imports between wings of laconic, and those of `STARTERS`.
    """
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    packages = "|".join(PACKAGES)
    for module, text in sources.items():
        names = re.findall(r"\blaconic\.(\w+)", text)
        for line in re.findall(r"^\s*from laconic import (.+)", text, re.MULTILINE):
            names += re.findall(r"\w+", line)
        named = {_HOME[name] for name in names if name in _HOME}
        named.update(re.findall(rf"[\"']((?:{packages})(?:\.\w+)+)", text))
        for package in re.findall(rf"f[\"']((?:{packages})(?:\.\w+)+)\.\{{", text):
            named |= graph.find_children(package) if package in graph.modules else set()
        for imported in (named & graph.modules) - {module}:
            graph.add_import(importer=module, imported=imported)
        for imported in graph.find_modules_directly_imported_by(module):
            across = wing(module).startswith("laconic.") and wing(module) != wing(imported)
            if "laconic" in (module, imported) or (not far and (across or module in STARTERS)):
                graph.remove_import(importer=module, imported=imported)
    return graph


def reached(paths: Iterable[str], sources: Mapping[str, str], far: bool = False) -> dict[str, list[str]]:
    """The test files, or folders, that each changed file reaches; `EVERYTHING` where that cannot be told.

    Args:
        paths: changed files, relative to the repository.
        sources: the text of each module of `PACKAGES`.
        far: as of `import_graph`.
    """
    graph = import_graph(sources, far)
    tests = {
        module: f"{module.replace('.', '/')}.py" for module in sources if re.search(r"^tests\b.*\.test_\w+$", module)
    }
    found = {}
    for path in paths:
        module, name = ("laconic.ops" if path.startswith("csrc/") else module_of(path)), Path(path).name
        downstream: set[str] = set()
        if module is not None and module in graph.modules:
            downstream = graph.find_downstream_modules(module, as_package=path.startswith("csrc/")) | {module}
        files: list[str] | set[str] = {tests[each] for each in downstream & tests.keys()}
        if path in ("pyproject.toml", "constraints.txt", "tests/conftest.py"):
            files = EVERYTHING
        elif path.startswith("tests/") and path.count("/") > 1 and (module is None or name == "conftest.py"):
            files = [f"{Path(path).parent.as_posix()}/"]
        elif not files:
            said = [re.escape(path)] + [re.escape(name)] * ("." in name or name[0].isupper())
            said += [rf"[\"']{re.escape(Path(path).stem)}[\"']"] * path.startswith(("tools/", "benchmarks/"))
            files = {file for each, file in tests.items() if re.search("|".join(said), sources[each])}
            files |= {file for file in tests.values() if file.startswith(READERS) and path.endswith(".md")}
        found[path] = sorted(files) or EVERYTHING
    return found


def changed(since: str) -> list[str]:
    """Files that differ from where this branch left `since`: committed, not committed, and new."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--since {since}: git {command[0]}: {done.stderr.strip()}; name a branch or a commit")
        return done.stdout.splitlines()

    [base] = lines("merge-base", since, "HEAD")
    return sorted({*lines("diff", "--name-only", base), *lines("ls-files", "--others", "--exclude-standard")})


def read_sources() -> dict[str, str]:
    """The text of each module of `PACKAGES`."""
    files = [file for folder in PACKAGES.values() for file in (ROOT / folder).rglob("*.py")]
    named = {module_of(file.relative_to(ROOT).as_posix()): file.read_text() for file in files}
    return {module: text for module, text in named.items() if module is not None}


def main(arguments: Sequence[str]) -> int:
    """Returns pytest's exit code; 0 when nothing differs."""
    parser = argparse.ArgumentParser(
        prog="python tools/changed_tests.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", default="main", help="a branch or commit: what changed since this branch left it")
    parser.add_argument("--far", action="store_true", help="tests that reach it through other wings, too")
    parser.add_argument("--show", action="store_true", help="say what would run")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    chosen = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # grimp looks for packages there
    found = reached(changed(chosen.since), read_sources(), chosen.far)
    for path, files in found.items():
        rooms = Counter("/".join(file.split("/")[:2]) for file in files)
        print(f"{path}: {', '.join(f'{room} ({count})' if count > 1 else room for room, count in rooms.items())}")
    files = sorted({file for files in found.values() for file in files})
    if EVERYTHING[0] in files:
        files = EVERYTHING
    print(f"{len(files)} files of tests" if files else f"nothing differs from {chosen.since}", flush=True)
    if chosen.show or not files:
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *files, *chosen.pytest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
