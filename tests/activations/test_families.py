"""The table of Hugging Face families (docs/families.md) is what is measured."""

from __future__ import annotations

import re

import pytest

from tests.distributed.processes import ROOT

pytest.importorskip("transformers")
import transformers

from benchmarks.families import Row, cells, measure, rows_of, summary, with_rows
from benchmarks.family_models import Family, families
from tests.grid import slow_but

PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
ROWS = rows_of(PAGE)
# At 8 bits a linear's weight gradient is off by 0.6 % and attention's by 1.3 %; the sites of two layers add up to less
# than 4 %. Behind a relu, half a per cent of the values round to zero and lose their gradient: sqrt(0.005) = 7 % of one
# factor. A gradient that is off by 6 % in all has a cosine of 1 - 0.06^2 / 2. At 4 bits it is off by less than 25 %.
COSINES = 0.97, 0.998
# Lower bounds of their own: levit and pp_lcnet have thirty batch norms over few values, CPM-Ant starts from weights so
# large that the bend of its GELU is as wide as a step of the format.
COSINES_OF = {"levit": (0.96, 0.9995), "pp_lcnet": (0.96, 0.9995), "cpmant": (0.96, 0.999)}

# What transformers and torch warn of while a family is built is no matter of this page.
pytestmark = pytest.mark.filterwarnings("ignore")

same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE, reason="the page is of another transformers"
)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\d(?:\.\d+)?", text)]


def check(family: Family) -> str:
    """What is wrong with a family, measured now; "" if nothing is."""
    row, page = measure(family), ROWS[family.name]
    if row.problem or "why" in page:
        return "" if row.problem.partition(":")[0] == page.get("why", "").partition(":")[0] else row.problem or "builds"
    shown = dict(zip(page, cells(row), strict=True))
    wrong = [name for name in ("forward bits", "random state") if shown[name] != page[name]]
    # What the unmodified model does not repeat cannot be compared.
    if row.bits != "not repeatable":
        wrong += [
            f"{name} {found}" for name, found in (("bits", row.bits), ("random", row.random_state)) if found != "equal"
        ]
        least = COSINES_OF.get(family.name, COSINES)
        if row.cosine[0] < least[0] or row.cosine[1] < least[1]:
            wrong.append(f"gradient {row.cosine}")
    before, after = numbers(page["kept, bytes"])
    if row.after_nbytes / row.before_nbytes > 1.02 * after / before:
        wrong.append(f"{row.after_nbytes:,} of {row.before_nbytes:,} bytes")
    return ", ".join(wrong)


@same_version
def test_every_family_is_on_the_page_once() -> None:
    names = [family.name for family in families()]
    assert sorted(ROWS) == sorted(names)
    assert sum("why" not in row for row in ROWS.values()) >= 250
    assert all(PAGE.count(f"\n| {name} |") == 1 for name in names)


@same_version
@pytest.mark.parametrize(
    "name", slow_but(["llama", "bert", "bart", "vit", "mamba", "wav2vec2", "whisper"], "llama", "bart", "vit", "mamba")
)
@pytest.mark.ci
def test_a_row_is_what_is_measured(name: str) -> None:
    (family,) = [family for family in families() if family.name == name]
    assert check(family) == ""


@same_version
def test_rows_are_replaced_in_a_page() -> None:
    assert with_rows(PAGE, []) == PAGE
    (family,) = [family for family in families() if family.name == "pp_lcnet"]
    row = measure(family)
    again = rows_of(
        with_rows(PAGE.replace("| pp_lcnet | equal | equal | 0.", "| pp_lcnet | differ | equal | 1."), [row])
    )
    assert again["pp_lcnet"]["gradient, 4 bits (worst)"] == cells(row)[3]
    assert {n: r for n, r in again.items() if n != "pp_lcnet"} == {n: r for n, r in ROWS.items() if n != "pp_lcnet"}


@same_version
def test_a_new_row_has_its_place_and_the_counts_follow() -> None:
    old = next(line for line in PAGE.splitlines() if line.startswith("| llama |"))
    without = PAGE.replace(old + "\n", "")
    (family,) = [family for family in families() if family.name == "llama"]
    before, after = (int(number) for number in numbers(ROWS["llama"]["kept, bytes"]))
    new = with_rows(without, [Row(family, bits="equal", before_nbytes=before, after_nbytes=after)])
    assert [*rows_of(new)] == [*ROWS]
    assert {line for line in PAGE.splitlines() if not line.startswith("| llama |")} == {
        line for line in new.splitlines() if not line.startswith("| llama |")
    }
    broken = with_rows(without, [Row(family, problem="not built: reason")])
    assert rows_of(broken)["llama"] == {"family": "llama", "why": "not built: reason"}
    counts = [int(number) for number in re.findall(r"\d+", re.findall(r"^\*\*(\d+ of .*?)\*\*", PAGE, re.M | re.S)[0])]
    assert f"**{counts[0] - 1} of {counts[1]} families build and run small; {counts[2] - 1} of them" in broken
    with pytest.raises(ValueError, match="is not of transformers"):
        with_rows(PAGE.replace(f"transformers {transformers.__version__} ", "transformers 4.0 "), [])


def test_a_summary_names_what_is_not_equal() -> None:
    (family,) = [family for family in families() if family.name == "reformer"]
    assert "reformer (not repeatable)" in " ".join(summary([measure(family)]).split())


def test_pages_count_what_the_table_shows() -> None:
    measured = [row for row in ROWS.values() if "why" not in row]
    equal = sum(row["forward bits"] == "equal" for row in measured)
    summed_up = f"{len(measured)} of transformers' {len(ROWS)} families"
    counted = {
        "README.md": f"{summed_up} build small, and {equal} of them",
        "CHANGELOG.md": f"{summed_up} build small, and {equal} of them",
        "docs/asks.md": f"{summed_up} are measured",
    }
    for name, sentence in counted.items():
        assert sentence in (ROOT / name).read_text(encoding="utf-8"), name


@same_version
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_is_what_is_measured() -> None:
    wrong = {family.name: problem for family in families() if (problem := check(family))}
    assert wrong == {}
