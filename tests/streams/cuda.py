"""torch.cuda on a simulated device: streams, events, futures, and tensors that say that they are on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from laconic.activations.keep import witnesses
from laconic.activations.keep.offload import offloader_of
from laconic.collectives.engine import device_handshake
from laconic.collectives.runtime import background
from laconic.moe.parallel import link_streams
from laconic.ops import constants
from tests.streams.device import Device, Node, Queue
from tests.streams.engine import Engine

__all__ = ["CUDA", "counted_waits", "cuda", "lost_waits"]

CUDA = torch.device("cuda", 0)
_HERE = Path(__file__).resolve().parent


class _Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._nodes: list[Node] | None = None

    def record(self, stream: _Stream | None = None) -> None:
        queue = self._device.current if stream is None else stream.queue
        self._nodes = [self._device.issue("event", queue)]

    def wait(self, stream: _Stream | None = None) -> None:
        if self._nodes is not None:  # one that was never recorded is waited for by nobody
            self._device.issue("wait", self._device.current if stream is None else stream.queue, self._nodes)

    def query(self) -> bool:
        if self._device.is_prompt:
            self.synchronize()
        return self._nodes is None or self._device.is_known(self._nodes)

    def synchronize(self) -> None:
        self._device.wait(self._nodes or [])

    def elapsed_time(self, end: _Event) -> float:
        """A millisecond for each node that the program has issued between, on any stream."""
        if not (self._nodes and end._nodes and self._device.is_known([*self._nodes, *end._nodes])):
            raise RuntimeError("device not ready")  # as CUDA does, where the host has not waited for both
        first, last = (self._device._nodes.index(event._nodes[0]) for event in (self, end))
        return float(last - first)


class _Stream:
    def __init__(self, device: Device, queue: Queue) -> None:
        self._device, self.queue = device, queue
        self.device = torch.device("cuda", queue.index)
        self.cuda_stream = self.stream_id = id(queue)
        self.device_index, self.device_type = queue.index, 1  # CUDA, as torch numbers kinds of devices

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: _Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self._device.wait(self.queue.tail)


class _Future:
    """torch's future with devices: events are recorded for what the value holds, and for nothing else."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_done, self._value, self._events = False, None, []
        self._callbacks: list[Callable[[], object]] = []

    def set_result(self, value: Any) -> None:
        self._is_done, self._value = True, value
        self._tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and self._device.has(x)]
        if self._tensors:
            event = _Event(self._device)
            event.record()
            self._events.append(event)
        for callback in self._callbacks:
            callback()

    def done(self) -> bool:
        return self._is_done

    def value(self) -> Any:
        assert self._is_done
        return self._value

    def wait(self) -> Any:
        for event in self._events:
            event.wait()
        for x in self._tensors:
            x.record_stream(torch.cuda.current_stream())
        return self.value()

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        following = _Future(self._device)

        def run() -> None:
            # torch runs callbacks on a stream of its pool, which waits for the value.
            with torch.cuda.stream(_Stream(self._device, self._device.new_queue())):
                self.wait()
                following.set_result(callback(self))

        if self._is_done:
            run()
        else:
            self._callbacks.append(run)
        return following


@contextmanager
def lost_waits(*functions: str) -> Iterator[list[str]]:
    """Drop every wait of a stream for an event in functions of these names: what a check has to find.

    Yields:
        Where waits were dropped, as "file:line", once for each.
    """
    wait = _Event.wait
    dropped: list[str] = []

    def maybe_wait(event: _Event, stream: _Stream | None = None) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name not in functions and Path(frame.f_code.co_filename).resolve().parent == _HERE:
            assert frame.f_back is not None
            frame = frame.f_back
        if frame.f_code.co_name in functions:
            dropped.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        else:
            wait(event, stream)

    with mock.patch.object(_Event, "wait", maybe_wait):
        yield dropped


