"""What a recorded run says is what the plan has: the same tasks, in order, none before what it waits for."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from laconic.cli.main import main
from laconic.errors import CollectiveError, ConfigError
from laconic.infer import Engine, InferencePlan, RunTrace
from laconic.infer.recorder import AnswerLog, LayerLog, MessageLog, PassLog, Recorder, WorkerLog
from laconic.infer.run_trace import clock_offsets
from laconic.infer.split import EngineSplit
from laconic.schedule.inference import BlockTimes, inference_plan
from laconic.schedule.streams import Timeline, simulate
from tests.infer.models import NEW_TOKENS, generated, make
from tests.patience import patient

PLAN = InferencePlan(num_micro_batches=2, num_slices=3, slicing="experts")
PROMPTS = [[5, 9, 2], [17, 3, 8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every row chooses all six experts, so that no slice is ever empty; layers 0 and 2 have experts."""
    return make("qwen2_moe", tmp_path_factory.mktemp("models"), num_experts_per_tok=6)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, plan=PLAN, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def run(engine: Engine, model: Path) -> RunTrace:
    """Two prompts of one length, one for each micro-batch, after some that are not recorded."""
    engine.generate([[1, 2]], 3)
    with engine.trace() as recording:
        assert engine.generate(PROMPTS, NEW_TOKENS) == generated(model, PROMPTS)
    engine.generate([[1, 2]], 3)
    return recording.trace


def planned(plan: InferencePlan, num_steps: int) -> Timeline:
    """Two layers with experts and what follows them, in the seconds of nothing."""
    layer = BlockTimes.uniform(1.0, 1.0, 1.0, 1.0, 1.0, plan.num_slices)
    return simulate(inference_plan([layer, layer, BlockTimes(1.0, 0.0, (), (), ())], plan, 3, num_steps))


def check_no_overlap(timeline: Timeline) -> None:
    streams = defaultdict(list)
    for span in timeline.spans.values():
        streams[span.stream].append((span.start_seconds, span.end_seconds))
    for spans in streams.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_tasks_are_those_of_the_plan(run: RunTrace) -> None:
    plan = planned(PLAN, NEW_TOKENS).plan  # the first pass makes the first token
    assert {(task.name, task.stream) for task in run.measured.plan.tasks} == {(t.name, t.stream) for t in plan.tasks}
    for task in plan.tasks:
        assert set(run.measured.plan[task.name].after) == set(task.after)
        for before in task.after:
            assert run.measured.spans[before].end_seconds <= run.measured.spans[task.name].start_seconds


def test_streams_do_one_task_at_a_time_in_the_order_of_the_plan(run: RunTrace) -> None:
    check_no_overlap(run.measured)
    plan = planned(PLAN, NEW_TOKENS).plan
    for stream in plan.streams:
        for micro_batch in ("0", "1"):  # which of them goes first is not planned: they do not wait for each other
            ran, wanted = (
                [
                    task.name
                    for task in tasks.tasks
                    if task.stream == stream and task.name.split()[1].split(".")[1] == micro_batch
                ]
                for tasks in (run.measured.plan, plan)
            )
            assert ran == wanted
    attention = [task.name for task in run.measured.plan.tasks if task.stream == "attention"]
    for one, other in zip(attention[::2], attention[1::2], strict=True):  # ASAS
        assert (one.split()[0], other) == ("attention", one.replace("attention", "shared"))


def test_workers_may_be_asked_on_several_threads_at_once(engine: Engine, run: RunTrace) -> None:
    loads = engine.expert_loads()
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(engine.expert_loads) for _ in range(60)]
        for _ in range(5):
            with engine.trace() as recording:
                pass
            assert recording.trace.summary.num_steps == 0
    assert all(each.result() == loads for each in found)


def test_the_simulated_run_is_no_later_anywhere(run: RunTrace) -> None:
    assert run.simulated.plan is run.measured.plan
    for name, span in run.simulated.spans.items():
        assert span.end_seconds <= run.measured.spans[name].end_seconds + 1e-9
        assert span.seconds == pytest.approx(run.measured.spans[name].seconds)


