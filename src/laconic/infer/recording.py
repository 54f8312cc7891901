"""Recordings of what an engine runs: asks its workers for what they have noted, and makes a trace of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter

from laconic.errors import CollectiveError, ConfigError, LaconicError
from laconic.infer.recorder import WorkerLog
from laconic.infer.run_trace import RunTrace
from laconic.infer.split import EngineSplit
from laconic.infer.workers import WorkerSet
from laconic.schedule.inference import InferencePlan

_RECORD_SECONDS = 60.0


class Recording:
    """A trace of what an engine runs inside of a `with` block; see Engine.trace.

    The planner predicted `planned_seconds` of a step, if there was one.
    """

    def __init__(
        self, workers: WorkerSet, split: EngineSplit, plan: InferencePlan, planned_seconds: float | None
    ) -> None:
        self._workers, self._split, self._plan = workers, split, plan
        self._planned_seconds = planned_seconds
        self._trace: RunTrace | None = None
        self._is_on = False
        self._num_restarts = 0

    @property
    def trace(self) -> RunTrace:
        """The trace, once the block has ended.

        Raises:
            ConfigError: it has not ended, or a worker was lost before.
        """
        if self._trace is None:
            raise ConfigError("the recording has no trace: its block has not ended, or a worker was lost in it")
        return self._trace

    def __enter__(self) -> Recording:
        check_traceable(self._split)
        if not self._workers.recorded.acquire(blocking=False):
            raise ConfigError("the engine is being recorded already; end that recording first")
        self._is_on, self._num_restarts = True, self._workers.num_restarts
        try:
            if not self._workers.running:
                raise self._lost("the workers are being started again; record when they are ready")
            # Whatever an attention worker records, an expert worker has recorded, too: those begin first and end last.
            self._ask(reversed(range(self._split.num_workers)), on=True)
        except BaseException:
            self._free()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except LaconicError:
            if error is None:
                raise

    def end(self) -> None:
        """End the recording, if it is on, and make its trace; a worker lost since it began is a CollectiveError."""
        if not self._is_on:
            return
        try:
            if self._num_restarts != self._workers.num_restarts or not self._workers.running:
                raise self._lost("a worker was lost during the recording, and its part with it")
            logs = self._ask(range(self._split.num_workers), on=False)
        finally:
            self._free()
        self._trace = RunTrace.of(logs, self._split, self._plan, self._planned_seconds)

    def _free(self) -> None:
        self._is_on = False
        self._workers.recorded.release()

    def _ask(self, ranks: Iterable[int], on: bool) -> list[WorkerLog]:
        """Begin or end the recording of one worker after the other; returns, by rank, what each has recorded."""
        logs: dict[int, WorkerLog] = {}
        for rank in ranks:
            answer: dict[str, Any] | None = self._workers.ask(rank, {"do": "record", "on": on}, _RECORD_SECONDS)
            if answer is None:
                raise self._lost(
                    f"{self._workers.name(rank)} did not answer within {_RECORD_SECONDS:.0f} s when it was asked for"
                    " its trace"
                )
            logs[rank] = TypeAdapter(WorkerLog).validate_python(answer["log"])
        return [logs[rank] for rank in sorted(logs)]

    def _lost(self, otherwise: str) -> LaconicError:
        return self._workers.requests.refusal or CollectiveError(otherwise)


def check_traceable(split: EngineSplit) -> None:
    """Refuse to trace whole models, which have no plan whose tasks could be recorded."""
    if not split.experts:
        raise ConfigError(
            "trace needs expert workers, but this engine has none: whole models have no plan whose tasks could be"
            " recorded; start expert workers, or leave trace out"
        )


def check_trace_file(path: Path) -> None:
    """Refuse a file into which no trace could be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"trace is {str(path)!r}, but {str(path.parent)!r} is no directory; make it first")
    if path.is_dir():
        raise ConfigError(f"trace is {str(path)!r}, but that is a directory; give the name of a file")
