"""Charts of the page beside curves: memory, bytes sent, sites, loads of experts, schedules; and what a run lacks."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.train.report.charts import experts_chart, left_out, sites_chart, timeline_chart
from laconic.train.report.compare import compare
from laconic.train.report.metrics import MetricsWriter
from laconic.train.report.run_reader import Run, load_runs
from laconic.train.step_timeline import TIMELINE_FILE, TaskTime, recorded_step, timeline_of_pipeline
from tests.patience import patient
from tests.train.report_runs import make_run, page_data

SITES = [
    {"name": "model.layers.0.mlp", "kind": "mlp", "format": "nf4", "origin": None, "before": 400.0, "after": 100.0},
    {"name": "model.layers.1.mlp", "kind": "mlp", "format": "nf4", "origin": None, "before": 400.0, "after": 100.0},
    {"name": "model.layers.0.q", "kind": "linear", "format": "nf4", "origin": "norm", "before": 90.0, "after": 0.0},
    {"name": "lm_head.0x.1", "kind": "linear", "format": None, "origin": None, "before": 10.0, "after": 10.0},
]
TASKS = [("rank 0", "a", 10.0, [("0F0", 1.0, 2.0), ("0B0", 5.0, 7.0)]), ("rank 1", "b", 110.0, [("1F0", 102.0, 103.5)])]


def make_rich_run(folder: Path, name: str, layers: int = 2, experts: int = 4) -> Path:
    """A run that has recorded everything the page can show."""
    run_dir = make_run(folder, name, bits=4)
    activations = json.loads((run_dir / "activations.json").read_text())
    activations["sites"] = [
        {**site, "before_nbytes_per_token": site["before"], "after_nbytes_per_token": site["after"]} for site in SITES
    ]
    (run_dir / "activations.json").write_text(json.dumps(activations))
    with MetricsWriter(run_dir) as writer:
        for step in range(41, 61):
            writer.write(step, loss=1.0, memory_nbytes=10**9 + step, wire_nbytes=2 * 10**6, wire_raw_nbytes=3 * 10**6)
            writer.write(step, moe_loads=[[step + expert for expert in range(experts)] for _ in range(layers)])
    (run_dir / TIMELINE_FILE).write_text(json.dumps(timeline_of_pipeline(3, "1f1b, 2 stages", TASKS)))
    return run_dir


def only(run_dir: Path) -> Run:
    (run,) = load_runs([run_dir])
    return run


def test_sites_of_all_layers_are_one_group_with_the_sum_of_their_bytes(tmp_path: Path) -> None:
    assert sites_chart(only(make_rich_run(tmp_path, "run"))) == [
        {"name": "model.layers.*.mlp", "kind": "mlp", "before": 800.0, "after": 200.0, "kept_as": "nf4"},
        {"name": "model.layers.*.q", "kind": "linear", "before": 90.0, "after": 0.0, "kept_as": "rebuilt from norm"},
        {"name": "lm_head.0x.*", "kind": "linear", "before": 10.0, "after": 10.0, "kept_as": "exact"},
    ]


def test_loads_of_experts_are_thinned_evenly_and_keep_both_ends(tmp_path: Path) -> None:
    small = experts_chart(only(make_rich_run(tmp_path, "small")))
    assert small is not None
    assert (small["steps"], small["numbers"]) == (list(range(41, 61)), [0, 1])
    assert small["layers"][1][0] == [41, 42, 43, 44]
    large = experts_chart(only(make_rich_run(tmp_path, "large", layers=40, experts=256)))
    assert large is not None
    assert (large["numbers"][0], large["numbers"][-1], len(large["numbers"])) == (0, 39, 12)
    assert (large["steps"][0], large["steps"][-1]) == (41, 60)
    assert sum(len(loads) for layer in large["layers"] for loads in layer) <= 24_000


@given(first=st.integers(0, 10**6), more=st.integers(1, 10**6))
def test_the_recorded_step_is_one_that_the_run_takes(first: int, more: int) -> None:
    assert first < recorded_step(first, first + more) <= min(first + 3, first + more)


def test_ranks_of_several_machines_share_one_axis() -> None:
    # Rank 1's clock is 100 s ahead: its forward begins 1 s after that of rank 0, which begins the axis.
    found = timeline_of_pipeline(3, "gpipe", TASKS)
    assert found["groups"][0]["lanes"] == [
        {"name": "rank 0", "tasks": [["0F0", 0.0, 1.0], ["0B0", 4.0, 6.0]]},
        {"name": "rank 1", "tasks": [["1F0", 1.0, 2.5]]},
    ]
    # On one machine the clock is the same, and the ends of the all-reduce do not count.
    one = [("rank 0", "a", 10.0, [TaskTime("0F0", 1.0, 2.0)]), ("rank 1", "a", 11.0, [TaskTime("1F0", 2.0, 3.0)])]
    assert timeline_of_pipeline(3, "gpipe", one)["groups"][0]["lanes"] == [
        {"name": "rank 0", "tasks": [["0F0", 0.0, 1.0]]},
        {"name": "rank 1", "tasks": [["1F0", 1.0, 2.0]]},
    ]


def test_a_schedule_names_the_kinds_of_its_tasks(tmp_path: Path) -> None:
    run_dir = make_rich_run(tmp_path, "run")
    chart = timeline_chart(only(run_dir))
    assert chart is not None
    assert chart["kinds"] == ["forward", "backward"]
    chunks = {"version": 1, "step": 3, "schedule": "2 chunks", "groups": [{"title": "forward", "lanes": []}]}
    chunks["groups"] = [{"title": "forward", "lanes": [{"name": "inter", "tasks": [["dispatch 0.1", 0.0, 1.0]]}]}]
    (run_dir / TIMELINE_FILE).write_text(json.dumps(chunks))
    chart = timeline_chart(only(run_dir))
    assert chart is not None
    assert chart["kinds"] == ["dispatch"]


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 2}',
        '{"version": 1, "step": 3, "schedule": "", "groups": [{"title": "a", "lanes": [{"name": "b"}]}]}',
        '{"version": 1, "step": 3, "schedule": "x", "groups": [{"title": "a", "lanes": [{"name": "b", "tasks": '
        '[["0F0", 2.0, 1.0]]}]}]}',
        '{"version": 1, "step": "x", "schedule": "x", "groups": []}',
    ],
)
def test_a_damaged_timeline_is_left_out_with_the_reason(tmp_path: Path, content: str) -> None:
    run_dir = make_rich_run(tmp_path, "run")
    (run_dir / TIMELINE_FILE).write_text(content)
    compare([run_dir], tmp_path / "report.html")
    assert "Schedule of run: timeline.json is damaged or of another version." in left_out([only(run_dir)])


@pytest.mark.parametrize("loads", [[], [[]], [[1, -1]], [[1.5]], "many", [[True]], [3]])
def test_loads_that_are_no_counts_are_left_out_and_named(tmp_path: Path, loads: Any) -> None:
    run_dir = make_run(tmp_path, "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "moe_loads": loads}) + "\n")
    run = only(run_dir)
    assert any("moe_loads is" in note for note in run.notes)
    assert experts_chart(run) is None


def test_what_a_run_did_not_record_is_told_in_a_sentence_with_the_reason(tmp_path: Path) -> None:
    runs = load_runs([make_rich_run(tmp_path, "rich"), make_run(tmp_path, "exact"), make_run(tmp_path, "again")])
    assert left_out(runs[:1]) == []
    assert left_out(runs) == [
        "Memory after each step of exact and again: metrics.jsonl has no memory_nbytes.",
        "Bytes by site of exact and again: activations.json lists no sites with their bytes; a run that keeps "
        "everything exact has none.",
        "Load of experts of exact and again: no router of a mixture of experts was watched, as in a dense model.",
        "Schedule of exact and again: it has neither a pipeline nor layers of experts in chunks.",
    ]


def test_the_page_has_the_data_of_every_chart(tmp_path: Path) -> None:
    compare([make_rich_run(tmp_path, "rich"), make_run(tmp_path, "exact")], tmp_path / "report.html")
    data = page_data(tmp_path / "report.html")
    rich, exact = data["runs"]
    assert rich["memory"][-1] == [60, 10**9 + 60]
    assert rich["wire_raw"][-1] == [60, 3e6]
    assert (len(rich["sites"]), rich["timeline"]["step"], len(rich["experts"]["layers"])) == (3, 3, 2)
    assert (exact["memory"], exact["sites"], exact["experts"], exact["timeline"]) == ([], [], None, None)


def test_a_page_without_scripts_still_has_the_numbers(tmp_path: Path) -> None:
    text = compare([make_run(tmp_path, "a<b"), make_run(tmp_path, "nf4", bits=4)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    shown = re.search(r"<noscript>.*<pre>(.*)</pre></noscript>", page, re.DOTALL)
    assert shown
    assert shown[1] == escape(text)
    assert "__REPORT_" not in page
    assert "<title>Runs compared</title>" in page
    compare([make_run(tmp_path, "__REPORT_DATA__")], tmp_path / "one.html")
    assert "<title>Run __REPORT_DATA__</title>" in (tmp_path / "one.html").read_text("utf-8")


class _Page(HTMLParser):
    """Counts elements, and checks that whatever a reader needs to be told is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        named = dict(attrs)
        if tag == "svg" and named.get("aria-hidden") != "true" and not (named.get("aria-label") or "").endswith("."):
            self.faults.append(f"a chart without its text: {named}")
        if tag == "th" and named.get("scope") not in ("row", "col"):
            self.faults.append("a heading without scope")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_page_draws_its_charts_in_a_browser(tmp_path: Path) -> None:
    runs = [make_rich_run(tmp_path, "rich"), make_run(tmp_path, "exact"), make_run(tmp_path, "nf4", bits=4)]
    compare(runs, tmp_path / "report.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    browser = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    drawn = subprocess.run(
        [*browser, (tmp_path / "report.html").as_uri()], capture_output=True, text=True, timeout=patient(120)
    ).stdout
    head, _, scripts = drawn.partition("<script")
    assert "NaN" not in head
    assert "undefined" not in head
    page = _Page()
    page.feed(head)
    assert page.faults == []
    # Three samples in the legend; six curves, kinds, sites, two layers of experts, a schedule.
    assert page.count["svg"] == 3 + 6 + 1 + 1 + 2 + 1
    # The summary, the configuration, and the numbers of every chart; experts have one for both layers.
    assert page.count["table"] == page.count["caption"] == 2 + 10
    assert page.count["details"] == 10
    assert scripts
