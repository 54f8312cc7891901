"""Ranks as threads, and rates that nobody measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from laconic.collectives.measure import Exchange
from laconic.cost.wire.rates import OPERATIONS, CodecRates, Line, LinkRates, WireRates

T = TypeVar("T")


def made_up_rates(bytes_per_second: float = 125e6, coding_bytes_per_second: float = 8e9) -> WireRates:
    """Four ranks on a link of 1 Gbit/s, 0.2 ms a message."""
    line = Line(2e-4, 1 / bytes_per_second)
    coding = Line(2e-5, 1 / coding_bytes_per_second)
    link = LinkRates(4, dict.fromkeys(OPERATIONS, line), 2e-4, overlap=0.5)
    codes = {"window": CodecRates(coding, coding, coding, 1.43), "tiered": CodecRates(coding, coding, coding, 1.49)}
    return WireRates({"across": link}, dict.fromkeys(("bfloat16", "float16", "float32"), codes))


def on_ranks(num_ranks: int, job: Callable[[int, Exchange], T]) -> list[T]:
    """What `job(rank, exchange)` returns on each rank; raises what a rank raised. Exchanges that ranks do not all come
    to, or come to with different lengths, break."""
    barrier = threading.Barrier(num_ranks, timeout=10)
    table: list[Sequence[int]] = [()] * num_ranks
    results: list[T | None] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def exchange(values: Sequence[int]) -> list[list[int]]:
            table[rank] = list(values)
            barrier.wait()
            found = [list(row) for row in table]
            barrier.wait()
            assert len({len(row) for row in found}) == 1
            return found

        try:
            results[rank] = job(rank, exchange)
            barrier.wait()  # one that still exchanges meets nobody who would answer
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [result for result in results if result is not None]
