"""The errors laconic raises, each also the built-in a caller would expect.

Every message names the field, the value it had, the rule it broke and what to do about it.
"""

from __future__ import annotations


class LaconicError(Exception):
    """Base of everything laconic raises on purpose."""


class FormatError(LaconicError, ValueError):
    """A block format, its arguments or its bytes are not valid."""


class KernelError(LaconicError, RuntimeError):
    """A compiled kernel does not give the bits of the plain-torch reference on this device."""


class ModelError(LaconicError, ValueError):
    """A model cannot be converted as asked."""


class ConfigError(LaconicError, ValueError):
    """A configuration file, flag or environment is not valid."""


class DataError(LaconicError, ValueError):
    """Training data is missing, empty, damaged or does not fit the model."""


class PlanError(LaconicError, ValueError):
    """A memory plan is not valid, is for another model or world, or cannot be met."""


class RoutingError(LaconicError, ValueError):
    """Tokens cannot be routed to experts as asked, or the router's scores are no numbers."""


class ScheduleError(LaconicError, ValueError):
    """A schedule is not valid or cannot run."""


class CollectiveError(LaconicError, RuntimeError):
    """Another rank ended, stopped or failed in the middle of a collective."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective was not done in the time that the caller waited for it."""


class CorruptionError(LaconicError, RuntimeError):
    """Replicas that have to hold the same bits do not."""


class CheckpointError(LaconicError, RuntimeError):
    """A checkpoint cannot be written, verified or loaded."""


class AuditError(LaconicError, RuntimeError):
    """The first step does not compute what the exact one does."""


class TrainingError(LaconicError, RuntimeError):
    """Training cannot go on."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says, for another message; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
