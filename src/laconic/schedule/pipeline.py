"""A pipeline schedule: the actions of every rank in order, with their memory, time and correctness.

The code works for any schedule: it replays the actions to find how many micro-batches are in flight, how long a step
takes and whether the schedule can run at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laconic.errors import ScheduleError
from laconic.schedule.actions import Action, actions_of, parse_action
from laconic.schedule.streams import StreamPlan, Task, Timeline, simulate


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of actions on every rank.

    `make_schedule` builds the known schedules, `from_torch` reads those of torch.

    Attributes:
        name: of the schedule.
        actions: by rank. Stages count from the first layers of the model on; the actions say which rank holds a stage.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of the model, over all ranks."""
        return 1 + max((action.stage for line in self.actions for action in line), default=-1)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return len({action.micro_batch for line in self.actions for action in line})

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, in order of the model."""
        return tuple(sorted({action.stage for action in self.actions[rank]}))

    def in_flight(self, rank: int) -> list[Counter[int]]:
        """Micro-batches in flight (forward done, backward not) by stage of a rank, after each of its actions."""
        waiting: Counter[int] = Counter()
        states = []
        for action in self.actions[rank]:
            if action.kind == "F":
                waiting[action.stage] += 1
            elif action.kind in ("B", "W"):
                waiting[action.stage] -= 1
            states.append(Counter(waiting))
        return states

    def peak_in_flight(self) -> tuple[int, ...]:
        """Most micro-batches in flight at one time, by rank, summed over its stages."""
        return tuple(max((s.total() for s in self.in_flight(rank)), default=0) for rank in range(self.num_ranks))

    def peak_states(self, rank: int) -> list[dict[int, int]]:
        """The maximal states of a rank: micro-batches in flight by stage, none of them below another in every stage.

        For any bytes per stage and micro-batch, the peak of memory is at one of these.
        """
        stages = self.stages_of(rank)
        seen = {tuple(state[stage] for stage in stages) for state in self.in_flight(rank)}
        peaks = [
            one
            for one in seen
            if not any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in seen)
        ]
        return [dict(zip(stages, peak, strict=True)) for peak in sorted(peaks, reverse=True)]

    def peak_nbytes(self, rank: int, nbytes_by_stage: Mapping[int, int]) -> int:
        """Peak bytes of activations on a rank if a micro-batch keeps `nbytes_by_stage` in each stage."""
        return max(
            (sum(n * nbytes_by_stage[stage] for stage, n in state.items()) for state in self.peak_states(rank)),
            default=0,
        )

    def check(self) -> None:
        """Check that the schedule can run to its end.

        Raises:
            ScheduleError: a pass is missing or there twice, a stage sits on two ranks, or ranks wait for each other.
        """
        self._check_complete()
        self.simulate(1.0, 1.0)

    def _check_complete(self) -> None:
        owner: dict[int, int] = {}
        counts: Counter[Action] = Counter()
        for rank, line in enumerate(self.actions):
            for action in line:
                counts[action] += 1
                if owner.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {action.stage} of schedule {self.name!r} is on rank {owner[action.stage]} and on rank "
                        f"{rank}; a stage belongs to one rank"
                    )
        if not counts:
            raise ScheduleError(f"schedule {self.name!r} has no actions")
        micro_batches = sorted({action.micro_batch for action in counts})
        for stage in range(self.num_stages):
            for micro_batch in micro_batches:
                wanted = [Action(stage, "F", micro_batch)]
                whole = Action(stage, "B", micro_batch)
                if whole in counts:
                    wanted.append(whole)
                else:
                    wanted += [Action(stage, "I", micro_batch), Action(stage, "W", micro_batch)]
                for action in wanted:
                    if counts.pop(action, 0) != 1:
                        raise ScheduleError(
                            f"schedule {self.name!r} must hold {action} exactly once: every stage has one forward and "
                            f"one backward (B, or I and W) per micro-batch"
                        )
        if counts:
            raise ScheduleError(f"schedule {self.name!r} holds {next(iter(counts))} beside a whole backward")

    def stream_plan(
        self,
        forward_seconds: float | Sequence[float],
        backward_seconds: float | Sequence[float],
        send_seconds: float = 0.0,
    ) -> StreamPlan:
        """The schedule as tasks on one stream per rank, named `rank 0`; a task is named as its action, `2F0`.

        Args:
            forward_seconds, backward_seconds: of one stage on one micro-batch, one number or one per stage. The two
                halves of a backward take half of it each.
            send_seconds: time for a result to reach the neighbouring stage on another rank; a task of its own, which
                delays only its receiver.

        Raises:
            ScheduleError: ranks wait for each other.
        """
        last = self.num_stages - 1
        forward, backward = (
            [float(seconds)] * (last + 1) if isinstance(seconds, (int, float)) else [float(s) for s in seconds]
            for seconds in (forward_seconds, backward_seconds)
        )
        owner = {action: rank for rank, line in enumerate(self.actions) for action in line}
        tasks: list[Task] = []
        for rank, line in enumerate(self.actions):
            for action in line:
                after = []
                for group in _needs(action, last):
                    found = next((one for one in group if one in owner), None)
                    if found is None:
                        raise ScheduleError(
                            f"schedule {self.name!r} cannot go on: rank {rank} at {action} waits for {group[0]}, which "
                            f"never comes"
                        )
                    after.append(str(found))
                    if send_seconds and owner[found] != rank:
                        sent = f"send {found} to rank {rank}"
                        tasks.append(Task(sent, sent, send_seconds, (after[-1],)))
                        after[-1] = sent
                seconds = forward[action.stage] if action.kind == "F" else backward[action.stage]
                seconds = seconds / 2 if action.kind in ("I", "W") else seconds
                tasks.append(Task(str(action), f"rank {rank}", seconds, tuple(after)))
        try:
            return StreamPlan(tuple(tasks))
        except ScheduleError as error:
            raise ScheduleError(f"schedule {self.name!r}: {error}") from None

    def simulate(
        self,
        forward_seconds: float | Sequence[float],
        backward_seconds: float | Sequence[float],
        send_seconds: float = 0.0,
    ) -> Timeline:
        """Simulate the actions, as of `stream_plan`: each rank in its order, each as soon as its inputs are there."""
        return simulate(self.stream_plan(forward_seconds, backward_seconds, send_seconds))

    def __str__(self) -> str:
        return "\n".join([self.name, *(" ".join(map(str, line)) for line in self.actions)])

    @classmethod
    def parse(cls, text: str) -> PipelineSchedule:
        """Read what `str(schedule)` wrote: a line with the name, then a line of actions per rank.

        Raises:
            ScheduleError: a line holds something that is no action, or there are no actions.
        """
        name, *lines = text.strip().splitlines() or [""]
        schedule = cls(name.strip(), tuple(tuple(map(parse_action, line.split())) for line in lines))
        schedule._check_complete()
        return schedule

    @classmethod
    def from_torch(cls, schedule: Any) -> PipelineSchedule:
        """Read a schedule object of torch.distributed.pipelining, or its `pipeline_order`.

        Nothing of torch is imported: any object with a `pipeline_order` (rank -> entries with `stage_index`,
        `computation_type`, `microbatch_index`, `sub_actions`, or None) is read. The order of torch's plain 1F1B counts
        micro-batches from 1 on the last rank, so the result is for counting; `check` may refuse it.

        Raises:
            ScheduleError: the object has no such order.
        """
        order = schedule if isinstance(schedule, Mapping) else getattr(schedule, "pipeline_order", None)
        if not isinstance(order, Mapping) or not order:
            raise ScheduleError(
                f"{type(schedule).__name__} has no pipeline_order to read; pass a schedule of "
                f"torch.distributed.pipelining or its pipeline_order"
            )
        lines = tuple(tuple(a for entry in order[rank] for a in actions_of(entry)) for rank in sorted(order))
        return cls(type(schedule).__name__, lines)


def _needs(action: Action, last_stage: int) -> list[list[Action]]:
    """Prerequisites of an action: groups, each of which is met by any one of its actions."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [] if stage == 0 else [[Action(stage - 1, "F", micro_batch)]]
    if action.kind == "W":
        return [[Action(stage, "I", micro_batch)]]
    own = [[Action(stage, "F", micro_batch)]]
    above = [Action(stage + 1, "B", micro_batch), Action(stage + 1, "I", micro_batch)]
    return own if stage == last_stage else [*own, above]