@contextmanager
def cuda(is_prompt: bool = False, num_devices: int = 1) -> Iterator[Device]:
    """Yield a device that "cuda" means inside; see `Device` for the arguments."""
    device = Device(is_prompt, num_devices)
    device.settle["laconic::lossless_encode"] = _zero_behind
    offloader_of.cache_clear()
    with (
        # What the process keeps for a device, as that cache does.
        mock.patch.dict(background._stream_executors, clear=True),
        mock.patch.dict(link_streams._wires, clear=True),
        _constants_forgotten(),
        # The device records one thread; announcements are compared by the next call.
        mock.patch.object(device_handshake, "_start"),
        mock.patch.object(device_handshake, "_pending", []),
        # What is left to be looked at on a device that is gone would fail the next one's first forward.
        mock.patch.object(witnesses, "_LEFT", []),
        _patched(device),
        device,
    ):
        yield device
    offloader_of.cache_clear()


@contextmanager
def _constants_forgotten() -> Iterator[None]:
    with ExitStack() as stack:
        for kept in constants.KEPT:
            stack.enter_context(mock.patch.dict(kept, clear=True))
        yield


@contextmanager
def counted_waits(device: Device) -> Iterator[list[Sequence[Node]]]:
    """Yield what the host waits for inside, each time that it is not over."""
    waits: list[Sequence[Node]] = []
    wait = device.wait

    def count(nodes: Sequence[Node]) -> None:
        if not device.is_known(nodes):
            waits.append(nodes)
        wait(nodes)

    with mock.patch.object(device, "wait", count):
        yield waits


def _zero_behind(message: Tensor) -> None:
    """Without a capacity the bytes behind a lossless message are undefined; bytes 16 to 23 say how long it is."""
    message[int(message[16:24].view(torch.int64)) :] = 0


@contextmanager
def _patched(device: Device) -> Iterator[None]:
    real_future = torch.futures.Future

    class Futures:
        def __call__(self, *, devices: Any = None) -> Any:
            return _Future(device) if devices else real_future()

        def __getitem__(self, item: Any) -> Any:
            return real_future[item]

    @contextmanager
    def stream(found: _Stream | None) -> Iterator[None]:
        if found is None:
            yield
            return
        index, before = device.index, device.current_of(found.queue.index)
        device.current = found.queue
        try:
            yield
        finally:
            device.current = before
            device.index = index

    def index_of(which: Any) -> int:
        return device.index_of(which)

    def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
        (device.resize if device.owns(storage) else c_resize)(storage, nbytes)

    c_resize = torch.UntypedStorage.resize_
    apis: dict[str, Any] = {
        "Stream": lambda which=None, **_: _Stream(device, device.new_queue(index_of(which))),
        "Event": lambda *_, **__: _Event(device),
        "current_stream": lambda which=None: _Stream(device, device.current_of(index_of(which))),
        "default_stream": lambda which=None: _Stream(device, device.defaults[index_of(which)]),
        "current_device": lambda: device.index,
        "device": lambda which: device.on(index_of(which)),
        "device_count": lambda: len(device.defaults),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "get_device_capability": lambda _=None: (8, 0),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "set_device": lambda which: setattr(device, "index", index_of(which)),
        "stream": stream,
        "synchronize": lambda _=None: device.wait(
            [node for node in device._nodes if node.queue.name.endswith("stream") or node.queue.name[-1].isdigit()]
        ),
    }
    with (
        mock.patch.multiple(torch.cuda, **apis),
        mock.patch.object(torch.accelerator, "current_stream", apis["current_stream"]),
        mock.patch.object(torch.futures, "Future", Futures()),
        mock.patch.object(torch.autograd, "_engine_run_backward", Engine(device).run),
        mock.patch.object(torch.UntypedStorage, "resize_", resize),
        mock.patch.multiple(torch.Tensor, **_methods(device)),
        mock.patch.multiple(torch, **_factories(device)),
        mock.patch.object(torch.nn.functional, "one_hot", _one_hot(device)),
    ):
        yield


_MADE = (
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "linspace",
    "rand",
    "randn",
    "randint",
    "eye",
)
_MADE_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")


