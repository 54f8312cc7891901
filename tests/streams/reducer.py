"""DistributedDataParallel's own reducer on the simulated device.

The reducer is C++ and sees CPU tensors. What differs on CUDA, and is made the same here:

- Its buckets are memory of the device.
- Its hook's future is one of CUDA: the reducer's wait makes the current stream wait, and the host goes on. The reducer
  takes torch's own future only; it gets one that is done, and the current stream waits where the reducer uses the
  bucket for the first time after backward, which is right behind its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from tests.streams.device import Device

__all__ = ["reducer_on"]


@contextmanager
def reducer_on(device: Device) -> Iterator[None]:
    """Inside, DistributedDataParallel of a model on `device` uses it as it uses CUDA. Enter the device before."""
    real_future = torch._C.Future
    register = dist._register_comm_hook

    class Reducer(dist.Reducer):
        def __init__(self, *args: Any) -> None:
            with device.adopting():
                super().__init__(*args)

        def _rebuild_buckets(self) -> bool:
            with device.adopting():
                rebuilt: bool = super()._rebuild_buckets()
                return rebuilt

    def register_comm_hook(reducer: Reducer, state: Any, hook: Any) -> None:
        def run(state: Any, bucket: dist.GradBucket) -> Any:
            future = hook(state, bucket)
            result = future.value()
            assert isinstance(result, Tensor)

            def reducer_waits() -> None:
                future.wait()

            # Backward ends with the callbacks in the order of their queueing; the reducer's comes after its last hook.
            Variable._execution_engine.queue_callback(partial(device.before_use, result, reducer_waits))
            done = real_future([])
            done.set_result(result)
            return done

        register(reducer, state, run)

    with (
        mock.patch.object(dist, "Reducer", Reducer),
        mock.patch.object(dist, "_register_comm_hook", register_comm_hook),
    ):
        yield
