"""Raw collectives: what they ask of a backend, whatever handle it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.collectives.engine import uncoded
from laconic.errors import CollectiveError


class _Work:
    def __init__(self, error: str = "") -> None:
        self.error, self.num_waits = error, 0

    def wait(self, timeout: object = None) -> None:
        self.num_waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return False


class _Group:
    """A backend of two ranks that records the options it is given and returns one handle for all calls."""

    def __init__(self, work: _Work | None) -> None:
        self.work, self.options = work, []

    def size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> _Work | None:
            self.options.append(arguments[-1])
            return self.work

        return call


_x, _pair = torch.ones(4), torch.ones(8)
_CALLS = {
    "all_reduce": lambda group, how: uncoded.all_reduce(_x, group, "sum", how),
    "reduce_scatter": lambda group, how: uncoded.reduce_scatter(_x, _pair, group, "avg", how),
    "all_gather": lambda group, how: uncoded.all_gather(_pair, _x, group, how),
    "all_to_all": lambda group, how: uncoded.all_to_all(_x, torch.ones(4), group, how),
    "broadcast": lambda group, how: uncoded.broadcast(_x, group, 1, how),
    "gather": lambda group, how: uncoded.gather(_pair, _x, group, 0, how),
    "scatter": lambda group, how: uncoded.scatter(_x, _pair, group, 0, how),
    "send": lambda group, how: uncoded.send(_x, group, 1, how),
    "recv": lambda group, how: uncoded.recv(_x, group, 1, how),
}
_OUTPUTS = {"all_gather": _pair, "gather": _pair}


@pytest.mark.parametrize("name", _CALLS)
def test_blocking_calls_wait_and_say_so_and_asynchronous_ones_do_not(name: str) -> None:
    for is_async in (False, True, False):  # options are shared by calls, so the second kind must not change the first
        group = _Group(_Work())
        work = _CALLS[name](group, is_async)
        assert group.work is not None
        assert group.work.num_waits == (0 if is_async else 1)
        assert work.is_completed() is not is_async
        if name not in ("send", "recv"):
            assert group.options[0].asyncOp is is_async
        assert work.wait() is _OUTPUTS.get(name, _x)


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_backend_that_returns_no_handle_has_waited(name: str, is_async: bool) -> None:
    work = _CALLS[name](_Group(None), is_async)
    assert work.is_completed()
    assert isinstance(work.get_future().wait(), torch.Tensor)
    assert work.map(lambda tensor: tensor.numel()).wait() == work.wait().numel()


def test_reductions_and_roots_reach_the_backend() -> None:
    group = _Group(_Work())
    uncoded.all_reduce(_x, group, "avg", False)
    uncoded.all_reduce(_x, group, "sum", False)
    average, total = group.options
    assert average.reduceOp == torch.distributed.ReduceOp.AVG
    assert total.reduceOp == torch.distributed.ReduceOp.SUM
    for root in (1, 0):
        uncoded.broadcast(_x, group, root, False)
        assert group.options[-1].rootRank == root


def test_a_finished_work_passes_on_the_error_of_what_is_made_of_it() -> None:
    def fail(_: object) -> None:
        raise ValueError("made nothing")

    failed = _CALLS["all_reduce"](_Group(None), False).map(fail)
    with pytest.raises(ValueError, match="made nothing"):
        failed.wait()


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_of_the_backend_name_the_call(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    def broken_off(name: str, group: object, error: RuntimeError, peer: int | None = None) -> CollectiveError:
        return CollectiveError(f"{name}, {peer}: {error}")

    monkeypatch.setattr(uncoded, "broken_off", broken_off)
    for name, peer in (("all_reduce", None), ("send", 1)):
        with pytest.raises(CollectiveError, match=f"{name}, {peer}: connection reset"):
            _CALLS[name](_Group(_Work("connection reset")), is_async).wait()