def _factories(device: Device) -> dict[str, Any]:
    def made(name: str) -> Callable[..., Tensor]:
        real = getattr(torch, name)

        def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            if name.endswith("_like") and device is None:
                return real(*args, **kwargs)
            if not (device is not None and torch.device(device).type == "cuda") and not pin_memory:
                return real(*args, device=device, **kwargs)
            found = real(*args, device="cpu", **kwargs)
            if isinstance(found, FakeTensor):  # shapes only
                return real(*args, device=device, **kwargs)
            with owner.on(owner.index_of(device)):
                if name.startswith("empty"):
                    return owner.allocate_empty(found, pinned=pin_memory)
                assert not pin_memory
                return owner.upload(found.clone() if name.endswith("_like") else found)

        return make

    owner = device
    return {name: made(name) for name in (*_MADE, *_MADE_LIKE)}


def _one_hot(device: Device) -> Callable[..., Tensor]:
    """C++ would make its result on the CPU."""
    real = torch.nn.functional.one_hot

    def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
        if not device.has(x):
            return real(x, num_classes)
        assert num_classes > 0, "the host would wait for the largest value"
        zeros = torch.zeros((*x.shape, num_classes), dtype=torch.int64, device=x.device)
        return zeros.scatter_(-1, x.unsqueeze(-1), 1)

    return one_hot


def _methods(device: Device) -> dict[str, Any]:
    c_device = torch._C.TensorBase.device.__get__
    c_to, c_tolist, c_numpy, c_wrapper = Tensor.to, Tensor.tolist, Tensor.numpy, Tensor._make_wrapper_subclass
    wrappers_key = "_simulated_device"

    def device_of(x: Tensor) -> torch.device:
        memory = device.memory_of(x)
        if memory is not None and memory.queue is not None:
            return torch.device("cuda", memory.queue.index)
        return CUDA if hasattr(x, wrappers_key) else c_device(x)

    class PeerCopy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
            ctx.index = device_of(x).index
            return device.peer_copy(x.detach(), index)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return device.peer_copy(gradient, ctx.index), None

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(x) not in (Tensor, torch.nn.Parameter):
            return c_to(x, *args, **kwargs)
        kwargs.pop("copy", None)
        if args and isinstance(args[0], Tensor):
            args = (device_of(args[0]), args[0].dtype, *args[1:])
        target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if target is not None and target.type == device_of(x).type == "cuda" != c_device(x).type:
            index = device.index_of(target)
            x = x if index == device_of(x).index else PeerCopy.apply(x, index)
        if target is None or target.type == device_of(x).type:
            return x if dtype is None else c_to(x, dtype)
        found = torch.empty(x.shape, dtype=x.dtype, device=target)
        found.copy_(x, non_blocking=non_blocking)
        return found if dtype is None else c_to(found, dtype)

    def tolist(x: Tensor) -> Any:
        return c_tolist(to(x, "cpu"))

    def numpy(x: Tensor, **kwargs: Any) -> Any:
        assert not device.has(x), "can't convert a CUDA tensor to numpy; use .cpu() first"
        return c_numpy(x, **kwargs)

    def record_stream(x: Tensor, stream: _Stream) -> None:
        memory = device.memory_of(x)
        assert memory is not None, "record_stream of a tensor that is not on the device"
        memory.used.add(stream.queue)

    def make_wrapper(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        found = c_wrapper(cls, *args, device="cpu", **kwargs)
        if device is not None and torch.device(device).type == "cuda":
            setattr(found, wrappers_key, True)
        return found

    return {
        "device": property(device_of),
        "is_cuda": property(lambda x: device_of(x).type == "cuda"),
        "is_cpu": property(lambda x: device_of(x).type == "cpu"),
        "to": to,
        "cpu": lambda x, **_: to(x, "cpu"),
        "cuda": lambda x, *_, **__: to(x, CUDA),
        "tolist": tolist,
        "numpy": numpy,
        "record_stream": record_stream,
        "_make_wrapper_subclass": staticmethod(make_wrapper),
    }
