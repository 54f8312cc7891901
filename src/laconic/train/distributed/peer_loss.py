"""Errors that are about another process."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["is_peer_lost"]

# What gloo and NCCL say; the last one is gloo's of a group in which something has timed out before.
_SIGNS = ("gloo/transport", "NCCL", "Application timeout caused pair closure")


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another process: gloo says so in plain RuntimeErrors, which DCP wraps."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, (RuntimeError, CheckpointException)) and any(sign in str(error) for sign in _SIGNS)