def test_the_summary_counts_what_ran(run: RunTrace) -> None:
    summary = run.summary
    tokens = sum(map(len, PROMPTS)) + 2 * (NEW_TOKENS - 1)
    assert (summary.num_steps, summary.num_dropped) == (2 * NEW_TOKENS, 0)
    attention, experts = summary.workers
    assert (attention.num_rows, experts.num_rows) == (tokens, tokens * 2 * PLAN.num_slices)
    assert experts.busy_seconds == pytest.approx(run.measured.busy_seconds("experts"))
    assert attention.busy_seconds >= run.measured.busy_seconds("attention")  # sending, too
    for use in summary.workers:
        assert use.bubble_share == pytest.approx(1 - use.busy_seconds / summary.makespan_seconds)
        assert 0 < use.bubble_share < 1
    assert summary.makespan_seconds == run.measured.makespan_seconds
    assert 0 < summary.step_seconds <= summary.makespan_seconds
    assert len(summary.exposed_seconds) == 2
    assert 0 < sum(summary.exposed_seconds) * summary.num_steps < 2 * summary.makespan_seconds
    text = str(summary)
    assert f"{2 * NEW_TOKENS} steps" in text
    assert f"expert worker 0: busy {experts.busy_seconds:.3f} s" in text
    json.dumps(summary.to_dict())


