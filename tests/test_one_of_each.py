"""What CI runs of the slow suite: what is marked ci, and of the rooms that compute a case of every slow test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import one_of_each


class _Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> object:
        return getattr(pytest.mark, name) if name in self.marks else None


def _kept(items: list[Any]) -> set[str]:
    return {item.nodeid for item in one_of_each(items)}


def test_every_slow_test_keeps_one_case_and_others_keep_all() -> None:
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
    assert sorted(functions) == sorted({item.nodeid.partition("[")[0] for item in (*slow, *alone)})


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
