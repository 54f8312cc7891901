"""torch's settings of a thread, carried along with what another thread does on its behalf.

Inference mode, grad mode and autocast belong to a thread. An executor's thread has torch's defaults, in which a tensor
that was made in inference mode may not be written to, and a view that was made there may not be changed. So whatever
runs later or elsewhere takes the settings along that its caller has in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda")

_is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


class ThreadState(NamedTuple):
    """The settings of a thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    """By device: whether it is on, and its dtype; empty if it is off everywhere."""
    caches: bool
    """Whether autocast keeps casts of weights."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Give the current thread these settings inside of the block."""
        # Inference mode sets the grad mode as well, so that comes second.
        with self._inference(), torch.set_grad_enabled(self.grad), self._autocast():
            yield

    def _inference(self) -> AbstractContextManager[object]:
        is_same = torch.is_inference_mode_enabled() == self.inference
        return _NOTHING if is_same else torch.inference_mode(self.inference)

    def _autocast(self) -> AbstractContextManager[None]:
        return _with_autocast(self) if self.autocast or _is_any_autocast_enabled() else _NOTHING


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NOTHING = _Nothing()


def thread_state(grad: bool | None = None, inference: bool | None = None) -> ThreadState:
    """The settings of the current thread, but for those that are given."""
    return ThreadState(
        torch.is_grad_enabled() if grad is None else grad,
        torch.is_inference_mode_enabled() if inference is None else inference,
        _autocast_here() if _is_any_autocast_enabled() else (),
        torch.is_autocast_cache_enabled(),
    )


def as_here(do: Callable[P, T], written: Iterable[object] = (), grad: bool | None = False) -> Callable[P, T]:
    """`do`, to be called later or by another thread, with the settings that the current thread has now.

    Tensors of inference mode can be written to in that mode only, hence `written`. With `grad` None autograd records as
    now.
    """
    if _has_inference(written):
        state = thread_state(False, True)
    else:
        state = thread_state(grad)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if state == thread_state():  # as in most calls; to enter a state takes longer than to compare
            return do(*args, **kwargs)
        with state.entered():
            return do(*args, **kwargs)

    return call


def may_write(written: Iterable[object]) -> AbstractContextManager[object]:
    """A context in which autograd records nothing and `written` can be written to, in the current thread."""
    return torch.inference_mode() if _has_inference(written) else torch.no_grad()


def _has_inference(written: Iterable[object]) -> bool:
    return any([isinstance(x, Tensor) and x.is_inference() for x in written])  # faster than a generator


def _autocast_here() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _AUTOCAST_DEVICES)


@contextmanager
def _with_autocast(state: ThreadState) -> Iterator[None]:
    # As torch.autocast does it, which warns on machines without the device.
    before, cached = _autocast_here(), torch.is_autocast_cache_enabled()
    wanted = state.autocast or tuple((False, dtype) for _, dtype in before)
    torch.autocast_increment_nesting()
    try:
        _set_autocast(wanted, state.caches)
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_autocast(before, cached)


def _set_autocast(settings: Iterable[tuple[bool, torch.dtype]], caches: bool) -> None:
    for name, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, settings, strict=True):
        torch.set_autocast_enabled(name, is_enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(caches)