def test_the_file_lays_both_on_one_axis(run: RunTrace, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["measured", "simulated"]
    measured, simulated = (
        {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["pid"] == pid} for pid in (0, 1)
    )
    assert measured == simulated
    assert len(measured) == len(run.measured.plan)


def test_recordings_do_not_overlap_and_leave_nothing_behind(engine: Engine) -> None:
    with engine.trace() as first:
        with pytest.raises(ConfigError, match="recorded already"), engine.trace():
            pass
        with pytest.raises(ConfigError, match="its block has not ended"):
            _ = first.trace
    assert first.trace.summary.num_steps == 0
    assert len(first.trace.measured.plan) == 0
    assert str(first.trace.summary) == "trace: no step was recorded whole"
    with engine.trace() as second:
        engine.generate([[4]], 1)
    assert second.trace.summary.num_steps == 1


def test_what_cannot_be_traced_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace needs expert workers"):
        Engine(model, experts=0, trace=tmp_path / "run.json")
    with pytest.raises(ConfigError, match="is no directory"):
        Engine(model, trace=tmp_path / "none" / "run.json")
    with pytest.raises(ConfigError, match="that is a directory"):
        Engine(model, trace=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "experts", "plan"),
    [
        (2, 2, InferencePlan(2, 2, order="greedy")),
        (1, 3, InferencePlan(1, 3, slicing="experts")),
        (1, 1, InferencePlan(2, shared_first=True)),
    ],
)
def test_every_worker_has_its_streams(
    model: Path, tmp_path: Path, attention: int, experts: int, plan: InferencePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5, 9, 2], [17], [4, 4, 4, 4]]
    file = tmp_path / "run.json"
    monkeypatch.chdir(tmp_path)
    with Engine(model, attention=attention, experts=experts, plan=plan, threads=1, trace="run.json") as engine:
        monkeypatch.chdir(model)  # relative paths are those of the start
        assert engine.generate(prompts, NEW_TOKENS) == generated(model, prompts)
    assert engine.recording is not None
    run = engine.recording.trace
    check_no_overlap(run.measured)
    for task in run.measured.plan.tasks:
        assert all(
            run.measured.spans[name].end_seconds <= run.measured.spans[task.name].start_seconds for name in task.after
        )
    links = attention * experts
    assert len(run.measured.plan.streams) == attention + experts + 2 * links
    tokens = sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS - 1)
    assert sum(use.num_rows for use in run.summary.workers if use.role == "attention") == tokens
    assert all(use.num_rows >= 2 * tokens for use in run.summary.workers if use.role == "expert")
    shared_first = {task.after[0].split()[0] for task in run.measured.plan.tasks if task.name.startswith("dispatch")}
    assert shared_first == {"shared" if plan.shared_first else "attention"}
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.slow
def test_a_recording_does_not_pass_over_a_restart(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(model, threads=1, max_restarts=1, trace=tmp_path / "run.json") as engine:
        request = engine.submit([1], 500)
        os.kill(engine.workers[1].pid, signal.SIGKILL)
        with pytest.raises(CollectiveError, match=r"expert worker 0 .*SIGKILL"):
            request.result(patient(60))
        assert engine.generate([[1, 2]], 3) == generated(model, [[1, 2]], 3)
    assert "run.json is not written: a worker was lost during the recording" in caplog.text
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_a_worker_that_is_lost_ends_the_recording_with_its_name(model: Path, tmp_path: Path) -> None:
    with Engine(model, threads=1, trace=tmp_path / "run.json") as engine:
        request = engine.submit([1], 500)
        os.kill(engine.workers[1].pid, signal.SIGKILL)
        with pytest.raises(CollectiveError, match=r"expert worker 0 .*SIGKILL"):
            request.result(patient(60))
    assert engine.recording is not None
    with pytest.raises(ConfigError, match="a worker was lost"):
        _ = engine.recording.trace
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
def test_the_command_writes_the_trace_and_prints_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = make("mixtral", tmp_path, vocab_size=257), tmp_path / "run.json"
    flags = ["--prompt", "one", "--max-new-tokens", "6", "--trace", str(file)]
    assert main(["generate", "--model", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert "trace: 6 steps" in out
    assert f"wrote {file}" in out
    assert main(["generate", "--model", str(path), "--json", *flags]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["trace"] == str(file)
    assert "trace: 6 steps" in captured.err


def made_up() -> list[WorkerLog]:
    """Two passes of one layer, in microseconds: there 30, experts 50, back 30."""
    log, answers = WorkerLog("here"), WorkerLog("there")
    for number in range(2):
        begin = 1_000_000 + number * 300_000
        message = MessageLog(0, number, 0, 4, begin + 100_000, begin + 210_000)
        layer = LayerLog(begin, begin + 100_000, begin + 105_000, begin + 110_000, begin + 150_000, [message])
        log.add_pass(PassLog(0, 4, begin + 220_000, begin + 250_000, [layer]))
        answers.add_answer(AnswerLog(0, number, begin + 130_000, begin + 130_000, begin + 180_000))
    return [log, answers]


def test_numbers_of_a_run_that_was_made_up() -> None:
    summary = RunTrace.of(made_up(), EngineSplit(1, 1), InferencePlan(), planned_step_seconds=1e-3).summary
    assert (summary.num_steps, summary.planned_step_seconds) == (2, 1e-3)
    assert summary.makespan_seconds == pytest.approx(550e-6)
    assert summary.step_seconds == pytest.approx(250e-6)
    assert summary.simulated_step_seconds == pytest.approx(240e-6)  # attention goes on when sums are back
    # Rows leave at 100, shared experts run from 110 to 150, experts from 130 to 180, sums are back at 210.
    assert summary.exposed_seconds == pytest.approx((10e-6 + 30e-6,))
    attention, experts = summary.workers
    assert attention.busy_seconds == pytest.approx(2 * (105e-6 + 40e-6 + 30e-6))
    assert experts.busy_seconds == pytest.approx(100e-6)
    assert (attention.num_rows, experts.num_rows) == (8, 8)


def shifted(logs: list[WorkerLog], by_ns: int) -> list[WorkerLog]:
    """The same run, the expert worker's clock so far ahead."""
    answers = [
        replace(one, arrived_ns=one.arrived_ns + by_ns, start_ns=one.start_ns + by_ns, end_ns=one.end_ns + by_ns)
        for one in logs[1].answers
    ]
    return [logs[0], replace(logs[1], answers=answers)]


@pytest.mark.parametrize("ahead_ns", [0, 5_000_000_000, -7_000_000_000])
def test_clocks_of_two_machines_are_aligned_by_the_fastest_round_trip(ahead_ns: int) -> None:
    logs = made_up()
    logs[0].passes[1].layers[0].messages[0].arrived_ns += 9_000  # a slower way back says less
    assert clock_offsets(shifted(logs, ahead_ns), EngineSplit(1, 1)) == [0, ahead_ns]
    aligned, plain = (RunTrace.of(one, EngineSplit(1, 1), InferencePlan()) for one in (shifted(logs, ahead_ns), logs))
    assert aligned.measured.spans == plain.measured.spans


def test_processes_of_one_machine_need_no_alignment() -> None:
    logs = made_up()
    logs[1].clock = "here"
    assert clock_offsets(shifted(logs, 1000), EngineSplit(1, 1)) == [0, 0]


def test_steps_whose_answers_are_missing_are_dropped_and_counted() -> None:
    logs = made_up()
    del logs[1].answers[1]
    summary = RunTrace.of(logs, EngineSplit(1, 1), InferencePlan()).summary
    assert (summary.num_steps, summary.num_dropped) == (1, 1)
    assert "1 more were not recorded whole" in str(summary)


def test_logs_travel_as_json_and_stop_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    for log in made_up():
        assert TypeAdapter(WorkerLog).validate_python(json.loads(json.dumps(asdict(log)))) == log
    monkeypatch.setattr("laconic.infer.recorder._MOST_ENTRIES", 5)
    full, answers = (deepcopy(log) for log in made_up())
    full.add_pass(full.passes[0])
    assert (len(full.passes), full.num_entries, full.num_dropped) == (2, 4, 1)
    for _ in range(4):
        answers.add_answer(answers.answers[0])
    assert (len(answers.answers), answers.num_dropped) == (5, 1)


def test_a_recorder_hands_out_one_log_after_the_other() -> None:
    recorder = Recorder()
    assert (recorder.log, recorder.stop().passes) == (None, [])
    recorder.start()
    first = recorder.log
    assert recorder.stop() is first
    recorder.start()
    second = recorder.log
    assert second is not None
    assert second is not first
