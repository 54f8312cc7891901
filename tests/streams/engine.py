"""Autograd on the streams of a simulated device, as torch's engine has it on a GPU.

There a node of the graph runs on the stream that was current when forward made it, whatever stream calls backward. It
waits for the nodes that its gradient comes from, and the caller's stream waits for the leaves. A leaf's node is made by
the first function that reads the leaf. On the CPU, where the simulated device computes, the engine knows no streams: so
hooks on the nodes make the right one current.

What is not modelled: hooks on tensors (not those after accumulation) run before their node's stream is current; they
run on one of their own that waits for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node as Function
from torch.utils._pytree import tree_leaves

from tests.streams.device import Device, Memory, Node, Queue

__all__ = ["Engine"]

_run_backward = torch.autograd._engine_run_backward


class Engine:
    """Runs backward passes of the graphs that a device has recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """In place of `torch.autograd._engine_run_backward`."""
        device, caller = self._device, self._device.current
        roots = [torch.autograd.graph.get_gradient_edge(x).node for x in tree_leaves(outputs) if x.requires_grad]
        queues = self._queues(roots)
        if set(queues.values()) <= {caller}:
            return _run_backward(outputs, *args, **kwargs)
        run = _Pass(device, caller, queues, roots)
        try:
            return _run_backward(outputs, *args, **kwargs)
        finally:
            run.end()

    def _queues(self, roots: Sequence[Function]) -> dict[Function, Queue]:
        """The stream of each node of a graph."""
        made: dict[Function, int] = {}
        leaves: dict[Function, int] = {}
        nodes = list(roots)
        while nodes:
            node = nodes.pop()
            if node in made:
                continue
            made[node] = number = node._sequence_nr()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following.next_functions or not hasattr(following, "variable"):
                    nodes.append(following)
                else:
                    leaves[following] = min(number, leaves.get(following, number))
        leaves.update({root: number for root, number in made.items() if hasattr(root, "variable")})
        made.update(leaves)
        return {node: self._device.stream_at(number) for node, number in made.items()}


class _Pass:
    """One backward pass."""

    def __init__(self, device: Device, caller: Queue, queues: dict[Function, Queue], roots: Sequence[Function]) -> None:
        self._device, self._caller, self._queues = device, caller, queues
        self._currents = [device.current_of(index) for index in range(len(device.defaults))]
        self._ready: dict[Function, list[Node | Queue]] = {
            root: [device.issue("backward", device.current_of(queues[root].index))] for root in roots
        }
        self._memories: dict[Function, list[Memory]] = {}  # of the gradients that a node has got
        self._leaves: list[Node] = []
        self._has_begun = False
        self._hooks = []
        for node, queue in queues.items():
            self._hooks.append(node.register_prehook(partial(self._before, node, queue)))
            self._hooks.append(node.register_hook(partial(self._after, node, queue)))

    def _before(self, node: Function, queue: Queue, gradients: Sequence[Tensor | None]) -> None:
        if not self._has_begun:
            self._has_begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end)
        self._device.issue("gradients", queue, self._tail(node))
        for x in gradients:
            memory = None if x is None else self._device.memory_of(x)
            if memory is not None and memory.queue is not queue:
                memory.used.add(queue)
        self._device.current = queue

    def _after(self, node: Function, queue: Queue, gradients: Sequence[Tensor | None], _: object) -> None:
        done = self._device.issue("gradient", queue)
        following = [one for one, _ in node.next_functions if one is not None]
        if not following:
            self._leaves.append(done)
        # Where a node gets several gradients they are added up once they are there, in its own order only.
        adding = {
            self._queues[one].index: Queue("gradients added up", index=self._queues[one].index) for one in following
        }
        for queue in adding.values():
            self._device.issue("gradients", queue, [done, *(x for one in following for x in self._tail(one))])
        memories = [None if x is None else self._device.memory_of(x) for x in gradients]
        for (one, _), memory in zip(node.next_functions, memories, strict=False):
            if one is None:
                continue
            queue = adding[self._queues[one].index]
            self._ready.setdefault(one, []).append(queue)
            added = self._memories.setdefault(one, [])
            if memory is not None:
                added.append(memory)
            for each in added:
                each.used.add(queue)
        for queue in adding.values():
            self._device.current = queue

    def _tail(self, node: Function) -> list[Node]:
        """What the gradients are made by that a node has got so far."""
        return [x for each in self._ready.get(node, ()) for x in (each.tail if isinstance(each, Queue) else [each])]

    def _at_the_end(self) -> None:
        """Before the callbacks that others leave for the end of a backward pass."""
        for queue in (*self._currents, self._caller):
            self._device.current = queue
        for queue in self._currents:
            self._device.issue("leaves", queue, [one for one in self._leaves if one.queue.index == queue.index])

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._at_the_end()
