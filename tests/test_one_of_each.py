"""What CI runs of the slow suite: a case of every slow test, and the same one each time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import one_of_each


class _Item:
    def __init__(self, nodeid: str, *, slow: bool) -> None:
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name: str) -> object:
        return pytest.mark.slow if name == "slow" and self.slow else None


def _kept(items: list[Any]) -> set[str]:
    return {item.nodeid for item in one_of_each(items)}


def test_every_slow_test_keeps_one_case_and_others_keep_all() -> None:
    slow = [
        _Item(f"tests/test_{file}.py::test_{test}[{case}]", slow=True)
        for file in "ab"
        for test in "xy"
        for case in range(9)
    ]
    alone = [_Item("tests/test_a.py::test_alone", slow=True)]
    quick = [_Item(f"tests/test_a.py::test_x[quick-{case}]", slow=False) for case in range(5)]
    kept = _kept([*slow, *alone, *quick])
    assert {item.nodeid for item in (*alone, *quick)} <= kept
    functions = [nodeid.partition("[")[0] for nodeid in kept - {item.nodeid for item in quick}]
    assert sorted(functions) == sorted({item.nodeid.partition("[")[0] for item in (*slow, *alone)})


def test_the_case_does_not_depend_on_the_order_nor_on_other_tests() -> None:
    items = [_Item(f"tests/test_a.py::test_x[{case}]", slow=True) for case in range(20)]
    others = [_Item("tests/test_b.py::test_y[1]", slow=True)]
    [kept] = _kept(items)
    assert {kept} == _kept(items[::-1]) == _kept([*others, *items]) - {"tests/test_b.py::test_y[1]"}
