"""Wide grids of parameters: a covering part of them runs by default, a wider one is slow, the rest is left out.

A mistake in how two parameters act together shows wherever the two meet, whatever the others are. So the default suite
runs few combinations in which every `strength` values of different axes meet at least once, and the slow suite further
ones, in which every `strength + 1` do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

Row = tuple[int, ...]


def grid(*axes: Sequence[Any], strength: int = 2) -> list[ParameterSet]:
    """Combinations of one value per axis, for `pytest.mark.parametrize`: two `covering` parts, the wider one slow.

    Args:
        axes: the values of each parameter, the slowest to change first. A `pytest.param` stands for several
            parameters that change together; its name and marks stay. Values marked slow or ci leave
            none of the others out of the default run.
        strength: how many values of different axes meet in at least one combination that is not slow.

    Returns:
        One `pytest.param` per combination, named by its values.
    """
    quick_values = [[index for index, value in enumerate(axis) if not _is_slow(value)] for axis in axes]
    rows = covering([len(indices) for indices in quick_values], strength)
    quick = {tuple(indices[place] for indices, place in zip(quick_values, row, strict=True)) for row in rows}
    # Of what is marked the same part keeps its own marks only.
    sizes = [len(axis) for axis in axes]
    own = covering(sizes, strength)
    params = []
    for row in sorted(quick | own | covering(sizes, strength + 1)):
        cells = [_cell(axis[index], index) for axis, index in zip(axes, row, strict=True)]
        is_covered = row in quick or (row in own and any(map(_is_slow, cells)))
        marks = [mark for cell in cells for mark in cell.marks] + ([] if is_covered else [pytest.mark.slow])
        name = "-".join(str(cell.id) for cell in cells)
        params.append(pytest.param(*(value for cell in cells for value in cell.values), marks=marks, id=name))
    return params


def slow_but(values: Iterable[Any], *quick: Any) -> list[ParameterSet]:
    """All values, for `pytest.mark.parametrize`; those that are not among `quick` are slow."""
    values = list(values)
    assert all(value in values for value in quick), quick
    return [
        pytest.param(value, marks=[] if value in quick else [pytest.mark.slow], id=_name(value, index))
        for index, value in enumerate(values)
    ]


def few(values: Iterable[Any], count: int, rest: pytest.MarkDecorator = pytest.mark.slow) -> list[ParameterSet]:
    """All values, for `pytest.mark.parametrize` or an axis of `grid`; all but `count`, first to last, get a mark.

    Slow ones run in CI once per test, and that in some rooms only; `pytest.mark.ci` as `rest` has CI run all.
    """
    values = list(values)
    assert 1 <= count <= len(values), (count, len(values))
    quick = {place * (len(values) - 1) // max(count - 1, 1) for place in range(count)}
    cells = [_cell(value, index) for index, value in enumerate(values)]
    return [cell if index in quick else cell._replace(marks=(*cell.marks, rest)) for index, cell in enumerate(cells)]


def covering(sizes: Sequence[int], strength: int) -> set[Row]:
    """Rows in which any values of any `strength` axes meet at least once, with axis i in range(sizes[i]).

    Greedy, one row at a time, as in Cohen et al., "The AETG system" (1997): a row begins with the first values that
    have not met, and each further axis takes the value that adds the most new meetings, then the one used least.
    """
    if strength >= len(sizes):
        return {*itertools.product(*map(range, sizes))}
    axes = range(len(sizes))
    missing = dict.fromkeys(
        tuple(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(axes, strength)
        for values in itertools.product(*(range(sizes[axis]) for axis in chosen))
    )
    rows: set[Row] = set()
    used: Counter[tuple[int, int]] = Counter()
    while missing:
        row = dict(next(iter(missing)))
        for axis in axes:
            if axis not in row:
                row[axis] = max(
                    range(sizes[axis]),
                    key=lambda value: (
                        len(_meetings(row, (axis, value), strength) & missing.keys()),
                        -used[axis, value],
                    ),
                )
        for meeting in itertools.combinations(sorted(row.items()), strength):
            missing.pop(meeting, None)
        used.update(row.items())
        rows.add(tuple(row[axis] for axis in axes))
    return rows


def _is_slow(value: Any) -> bool:
    """Whether a value of an axis is marked so that the default run leaves it out."""
    return isinstance(value, ParameterSet) and any(mark.name in ("slow", "ci") for mark in value.marks)


def _meetings(row: dict[int, int], added: tuple[int, int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """What meets in a row because of one more axis and its value."""
    others = itertools.combinations(row.items(), strength - 1)
    return {tuple(sorted((*chosen, added))) for chosen in others}


def _cell(value: Any, index: int) -> ParameterSet:
    """A value of an axis with a name for it."""
    if isinstance(value, ParameterSet):
        return value if value.id is not None else value._replace(id=str(index))
    return pytest.param(value, id=_name(value, index))


def _name(value: object, index: int) -> str:
    """A value as it reads in the name of a test; one that does not read well is named by its place in its axis."""
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    named = getattr(value, "name", getattr(value, "__name__", None))
    return named if isinstance(named, str) else str(index)
