"""Jobs on the executor's stream: their results are waited for, and what they use lives as long as they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from laconic.collectives.codec import Blockwise, Codec, Lossless, Raw
from laconic.collectives.runtime.background import Work, run_in_background
from laconic.collectives.runtime.device_streams import Ready
from laconic.formats import BlockFormat
from laconic.gradients import all_reduce_q8
from tests.grid import grid
from tests.streams.cuda import CUDA, cuda
from tests.streams.device import RaceError
from tests.streams.echo import echo

INT8 = Blockwise(BlockFormat("int8", 128, torch.float32))


def doubled(x: Tensor, group: dist.ProcessGroup, returns: bool = False) -> Work[Tensor | None]:
    def job(_: object) -> Tensor | None:
        x.mul_(2)
        return x if returns else None

    return run_in_background(job, (group,), CUDA)


@pytest.mark.parametrize("returns", [False, True])
def test_a_job_is_waited_for_whatever_it_returns(returns: bool) -> None:
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        doubled(x, group, returns).wait()
        x += 1
    device.check()


def test_a_changed_result_is_waited_for() -> None:
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        work = doubled(x, group).map(lambda _: x.add_(1))
        assert (work.wait() * 3).sum().item() == 54.0
    device.check()


@pytest.mark.parametrize("is_prompt", [False, True])
def test_what_a_change_uses_lives_as_long_as_it_runs(is_prompt: bool) -> None:
    def start(group: dist.ProcessGroup) -> Work[Tensor]:
        more = torch.full((6,), 3.0, device=CUDA)
        return doubled(x, group).map(lambda _: x.add_(more))

    with cuda(is_prompt) as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        for _ in range(3):
            work = start(group)
        assert work.wait().sum().item() == 174.0
    device.check()


def test_a_result_of_the_executor_may_be_freed_by_the_caller() -> None:
    """Its memory is the executor's stream's, and the caller's stream still reads it."""
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        for _ in range(3):
            x = x + run_in_background(lambda _: torch.full((6,), 2.0, device=CUDA), (group,), CUDA).wait()
    device.check()


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_job_that_nobody_waits_for_keeps_what_it_uses(is_prompt: bool) -> None:
    with cuda(is_prompt) as device, echo() as group:
        for _ in range(3):
            doubled(torch.ones(6, device=CUDA), group)
    device.check()


def test_waiting_on_another_stream_gives_no_memory_of_the_callers_away() -> None:
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        work = doubled(x, group)
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
        del x, work
        torch.empty(6, device=CUDA)
    device.check()


def test_a_job_that_fails_half_way_keeps_what_it_uses() -> None:
    def job(x: Tensor) -> None:
        x.mul_(2)
        raise OSError("wire cut")

    def start(group: dist.ProcessGroup) -> None:
        x = torch.ones(6, device=CUDA)
        run_in_background(lambda _: job(x), (group,), CUDA)

    with cuda() as device, echo() as group:
        for _ in range(2):
            with pytest.raises(OSError, match="wire cut"):
                start(group)
    device.check()


def test_a_callback_runs_after_a_job_without_result() -> None:
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        doubled(x, group).get_future().then(lambda _: x.add_(1)).wait()
        x += 1
    device.check()


def test_memory_is_let_go_once_the_caller_has_waited() -> None:
    """And not at the next job, which may be a step later."""
    with cuda() as device, echo() as group:
        x = torch.ones(6, device=CUDA)
        storage = device.memory_of(x).storage
        work = doubled(x, group)
        del x
        assert storage() is not None
        work.wait()
        assert storage() is None
    device.check()


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x, group: all_reduce_q8(x, group, async_op=True, min_nbytes=0),
        lambda x, group: all_reduce_q8(x, group, async_op=True, min_nbytes=1 << 20),
        lambda x, group: all_reduce(x, group, codec=Raw(), async_op=True),
    ],
)
def test_collectives_in_the_background(reduce: Callable[[Tensor, dist.ProcessGroup], Work[Tensor]]) -> None:
    with cuda() as device, echo(3) as group:
        works, values = [], [torch.randn(400, device=CUDA) for _ in range(3)]
        for x in values:
            works.append(reduce(x.mul_(2), group))
        for x, work in zip(values, works, strict=True):
            work.wait()
            x.sub_(1)
    device.check()


def gathered(x: Tensor, group: dist.ProcessGroup, codec: Codec) -> Work[Tensor]:
    return all_gather(x.new_empty(2, x.numel()), x, group, codec=codec, async_op=True)


def scattered(x: Tensor, group: dist.ProcessGroup, codec: Codec) -> Work[Tensor]:
    return reduce_scatter(torch.empty_like(x), torch.stack((x, x)), group, codec=codec, async_op=True)


def exchanged(x: Tensor, group: dist.ProcessGroup, codec: Codec) -> Work[Tensor]:
    return all_to_all(torch.empty_like(x), x * 1, group=group, codec=codec, async_op=True)


@pytest.mark.parametrize(
    ("call", "codec"),
    grid([gathered, scattered, exchanged], [Lossless(), Lossless(capacity_bits=8.0), INT8], strength=1),
)
def test_coded_collectives_drop_their_tensors_at_once(
    call: Callable[[Tensor, dist.ProcessGroup, Codec], Work[Tensor]], codec: Codec
) -> None:
    """Messages whose lengths make the host wait, those that do not fit, and those of one length."""
    with cuda(is_prompt=True) as device, echo() as group:
        values = [torch.randn(512, device=CUDA).bfloat16() for _ in range(2)]
        works = [call(x.mul_(2), group, codec) for x in values]
        outs = [work.wait() for work in works]
        sums = [out.float() * 2 for out in outs]
        del works, outs
        for x in values:
            x.zero_()
        del sums
    device.check()


def test_readiness_orders_two_streams() -> None:
    for waits in (False, True):
        with cuda() as device:
            side = torch.cuda.Stream()
            x = torch.ones(6, device=CUDA)
            ready = Ready(CUDA)
            with torch.cuda.stream(side):
                if waits:
                    ready.wait()
                x.mul_(2)
            assert not ready.is_over
            torch.cuda.current_stream().wait_stream(side)
            ready.synchronize()
            assert ready.is_over
        if waits:
            device.check()
        else:
            with pytest.raises(RaceError, match=r"aten\.mul_"):
                device.check()


def test_readiness_on_the_host_is_there() -> None:
    ready = Ready(torch.device("cpu"))
    ready.wait()
    ready.synchronize()
    assert ready.is_over
