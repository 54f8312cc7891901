"""Works of a process group that run a function afterwards, and which of them the group keeps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.collectives.process_group.work_handles import AfterWork


class _Work(dist.Work):
    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error, self.num_queries = error, 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        self.num_queries += 1
        return not self.error


def test_a_work_that_failed_is_kept_no_longer_but_one_that_goes_on_is() -> None:
    kept: set[AfterWork] = set()
    done: list[bool] = []
    inner = _Work("Operation timed out")
    work = AfterWork(inner, [torch.zeros(1)], lambda: done.append(True)).kept_in(kept)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=1))
    assert kept == {work}
    inner.error = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="closed"):
        work.wait()
    assert not kept
    assert not done
    assert not work.is_success()


def test_a_work_whose_function_fails_is_kept_no_longer() -> None:
    kept: set[AfterWork] = set()
    work = AfterWork(_Work(), [torch.zeros(1)], lambda: 1 // 0).kept_in(kept)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert not kept
    assert not work.is_success()


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the latter in place of cuda
def test_works_of_other_devices_are_not_queried(device: str) -> None:
    kept: set[AfterWork] = set()
    inner: Any = _Work()
    first = AfterWork(inner, [torch.zeros(1, device=device)], lambda: None).kept_in(kept)
    AfterWork(_Work(), [torch.zeros(1, device=device)], lambda: None).kept_in(kept)
    assert inner.num_queries == (device == "cpu")
    assert (first in kept) == (device != "cpu")
