"""docs/reliability.md has every row of the plan, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = [
    f"{kind}{number}" for kind, most in zip("PLFBDS", (8, 6, 11, 5, 6, 5), strict=True) for number in range(1, most + 1)
]


def test_every_row_says_what_proves_it_or_why_nothing_can() -> None:
    for row in ROWS:
        found = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
        assert len(found) == 1, (row, found)
        assert "`tests/" in found[0] or "make " in found[0], found


def named_tests() -> list[tuple[str, str]]:
    """File and function of each; `::name` alone is in the file before."""
    found, file = [], ""
    for path, function in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", PAGE):
        file = path or file
        if path or function:
            found.append((file, function))
    return found


def test_the_tests_that_the_page_names_exist() -> None:
    names = named_tests()
    assert len(names) > 60
    for file, function in names:
        assert (ROOT / file).is_file(), file
        if function:
            assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), (file, function)
