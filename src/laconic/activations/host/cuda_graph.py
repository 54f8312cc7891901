"""What eager code may do while a CUDA graph is captured around it.

A replayed graph repeats the kernels and nothing that the host did. So code that runs twice, in forward for its value
and in backward again, cannot note the state of the device's random generator in between; torch does not even give it
away during a capture. Code that draws nothing needs no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.errors import ModelError


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream of the device."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def without_draws() -> Iterator[None]:
    """Refuse operations that draw random numbers while the block runs.

    Raises:
        ModelError: one draws; the message names it.
    """
    with _Draws():
        yield


class _Draws(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(func, args, kwargs):
            raise ModelError(
                f"{func} draws random numbers while a CUDA graph is captured, but backward runs this code again and"
                " could not draw the same; set its dropout to 0, keep this site exact, or call it outside of the graph"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws: those of attention are tagged as if they did, but only draw with a dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0
