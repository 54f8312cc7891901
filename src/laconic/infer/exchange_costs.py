"""Measures what a message and its answer take from the processors of an attention and of an expert worker.

Both ends run what the engine runs: `TcpExpertLink` and `serve`, with their threads. Processor time of the whole process
counts packing, system calls, copies, receiving threads and wake-ups, and not the time of the link. Where a CUDA device
computes, an expert worker also copies the rows of each message to it and sums from it, and its host waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.infer.connections import accept_attention, connect_expert
from laconic.infer.links import TcpExpertLink, serve
from laconic.infer.messages import Rows

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_EXCHANGES = 32
"""Messages that are on their way together: the scheduler's ticks and the clock do not matter then."""
_ROUNDS = 5


def measure_attention_end(
    store: Store, num_rows: Sequence[int], width: int, dtype: torch.dtype
) -> list[tuple[int, float]]:
    """Send messages to the process that calls `measure_experts_end`, and receive their answers.

    Both meet in `store`, whose keys nobody else uses. Return, for each of `num_rows`, rows of a message of `width`
    values, the bytes of its values, and processor seconds of an exchange at this end.
    """
    link = TcpExpertLink(connect_expert(store, 0, 0), "the other process")
    found: dict[int, list[float]] = {rows: [] for rows in num_rows}
    try:
        for batch, rows in enumerate(_batches(num_rows)):
            messages = [_message(batch, number, rows, width, dtype) for number in range(_EXCHANGES)]
            started = time.process_time()
            for message in messages:
                link.send(message)
            for message in messages:
                link.receive(message)
            found[rows].append(time.process_time() - started)
        last = _message(len(_batches(num_rows)), 0, 1, width, dtype)  # by which the other end knows that all is over
        link.send(last)
        link.receive(last)
    finally:
        link.close()
    return _per_exchange(found, width, dtype)


def measure_experts_end(
    store: Store, num_rows: Sequence[int], width: int, dtype: torch.dtype
) -> list[tuple[int, float]]:
    """Answer what `measure_attention_end` sends with the same rows; arguments and result are as there."""
    started: dict[int, float] = {}

    def run(rows: Rows) -> Tensor:
        started.setdefault(rows.layer, time.process_time())
        return rows.hidden

    serve(accept_attention(store, 0, 1), run)
    found: dict[int, list[float]] = {rows: [] for rows in num_rows}
    # Nothing runs here between two batches: what was used up to the next one was used for this one.
    times = [started[batch] for batch in sorted(started)]
    for rows, (first, following) in zip(_batches(num_rows), pairwise(times), strict=True):
        found[rows].append(following - first)
    return _per_exchange(found, width, dtype)


def copy_seconds(num_rows: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    """By size, seconds that an expert worker's host waits for the copies of a message and its answer; 0 on a CPU."""
    if device.type == "cpu":
        return [0.0] * len(num_rows)
    found: dict[int, list[float]] = {rows: [] for rows in num_rows}
    for rows in _batches(num_rows):
        message = _message(0, 0, rows, width, dtype)
        here = message.hidden, message.experts, message.weights
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(_EXCHANGES):
            there = [x.to(device) for x in here]
            there[0].to("cpu")
        torch.cuda.synchronize(device)
        found[rows].append(time.perf_counter() - started)
    return [median(taken[1:]) / _EXCHANGES for taken in found.values()]


def _batches(num_rows: Sequence[int]) -> list[int]:
    """Rows of the messages of each batch; the sizes take turns, and their first turn is not counted."""
    return [*num_rows] * (1 + _ROUNDS)


def _message(layer: int, number: int, rows: int, width: int, dtype: torch.dtype) -> Rows:
    experts = torch.zeros(rows, 1, dtype=torch.int32, device="cpu")
    return Rows(
        layer,
        0,
        number,
        torch.ones(rows, width, dtype=dtype, device="cpu"),
        experts,
        torch.ones(rows, 1, dtype=torch.float32, device="cpu"),
    )


def _per_exchange(found: Mapping[int, Sequence[float]], width: int, dtype: torch.dtype) -> list[tuple[int, float]]:
    return [(rows * width * dtype.itemsize, median(taken[1:]) / _EXCHANGES) for rows, taken in found.items()]
