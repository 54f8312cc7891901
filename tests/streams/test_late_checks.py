"""Coded collectives that the host checks late: where it waits, how often, for what, and that bits are right."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, Raw, all_gather, all_to_all, reduce_scatter
from laconic.collectives.codec import Codec
from laconic.collectives.integrations.fsdp2 import ZipAllGather, ZipReduceScatter
from laconic.collectives.runtime.background import BackgroundWork, Work
from laconic.errors import FormatError
from tests.streams.cuda import CUDA, counted_waits, cuda
from tests.streams.echo import echo
from tests.streams.fsdp2_unit import Unit

ROOMY, TIGHT = Lossless(capacity_bits=14.0), Lossless(capacity_bits=4.0)
"""For normal numbers in bfloat16: with place for them, and without."""

SLOW = pytest.mark.slow

Call = Callable[[Tensor, dist.ProcessGroup, Codec, bool], Work[Tensor]]


def gathered(x: Tensor, group: dist.ProcessGroup, codec: Codec, is_async: bool) -> Work[Tensor]:
    return all_gather(x.new_empty(group.size(), x.numel()), x, group, codec=codec, async_op=is_async)


def scattered(x: Tensor, group: dist.ProcessGroup, codec: Codec, is_async: bool) -> Work[Tensor]:
    rows = torch.stack([x] * group.size())
    return reduce_scatter(torch.empty_like(x), rows, group, codec=codec, async_op=is_async)


def exchanged(x: Tensor, group: dist.ProcessGroup, codec: Codec, is_async: bool) -> Work[Tensor]:
    rows = torch.stack([x] * group.size())
    return all_to_all(torch.empty_like(rows), rows, group=group, codec=codec, async_op=is_async)


def right(call: Call, x: Tensor, size: int) -> Tensor:
    """What `call` has to give where every rank has `x`."""
    return (x.float() * size).bfloat16() if call is scattered else torch.stack([x] * size)


def numbers(numel: int = 512) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("call", [gathered, scattered, exchanged])
def test_a_call_does_not_wait_and_its_work_waits_once(call: Call, size: int) -> None:
    here = numbers()
    with cuda() as device, echo(size) as group:
        x = here.to(CUDA)
        call(x, group, ROOMY, False)  # the first of its kind waits for the announcements
        with counted_waits(device) as waits:
            work = call(x, group, ROOMY, True)
            assert not waits
            assert not work.is_completed()
            out = work.wait()
            assert len(waits) == 1
            assert work.is_completed()
            assert work.wait() is out
            assert len(waits) == 1
            waits.clear()
            out = call(x, group, ROOMY, False).wait()
            assert len(waits) == 1  # for all messages of the call
            waits.clear()
            call(x, group, Lossless(), False)
            assert len(waits) > size  # what this is for
        assert torch.equal(out.cpu(), right(call, here, size))
    device.check(20 if size == 2 else 300)


@pytest.mark.parametrize("is_prompt", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("call", [gathered, scattered, exchanged])
def test_what_does_not_fit_is_right_whenever_it_is_waited_for(call: Call, is_prompt: bool) -> None:
    values = [numbers(), torch.zeros(512).bfloat16(), numbers() * 3]
    with cuda(is_prompt) as device, echo(3) as group:
        # Each call makes the check of the one before; the last is left to its work.
        started = [call(x.to(CUDA), group, TIGHT, True) for x in values]
        outs = [work.wait() * 1 for work in started[::-1]][::-1]
        mapped = call(values[0].to(CUDA), group, TIGHT, True).map(lambda out: out + 0).map(lambda out: out * 1)
        assert is_prompt or not mapped.is_completed()
        outs.append(mapped.wait())
        future = call(values[0].to(CUDA), group, TIGHT, True).get_future()
        outs.append(future.wait() * 1)
        for out, x in zip(outs, [*values, values[0], values[0]], strict=True):
            assert torch.equal(out.cpu(), right(call, x, 3))
    device.check(200 if is_prompt else 10)


@pytest.mark.parametrize("codec", [ROOMY, TIGHT], ids=["fits", "does not fit"])
def test_what_is_sent_may_lie_in_what_is_received(codec: Lossless) -> None:
    mine = numbers()
    with cuda() as device, echo(2) as group:
        rows = torch.stack((mine, mine)).to(CUDA)
        reduce_scatter(rows[0], rows, group, codec=codec, async_op=True).wait()
        rows[1].mul_(2)
        summed = rows[0] * 1
        all_to_all(rows, rows, group=group, codec=codec, async_op=True).wait()
        assert torch.equal(summed.cpu(), (mine.float() * 2).bfloat16())
        assert torch.equal(rows[0].cpu(), summed.cpu())
        all_gather(rows, rows[0], group, codec=codec, async_op=True).wait()
        assert torch.equal(rows[1].cpu(), summed.cpu())
    device.check(20)


@pytest.mark.parametrize("where", ["wait", "next call"])
def test_a_damaged_message_is_an_error_that_stays(where: str) -> None:
    decode = Lossless.decode_unread

    def damaged(codec: Lossless, message: Tensor, out: Tensor) -> Tensor:
        message[100] ^= 1
        return decode(codec, message, out)

    with cuda(), echo(2) as group:
        x = numbers().to(CUDA)
        with mock.patch.object(Lossless, "decode_unread", damaged):
            work = gathered(x, group, ROOMY, True)
        if where == "next call":
            with pytest.raises(FormatError, match="all_gather of 512 bfloat16, the message from rank 1"):
                gathered(x, group, Raw(), True)
        for _ in range(2):
            with pytest.raises(FormatError, match="all_gather of 512 bfloat16, the message from rank 1"):
                work.wait()
        gathered(x, group, ROOMY, True).wait()


# --- FSDP2 ---


@pytest.mark.parametrize(
    ("codec", "reduces", "orders"),
    [
        pytest.param(ROOMY, Raw(), 100, id="fits"),
        pytest.param(TIGHT, Raw(), 100, id="does not fit"),
        pytest.param(ROOMY, ROOMY, 500, marks=SLOW, id="all late"),
        pytest.param(TIGHT, TIGHT, 500, marks=SLOW, id="none fits"),
    ],
)
def test_a_unit_that_is_checked_late(codec: Lossless, reduces: Raw | Lossless, orders: int) -> None:
    with cuda() as device, echo() as group:
        unit = Unit(group, ZipAllGather(codec), ZipReduceScatter(reduces))
        for _ in range(3):
            unit.backward(unit.forward())
            unit.step()
    device.check(orders)


@pytest.mark.parametrize("orders", [100, pytest.param(500, marks=SLOW)])
def test_a_prefetched_unit_is_waited_for_without_the_computation_before_it(orders: int) -> None:
    """The host gathers the next layer, issues this one's computation, and then needs the next layer."""
    with cuda() as device, echo() as group:
        gather = ZipAllGather(ROOMY)
        compute, gathers = torch.cuda.current_stream(), torch.cuda.Stream()
        shards = [numbers(256).to(CUDA) * number for number in range(5)]

        def prefetch(number: int) -> tuple[Tensor, BackgroundWork]:
            with torch.cuda.stream(gathers):
                whole = gather.allocate((512,), dtype=torch.bfloat16, device=CUDA)
                work = gather(whole, shards[number], group, False)
            assert isinstance(work, BackgroundWork)
            return whole, work

        gathers.wait_stream(compute)
        x = torch.ones(512, device=CUDA)
        whole, work = prefetch(0)
        work.wait()
        with counted_waits(device) as waits:
            for number in range(1, 5):
                following = prefetch(number)
                assert not waits
                x = x + whole  # this layer
                layer = compute.record_event()
                whole, work = following
                work.wait()
                assert len(waits) == 1
                assert not layer.query()  # the host has not waited for it
                waits.clear()
                gathers.wait_stream(compute)  # as FSDP2 does before it gathers into that memory again
                whole.record_stream(compute)
        expected = torch.ones(512)
        for number in range(4):
            expected += (numbers(256) * number).repeat(2)
        assert torch.equal(x.cpu(), expected)
    device.check(orders)
