"""An expert worker in the same process, for what is above the links."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from laconic.infer.messages import Rows, pack_rows, pack_sums, unpack_rows, unpack_sums
from laconic.infer.payload import Coder
from laconic.infer.recorder import now_ns


class LocalLink:
    """An `ExpertLink` whose `run` computes when rows are sent; both directions pass through the bytes of messages."""

    def __init__(self, run: Callable[[Rows], Tensor]) -> None:
        self._run, self._coder = run, Coder()
        self._answers: dict[tuple[int, int], Tensor] = {}

    def send(self, rows: Rows) -> None:
        arrived = unpack_rows(*pack_rows(rows, self._coder))
        self._answers[rows.micro_batch, rows.slice] = unpack_sums(*pack_sums(rows, self._run(arrived), self._coder))

    def receive(self, rows: Rows) -> Tensor:
        return self._answers.pop((rows.micro_batch, rows.slice))

    def arrived_ns(self, rows: Rows) -> int:
        return now_ns()  # it was here when `send` returned, which is not long ago
