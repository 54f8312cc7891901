"""The part of a grid that runs by default: every values of as many axes as asked for meet in it, and it is small."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grid import covering, few, grid, slow_but


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), strength=st.integers(1, 3))
def test_all_values_of_as_many_axes_as_asked_meet(sizes: list[int], strength: int) -> None:
    rows = covering(sizes, strength)
    everything = set(itertools.product(*map(range, sizes)))
    assert rows <= everything
    for axes in itertools.combinations(range(len(sizes)), min(strength, len(sizes))):
        met = {tuple(row[axis] for axis in axes) for row in rows}
        assert met == set(itertools.product(*(range(sizes[axis]) for axis in axes)))


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_alone_values_take_turns(sizes: list[int]) -> None:
    rows = covering(sizes, 1)
    assert len(rows) == max(sizes)
    for axis, size in enumerate(sizes):
        times = [sum(row[axis] == value for row in rows) for value in range(size)]
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("sizes", [(4, 6, 3, 3, 3), (5, 6, 3), (2, 2, 2, 2, 2, 2), (27, 3, 2)])
def test_pairs_take_little_more_than_the_two_largest_axes(sizes: tuple[int, ...]) -> None:
    least = math.prod(sorted(sizes)[-2:])
    assert least <= len(covering(sizes, 2)) <= 2 * least


def test_rows_do_not_change_from_run_to_run() -> None:
    # Workers of pytest-xdist have to collect the same tests.
    assert covering((2, 2, 2), 2) == {(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)}


def test_a_grid_has_every_combination_once_and_marks_those_that_add_no_pair() -> None:
    class Named:
        name = "named"

    axes = (("a", None), (torch.bfloat16, torch.float32), (Named(), (1, 2)))
    params = grid(*axes)
    assert [param.values for param in params] == list(itertools.product(*axes))
    assert [param.id for param in params[:4]] == [
        "a-bfloat16-named",
        "a-bfloat16-1",
        "a-float32-named",
        "a-float32-1",
    ]
    assert len({param.id for param in params}) == len(params)
    assert [bool(param.marks) for param in params] == [False, True, True, False, True, False, False, True]
    assert {mark.name for param in params for mark in param.marks} == {"slow"}


def test_slow_combinations_are_those_in_which_one_more_value_meets() -> None:
    sizes = (4, 3, 3, 2)
    params = grid(*map(range, sizes), strength=1)
    for one, other in itertools.combinations(range(4), 2):
        assert len({(param.values[one], param.values[other]) for param in params}) == sizes[one] * sizes[other]
    assert len(params) < math.prod(sizes) / 2
    assert sum(not param.marks for param in params) == 4


def test_parameters_that_change_together_keep_their_name_and_marks() -> None:
    pairs = (pytest.param(1, 2, id="ascending"), pytest.param(2, 1, marks=pytest.mark.gpu))
    params = grid(pairs, ("a", "b"), strength=1)
    assert [param.values for param in params] == [(1, 2, "a"), (1, 2, "b"), (2, 1, "a"), (2, 1, "b")]
    assert [param.id for param in params] == ["ascending-a", "ascending-b", "1-a", "1-b"]
    assert [[mark.name for mark in param.marks] for param in params] == [[], ["slow"], ["gpu", "slow"], ["gpu"]]


def test_all_but_the_named_values_are_slow() -> None:
    params = slow_but({"a": 1, "b": 2, "c": 3}, "b")
    assert [(*param.values, param.id, [mark.name for mark in param.marks]) for param in params] == [
        ("a", "a", ["slow"]),
        ("b", "b", []),
        ("c", "c", ["slow"]),
    ]
    with pytest.raises(AssertionError, match="d"):
        slow_but("abc", "d")


def test_no_more_axes_than_the_strength_are_never_slow() -> None:
    assert not any(param.marks for param in grid(range(3), range(4)))
    assert sum(not param.marks for param in grid(range(3), range(4), strength=1)) == 4


def test_a_few_values_run_by_default_and_meet_all_others() -> None:
    params = few("abcde", 3)
    assert [param.id for param in params] == list("abcde")
    assert [bool(param.marks) for param in params] == [False, True, False, True, False]
    assert [[mark.name for mark in param.marks] for param in few("abc", 1, pytest.mark.ci)] == [[], ["ci"], ["ci"]]
    marked = few([pytest.param(1, 2, id="pair", marks=pytest.mark.gpu), (3, 4)], 2)
    assert [(param.values, param.id, len(param.marks)) for param in marked] == [
        ((1, 2), "pair", 1),
        (((3, 4),), "1", 0),
    ]
    with pytest.raises(AssertionError):
        few("ab", 3)
    quick = [param.values for param in grid(params, "xyz", strength=1) if not param.marks]
    assert quick == [("a", "x"), ("c", "y"), ("e", "z")]
    assert len(grid(params, "xyz", strength=1)) == 15
    ci = grid(few("abcde", 3, pytest.mark.ci), "xyz", strength=1)
    assert sorted(param.values[0] for param in ci if [mark.name for mark in param.marks] == ["ci"]) == ["b", "d"]
    assert [param.values for param in ci if not param.marks] == quick
