"""How benchmarks take times: cases in turn, what counts and what does not, and what a report says about it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kit import timing
from benchmarks.kit.timing import Timing, seconds_of
from benchmarks.registry import Table, how_long, took
from benchmarks.run import modules
from laconic.activations.keep import witnesses


def clock(case: Callable[[], object]) -> Callable[[], float]:
    """A clock by which a case takes the number that it returns."""
    taken = float(str(case()))
    return lambda: taken


def test_training_steps_are_timed_behind_those_that_compare_themselves() -> None:
    assert witnesses.ALWAYS == timing.UNUSUAL_ROUNDS


def test_cases_take_turns_and_first_rounds_do_not_count() -> None:
    calls: list[str] = []
    values = {"a": iter((9.0, 1.0, 2.0, 5.0)), "b": iter((9.0, 3.0, 3.0, 3.0))}

    def case(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return next(values[name])

        return run

    found = seconds_of({"a": case("a"), "b": case("b")}, 3, clock=clock)
    assert calls == ["a", "b"] * 4
    assert found["a"].samples == (1.0, 2.0, 5.0)
    assert found == {"a": 2.0, "b": 3.0}
    assert found["a"].over(found["b"]) == pytest.approx(2 / 3)


def test_a_timing_keeps_its_rounds_between_processes() -> None:
    back = pickle.loads(pickle.dumps(Timing([3.0, 1.0, 2.0])))
    assert (back, back.samples) == (2.0, (3.0, 1.0, 2.0))


def test_warm_ups_and_preparations_come_before_each_time() -> None:
    calls: list[str] = []

    def run() -> float:
        calls.append("run")
        return 1.0

    seconds_of({"a": run}, 2, warm_up_rounds=0, warm_ups=2, before=calls.append, clock=clock)
    assert calls == ["run", "run", "a", "run"] * 2


def test_rounds_have_orders_of_their_own_when_asked() -> None:
    calls: list[int] = []

    def case(number: int) -> Callable[[], float]:
        def run() -> float:
            calls.append(number)
            return 1.0

        return run

    cases = {f"{number}": case(number) for number in range(3)}
    seconds_of(cases, 20, warm_up_rounds=0, shuffle=True, clock=clock)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert len(set(rounds)) == 6  # every case follows every other
    seconds_of(cases, 20, warm_up_rounds=0, shuffle=True, clock=clock)
    assert calls[60:] == calls[:60]  # as on another rank


def test_spread_is_the_distance_of_the_quartiles_over_the_median() -> None:
    assert Timing((4.0, 1.0, 2.0, 3.0, 5.0)).spread == pytest.approx(2 / 3)
    assert Timing((4.0,)).spread == 0.0


def test_a_report_says_how_times_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "protocols", [])
    assert timing.summary() == ""
    timing.note({"other": Timing((1.0,))}, 3, 1)
    assert "Spread (distance of the quartiles over the median): one round has none." in timing.summary()
    timing.note({"steady": Timing((1.0, 1.0, 1.0)), "unsteady": Timing((1.0, 2.0, 3.0))}, 1, 0)
    text = timing.summary()
    assert "Rounds that count: 1 to 3; rounds before them: 1 to 3." in text
    assert "some right after a run of the same case (warm caches)" in text
    assert "of 2 cases, at most 50.0% (unsteady)" in text


def test_a_table_is_made_from_columns() -> None:
    table = Table.of("Squares", [2, 3], [("x", str), ("x x", lambda x: f"{x * x}")], "Small ones.")
    assert table.header == ["x", "x x"]
    assert table.rows == [["2", "4"], ["3", "9"]]
    assert "\n| 3 | 9 |\n\nSmall ones.\n" in table.render()


def test_every_benchmark_is_found_by_its_name() -> None:
    found = modules()
    assert found["moe-steps"] == "benchmarks.moe_steps"
    assert len(found) >= 29


def test_a_benchmark_says_before_it_starts_how_long_it_took(tmp_path: Path) -> None:
    def report(file: str, name: str, rest: str, minutes: float) -> None:
        command = f"python -m benchmarks.run {name}{rest} --out results/{file}"
        text = f"# Benchmark: {name}\n\n`{command}`\n\n{took(time.monotonic() - 60 * minutes)}\n"
        (tmp_path / file).write_text(text)

    parm = "python -m benchmarks.run moe-parm"
    assert "no report of moe-parm says" in how_long("moe-parm", parm, tmp_path)
    report("moe_parm_xeon.md", "moe-parm", "", 2.5)
    report("moe_parm_zoo.md", "moe-parm-zoo", "", 9.0)
    whole = "moe-parm took 2.5 minutes when moe_parm_xeon.md was made; "
    assert how_long("moe-parm", f"{parm} --out mine.md", tmp_path).startswith(whole)
    report("moe_parm_zwei.md", "moe-parm", " --only S2", 0.5)  # the report of a part says nothing of the whole
    assert how_long("moe-parm", parm, tmp_path).startswith(whole)
    part = f"0.5 minutes when moe_parm_zwei.md was made by `{parm} --only S2 --out results/moe_parm_zwei.md`; "
    assert part in how_long("moe-parm", f"{parm} --threads 2", tmp_path)
