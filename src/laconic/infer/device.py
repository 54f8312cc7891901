"""The device of a worker: the CPU, or one CUDA device of its machine."""

from __future__ import annotations

import os
import socket
from typing import Literal, get_args

import torch

from laconic.errors import ConfigError

DeviceKind = Literal["cpu", "cuda"]


def check_device(device: str, name: str = "device") -> None:
    """Check the setting `name`; another kind of device is a ConfigError."""
    if device not in get_args(DeviceKind):
        raise ConfigError(
            f"{name} is {device!r}, but it must be one of {', '.join(get_args(DeviceKind))}; which of several CUDA"
            " devices a worker takes is CUDA_VISIBLE_DEVICES' and its rank's"
        )


def take_device(device: str, local_rank: int, num_alone: int = 0) -> torch.device:
    """Take a worker's device; workers of a machine take its CUDA devices in turn, by `local_rank`.

    This process sees no other CUDA device afterwards: threads of transformers' managers begin on the first one. It is a
    ConfigError if there is none here, fewer than the `num_alone` workers of this machine that need one each, as NCCL
    asks of those it joins, or if this process uses CUDA already.
    """
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(
            f"device is 'cuda', but {socket.gethostname()} has no CUDA device that this torch ({torch.__version__}) can"
            " use; leave device out, or see `laconic doctor`"
        )
    if count < num_alone:
        raise ConfigError(
            f"link is 'group' with device = 'cuda', but {socket.gethostname()} has {count} CUDA devices for {num_alone}"
            " workers, each of which needs its own; start fewer workers, or leave link out"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "device is 'cuda', but this process uses CUDA already and can no longer be given one device; call"
            " serve_rank before anything else that uses CUDA"
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if seen is None else seen.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % count].strip()
    return torch.device("cuda", 0)
