"""Groups that can no longer be used because ranks disagreed while messages were under way."""

from __future__ import annotations

import logging
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from laconic.errors import ConfigError

__all__ = ["fail", "raise_if_failed"]

_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def fail(group: dist.ProcessGroup, error: ConfigError) -> None:
    """End a group: its messages under way are aborted, and every later call on it raises `error`.

    The error is also logged, because the thread that issued the call may wait for the device meanwhile.
    """
    if group in _failed:
        return
    _failed[group] = str(error)
    logging.getLogger(__name__).error("%s", error)
    with suppress(RuntimeError):  # backends that cannot
        group.abort()


def raise_if_failed(group: dist.ProcessGroup) -> None:
    """Raise the error with which a group was ended.

    Raises:
        ConfigError: ranks disagreed in an earlier call.
    """
    if group in _failed:
        raise ConfigError(_failed[group])
