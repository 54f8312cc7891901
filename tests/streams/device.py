"""A device without hardware: what streams, events and the allocator of a GPU allow, tried out on the CPU.

`Device` records a program while it runs and then runs its work again, late and in other orders:

- Tensors of the device are CPU tensors that hold what the program's own order makes of them. So the host sees right
  values and the program takes its course, once.
- Each operation on them becomes a node in the queue of the stream that is current, with the bits that it has to
  produce. Nodes of a stream keep their order; between streams only events order them, and the host where it waits.
- `check` fills a second copy of all memory with NaN (all bits set), runs the nodes there in hundreds of orders, and
  compares what each of them writes. An order is drawn from a seed, and streams differ in how eager they are, so that
  one may be far behind another.
- Memory whose last tensor is gone, or whose storage is resized to nothing, goes, as torch's caching allocator has it,
  to the next allocation on the stream that it was allocated on: after the work of that stream so far, and of streams
  passed to `record_stream`. It is overwritten then.
- What only the program's own order can do, such as a message to another process, is repeated from what it left behind
  (`external`), where it finds the bits that it found.
- Memory that is allocated without values may be written to by whoever had it before until its stream comes there: it is
  filled once more at that place.

So a stream that does not wait reads NaN, and so does one that reads memory which was given away, or writes to memory
that its own stream has not got yet. What is not modelled: no memory is handed out twice, and kernels are atomic.
"""

from __future__ import annotations

import random
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import laconic

__all__ = ["Device", "Memory", "Node", "Queue", "RaceError"]

