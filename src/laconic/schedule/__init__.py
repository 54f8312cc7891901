"""Schedules as data: the stream and the order of every task. Pure Python, without torch.

>>> from laconic.schedule import make_schedule
>>> make_schedule("interleaved-1f1b", num_ranks=4, num_micro_batches=8, stages_per_rank=2).peak_in_flight()
(11, 9, 7, 5)
"""

from laconic.schedule.actions import Action, parse_action
from laconic.schedule.pipeline import PipelineSchedule
from laconic.schedule.pipelines import SCHEDULES, gpipe, interleaved_1f1b, make_schedule, one_f_one_b
from laconic.schedule.streams import Span, StreamPlan, Task, Timeline, simulate

__all__ = [
    "Task",
    "StreamPlan",
    "Span",
    "Timeline",
    "simulate",
    "Action",
    "parse_action",
    "PipelineSchedule",
    "SCHEDULES",
    "make_schedule",
    "gpipe",
    "one_f_one_b",
    "interleaved_1f1b",
]
