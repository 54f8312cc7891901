"""A rank of torchrun above 0, as the worker that the engine on rank 0 asks for."""

from __future__ import annotations

from typing import NoReturn

from laconic.infer.control import connect_rank


def serve_rank(timeout_seconds: float = 300.0) -> NoReturn:
    """Be the worker of a rank above 0 that torchrun has started, and end the process with it.

    Rank 0 runs `Engine(..., launcher="torchrun")` and says what this rank is to be. The directory of the model has the
    same path on all machines.

    Args:
        timeout_seconds: for the engine on rank 0 to start.

    Raises:
        ConfigError: this is no rank above 0, or rank 0 cannot be reached.
    """
    from laconic.infer.worker import work  # which `python -m laconic.infer.worker` must not find imported already

    settings, commands, events = connect_rank(timeout_seconds)
    work(settings, commands, events)
