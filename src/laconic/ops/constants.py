"""Constant tensors, made once for each device and never where they would not be what they seem to be later."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")

_MAX_KEPT = 256
"""Of each function; the oldest goes first."""

KEPT: list[dict[object, Tensor]] = []
"""What each function has kept."""


def constant_tensor(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate a function that makes a tensor of hashable arguments: equal calls get the same tensor.

    Two kinds of tensors are made anew and not kept: a fake one, which has no values once FakeTensorMode has ended; and
    one that is made while a CUDA graph is captured, which has none before the first replay. The host waits for
    a tensor that is kept, once, so that every stream may read it.
    """
    kept: dict[object, Tensor] = {}
    KEPT.append(kept)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return make(*args, **kwargs)
        key = (args, *kwargs.items())
        found = kept.get(key)
        if found is None:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # or autograd could not use it outside
                    found = make(*args, **kwargs)
            else:
                found = make(*args, **kwargs)
            if type(found) is Tensor and not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
                if found.is_cuda:  # other streams, which wait for no event of this one, will read it
                    torch.cuda.current_stream(found.device).synchronize()
                while len(kept) >= _MAX_KEPT:
                    kept.pop(next(iter(kept)))
                # Of threads that make it together all get the one that stays: kernels are given its address.
                found = kept.setdefault(key, found)
        return found

    return call
