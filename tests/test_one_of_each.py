"""Parts of the suite: what is marked ci, of rooms that compute a case of every slow test, and shards for a night."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import in_shard, is_all_slow, may_be_one_of_each, one_of_each
from tests.distributed.processes import ROOT


class _Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> object:
        return getattr(pytest.mark, name) if name in self.marks else None


def _kept(items: list[Any]) -> set[str]:
    return {item.nodeid for item in one_of_each(items)}


def test_every_slow_test_without_a_quick_case_keeps_one_and_others_keep_all() -> None:
    slow = [
        _Item(f"tests/moe/test_{file}.py::test_{test}[{case}]", "slow")
        for file in "ab"
        for test in "xy"
        for case in range(9)
    ]
    alone = [_Item("tests/moe/test_a.py::test_alone", "slow")]
    quick = [_Item(f"tests/moe/test_a.py::test_x[quick-{case}]") for case in range(5)]
    kept = _kept([*slow, *alone, *quick])
    assert {item.nodeid for item in (*alone, *quick)} <= kept
    functions = [nodeid.partition("[")[0] for nodeid in kept - {item.nodeid for item in quick}]
    with_quick = quick[0].nodeid.partition("[")[0]
    assert sorted(functions) == sorted({item.nodeid.partition("[")[0] for item in (*slow, *alone)} - {with_quick})


def test_the_case_does_not_depend_on_the_order_nor_on_other_tests() -> None:
    items = [_Item(f"tests/moe/test_a.py::test_x[{case}]", "slow") for case in range(20)]
    others = [_Item("tests/moe/test_b.py::test_y[1]", "slow")]
    [kept] = _kept(items)
    assert {kept} == _kept(items[::-1]) == _kept([*others, *items]) - {"tests/moe/test_b.py::test_y[1]"}


def test_elsewhere_and_of_benchmarks_only_what_is_marked_for_ci_is_kept_and_that_with_every_case() -> None:
    marked = [_Item(f"tests/infer/test_a.py::test_x[{case}]", "ci") for case in range(3)]
    slow = [
        _Item(f"tests/infer/test_a.py::test_y[{case}]", *marks)
        for case, marks in enumerate((("slow",), ("slow", "ci")))
    ]
    benchmark = _Item("tests/moe/test_layer_benchmark.py::test_it_writes_its_table", "slow")
    assert _kept([*marked, *slow, benchmark]) == {item.nodeid for item in marked}


def test_shards_have_every_file_once() -> None:
    items = [_Item(f"tests/moe/test_{file}.py::test_{test}") for file in range(50) for test in "xy"]
    shards = [in_shard(items, f"{k}/4") for k in (1, 2, 3, 4)]  # type: ignore[arg-type]
    assert sorted(item.nodeid for shard in shards for item in shard) == sorted(item.nodeid for item in items)
    assert len(set.union(*shards)) == 100
    files = [{item.nodeid.partition("::")[0] for item in shard} for shard in shards]
    assert all(5 < len(shard) < 25 for shard in files)
    assert len(set.union(*files)) == sum(len(shard) for shard in files)
    assert in_shard(items, "1/1") == set(items)  # type: ignore[arg-type]
    for wrong in ("0/4", "5/4", "4", "1/0", "a/b", "1/4 "):
        with pytest.raises(pytest.UsageError, match="not K/N"):
            in_shard(items, wrong)  # type: ignore[arg-type]


@pytest.mark.ci
def test_ci_and_what_it_leaves_out_are_all_slow_tests() -> None:
    collect = [sys.executable, "-m", "pytest", "tests/gpu_day/test_parts.py", "-m", "slow", "--collect-only", "-q"]
    whole, ci, left_out = (
        {line for line in subprocess.check_output([*collect, *more], cwd=ROOT, text=True).splitlines() if "::" in line}
        for more in ((), ("--one-of-each",), ("--left-out",))
    )
    assert ci
    assert left_out
    assert not ci & left_out
    assert ci | left_out == whole


@pytest.mark.parametrize(
    ("text", "all_slow"),
    [
        ("pytestmark = pytest.mark.slow  # it draws\n\n\ndef test_a():\n    pass\n", True),
        ("pytestmark = [\n    pytest.mark.timeout(9),\n    pytest.mark.ci,\n]\n", True),
        ("pytestmark = pytest.mark.timeout(9)\nSLOW = pytest.mark.slow\n\n\ndef test_a():\n    pass\n", False),
        ("@pytest.mark.slow\ndef test_a():\n    pass\n\n\n@pytest.mark.ci\n@other\ndef test_b():\n    pass\n", True),
        ("@pytest.mark.slow\ndef test_a():\n    pass\n\n\ndef test_b():\n    pass\n", False),
        ("@pytest.mark.slow\ndef test_a():\n    pass\n\n\nTestMachine = Machine.TestCase\n", False),
        ("@pytest.mark.slow\ndef test_a():\n    pass\n\n\nclass TestB:\n    pass\n", False),
        ('@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.slow)])\ndef test_a(x):\n    pass\n', False),
        ("def help():\n    pass\n", False),
    ],
)
def test_files_with_a_quick_test_are_imported_by_the_default_run(text: str, all_slow: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(text)
    assert is_all_slow(file) == all_slow


@pytest.mark.parametrize(
    ("room", "text", "is_imported"),
    [
        ("moe", "@pytest.mark.slow\n", True),
        ("moe", "@pytest.mark.parametrize('x', grid([1, 2], [3]))\n", True),
        ("activations", "def test_a(family: str) -> None:\n", True),
        ("moe", "def test_a() -> None:\n", False),
        ("infer", "@pytest.mark.slow\n", False),
        ("infer", "@pytest.mark.ci\n", True),
    ],
)
def test_files_without_slow_tests_are_left_out_by_ci(room: str, text: str, is_imported: bool, tmp_path: Path) -> None:
    file = tmp_path / "tests" / room / "test_x.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert may_be_one_of_each(file, tmp_path) == is_imported


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("nightly")


def test_a_nights_shards_run_every_part(nightly: ModuleType) -> None:
    whole = nightly.parts(seed=7)
    for num in (1, 3, 4, 20):
        shards = [nightly.of_shard(whole, k, num) for k in range(1, num + 1)]
        assert [shard.pop("slow")[-1] for shard in shards] == [f"--shard={k}/{num}" for k in range(1, num + 1)]
        assert sorted(name for shard in shards for name in shard) == sorted(whole.keys() - {"slow"})
        assert all(command == whole[name] for shard in shards for name, command in shard.items())


def test_six_nights_have_transformers_suite_on_every_family_and_every_example(nightly: ModuleType) -> None:
    suite = pytest.importorskip("tests.integrations.transformers_suite")
    nights = [nightly.parts(seed) for seed in range(6)]
    assert {night["hosts"][-1].split()[-1].strip("'") for night in nights} == suite.MODELS.keys()
    assert {night["examples"][-1] for night in nights} == {"1/3", "2/3", "3/3"}


def test_what_parts_of_a_night_name_is_there(nightly: ModuleType) -> None:
    rooms = importlib.import_module("mutation_rooms").ROOMS.values()
    named = [f"src/laconic/{file}" for room in rooms for file in room.files]
    named += [f"tests/{file}" for room in rooms for file in room.tests]
    commands = " ".join(word for command in nightly.parts(seed=7).values() for word in command)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    for prefix, names in re.findall(r"\$\(addprefix (tests/[^,]+),([^)]+)\)", makefile):
        named += [prefix + name for name in names.split()]
    named += re.findall(r"(?<= )tests/[\w/]+(?:\.py)?(?=[\s;]|$)", f"{commands} {makefile}")
    assert len(named) > 80
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_part_of_a_night_ends_with_a_line(
    nightly: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(seed: int) -> dict[str, list[str]]:
        say = [sys.executable, "-c"]
        return {
            "slow": [*say, "print('=== 3 passed, 1 skipped in 2s ===\\nmake[1]: bye')"],
            "soak": [*say, "import sys; sys.exit('fault 5 was not seen')"],
            "fuzz": [*say, ""],
        }

    monkeypatch.setattr(nightly, "parts", parts)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    assert nightly.main(["--seed", "7"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "seed 7, shard 1/1",
        "slow: green, 0.0 min: 3 passed, 1 skipped in 2s",
        "soak: RED, exit code 1, build/nightly/soak.log, 0.0 min: fault 5 was not seen",
        "fuzz: green, 0.0 min: it said nothing",
    ]
    assert (tmp_path / "build" / "nightly" / "soak.log").read_text() == "fault 5 was not seen\n"
    with pytest.raises(SystemExit):
        nightly.main(["--shard", "5/4"])
    assert "not K/N with K from 1 to N" in capsys.readouterr().err
