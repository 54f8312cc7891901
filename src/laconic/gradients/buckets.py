"""Buckets of gradients, and when each is reduced: the reduction starts while backward still runs.

Parameters are cut into buckets in reverse order, because backward reaches the last ones first. A bucket is launched as
soon as each of its gradients has arrived for the last time, and never before the buckets in front of it: so every rank
sends the same buckets in the same order, whatever order its own backward takes. Buckets that are not launched by the
end of backward are launched then. Parameters that had no gradient on any rank in the last step come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from laconic.collectives.runtime.background import Work
from laconic.errors import TrainingError


class Buckets:
    """Parameters 0 .. n - 1, cut into buckets of bucket_nbytes of gradients; `reduce` starts one, by numbers."""

    def __init__(self, nbytes: Sequence[int], bucket_nbytes: int, reduce: Callable[[list[int]], Work[None]]) -> None:
        self._reduce = reduce
        self._nbytes = nbytes
        self._bucket_nbytes = bucket_nbytes
        self._expected: dict[int, int] | None = None
        self._failed = False
        self._works: list[Work[None]] = []
        self._last: frozenset[int] = frozenset()
        self._arrange()

    @property
    def num_launched(self) -> int:
        """Number of buckets whose reduction has been started."""
        return len(self._works)

    @property
    def is_under_way(self) -> bool:
        """Whether the last backward has been announced and its gradients have not been reduced yet."""
        return self._expected is not None

    @property
    def has_failed(self) -> bool:
        """Whether the announced backward ended with an exception."""
        return self._failed

    def fail(self) -> None:
        """Note that the announced backward ended with an exception: no bucket is launched any more before `drain`."""
        self._failed = True

    def expect(self, num_backwards: int) -> None:
        """Announce the last backwards: a gradient arrives `num_backwards` times, then its bucket may be launched."""
        self._check_sound()
        if self._expected is not None:
            raise TrainingError(
                "the last micro-batch was announced twice without a reduction in between; call reduce() after it"
            )
        self._expected = dict.fromkeys(self._bucket_of, num_backwards)

    def check_open(self, number: int, name: str) -> None:
        """Refuse a gradient of parameter `number`, called `name` in the error, once its bucket has been launched."""
        self._check_sound()
        if self._expected is not None and self._bucket_of[number] < len(self._works):
            raise TrainingError(
                f"a gradient of {name} arrived after its reduction had started; inside last_micro_batch() each"
                " parameter may get one gradient per backward: say how many backwards follow (num_backwards), use"
                " checkpointing with use_reentrant=False, or leave last_micro_batch() out"
            )

    def arrived(self, number: int) -> None:
        """Note a new gradient of parameter `number`; call `check_open` before."""
        if self._expected is None:
            return
        self._expected[number] -= 1
        while len(self._works) < len(self._buckets) and self._is_ready(self._buckets[len(self._works)]):
            self._launch()

    def put_last(self, numbers: Iterable[int]) -> None:
        """Arrange buckets anew with the parameters without gradient at the end, where no bucket waits for them."""
        assert not self._works
        if self._last != frozenset(numbers):
            self._last = frozenset(numbers)
            self._arrange()

    def finish(self) -> None:
        """Launch the remaining buckets and wait for all; TrainingError if the announced backward has failed."""
        self.drain(len(self._buckets))

    def drain(self, num_launched: int) -> None:
        """Launch buckets until `num_launched` of them are, wait for all launched ones, and expect nothing more.

        Ranks that give up a step have launched different numbers of buckets; drained at the same number, they stay in
        order.
        """
        try:
            while len(self._works) < num_launched:
                self._launch()
            for work in self._works:
                work.wait()
        finally:
            self._works, self._expected, self._failed = [], None, False

    def _check_sound(self) -> None:
        if self._failed:
            raise TrainingError(
                "the backward inside last_micro_batch() ended with an exception, so the gradients of this step are"
                " incomplete; call zero_() of compress_gradients' result, on every rank, and start the step again"
            )

    def _arrange(self) -> None:
        self._buckets: list[list[int]] = []
        backwards = range(len(self._nbytes))[::-1]
        for some in ([n for n in backwards if n not in self._last], [n for n in backwards if n in self._last]):
            size = self._bucket_nbytes
            for number in some:
                if size + self._nbytes[number] > self._bucket_nbytes:
                    self._buckets.append([])
                    size = 0
                self._buckets[-1].append(number)
                size += self._nbytes[number]
        self._bucket_of = {number: at for at, bucket in enumerate(self._buckets) for number in bucket}

    def _is_ready(self, bucket: list[int]) -> bool:
        assert self._expected is not None
        return all(self._expected[number] <= 0 for number in bucket)

    def _launch(self) -> None:
        self._works.append(self._reduce(self._buckets[len(self._works)]))
