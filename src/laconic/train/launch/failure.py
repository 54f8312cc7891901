"""Why the processes of an attempt ended, which of them was the first cause, and whether another attempt may help."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from laconic.errors import CheckpointError, CollectiveError, CorruptionError, LaconicError, TrainingError
from laconic.train.signals import EXIT_INTERRUPTED, EXIT_PEER_LOST, INTERRUPTED, STOP_SIGNAL

# Exit codes of processes that were stopped because of another one: by themselves, or by the agent before they listened.
_BYSTANDER_CODES = (EXIT_PEER_LOST, -signal.SIGTERM)
# Errors of ours that need not come back when the same steps are done again; the others are about what the user gave.
_MAY_PASS = (CheckpointError, CollectiveError, CorruptionError, TrainingError)


_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
_SHARED = (CheckpointError, CorruptionError)
_Kind = Literal["refused", "error", "killed", "hung", "lost"]


@dataclass(frozen=True)
class Failure:
    """The end of an attempt's processes by that of one of them."""

    rank: int | None
    """None: what happened is not one rank's doing, or nothing tells whose."""
    what: str
    """What happened to it, with rank, process id and host."""
    kind: _Kind
    """refused: what the user gave cannot be used. error: an exception or an exit code. killed: by a signal. hung: it
    kept the others waiting. lost: contact broke, and no process is known to be the cause."""
    text: str = ""
    """What the process wrote about its error, "<class>: <message>"."""
    error: LaconicError | None = None
    """That error, if it is one of ours."""
    step: int | None = None
    """Step in which the process was, from 1; None before the first."""


def was_asked_for(failures: Mapping[int, ProcessFailure]) -> bool:
    """Whether the processes ended as they do after a request to stop."""
    codes = {failure.exitcode for failure in failures.values()}
    return codes <= {EXIT_INTERRUPTED, -STOP_SIGNAL, -signal.SIGKILL, *_BYSTANDER_CODES}


def failure_of(
    failures: Mapping[int, ProcessFailure],
    steps: Mapping[int, int] | None = None,
    stopped: Mapping[int, float] | None = None,
    timeout_seconds: float = 0.0,
) -> Failure:
    """Find the first cause.

    Args:
        failures: by rank, in the order in which the agent saw them.
        steps: in which ranks were, from 1; without those that had not begun one.
        stopped: ranks that did not run and were killed for that, and for how many seconds they had not.
        timeout_seconds: for how long processes wait for each other.
    """
    stopped = stopped or {}
    texts = {rank: _recorded(failure) for rank, failure in failures.items()}
    waited = any(_TIMED_OUT.search(text) for text in texts.values())
    culprits = [rank for rank, failure in failures.items() if failure.exitcode not in _BYSTANDER_CODES]
    culprits.sort(key=lambda rank: rank not in stopped)
    silent = [rank for rank, text in texts.items() if not text or text.startswith(INTERRUPTED)]
    rank = (culprits or (silent if waited else []) or list(failures))[0]
    failure, text, step = failures[rank], texts[rank], (steps or {}).get(rank)
    who = _who(rank, failure, step)
    timeout = f"rank_timeout_seconds ({timeout_seconds:g} s)" if timeout_seconds else "rank_timeout_seconds"

    def found(what: str, kind: _Kind, error: LaconicError | None = None) -> Failure:
        return Failure(rank, f"{who} {what}", kind, text or f"exit code {failure.exitcode}", error, step)

    # What a bystander says is about its peer, whichever class says it.
    error = None if failure.exitcode == EXIT_PEER_LOST else _laconic_error(text)
    if isinstance(error, _SHARED):  # all processes raise it together; it says whose it is
        named = re.search(r": rank (\d+)(?::| has other bits)", text)
        if named is None:
            return Failure(None, text, "error", text, error, step)
        rank = int(named[1])
        who = _who(rank, failures.get(rank, failure), step)
        return Failure(rank, f"{who} failed ({text})", "error", text, error, step)
    if error is not None:
        return found(f"failed ({text})", "error" if isinstance(error, _MAY_PASS) else "refused", error)
    if rank in stopped:
        return found(f"was stopped for {stopped[rank]:.1f} s and was killed", "hung")
    if failure.exitcode in _BYSTANDER_CODES:
        if not waited or rank not in silent:
            return found(f"lost contact with another process: {text[:600]}", "lost")
        where = text.removeprefix(INTERRUPTED)
        return found(f"was not there for a collective for {timeout}" + (f", but at {where}" if where else ""), "hung")
    if failure.exitcode == -signal.SIGKILL and waited:
        # The others gave up on it; the agent then killed it, because it did not react to SIGTERM either.
        return found(f"did not answer within {timeout} and was killed", "hung")
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return found(f"was killed by {name}{hint}", "killed")
    return found(f"failed with exit code {failure.exitcode}" + (f" ({text})" if text else ""), "error")


def _who(rank: int, failure: ProcessFailure, step: int | None) -> str:
    return f"rank {rank} (pid {failure.pid} on {socket.gethostname()}{'' if step is None else f', step {step}'})"


def why_no_restart(failure: Failure, earlier: list[Failure], restarts: int) -> str | None:
    """The reason not to start the processes again; None if they should be.

    A signal, a hang or a lost connection has its cause outside of the program, so the same steps may go well. An
    exception may, too, unless it comes before the first step or again in the same one.
    """
    if failure.kind == "refused":
        return "it would be refused again"
    if failure.kind == "error":
        if failure.step is None and not earlier:
            return "it came before the first step, so it would come again"
        if earlier and (earlier[-1].text, earlier[-1].step) == (failure.text, failure.step):
            return "it came again in the same place, so another restart would not help"
    if len(earlier) >= restarts:
        return f"that is restarts ({restarts}) used up" if restarts else ""
    return None


def _recorded(failure: ProcessFailure) -> str:
    message: Any = failure.error_file_data.get("message")
    return str(message["message"]) if isinstance(message, dict) else ""


def _laconic_error(text: str) -> LaconicError | None:
    name, _, message = text.partition(": ")
    classes = [LaconicError]
    for cls in classes:
        if cls.__name__ == name:
            return cls(message)
        classes += cls.__subclasses__()
    return None
