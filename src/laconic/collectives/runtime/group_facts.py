"""What is known of a process group wherever it comes from: global ranks, its original, its timeout, why it has ended.

torch's registry knows the groups that `init_process_group` and `new_group` made, until they are destroyed. Executors
run on private copies, a laconic group has a backend group inside, and other libraries make groups by hand. And settings
of a group may change while it lives, so that copies have to ask the original.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from laconic.errors import ConfigError

_CPU = torch.device("cpu")

_ranks: WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()
_originals: WeakKeyDictionary[dist.ProcessGroup, ref[dist.ProcessGroup]] = WeakKeyDictionary()


def register_group(
    group: dist.ProcessGroup, ranks: Sequence[int], original: ref[dist.ProcessGroup] | None = None
) -> None:
    """Remember the global ranks of a private group, and the caller's group that it is a copy of."""
    _ranks[group] = tuple(ranks)
    if original is not None:
        _originals[group] = original


def original_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The caller's group that an executor's group is a copy of; `group` itself if it is no copy."""
    found = _originals.get(group)
    return (found() if found is not None else None) or group


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group, by group rank: those that it has or had, and 0, 1, ... of one that torch never knew."""
    found = _known(group)
    return tuple(range(group.size())) if found is None else found


def registered_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The same for arguments that are global ranks, not to be guessed; ConfigError if torch does not know the group."""
    found = _known(group)
    if found is None:
        raise ConfigError(
            "group is none that torch.distributed knows, so its global ranks cannot be told; make it with"
            " torch.distributed.new_group, and use it before it is destroyed"
        )
    return found


def check_member(group: object) -> None:
    """Refuse with a ConfigError what torch gives a process that is not in a new group, in the place of one."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, int):  # which it is in torch 2.13
        raise ConfigError("group does not contain this process; call on members of the group only")


def _known(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    check_member(group)
    found = _ranks.get(group)
    if found is None:
        try:
            found = _ranks[group] = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):
            return None
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long calls on a group may take on CPU tensors now; of a copy that of its original. Zero: not known.

    gloo's sends and receives have the timeout that was set when the group was made, unless their `wait` is given one.
    """
    found = getattr(options_of(group), "_timeout", None)
    return found if isinstance(found, timedelta) else timedelta()


def options_of(group: dist.ProcessGroup) -> Any:
    """Options of the backend that a group has for CPU tensors; None if it has none. Their `_timeout` may change."""
    try:
        return original_of(group)._get_backend(_CPU).options
    except (AttributeError, RuntimeError):
        return None


def goes_through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries a device's tensors: it sends from the host's memory; another address ends the process."""
    if device.type == "cpu":
        return False
    try:
        return group._get_backend(device).name() == "gloo"
    except (AttributeError, RuntimeError):
        return False


def follow_timeout(copies: Iterable[dist.ProcessGroup]) -> None:
    """Give copies the timeouts that their originals have now."""
    for copy in copies:
        wanted, backend = timeout_of(copy), copy._get_backend(_CPU)
        if wanted and backend.options._timeout != wanted:
            backend._set_default_timeout(wanted)


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
    """Raise the ConfigError with which a group was ended, because ranks disagreed in an earlier call."""
    if group in _failed:
        raise ConfigError(_failed[group])