aten = torch.ops.aten
_UNINITIALIZED = {
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_REFUSED = {"aten::set_", "aten::resize_"}
_TAKES_BOTH = {aten.copy_.default, aten._foreach_copy_.default, aten.index.Tensor, aten.index_put_.default}
"""Operations that take tensors of the host beside those of the device."""


def _histc(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(x.double(), *args, **kwargs).to(x.dtype)


_AS_ON_CUDA: dict[Any, Callable[..., Any]] = {aten.histc.default: _histc}
"""What CUDA computes of integers, too."""
_WRITES_UNDECLARED = {"fsdp::all_gather_copy_in": 1}
"""By name of an operation: which of its arguments it writes to without its schema saying so."""
_HERE = Path(__file__).resolve().parent
_OURS = (Path(laconic.__file__).resolve().parent, _HERE.parent)
"""Folders of the library and of the tests: torch may lie in an environment below the same checkout."""
_OWN = {"cuda", "device", "echo", "ranks", "reducer", "stream_group"}
_resize = torch.UntypedStorage.resize_


class RaceError(AssertionError):
    """Work that an order allowed by the recorded events gives other bits than the program's own order."""


@dataclass(eq=False, repr=False)
class Node:
    """Work of a queue, or a place in it."""

    name: str
    queue: Queue
    number: int
    run: Callable[[], str | None] | None
    """Runs it on the second copy of memory; returns what is wrong with the result. None: there is nothing to run."""
    after: list[Node]
    """Of other queues; and the queue's own node before, if there is one."""
    issued: str


@dataclass(eq=False, repr=False)
class Queue:
    """Nodes that run in their order: a stream, the host, or one node that memory is free."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    is_allocator: bool = False
    index: int = 0
    """Of the device that the stream is on."""

    @property
    def tail(self) -> list[Node]:
        """The node that was issued last, if there is one."""
        return self.nodes[-1:]


class Memory:
    """A storage of the device, or pinned memory of the host: its second copy and who uses it."""

    def __init__(self, storage: torch.UntypedStorage, queue: Queue | None, freed: Callable[[int], None]) -> None:
        key = storage._cdata
        self.copy = torch.UntypedStorage(storage.nbytes()).fill_(0xFF)
        self.queue = queue
        """The stream it was allocated on; None: it is the host's."""
        self.made = _place()
        self.used: set[Queue] = set()
        """Streams that `record_stream` was called for."""
        self.storage = weakref.ref(storage, lambda _: freed(key))

    def like(self, x: Tensor) -> Tensor:
        """The part of the second copy that corresponds to `x`."""
        found = torch.empty(0, dtype=x.dtype).set_(self.copy, x.storage_offset(), x.size(), x.stride())
        if x.is_conj():
            found = found.conj()
        return torch._neg_view(found) if x.is_neg() else found


class Device(TorchDispatchMode):
    """Records what a program does with tensors of the device, inside `with`; then `check` tries other orders.

    Args:
        is_prompt: an event is over whenever the program asks; else only if the host has waited for it before.
        num_devices: how many devices there are; each has its own memory and its own current stream.
    """

    def __init__(self, is_prompt: bool = False, num_devices: int = 1) -> None:
        super().__init__()
        self.is_prompt = is_prompt
        self.settle: dict[str, Callable[[Tensor], object]] = {}
        """By name of an operation: writes to what its result leaves undefined."""
        self.host = Queue("host")
        self.defaults = [
            Queue("default stream" if i == 0 else f"default stream of {i}", index=i) for i in range(num_devices)
        ]
        self.index = 0
        """Of the current device."""
        self._currents = list(self.defaults)
        self._switches: list[tuple[int, Queue]] = []  # numbers of autograd's nodes from which on a stream was current
        self._used: list[tuple[int, int]] = []  # and on which device they computed
        self.num_streams = 0
        self._memories: dict[int, Memory] = {}
        self._copies: list[torch.UntypedStorage] = []
        self._free: dict[Queue, list[tuple[torch.UntypedStorage, list[Node]]]] = {}
        self._nodes: list[Node] = []
        self._known: dict[Queue, int] = {}  # nodes that the host knows to be done
        self._is_open = True
        self._is_adopting = False
        self._before_use: dict[int, Callable[[], object]] = {}  # by storage

    @property
    def current(self) -> Queue:
        """The current stream of the current device; when it is set, its device becomes the current one."""
        return self._currents[self.index]

    @current.setter
    def current(self, queue: Queue) -> None:
        self.index = queue.index
        self._currents[queue.index] = queue
        self._switches.append((torch.autograd._get_sequence_nr(), queue))

    def index_of(self, which: torch.device | str | int | None) -> int:
        """Of the device that is meant; without a number the current one."""
        index = which if which is None or isinstance(which, int) else torch.device(which).index
        return self.index if index is None else index

    def current_of(self, index: int) -> Queue:
        """The current stream of a device."""
        return self._currents[index]

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Inside, another device is the current one."""
        before, self.index = self.index, index
        try:
            yield
        finally:
            self.index = before

    def _note_place(self, memory: Memory | None) -> None:
        """Note where autograd's newest node computes."""
        if len(self.defaults) > 1 and memory is not None and memory.queue is not None:
            self._used.append((torch.autograd._get_sequence_nr(), memory.queue.index))

    def stream_at(self, number: int) -> Queue:
        """The stream of autograd's node `number`: the one that was current on the device where it computed."""
        # A function makes its node before it computes.
        place = bisect_left(self._used, number + 1, key=itemgetter(0))
        index = self._used[place][1] if place < len(self._used) else 0
        place = bisect_right(self._switches, number, key=itemgetter(0))
        return next((queue for _, queue in self._switches[:place][::-1] if queue.index == index), self.defaults[index])

    def new_queue(self, index: int | None = None) -> Queue:
        """A new stream of a device, without `index` of the current one."""
        self.num_streams += 1
        return Queue(f"stream {self.num_streams}", index=self.index if index is None else index)

    # --- tensors ---

    def memory_of(self, x: Tensor) -> Memory | None:
        """The memory of a tensor; None for one of the host that is not pinned."""
        try:
            return self._memories.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a wrapper without storage
            return None

    def has(self, x: Tensor) -> bool:
        """Whether `x` is in the device's memory."""
        memory = self.memory_of(x)
        return memory is not None and memory.queue is not None

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` is memory of the device."""
        memory = self._memories.get(storage._cdata)
        return memory is not None and memory.queue is not None

    def allocate(self, x: Tensor, pinned: bool = False) -> Tensor:
        """Make fresh CPU tensor `x` one of the device (or of pinned memory), allocated on the current stream."""
        storage = x.untyped_storage()
        memory = self._memories[storage._cdata] = Memory(storage, None if pinned else self.current, self._freed)
        self._copies.append(memory.copy)
        if not pinned:
            self._reuse()
        return x

    def _reuse(self) -> None:
        """An allocation on the current stream gets what is free there."""
        for copy, after in self._free.pop(self.current, ()):
            nodes = [*after, *self.current.tail]
            self._issue("given away", Queue("allocator", is_allocator=True), partial(_fill, copy), nodes)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the device's memory of `storage`, or allocate it again on the current stream: what FSDP2 does.

        Raises:
            NotImplementedError: it is neither from nor to nothing.
        """
        memory = self._memories[storage._cdata]
        if nbytes and storage.nbytes():
            raise NotImplementedError(
                f"{storage.nbytes()} bytes become {nbytes}, but this device models no memory that grows; free it first"
            )
        if storage.nbytes():
            self._give_back(memory)
        _resize(storage, nbytes)
        memory.copy, memory.queue, memory.made = torch.UntypedStorage(nbytes), self.current, _place()
        memory.used = set()
        if nbytes:
            storage.fill_(0xFF)
            self._copies.append(memory.copy.fill_(0xFF))
            self._reuse()
            self._receive(storage)

    def allocate_empty(self, x: Tensor, pinned: bool = False) -> Tensor:
        """The same without values."""
        x.untyped_storage().fill_(0xFF)
        self.allocate(x, pinned)
        if not pinned:
            self._receive(x.untyped_storage())
        return x

    def _receive(self, storage: torch.UntypedStorage) -> None:
        """Until the current stream comes here, whoever had this memory before may write to it."""
        self._issue("allocated", self.current, partial(_fill, self._memories[storage._cdata].copy))

    def upload(self, x: Tensor) -> Tensor:
        """Make fresh CPU tensor `x` one of the device, with its values written on the current stream."""
        with _disable_current_modes():
            self.allocate(x)
            self._write("upload", [x], lambda out, values: out[0].copy_(values), [self._like(x)], x.detach().clone())
        return x

    def peer_copy(self, x: Tensor, index: int) -> Tensor:
        """Copy a tensor to another device, as torch does: on the stream of its own, and both wait for each other."""
        with _disable_current_modes():
            with self.on(index):
                found = self.allocate_empty(torch.empty_like(x))
                there = self.current
            memory = self.memory_of(x)
            assert memory is not None
            assert memory.queue is not None
            self._note_place(self.memory_of(found))
            with self.on(memory.queue.index):
                here = self.current
                self.issue("ready", here, there.tail)
                found.copy_(x)
                self._write(
                    "peer copy", [found], lambda out, source: out[0].copy_(source), [self._like(found)], self._like(x)
                )
                self.issue("copied", there, here.tail)
        return found

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key)
        if self._is_open and memory.copy.nbytes():
            self._give_back(memory)

    def _give_back(self, memory: Memory) -> None:
        if memory.queue is None:
            return  # the host's allocator waits for copies by itself
        after = [node for queue in memory.used for node in queue.tail]
        self._free.setdefault(memory.queue, []).append((memory.copy, after))

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Inside, floating-point tensors that C++ allocates on the CPU are the device's."""
        self._is_adopting = True
        try:
            yield
        finally:
            self._is_adopting = False

    def before_use(self, x: Tensor, run: Callable[[], object]) -> None:
        """Call `run` right before the next operation with memory of `x`."""
        self._before_use[x.untyped_storage()._cdata] = run

    # --- order ---

    def issue(self, name: str, queue: Queue, after: Sequence[Node] = ()) -> Node:
        """Add a node without work."""
        return self._issue(name, queue, None, after)

    def _issue(self, name: str, queue: Queue, run: Callable[[], str | None] | None, after: Sequence[Node] = ()) -> Node:
        # What the host has done or waited for comes before everything that it issues later.
        known = [other.nodes[number] for other, number in self._known.items()]
        before = {*after, *queue.tail, *self.host.tail, *known}
        node = Node(name, queue, len(queue.nodes), run, [*before], _place())
        queue.nodes.append(node)
        self._nodes.append(node)
        return node

    def wait(self, nodes: Sequence[Node]) -> None:
        """The host waits for nodes."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            done = self._known.get(node.queue, -1)
            if done < node.number:
                self._known[node.queue] = node.number
                waiting += [before for each in node.queue.nodes[done + 1 : node.number + 1] for before in each.after]

    def is_known(self, nodes: Sequence[Node]) -> bool:
        """Whether the host has waited for nodes already."""
        return all(self._known.get(node.queue, -1) >= node.number for node in nodes)

    # --- operations ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # shapes only: how DTensor finds out what an operation gives
        if any(one is not Tensor and one is not Parameter for one in types):
            return NotImplemented  # a wrapper, whose parts come here
        if func.is_view and not self._before_use:
            self._note_place(self.memory_of(args[0]))
            return func(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        memories = [memory for x in given if (memory := self.memory_of(x)) is not None]
        if not memories:
            result = func(*args, **kwargs)
            is_adopted = self._is_adopting and func is aten.empty.memory_format and result.is_floating_point()
            return self.allocate_empty(result) if is_adopted else result
        for x in given if self._before_use else ():
            if self.memory_of(x) and (first := self._before_use.pop(x.untyped_storage()._cdata, None)):
                first()
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func} is a collective of torch.compile and DTensor, which has no stream here")
        if func._schema.name in _REFUSED:
            raise NotImplementedError(f"{func} changes the memory of a tensor, which this device does not model")
        on_device = any(memory.queue is not None for memory in memories)
        if on_device and func not in _TAKES_BOTH and any(x.dim() > 0 and not self.has(x) for x in given):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but some are on the CPU")
        indices = {memory.queue.index for memory in memories if memory.queue is not None}
        if len(indices) > 1:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but they are on {indices}")
        if on_device and indices != {self.index}:
            with self.on(indices.pop()):
                return self._computed(func, args, kwargs, given, on_device)
        return self._computed(func, args, kwargs, given, on_device)

    def _computed(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], on_device: bool) -> Any:
        """Compute an operation on tensors of the current device, or of pinned memory."""
        self._note_place(memories[0] if (memories := [self.memory_of(x) for x in given if self.has(x)]) else None)
        queue = self.current if on_device else self.host
        written = _written(func, args, kwargs)
        real_args = [self._real(x, written) for x in args]
        real_kwargs = {name: self._real(x, written) for name, x in kwargs.items()}
        settle = self.settle.get(func._schema.name)
        compute = _AS_ON_CUDA.get(func, func) if on_device else func
        result = compute(*args, **kwargs)
        outs = _leaves(result)
        if settle:
            tree_map(settle, outs)
        fresh = [i for i, x in enumerate(outs) if isinstance(x, Tensor) and self.memory_of(x) is None]
        fresh = [i for i in fresh if all(outs[i] is not x for x in given)]
        if on_device:
            for i in fresh:
                (self.allocate_empty if func in _UNINITIALIZED else self.allocate)(outs[i])
        if func in _UNINITIALIZED:
            return result
        numbers = [x for x in outs if not isinstance(x, Tensor) and x is not None]
        if not fresh and not written and not numbers:
            return result  # a view
        reals = [*_tensors(real_args), *_tensors(real_kwargs.values())]
        real_written = [real for x, real in zip(given, reals, strict=True) if any(x is one for one in written)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        writes = [*[x for x in given if any(x is one for one in written)], *[outs[i] for i in fresh]]
        expected = [x.detach().clone() for x in writes]

        def work(out: list[Tensor]) -> None:
            if is_random:
                for one, values in zip(out, expected, strict=True):
                    one.copy_(values)
                return
            found = _leaves(compute(*real_args, **real_kwargs))
            if settle:
                tree_map(settle, found)
            for i, one in zip(fresh, out[len(real_written) :], strict=True):
                if found[i].shape != one.shape:
                    raise ValueError(f"has shape {tuple(found[i].shape)} instead of {tuple(one.shape)}")
                one.copy_(found[i])
            if numbers and [x for x in found if not isinstance(x, Tensor) and x is not None] != numbers:
                raise ValueError(f"gives the host {found} instead of {numbers}")

        self._write(str(func), writes, work, [*real_written, *[self._room_of(outs[i]) for i in fresh]], queue=queue)
        if on_device and (numbers or self._host_waits(func, args, kwargs, given)):
            self.wait(self.current.tail)
        return result

    def _host_waits(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> bool:
        """Whether an operation makes the host wait for the stream, as on CUDA."""
        if torch.Tag.dynamic_output_shape in func.tags:
            masks = (torch.bool, torch.uint8)  # the indices of `index` that give a size which depends on values
            indices = [x for x in args[1] if x is not None] if func is aten.index.Tensor else []
            return not indices or any(x.dtype in masks or not self.has(x) for x in indices)
        if func is not aten.copy_.default:
            return False
        memories = [self.memory_of(x) for x in args[:2]]
        crosses = any(memory is None or memory.queue is None for memory in memories)
        is_asked = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if not crosses or (is_asked and memories[0] is not None and memories[1] is None):
            return False  # pageable memory is read before the call returns: its values are taken then
        is_pinned = all(memory is not None for memory in memories)
        return not (is_pinned and is_asked)

    def _like(self, x: Tensor) -> Tensor:
        memory = self.memory_of(x)
        assert memory is not None
        return memory.like(x)

    def _room_of(self, x: Tensor) -> Tensor:
        return torch.empty_like(x) if self.memory_of(x) is None else self._like(x)

    def _real(self, x: Any, written: Sequence[Tensor]) -> Any:
        if isinstance(x, list | tuple) and any(isinstance(one, Tensor) for one in x):
            return [self._real(one, written) for one in x]
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone() if self.memory_of(x) is None else self._like(x)

    def _write(
        self,
        name: str,
        writes: Sequence[Tensor],
        work: Callable[..., Any],
        real: list[Tensor],
        *arguments: Any,
        queue: Queue | None = None,
    ) -> None:
        expected = [_bits(x.detach().clone()) for x in writes]
        # `real` stays where it is: what is contiguous is seen as bytes once and not in every order.
        views = [_bits(x) if x.is_contiguous() else None for x in real]

        def run() -> str | None:
            try:
                work(real, *arguments)
            except (RuntimeError, IndexError, ValueError) as error:
                return str(error)
            for x, view, bits in zip(real, views, expected, strict=True):
                if not torch.equal(_bits(x) if view is None else view, bits):
                    return "gives other bits"
            return None

        self._issue(name, queue or self.current, run)

    def external(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[[], object]) -> None:
        """Work on the current stream that is done once, here, and reaches out of the process.

        In other orders it has to find in `reads` what it finds now, and leaves in `writes` what it leaves now.

        Args:
            name: what a race is reported as.
            reads: tensors of the device that it reads.
            writes: tensors of the device that it writes to; they may overlap with `reads`.
            run: does it, on the CPU tensors that these are.
        """
        with _disable_current_modes(), torch.no_grad():
            found = [_bits(x.detach().clone()) for x in reads]
            real_reads = [self._like(x) for x in reads]
            run()
            left = [x.detach().clone() for x in writes]

            def work(real: list[Tensor]) -> None:
                if not all(torch.equal(_bits(x), bits) for x, bits in zip(real_reads, found, strict=True)):
                    raise ValueError("reads other bits")
                for one, values in zip(real, left, strict=True):
                    one.copy_(values)

            self._write(name, writes, work, [self._like(x) for x in writes])

    # --- other orders ---

    def __exit__(self, *error: Any) -> None:
        self._is_open = False
        assert error[0] is not None or not self._before_use, "something that was to be waited for has not been used"
        super().__exit__(*error)

    def check(self, orders: int = 40, seed: int = 0) -> None:
        """Run the recorded work in `orders` orders that its events allow.

        The default number finds every race that test_device.py plants.

        Raises:
            RaceError: an operation gave other bits than in the program's order, or memory holds others at the end.
        """
        with _disable_current_modes(), torch.no_grad():
            remaining = [(memory, storage) for memory in self._memories.values() if (storage := memory.storage())]
            expected = [
                (memory.made, _bytes_of(memory.copy), _bytes_of(storage).clone()) for memory, storage in remaining
            ]
            before = self._what_comes_before()
            following: dict[Node, list[Node]] = {}
            for node, nodes in before.items():
                for one in nodes:
                    following.setdefault(one, []).append(node)
            missing = {node: len(nodes) for node, nodes in before.items()}
            for number in range(seed, seed + orders):
                self._run(number, dict(missing), following)
                for made, found, right in expected:
                    if not torch.equal(found, right):
                        raise RaceError(f"order {number}: memory allocated at {made} holds other bits at the end")

    def _what_comes_before(self) -> dict[Node, list[Node]]:
        """Of each node with work: those with work that it has to wait for, but for what follows from the others."""
        # Queues keep their order: of all nodes before one, the last of each queue says the rest.
        ends: dict[Node, dict[Queue, Node]] = {}  # of a node without work: what whoever waits for it waits for
        bits: dict[Node, int] = {}  # of a node with work: its own bit
        all_before: dict[Node, int] = {}  # the bits of all with work before one
        found: dict[Node, list[Node]] = {}
        for node in self._nodes:
            last: dict[Queue, Node] = {}
            for one in node.after:
                for queue, end in ends[one].items():
                    if queue not in last or last[queue].number < end.number:
                        last[queue] = end
            if node.run is None:
                ends[node] = last
                continue
            ends[node] = {node.queue: node}
            bits[node] = 1 << len(bits)
            earlier = 0
            for end in last.values():
                earlier |= all_before[end]
            found[node] = [end for end in last.values() if not earlier & bits[end]]
            for end in found[node]:
                earlier |= bits[end]
            all_before[node] = earlier
        return found

    def _run(self, seed: int, missing: dict[Node, int], following: dict[Node, list[Node]]) -> None:
        for copy in self._copies:
            copy.fill_(0xFF)
        chance = random.Random(seed)
        frees_at_once = chance.choice((0.0, 0.2, 1.0))
        eagerness: dict[Queue, float] = {}
        heads = {node.queue: node for node, number in missing.items() if not number}  # of each queue one at most
        free: deque[Node] = deque()
        queue: Queue | None = None
        while heads or free:
            if free and (not heads or chance.random() < frees_at_once):
                node = free.popleft()
            elif len(heads) == 1:
                queue, node = heads.popitem()
            elif queue in heads and chance.random() < 0.5:
                node = heads.pop(queue)  # a stream that has begun often goes on
            else:
                if chance.random() < 0.02:
                    eagerness.clear()
                for one in heads:
                    if one not in eagerness:
                        eagerness[one] = 10.0 ** chance.uniform(-3.0, 3.0)
                (queue,) = chance.choices([*heads], [eagerness[queue] for queue in heads])
                node = heads.pop(queue)
            assert node.run is not None
            if (wrong := node.run()) is not None:
                raise RaceError(f"order {seed}: {node.name} on {node.queue.name}, issued at {node.issued}, {wrong}")
            for later in following.get(node, ()):
                missing[later] -= 1
                if not missing[later]:
                    if later.queue.is_allocator:
                        free.append(later)
                    else:
                        heads[later.queue] = later


def _fill(copy: torch.UntypedStorage) -> None:
    copy.fill_(0xFF)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Arguments that an operation writes to."""
    found: list[Tensor] = []
    if (undeclared := _WRITES_UNDECLARED.get(func._schema.name)) is not None:
        found.append(args[undeclared])
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _tensors((value,))
    return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and their lists."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _leaves(result: Any) -> Sequence[Any]:
    """What an operation returns, in a row."""
    if not isinstance(result, list | tuple):
        return (result,)
    return tree_leaves(result) if any(isinstance(x, list | tuple) for x in result) else result


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _place() -> str:
    """Where the running operation was called, outside of this folder's device and of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if (name := _shown(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def _shown(file: str) -> str | None:
    """Name of a file that says where an operation comes from; None: the device's own or another library's."""
    if not Path(file).is_absolute():
        return None  # "<string>", "<frozen importlib._bootstrap>"
    path = Path(file).resolve()
    is_ours = any(path.is_relative_to(folder) for folder in _OURS)
    return path.name if is_ours and not (path.parent == _HERE and path.stem in _OWN) else None
