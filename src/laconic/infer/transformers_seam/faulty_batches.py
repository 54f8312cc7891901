"""A loop of requests that outlives a batch that raises, and requests that are cancelled."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any

from laconic.errors import CollectiveError, ConfigError


class _BatchFailedError(Exception):
    """A forward, or the choice of its tokens, has raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class FaultyBatches:
    """Lets a manager's loop outlive a batch that raises.

    The requests of such a batch are tried again, each alone until it has its next token. One that fails alone ends; the
    others go on with the tokens that they have. What else the loop may raise, of the scheduler or the cache, ends it:
    nothing that it leaves behind could be trusted.

    Both callbacks are called on the manager's thread: `on_alone` with the name of a request that has failed alone, the
    tokens that it was given, and why it failed, of which the manager knows nothing any more; `on_ended` with what ends
    the loop, before any request hears of it.
    """

    def __init__(
        self, manager: Any, on_alone: Callable[[str, list[int], Exception], None], on_ended: Callable[[Exception], None]
    ) -> None:
        self._on_alone, self._on_ended = on_alone, on_ended
        self._body, self._step = manager._generation_loop_body, manager._generation_step
        self._suspects: deque[str] = deque()
        manager._generation_loop_body, manager._generation_step = self._run_body, self._run_step

    def watch(self, processor: Any) -> None:
        """Choose the batches of a manager's processor."""
        scheduler = processor.scheduler
        for owner, names in (
            (scheduler, ("active_requests", "waiting_requests", "waiting_requests_order", "block_new_requests")),
            (processor.inputs_and_outputs, ("requests_in_batch",)),
        ):
            if lost := [name for name in names if not hasattr(owner, name)]:
                raise ConfigError(
                    f"{type(owner).__name__} of transformers has no {', '.join(lost)}, which is used here"
                )
        schedule = scheduler.schedule_batch
        scheduler.schedule_batch = lambda *budgets: self._schedule(scheduler, schedule, *budgets)

    def _run_step(self) -> None:
        try:
            self._step()
        except CollectiveError:  # an expert worker is lost
            raise
        except Exception as error:
            raise _BatchFailedError(error) from error

    def _run_body(self, processor: Any, bootstrapping: bool) -> bool:
        try:
            goes_on: bool = self._body(processor, bootstrapping)
            if goes_on and self._suspects:
                self._clear(processor.inputs_and_outputs.requests_in_batch)
            return goes_on
        except _BatchFailedError as failed:
            self._recover(processor, failed.error)
            return True
        except CollectiveError:
            raise
        except Exception as error:
            self._on_ended(error)
            raise

    def _clear(self, batch: list[Any]) -> None:
        for future in batch:
            if future.has_new_token and self._suspects and future.state.request_id == self._suspects[0]:
                self._suspects.popleft()

    def _recover(self, processor: Any, error: Exception) -> None:
        states = [future.state for future in processor.inputs_and_outputs.requests_in_batch]
        names = [state.request_id for state in states]
        logging.getLogger("laconic").error("a forward of %d requests failed", len(states), exc_info=error)
        if len(states) == 1:
            self._suspects = deque(name for name in self._suspects if name != names[0])
            processor.scheduler.finish_request(names[0])
            self._on_alone(names[0], states[0].to_generation_output().generated_tokens, error)
            return
        for state in states:
            again = state.create_equivalent_initial_request()
            processor.scheduler.finish_request(state.request_id)
            processor.scheduler.add_waiting_request(again)
        self._suspects.extend(name for name in names if name not in self._suspects)

    def _schedule(self, scheduler: Any, schedule: Callable[..., Any], *budgets: int) -> Any:
        """Choose a batch; while there are suspects, from the first of them alone."""
        active, waiting = scheduler.active_requests, scheduler.waiting_requests
        if not active:
            # The cache was too small for all. Who lost their place wait for one that runs to finish, and the manager
            # takes none for finished that was cancelled or has failed.
            scheduler.block_new_requests = False
        while self._suspects and self._suspects[0] not in active and self._suspects[0] not in waiting:
            self._suspects.popleft()  # it was cancelled
        if not self._suspects:
            return schedule(*budgets)
        found = _schedule_some(scheduler, schedule, {self._suspects[0]}, budgets)
        if found[0] is None and (others := active.keys() - set(self._suspects)):
            # They hold what it lacks of the cache, and give it back when they finish.
            found = _schedule_some(scheduler, schedule, others, budgets)
        return found


def _schedule_some(scheduler: Any, schedule: Callable[..., Any], names: Set[str], budgets: Sequence[int]) -> Any:
    active, waiting = scheduler.active_requests, scheduler.waiting_requests
    order, blocked = scheduler.waiting_requests_order, scheduler.block_new_requests
    scheduler.active_requests = {key: state for key, state in active.items() if key in names}
    scheduler.waiting_requests = {key: state for key, state in waiting.items() if key in names}
    scheduler.waiting_requests_order = deque(scheduler.waiting_requests)
    scheduler.block_new_requests = False
    try:
        return schedule(*budgets)
    finally:
        active.update(scheduler.active_requests)
        for name in names - scheduler.waiting_requests.keys():
            if waiting.pop(name, None) is not None:
                order.remove(name)
        scheduler.active_requests, scheduler.waiting_requests = active, waiting
        scheduler.waiting_requests_order, scheduler.block_new_requests = order, blocked
