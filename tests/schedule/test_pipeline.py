"""Pipeline schedules: counted by replay, equal to torch's own, refused when they cannot run."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from laconic.errors import ScheduleError
from laconic.schedule import Action, PipelineSchedule, interleaved_1f1b, make_schedule, parse_action
from tests.grid import grid


def test_the_papers_example_is_counted_exactly() -> None:
    schedule = make_schedule("interleaved-1f1b", num_ranks=4, num_micro_batches=8, stages_per_rank=2)
    assert schedule.peak_in_flight() == (11, 9, 7, 5)


@pytest.mark.parametrize(("rounds", "v", "p"), grid([1, 2, 5], [1, 2, 3, 4], [1, 2, 3, 4, 6], strength=1))
def test_interleaved_in_flight_is_the_closed_form(p: int, v: int, rounds: int) -> None:
    for g in range(p, 2 * p):
        m = g * rounds
        schedule = interleaved_1f1b(p, m, v, group_size=g)
        assert schedule.peak_in_flight() == tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * g + 1) for r in range(p))
        schedule.check()


def test_plain_schedules_are_the_closed_forms() -> None:
    for p, m in itertools.product((1, 2, 4, 7), (1, 2, 4, 9)):
        for name, expected in (("gpipe", [m] * p), ("1f1b", [min(m, p - r) for r in range(p)])):
            schedule = make_schedule(name, p, m)
            assert list(schedule.peak_in_flight()) == expected, (p, m)
            schedule.check()
            assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches) == (p, p, m)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group that sends nothing, for building torch's schedule objects."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def _torch_schedule(name: str, p: int, m: int, v: int) -> Any:
    from torch.distributed import pipelining

    assert dist.get_world_size() == p
    stages = [
        pipelining.PipelineStage(nn.Linear(1, 1), chunk * p, p * v, "cpu", group=dist.group.WORLD) for chunk in range(v)
    ]
    made = getattr(pipelining, name)
    return made(stages[0] if name in ("ScheduleGPipe", "Schedule1F1B") else stages, m, loss_fn=lambda x, y: x)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "theirs", "m", "v"),
    [
        ("gpipe", "ScheduleGPipe", 6, 1),
        ("1f1b", "Schedule1F1B", 4, 1),
        ("1f1b", "Schedule1F1B", 9, 1),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 8, 2),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 4, 3),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 10, 2),
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", 3, 2),
    ],
)
def test_torchs_own_schedules_count_the_same(name: str, theirs: str, m: int, v: int) -> None:
    ours = make_schedule(name, 4, m, v)
    torchs = PipelineSchedule.from_torch(_torch_schedule(theirs, 4, m, v))
    assert torchs.name == theirs
    assert ours.peak_in_flight() == torchs.peak_in_flight()
    assert [ours.stages_of(r) for r in range(4)] == [torchs.stages_of(r) for r in range(4)]
    if name == "interleaved-1f1b":
        assert ours.actions == torchs.actions


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("theirs", ["ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
def test_other_schedules_of_torch_are_counted_and_run(theirs: str) -> None:
    schedule = PipelineSchedule.from_torch(_torch_schedule(theirs, 4, 8, 2))
    schedule.check()
    peaks = schedule.peak_in_flight()
    assert all(1 <= peak <= 16 for peak in peaks)
    if theirs == "ScheduleLoopedBFS":
        assert peaks == (16,) * 4
    assert any(a.kind == "W" for a in schedule.actions[0]) == (theirs == "ScheduleInterleavedZeroBubble")


def test_overlapped_pairs_are_two_actions() -> None:
    class Entry:
        def __init__(self, stage: int, kind: str, micro_batch: int | None, sub_actions: Any = None) -> None:
            self.stage_index, self.computation_type, self.microbatch_index = stage, kind, micro_batch
            self.sub_actions = sub_actions

    pair = Entry(-1, "OVERLAP_F_B", None, (Entry(0, "F", 1), Entry(0, "B", 0)))
    order = {0: [Entry(0, "UNSHARD", None), Entry(0, "F", 0), None, pair, Entry(0, "B", 1)]}
    schedule = PipelineSchedule.from_torch(order)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 0F1 0B0 0B1"
    assert schedule.peak_in_flight() == (2,)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_a_schedule_prints_and_parses(name: str) -> None:
    schedule = make_schedule(name, 3, 6, 2 if name.startswith("inter") else 1)
    assert PipelineSchedule.parse(str(schedule)) == schedule
    assert parse_action("12F3") == Action(12, "F", 3)


def test_weighted_peaks_are_those_of_a_plain_replay() -> None:
    schedule = make_schedule("interleaved-1f1b", 4, 8, 3)
    generator = random.Random(0)
    for _ in range(50):
        nbytes = {stage: generator.randrange(1000) for stage in range(12)}
        for rank in range(4):
            held, peak = 0, 0
            for action in schedule.actions[rank]:
                held += nbytes[action.stage] * (1 if action.kind == "F" else -1)
                peak = max(peak, held)
            assert schedule.peak_nbytes(rank, nbytes) == peak


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 4), (4, 12)])
def test_a_step_takes_what_the_papers_bubble_says(p: int, m: int) -> None:
    """Time (m + p - 1) (f + b) for 1F1B and GPipe; interleaving divides the bubble by the stages per rank."""
    f, b = 1.0, 2.0
    for name in ("gpipe", "1f1b"):
        assert make_schedule(name, p, m).simulate(f, b).makespan_seconds == (m + p - 1) * (f + b)
    if m % p == 0:
        timeline = make_schedule("interleaved-1f1b", p, m, 2).simulate(f / 2, b / 2)
        assert timeline.makespan_seconds == m * (f + b) + (p - 1) * (f + b) / 2


def test_sending_takes_time_only_between_ranks() -> None:
    assert make_schedule("1f1b", 1, 4).simulate(1.0, 1.0, send_seconds=9.0).makespan_seconds == 8
    assert make_schedule("1f1b", 2, 1).simulate(1.0, 1.0, send_seconds=9.0).makespan_seconds == 4 + 2 * 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\n0F0 0B0\n1B0 1F0", r"cannot go on: rank 0 at 0B0, rank 1 at 1B0"),
        ("x\n0F0", r"must hold 0I0 exactly once"),
        ("x\n0F0 0F0 0B0", r"must hold 0F0 exactly once"),
        ("x\n0F0 0B0\n0F1 0B1", r"stage 0 of schedule 'x' is on rank 0 and on rank 1"),
        ("x\n0F0 0B0 0W0", r"holds 0W0 beside a whole backward"),
        ("x\n0F0 OB0", r"action is 'OB0', but it must be stage, kind"),
        ("", r"has no actions"),
    ],
)
def test_what_cannot_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        PipelineSchedule.parse(text).check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), r"schedule is '2f2b', but it must be one of gpipe, 1f1b, interleaved-1f1b"),
        (("1f1b", 0, 2), r"num_ranks is 0"),
        (("1f1b", 2, 4, 2), r"stages_per_rank is 2, but 1f1b holds one"),
        (("interleaved-1f1b", 4, 9, 2), r"num_micro_batches is 9, .* 2 rounds; 8 is the nearest below"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*arguments)
    with pytest.raises(ScheduleError, match="no pipeline_order"):
        PipelineSchedule.from_torch(object())


def test_schedules_need_no_torch() -> None:
    code = "import laconic.schedule, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
